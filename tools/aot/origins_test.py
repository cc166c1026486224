"""Names of instructions that the compiler left without one; components and passes."""

import pytest

from tools.aot import hlo, origins

_MODULE = """HloModule jit_f, is_scheduled=true

%fused (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %inner = f32[8]{0} negate(%p.1), metadata={op_name="jit(f)/jvp()/gdn/neg"}
}

%wrapped (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %reduced = f32[8]{0} all-reduce(%p.2), replica_groups={}, to_apply=%sum
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %masked = f32[8]{0} multiply(%a, %a)
  %copied = f32[8]{0} copy(%masked)
  %read = f32[8]{0} add(%copied, %a), metadata={op_name="jit(f)/transpose(jvp())/moe/add"}
  %far = f32[8]{0} negate(%read)
  %plain = f32[8]{0} add(%far, %a), metadata={op_name="jit(f)/jvp()/gather"}
  %after = f32[8]{0} add(%plain, %a), metadata={op_name="jit(f)/jvp()/attention/add"}
  %called = f32[8]{0} fusion(%after), kind=kLoop, calls=%fused
  %start = f32[8]{0} async-start(%called), calls=%wrapped
  %done = f32[8]{0} async-done(%start)
  %use = f32[8]{0} add(%done, %a), metadata={op_name="jit(f)/jvp(head)/dot_general"}
  ROOT %last = f32[8]{0} copy(%use)
}
"""


@pytest.fixture(scope="module")
def names():
  return origins.trace(hlo.parse(_MODULE))


@pytest.mark.parametrize(
  ("instruction", "component", "of"),
  [
    ("masked", "moe", "backward"),  # Through a nameless copy to its reader.
    ("read", "moe", "backward"),  # Its own.
    ("far", "other", "forward"),  # The nearest reader is named, of no component: no further.
    ("called", "gdn", "forward"),  # What it calls comes before its readers.
    ("reduced", "head", "forward"),  # By the caller's reader.
    ("last", "head", "forward"),  # Nobody reads it: what it reads.
    ("a", "moe", "backward"),
  ],
)
def test_nameless_instructions_take_the_nearest_name(names, instruction, component, of):
  name = names[instruction]
  assert (origins.component_of(name, "compute"), origins.pass_of(name)) == (component, of)


def test_components_without_a_name_are_told_by_what_they_use():
  assert origins.component_of("", "wire") == "wire, unnamed"
  assert origins.component_of("jit(f)/dot_general", "compute") == "products, unnamed"
  assert origins.component_of("", "compute") == "other"
  for name in ("jvp(head)/add", "transpose(jvp(head))/while", "f/head/add", "f/head"):
    assert origins.named_component(name) == "head", name
  assert origins.named_component("f/heads/add") == ""
