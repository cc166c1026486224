"""The rules of the estimate, against figures worked by hand, and on recorded programs."""

import dataclasses
import pathlib

import pytest
from rich.console import Console

from tools.aot import costs, diff, guard, hlo, memory, report, show, timeline
from tools.roofline.machine import TPU7X, Grid

RECORDED = pathlib.Path("tools/aot/testdata")
GRID = Grid({"fsdp": 32, "context": 4, "expert": 2}, TPU7X)
BF16, HBM, HOST = 2307e12 / 2, 7.38e12 / 2, 21.3e9 / 2  # per device


def entry(lines, before="", parameters="x: bf16[1024,1024]"):
  body = "\n".join("  " + line for line in lines)
  return hlo.parse(
    f"HloModule m, is_scheduled=true\n{before}\n"
    f"ENTRY %main ({parameters}) -> f32[] {{\n"
    "  %x = bf16[1024,1024]{1,0} parameter(0)\n"
    f"{body}\n}}\n"
  )


def cost_of(lines, name="r", **more):
  module = entry(lines, **more)
  return costs.cost(module, module.entry, module.entry.by_name[name])


MIB2 = 2 * 2**20  # bytes of x


def test_elementwise_reads_and_writes():
  assert cost_of(["ROOT %r = bf16[1024,1024]{1,0} add(%x, %x)"]).hbm_bytes == 3 * MIB2
  in_vmem = cost_of(["ROOT %r = bf16[1024,1024]{1,0:T(8,128)S(1)} add(%x, %x)"])
  assert in_vmem.hbm_bytes == 2 * MIB2
  assert cost_of(["ROOT %r = bf16[1024,1024]{1,0} bitcast(%x)"]).hbm_bytes == 0


def test_slices_and_updates_move_their_own_size():
  slice_ = cost_of(
    [
      "%i = s32[] constant(0)",
      "ROOT %r = bf16[8,1024]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={8,1024}",
    ]
  )
  assert slice_.hbm_bytes == pytest.approx(2 * 8 * 1024 * 2, abs=16)  # and the indices
  update = cost_of(
    [
      "%u = bf16[8,1024]{1,0} constant({...})",
      "%i = s32[] constant(0)",
      "ROOT %r = bf16[1024,1024]{1,0} dynamic-update-slice(%x, %u, %i, %i)",
    ]
  )
  assert update.hbm_bytes == 2 * 8 * 1024 * 2


FUSED_SLICE = """
%f (p0: bf16[64,1024,1024], p1: s32[], p2: bf16[1024,1024]) -> bf16[64,1024,1024] {
  %p0 = bf16[64,1024,1024]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[1024,1024]{1,0} parameter(2)
  %b = bf16[64,1024,1024]{2,1,0} bitcast(%p0)
  %s = bf16[1,1024,1024]{2,1,0} dynamic-slice(%b, %p1, %p1, %p1), dynamic_slice_sizes={1,1024,1024}
  %t = bf16[1,1024,1024]{2,1,0} bitcast(%p2)
  %a = bf16[1,1024,1024]{2,1,0} add(%s, %t)
  ROOT %u = bf16[64,1024,1024]{2,1,0} dynamic-update-slice(%p0, %a, %p1, %p1, %p1)
}
"""


def test_a_fusion_reads_a_slice_of_a_stack_and_updates_it_in_place():
  lines = [
    "%stack = bf16[64,1024,1024]{2,1,0} constant({...})",
    "%i = s32[] constant(0)",
    "ROOT %r = bf16[64,1024,1024]{2,1,0} fusion(%stack, %i, %x), kind=kLoop, calls=%f",
  ]
  # A layer read, x read, a layer written, the index: not the stack of 64.
  assert cost_of(lines, before=FUSED_SLICE).hbm_bytes == pytest.approx(3 * MIB2, abs=16)


@pytest.mark.parametrize(
  "line, flops, kind",
  [
    ("f32[1024,1024] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2**31, "bf16"),
    ("f32[1024,1024] convolution(%x, %x), dim_labels=bf_io->bf", 2**31, "bf16"),
    ("f32[1024,1024] convolution(%x, %x), dim_labels=fb_io->bf", 2**31, "bf16"),
    ("f32[1024,1024] convolution(%e, %e), dim_labels=bf_io->bf", 2**31, "fp8"),
    ("f32[1024,1024] convolution(%s, %s), dim_labels=bf_io->bf", 2**31, "bf16"),
    (
      "f32[1024,1024] convolution(%s, %s), dim_labels=bf_io->bf,"
      " operand_precision={highest,highest}",
      6 * 2**31,
      "bf16",
    ),
    # A product over a batch of 16, written with base dilation: 16 x [512 x 64] [64 x 128].
    (
      "f32[16,512,128] convolution(%l, %q), window={size=16 stride=15 lhs_dilate=16},"
      " dim_labels=0fb_0io->0bf",
      2 * 16 * 512 * 64 * 128,
      "bf16",
    ),
    # A causal convolution of 4 taps over 32 steps, 8 channels alone: 4 x 32 - 6 live pairs.
    (
      "f32[1,32,8] convolution(%c, %w), window={size=4 pad=3_0}, dim_labels=b0f_0io->b0f,"
      " feature_group_count=8",
      2 * (4 * 32 - 6) * 8,
      "bf16",
    ),
  ],
)  # fmt: skip
def test_flops_of_products(line, flops, kind):
  lines = [
    "%e = f8e4m3fn[1024,1024]{1,0} constant({...})",
    "%s = f32[1024,1024]{1,0} constant({...})",
    "%l = bf16[16,64,512]{2,1,0} constant({...})",
    "%q = bf16[16,64,128]{2,1,0} constant({...})",
    "%c = f32[1,32,8]{2,1,0} constant({...})",
    "%w = f32[4,1,8]{2,1,0} constant({...})",
    f"ROOT %r = {line}",
  ]
  assert cost_of(lines).flops == {kind: flops}


def test_declared_and_undeclared_kernels():
  call = 'custom-call(%x), custom_call_target="tpu_custom_call"'
  said = cost_of(
    [
      f"ROOT %r = bf16[1024,1024]{{1,0}} {call}, backend_config="
      '{"cost_estimate":{"flops":"5000","transcendentals":"0","bytes_accessed":"9000000"}}'
    ]
  )
  assert said.flops == {"bf16": 5000} and said.hbm_bytes == 9e6 and not said.unknown
  silent = cost_of(
    [f'ROOT %r = bf16[1024,1024]{{1,0}} {call}, metadata={{op_name="jit(f)/gdn_fwd/pallas_call"}}']
  )
  assert not silent.flops and silent.hbm_bytes == 2 * MIB2
  assert silent.unknown.startswith("kernel gdn_fwd: FLOPs not declared")


def seconds(module, **more):
  return timeline.estimate(module, GRID, **more)


ADD = "%a{} = bf16[1024,1024]{{1,0}} add(%x, %x)"
ADD_SECONDS = 3 * MIB2 / HBM


def test_compute_bound_and_memory_bound_and_cycles():
  played = seconds(
    entry(["ROOT %r = f32[1024,1024]{1,0} convolution(%x, %x), dim_labels=bf_io->bf"])
  )
  assert played.seconds == pytest.approx(max(2**31 / BF16, (2 * MIB2 + 2 * MIB2) / HBM))
  slow = 'backend_config={"estimated_cycles":"2200000"}'
  memory_bound = entry([f"ROOT %r = bf16[1024,1024]{{1,0}} add(%x, %x), {slow}"])
  assert seconds(memory_bound).seconds == pytest.approx(1e-3 / 2.65)
  assert seconds(memory_bound, use_cycles=False).seconds == pytest.approx(ADD_SECONDS)
  unknown = slow.replace("2200000", str(2**63 - 1))
  never = entry([f"ROOT %r = bf16[1024,1024]{{1,0}} add(%x, %x), {unknown}"])
  assert seconds(never).seconds == pytest.approx(ADD_SECONDS)


GATHER = (
  "(bf16[32,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%s),"
  " replica_groups=[8,32]<=[32,8]T(1,0), dimensions={0}"
)
GATHER_SECONDS = 2 * MIB2 * 31 / 32 / 400e9


def overlapped(between, gathers=1):
  starts = [f"%g{k} = {GATHER}" for k in range(gathers)]
  work = [ADD.format(k) for k in range(between)]
  dones = [f"%d{k} = bf16[1024,1024]{{1,0}} all-gather-done(%g{k})" for k in range(gathers)]
  return entry(["%s = bf16[32,1024]{1,0} constant({...})", *starts, *work, *dones])


@pytest.mark.parametrize("between", [0, 2, 5, 100])
def test_an_overlapped_gather_costs_what_work_does_not_hide(between):
  played = seconds(overlapped(between))
  work = between * ADD_SECONDS
  assert played.seconds == pytest.approx(max(work, GATHER_SECONDS))
  (row,) = [r for r in played.rows if r.collective]
  assert row.exposed == pytest.approx(max(0.0, GATHER_SECONDS - work))
  assert row.window == pytest.approx(work)


def test_two_gathers_share_their_axis():
  played = seconds(overlapped(2, gathers=2))
  assert played.seconds == pytest.approx(2 * GATHER_SECONDS)


def test_a_synchronous_collective_adds_all_of_itself():
  line = (
    "ROOT %r = bf16[1024,1024]{1,0} all-gather(%s), replica_groups=[8,32]<=[32,8]T(1,0),"
    " dimensions={0}"
  )
  module = entry(["%s = bf16[32,1024]{1,0} constant({...})", ADD.format(0), line])
  assert seconds(module).seconds == pytest.approx(ADD_SECONDS + GATHER_SECONDS)


NESTED = """
%inner_c (s: (s32[], bf16[1024,1024])) -> pred[] {
  %s = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(3)
  ROOT %r = pred[] compare(%i, %n), direction=LT
}
%inner_b (s: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %s = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[1024,1024]{1,0} get-tuple-element(%s), index=1
  %a = bf16[1024,1024]{1,0} add(%x, %x)
  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%i, %a)
}
%outer_c (s: (s32[], bf16[1024,1024])) -> pred[] {
  %s = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] LIMIT
  ROOT %r = pred[] compare(%i, %n), direction=LT
}
%outer_b (s: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %s = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %w = (s32[], bf16[1024,1024]{1,0}) while(%s), condition=%inner_c, body=%inner_b
  %x = bf16[1024,1024]{1,0} get-tuple-element(%w), index=1
  %a = bf16[1024,1024]{1,0} add(%x, %x)
  %i = s32[] get-tuple-element(%w), index=0
  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%i, %a)
}
"""
NEST = [
  "%z = s32[] constant(0)",
  "%t = (s32[], bf16[1024,1024]{1,0}) tuple(%z, %x)",
  "ROOT %w = (s32[], bf16[1024,1024]{1,0}) while(%t), condition=%outer_c, body=%outer_b",
]


def test_nested_loops_multiply():
  played = seconds(entry(NEST, before=NESTED.replace("LIMIT", "constant(5)")))
  assert played.seconds == pytest.approx(5 * (3 + 1) * ADD_SECONDS, rel=1e-4)
  assert [(loop.trips, loop.runs, loop.known) for loop in played.loops] == [
    (5, 1, True),
    (3, 5, True),
  ]
  assert sorted(r.count for r in played.rows) == [5, 15]
  assert not played.unknown


def test_an_unknown_trip_count_is_listed():
  played = seconds(entry(NEST, before=NESTED.replace("LIMIT", "add(%i, %i)")))
  assert [loop.known for loop in played.loops] == [False, True]
  assert any("trip count" in what for what in played.unknown)


def test_conditionals_take_their_longest_branch():
  before = """
%short (x.1: bf16[1024,1024]) -> bf16[1024,1024] {
  ROOT %x.1 = bf16[1024,1024]{1,0} parameter(0)
}
%long (x.2: bf16[1024,1024]) -> bf16[1024,1024] {
  %x.2 = bf16[1024,1024]{1,0} parameter(0)
  ROOT %a = bf16[1024,1024]{1,0} add(%x.2, %x.2)
}
"""
  line = "ROOT %r = bf16[1024,1024] conditional(%p, %x, %x), true_computation=%short, false_computation=%long"
  played = seconds(entry(["%p = pred[] constant(true)", line], before=before))
  assert played.seconds == pytest.approx(ADD_SECONDS) and played.conditionals == 1


def test_host_transfers_run_at_the_host_link_in_each_direction():
  lines = [
    "%h = bf16[1024,1024]{1,0:T(8,128)S(5)} constant({...})",
    "%in = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0:T(8,128)S(5)}, u32[]) copy-start(%h)",
    "%out = (bf16[1024,1024]{1,0:T(8,128)S(5)}, bf16[1024,1024]{1,0}, u32[]) copy-start(%x)",
    "%in.1 = bf16[1024,1024]{1,0} copy-done(%in)",
    "ROOT %out.1 = bf16[1024,1024]{1,0:T(8,128)S(5)} copy-done(%out)",
  ]
  played = seconds(entry(lines))
  assert played.seconds == pytest.approx(MIB2 / HOST)  # both at once
  assert sum(r.host_bytes for r in played.rows) == 2 * MIB2


def test_an_unscheduled_module_is_refused():
  module = hlo.parse(
    "HloModule m\n\nENTRY %e (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}"
  )
  with pytest.raises(ValueError, match="not scheduled"):
    timeline.estimate(module, GRID)


def recorded(name, grid):
  read = lambda suffix: (RECORDED / f"{name}{suffix}.txt").read_text()
  return report.make(
    read(""),
    grid,
    memory_report=read("-memory-usage-report"),
    buffer_assignment=read("-buffer-assignment"),
  )


@pytest.fixture(scope="module")
def offloaded():
  return recorded("offloaded_update", Grid({"fsdp": 4, "expert": 2}, TPU7X))


def test_report_of_a_recorded_training_step(offloaded):
  # [2048, 1024] x [1024, 1024] each time; in 4 layers, forward, replay and two gradients of each
  # of 3 inner steps, and the float8 product with its two gradients, whose replay nothing needs.
  product = 2 * 2048 * 1024 * 1024
  assert offloaded.flops / product == pytest.approx(4 * (3 * 4 + 3), rel=0.01)
  assert offloaded.host_bytes == pytest.approx(
    4 * 2**20, abs=64
  )  # the float32 moment, a quarter of [4, 1024, 1024]
  assert offloaded.host_transfer_bytes == 2 * 4 * 2**20
  assert "host in" in offloaded.resources and "host out" in offloaded.resources
  assert offloaded.seconds > offloaded.seconds_by_rule > 0
  passes = {r.pass_name for r in offloaded.collectives if r.loops}
  assert passes == {"forward", "replay", "backward"}
  assert {r.path for r in offloaded.loops} == {(4,), (4, 3)}
  total = sum(sum(p.values()) for p in offloaded.components.values())
  assert total == pytest.approx(offloaded.seconds, rel=1e-6)
  assert not offloaded.unknown


def test_report_counts_memory_and_buffers(offloaded):
  assert offloaded.fits.startswith("fits: 0.08 GiB of 94.75")
  sizes = [b.bytes for b in offloaded.buffers]
  assert sizes == sorted(sizes, reverse=True)
  assert offloaded.buffers[0].shape == "bf16[4,2048,1024]"


def test_json_keeps_everything(offloaded, tmp_path):
  show.write_json(offloaded, str(tmp_path / "r.json"))
  assert report.read(str(tmp_path / "r.json")) == offloaded
  with pytest.raises(ValueError, match="no AOT report"):
    report.from_json({"name": "x"})


def test_tables_and_plot(offloaded, tmp_path):
  console = Console(width=250, file=open(tmp_path / "out.txt", "w"))
  show.show(offloaded, console)
  console.file.close()
  text = (tmp_path / "out.txt").read_text()
  for word in ("all-gather", "reduce-scatter", "4 x 3", "fits: 0.08 GiB", "host out", "fsdp"):
    assert word in text
  show.plot(offloaded, str(tmp_path / "out.png"))
  assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_diff_names_what_changed_and_nothing_else(offloaded):
  assert not [line for line in diff.compare(offloaded, offloaded) if line.changed]
  other = recorded("sharded_product", GRID)
  changed = {(line.section, line.name) for line in diff.compare(offloaded, other) if line.changed}
  assert ("memory", "HBM") in changed and ("estimate", "whole run") in changed
  assert ("collectives", "reduce-scatter fsdp in loops: runs") in changed
  assert ("instructions", "loop instructions") in changed


def test_guard_accepts_itself_and_a_gain_is_said(offloaded):
  assert guard.findings(offloaded, offloaded) == []
  fewer = dataclasses.replace(offloaded, collectives=offloaded.collectives[1:])
  assert any("if that is a gain" in f for f in guard.findings(offloaded, fewer))
  more = dataclasses.replace(offloaded, loop_instructions=offloaded.loop_instructions * 2)
  assert any("instructions in loops" in f for f in guard.findings(offloaded, more))


def test_memory_report_must_add_up():
  text = (RECORDED / "sharded_product-memory-usage-report.txt").read_text()
  assert memory.is_complete(text)
  assert not memory.is_complete(text[: len(text) // 2])
  assert not memory.is_complete("")
  # A kernel's own VMEM is a total without rows; HBM without rows is a file cut short.
  whole = "Memory Space: {} (color=1)\nTotal bytes: 512 (512B)\n  size; shapes_list\n  ---\n\n\n"
  assert memory.is_complete(whole.format("vmem"))
  assert not memory.is_complete(whole.format("default"))
