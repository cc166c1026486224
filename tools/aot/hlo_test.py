"""The reader of HLO text, on hand-made forms and on what the compiler wrote."""

import pathlib

import pytest

from tools.aot import collectives, hlo
from tools.roofline.machine import TPU7X, Grid

RECORDED = pathlib.Path("tools/aot/testdata")
GRID = Grid({"fsdp": 32, "context": 4, "expert": 2}, TPU7X)


def module(body, header="HloModule m, is_scheduled=true"):
  return hlo.parse(f"{header}\n\n{body}")


def test_shapes():
  shapes = hlo.parse_shapes(
    "(bf16[2,3]{1,0:T(8,128)(2,1)}, f32[4]{0:T(128)S(5)}, pred[], token[], s4[3]{0}, f8e4m3fn[8])"
  )
  assert [s.bytes for s in shapes] == [12, 16, 1, 0, 2, 8]
  assert [s.space for s in shapes] == [0, hlo.HOST, 0, 0, 0, 0]
  assert str(shapes[0]) == "bf16[2,3]" and shapes[2].elements == 1


def test_instructions_of_every_form():
  text = """
%inner.1 (p.0: f32[4], p.1: (f32[], s32[])) -> f32[4] {
  %p.1 = (f32[], s32[]) parameter(1)
  ROOT %p.0 = f32[4]{0} parameter(0), metadata={op_name="a \\" ) { b"}
}, execution_thread="sparsecore"

ENTRY %main (a: f32[4]) -> f32[4] {
  a = f32[4]{0} parameter(0)
  %k = custom-call.7 = f32[] add(%a, %a)
  %call.1 = (f32[4]{0}, /*index=1*/f32[4]{0}) custom-call(%a, /*index=1*/%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"torn": "{}"
}}, called_computations={%inner.1}, backend_config={"x":"y, z"}
  c = s32[] constant(-7)
  ROOT r = f32[4]{0} get-tuple-element(%call.1), index=1
}
"""
  read = module(text)
  assert read.entry.name == "main" and set(read.computations) == {"inner.1", "main"}
  call = read.entry.by_name["call.1"]
  assert call.operands == ("a", "a") and call.custom_call_target == "tpu_custom_call"
  assert call.called["called_computations"] == ("inner.1",)
  assert [i.name for i in read.inside(call)] == ["p.1", "p.0"]
  assert call.attribute("backend_config") == '{"x":"y, z"}'
  assert read.entry.root.attribute("index") == "1" and read.entry.root.operands == ("call.1",)
  assert read.entry.by_name["c"].literal == "-7"
  assert read.computations["inner.1"].root.op_name.startswith("a ")


def test_text_that_is_no_module_is_refused():
  with pytest.raises(ValueError, match="ENTRY"):
    hlo.parse("a table of numbers\n1 2 3\n")


LOOP = """
%fused (p: s32[], q: s32[]) -> pred[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %lt = pred[] compare(%p, %q), direction={direction}
}}

%condition (state: (f32[4], s32[])) -> pred[] {{
  %state = (f32[4]{{0}}, s32[]) parameter(0)
  %limit = s32[] constant({limit})
  %i = s32[] get-tuple-element(%state), index=1
  {root}
}}

%body (state.1: (f32[4], s32[])) -> (f32[4], s32[]) {{
  %state.1 = (f32[4]{{0}}, s32[]) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%state.1), index=0
  %j = s32[] get-tuple-element(%state.1), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%j, %step)
  ROOT %out = (f32[4]{{0}}, s32[]) tuple(%x, %next)
}}

ENTRY %main (x0: f32[4], n: s32[]) -> f32[4] {{
  %x0 = f32[4]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant({start})
  %init = (f32[4]{{0}}, s32[]) tuple(%x0, %zero)
  %loop = (f32[4]{{0}}, s32[]) while(%init), condition=%condition, body=%body
  ROOT %done = f32[4]{{0}} get-tuple-element(%loop), index=0
}}
"""
PLAIN = "ROOT %cmp = pred[] compare(%i, %limit), direction={}"
FUSED = "ROOT %cmp = pred[] fusion(%i, %limit), kind=kLoop, calls=%fused"
SWAPPED = "ROOT %cmp = pred[] compare(%limit, %i), direction={}"
NOT_CONSTANT = "ROOT %cmp = pred[] compare(%i, %i), direction={}"


@pytest.mark.parametrize(
  "root, direction, start, limit, step, trips",
  [
    (PLAIN, "LT", 0, 15, 1, 15),
    (PLAIN, "LE", 0, 15, 1, 16),
    (PLAIN, "NE", 0, 15, 1, 15),
    (PLAIN, "LT", 3, 15, 1, 12),
    (PLAIN, "LT", 0, 15, 4, 4),
    (PLAIN, "LT", 20, 15, 1, 0),
    (FUSED, "LT", 0, 9, 1, 9),
    (SWAPPED, "GT", 0, 6, 1, 6),
    (NOT_CONSTANT, "LT", 0, 6, 1, None),
    (PLAIN, "GT", 0, 6, 1, None),
  ],
)
def test_trip_counts(root, direction, start, limit, step, trips):
  text = LOOP.format(
    root=root.format(direction), direction=direction, start=start, limit=limit, step=step
  )
  read = module(text)
  assert hlo.trip_count(read, read.entry.by_name["loop"], read.entry) == trips


@pytest.mark.parametrize(
  "name, counts", [("sharded_product", [3]), ("offloaded_update", [3, 3, 3, 4, 4])]
)
def test_recorded_programs(name, counts):
  read = hlo.parse((RECORDED / f"{name}.txt").read_text())
  assert read.is_scheduled
  found = [
    hlo.trip_count(read, i, c)
    for c in read.computations.values()
    for i in c.instructions
    if i.opcode == "while"
  ]
  assert sorted(n or 0 for n in found) == counts
  for computation in read.computations.values():  # every name that is used is defined
    for instruction in computation.instructions:
      assert all(o in computation.by_name for o in instruction.operands), instruction.name
      for names in instruction.called.values():
        assert all(n in read.computations for n in names)


def one_collective(line):
  text = f"""
%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (x: bf16[64,128]) -> bf16[64,128] {{
  %x = bf16[64,128]{{1,0}} parameter(0)
  ROOT %c = {line}
}}
"""
  read = module(text)
  return collectives.read(read, read.entry.by_name["c"], GRID)


def groups(axes):
  """Replica groups over the named axes of the grid, as the compiler writes them."""
  sizes = {"fsdp": (32, 8), "context": (4, 2), "expert": (2, 1)}
  firsts, members = [0], [0]
  for axis, (size, stride) in sizes.items():
    grown = [m + k * stride for m in (members if axis in axes else firsts) for k in range(size)]
    if axis in axes:
      members = grown
    else:
      firsts = grown
  return "{" + ",".join("{" + ",".join(str(f + m) for m in members) + "}" for f in firsts) + "}"


BYTES = 64 * 128 * 2


@pytest.mark.parametrize(
  "axes", [("fsdp",), ("context",), ("fsdp", "expert"), ("context", "expert")]
)
def test_axes_of_written_groups(axes):
  read = one_collective(
    f"bf16[64,128]{{1,0}} all-gather(%x), replica_groups={groups(axes)}, dimensions={{0}}"
  )
  assert read.axes == axes and read.kind == "all-gather" and not read.is_async
  assert read.payload_bytes == BYTES


@pytest.mark.parametrize(
  "text, axes, size",
  [
    ("[8,32]<=[32,8]T(1,0)", ("fsdp",), 32),
    ("[32,8]<=[256]", ("context", "expert"), 8),
    ("[64,4]<=[32,4,2]T(0,2,1)", ("context",), 4),
    ("[1,256]<=[256]", ("fsdp", "context", "expert"), 256),
    ("{}", ("fsdp", "context", "expert"), 256),
    ("{{0,3},{1,2}}", ("?",), 2),
    ("{{0,8,16}}", ("?",), 3),
  ],
)
def test_axes_of_other_groups(text, axes, size):
  read = one_collective(f"bf16[64,128]{{1,0}} all-reduce(%x), replica_groups={text}, to_apply=%sum")
  assert (read.axes, read.group_size) == (axes, size)


def test_permutes_know_their_axis_and_self_pairs():
  read = one_collective(
    "bf16[64,128]{1,0} collective-permute(%x), source_target_pairs={{0,2},{2,4},{4,6},{6,6}}"
  )
  assert (read.axes, read.pairs, read.self_pairs) == (("context",), 4, 1)
  # Both devices of a chip send; a pair that stays at home sends nothing.
  assert collectives.wire_bytes(read, GRID) == {"context": 2 * BYTES * 0.75}


def test_wire_of_collectives_by_hand():
  def wire(kind, axes, shape="bf16[64,128]{1,0}"):
    reduces = ", to_apply=%sum" if "reduce" in kind else ""
    line = f"{shape} {kind}(%x), replica_groups={groups(axes)}, dimensions={{0}}{reduces}"
    return collectives.wire_bytes(one_collective(line), GRID)

  assert wire("all-gather", ("fsdp",)) == {"fsdp": 2 * BYTES * 31 / 32}
  assert wire("all-gather", ("expert",)) == {}  # the two devices of a chip
  # Over the pair first, which is free, then over fsdp in blocks of two shares.
  assert wire("all-gather", ("fsdp", "expert")) == {"fsdp": 2 * BYTES * 31 / 32}
  assert wire("all-reduce", ("context",)) == {"context": 2 * 2 * BYTES * 3 / 4}
  # A reduce-scatter's result is a share: 4 times as much goes in.
  assert wire("reduce-scatter", ("context",)) == {"context": 2 * 4 * BYTES * 3 / 4}
  assert wire("all-to-all", ("context",)) == {"context": 2 * BYTES * 3 / 4}


def test_starts_and_offloaded_calls():
  start = one_collective(
    "(bf16[2,128]{1,0}, bf16[64,128]{1,0}) all-gather-start(%x), replica_groups="
    + groups(("fsdp",))
  )
  assert start.is_async and start.payload_bytes == BYTES
  several = one_collective(
    "((bf16[2,128]{1,0}, f32[1,8]{1,0}), (bf16[64,128]{1,0}, f32[32,8]{1,0}))"
    " all-gather-start(%x, %x), replica_groups=" + groups(("fsdp",))
  )
  assert several.payload_bytes == BYTES + 32 * 8 * 4
  permute = one_collective(
    "(bf16[64,128]{1,0}, bf16[64,128]{1,0}, u32[], u32[]) collective-permute-start(%x),"
    " source_target_pairs={{0,2}}"
  )
  assert permute.is_async and permute.payload_bytes == BYTES
  read = hlo.parse((RECORDED / "offloaded_update.txt").read_text())
  grid = Grid({"fsdp": 4, "expert": 2}, TPU7X)
  found = [
    c
    for computation in read.computations.values()
    for i in computation.instructions
    if i.opcode.endswith("-start") and (c := collectives.read(read, i, grid))
  ]
  assert sorted((c.kind, c.axes, c.payload_bytes) for c in found) == [
    ("all-gather", ("fsdp",), 2 * 2**20),
    ("all-gather", ("fsdp",), 2 * 2**20),
    ("all-reduce", ("expert",), 2 * 2**20),
    ("reduce-scatter", ("fsdp",), 2 * 2**20),
  ]
  assert all(c.offloaded and c.is_async for c in found)
