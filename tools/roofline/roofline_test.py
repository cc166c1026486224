"""The cost model against the worked figures of one large cell, and against its own invariants."""

import dataclasses
import json
from typing import Any

import pytest

from kernels.base import options, refusals
from model import config as model_config
from tools.roofline import machine, main, report, roofline

STEP_SECONDS = 64.271
MOE = roofline.ModelDims.from_config(model_config.preset("397B-A17B"))
DENSE = roofline.ModelDims.from_config(model_config.preset("27B"))


def cell(**changes):
  """397B-A17B on 128 chips: 9 micro-batches of 64 rows x 65,536 tokens, experts in fp8."""
  values: dict[str, Any] = {
    "dims": MOE,
    "mesh": machine.Mesh(32, 2, 4),
    "rows": 64,
    "row_tokens": 65536,
    "micro_batches": 9,
    "effective_length": 32768,
    "expert_dtype": "fp8",
  }
  return roofline.price(roofline.Workload(**(values | changes)))


def products(priced, name, passes=("forward", "backward")):
  """Seconds of one component's products at peak."""
  component = priced.component(name)
  peak = priced.workload.chip.peak(component.dtype)
  return sum(getattr(component, p) for p in passes) / peak


def shown(value, digits):
  """Whether `value` prints as the expected text does: half a unit of the last digit."""
  return pytest.approx(value, abs=0.5000001 * 10**-digits)


@pytest.mark.parametrize(
  "name, bf16, fp8",
  [
    ("MoE routed GMMs", 5.79, 2.90),
    ("shared expert+router", 0.68, 0.34),
    ("GDN projections", 4.07, 4.07),
    ("attn projections", 1.21, 1.21),
    ("attention core", 3.60, 3.60),
    ("GDN core", 0.20, 0.20),
    ("GDN CP folds", 0.11, 0.11),
    ("log-prob head", 1.04, 1.04),
  ],
)
def test_cell_products(name, bf16, fp8):
  assert products(cell(expert_dtype="bf16"), name) == shown(bf16, 2)
  assert products(cell(), name) == shown(fp8, 2)


@pytest.mark.parametrize("length, seconds", [(8192, 0.90), (65536, 7.21)])
def test_cell_attention_by_effective_length(length, seconds):
  assert products(cell(effective_length=length), "attention core") == shown(seconds, 2)


def test_cell_totals_and_replay():
  fp8, bf16 = cell(), cell(expert_dtype="bf16")
  assert bf16.compute_seconds(replay=False) == shown(16.7, 1)
  assert fp8.compute_seconds(replay=False) == shown(13.5, 1)
  replay = fp8.compute_seconds(replay=True) - fp8.compute_seconds(replay=False)
  assert replay == shown(4.25, 2)
  assert bf16.compute_seconds(replay=True) == shown(22.0, 1)
  assert fp8.compute_seconds(replay=True) == shown(17.7, 1)


def test_cell_hbm():
  bare = cell(replay=0.0)  # the matrix products' traffic of forward and backward alone
  assert bare.component("MoE routed GMMs").hbm / 1e12 == shown(13.2, 1)
  assert bare.component("MoE routed GMMs").seconds["hbm"] == shown(1.79, 2)
  full = cell()
  for name, terabytes, seconds in (
    ("MoE dispatch", 14.2, 1.92),
    ("GDN core", 9.1, 1.24),
    ("norms+residual", None, 0.55),
  ):
    component = full.component(name)
    if terabytes:
      assert component.hbm / 1e12 == shown(terabytes, 1)
    assert component.seconds["hbm"] == shown(seconds, 2)
  states = full.notes["GDN chunk states and T per layer and device, float32"]
  assert states / 1e9 == shown(1.34, 2)


def test_cell_wire():
  bf16, fp8 = cell(), cell(weight_wire_dtype="fp8")
  seconds = lambda priced, name, axis: priced.component(name).seconds[f"wire:{axis}"]
  gather = 8.4  # two all-gathers of bfloat16 weights
  scatter = 4.2
  assert seconds(bf16, "MoE routed GMMs", "fsdp") == shown(gather + scatter, 1)
  assert seconds(fp8, "MoE routed GMMs", "fsdp") == shown(gather / 2 + scatter, 1)
  dense = ("shared expert+router", "GDN projections", "attn projections")
  assert sum(seconds(bf16, name, "fsdp") for name in dense) == shown(2.0, 1)
  assert seconds(bf16, "log-prob head", "fsdp") == shown(0.14, 2)
  assert bf16.seconds["wire:fsdp"] == shown(14.8, 1)
  assert fp8.seconds["wire:fsdp"] == shown(10.6, 1)
  assert seconds(bf16, "MoE dispatch", "context") == shown(7.6, 1)
  assert seconds(bf16, "attention core", "context") == shown(0.4, 1)
  assert seconds(bf16, "GDN CP folds", "context") == shown(0.2, 1)
  assert bf16.seconds["wire:context"] == shown(8.2, 1)
  ragged = cell(dispatch="ragged").component("MoE dispatch")
  assert ragged.seconds["wire:context"] == shown(19, 0)
  assert "wire:expert" not in bf16.seconds  # the expert pair is one chip


def test_cell_host():
  f32 = cell().component("optimizer")
  small = cell(master="residual16").component("optimizer")
  assert f32.host / 1e9 == shown(37.2, 1)
  assert f32.seconds["host"] == shown(1.74, 2)
  assert small.host / 1e9 == shown(31.4, 1)
  assert small.seconds["host"] == shown(1.47, 2)
  resident = cell(master="residual16", resident_gib=6.0).component("optimizer")
  assert resident.seconds["host"] == shown(0.87, 2)


@pytest.mark.parametrize("length, mfu", [(1e-6, 19.8), (8192, 21.0), (32768, 24.6), (65536, 29.4)])
def test_cell_mfu(length, mfu):
  assert cell(effective_length=length).mfu(STEP_SECONDS) * 100 == shown(mfu, 1)


def test_cell_floors():
  full = cell()
  assert full.floor == shown(18, 0)
  assert STEP_SECONDS / full.floor == shown(3.6, 1)
  best = cell(replay=0.0, weight_wire_dtype="fp8")
  assert best.floor == shown(13.5, 1)
  assert STEP_SECONDS / best.floor == shown(4.8, 1)
  assert full.tokens_per_second_per_chip(STEP_SECONDS) == shown(4589, 0)


def test_cell_sizes():
  work = cell().workload
  assert (work.device_tokens, work.chip_tokens, work.step_tokens) == (16384, 294912, 37748736)
  assert work.dims.total_params / 1e9 == shown(396.34, 2)
  assert work.dims.active_params / 1e9 == shown(16.33, 2)


def test_parameters_of_every_preset():
  # Counts of the text models on the Hub; norms, convolutions and decay rates are not in ours.
  counts = {
    "397B-A17B": 396_346_350_336,
    "122B-A10B": 122_111_526_912,
    "35B-A3B": 34_660_610_688,
    "27B": 26_895_998_464,
    "9B": 8_953_803_264,
    "4B": 4_205_751_296,
    "2B": 1_881_825_088,
    "0.8B": 752_393_024,
  }
  for name, count in counts.items():
    dims = roofline.ModelDims.from_config(model_config.preset(name))
    assert 0 < count - dims.total_params < 0.002 * count, name


@pytest.mark.parametrize(
  "dims, mesh", [(MOE, (32, 2, 4)), (DENSE, (128, 1, 1)), (DENSE, (16, 1, 8))]
)
def test_work_is_linear_in_micro_batches(dims, mesh):
  values: dict[str, Any] = {
    "dims": dims,
    "mesh": machine.Mesh(*mesh),
    "rows": 128,
    "row_tokens": 32768,
  }
  one = roofline.price(roofline.Workload(**values, micro_batches=1))
  three = roofline.price(roofline.Workload(**values, micro_batches=3))
  for a, b in zip(one.components, three.components):
    factor = 1 if a.name == "optimizer" else 3
    assert b.flops == pytest.approx(factor * a.flops)
    assert b.hbm == pytest.approx(factor * a.hbm)
    assert b.host == pytest.approx(a.host)
    assert b.wire == pytest.approx({axis: factor * n for axis, n in a.wire.items()})
  assert one.model_flops * 3 == pytest.approx(three.model_flops)


def test_components_follow_the_model_and_the_mesh():
  dense = roofline.price(
    roofline.Workload(dims=DENSE, mesh=machine.Mesh(128, 1, 1), rows=128, row_tokens=8192)
  )
  names = {c.name for c in dense.components}
  assert "dense MLP" in names
  assert not {"MoE routed GMMs", "MoE dispatch", "shared expert+router", "GDN CP folds"} & names
  assert [r for r in dense.seconds if r.startswith("wire")] == ["wire:fsdp"]
  split = {c.name for c in cell().components}
  assert "dense MLP" not in split and "GDN CP folds" in split


def test_a_single_chip_needs_no_wire():
  dims = roofline.ModelDims.from_config(model_config.preset("0.8B"))
  for mesh in ((1, 1, 1), (2, 1, 1), (1, 1, 2)):
    work = roofline.Workload(dims=dims, mesh=machine.Mesh(*mesh), rows=2, row_tokens=1024)
    assert set(roofline.price(work).seconds) == {"compute", "hbm", "host", "floor"}


def test_whole_slice_flops_do_not_depend_on_the_mesh():
  def whole(mesh):
    work = roofline.Workload(
      dims=DENSE, mesh=machine.Mesh(*mesh), rows=128, row_tokens=16384, micro_batches=2
    )
    return sum(c.flops for c in roofline.price(work).components) * work.chips

  assert whole((128, 1, 1)) == pytest.approx(whole((32, 1, 1)))
  # Folds are the price of splitting rows.
  assert whole((32, 1, 4)) > whole((128, 1, 1))


def test_wire_of_an_axis_inside_the_chip_is_free_and_shared():
  chip = machine.TPU7X
  # Two devices a chip hold different shards of the other axes: both fetch all remote shards.
  assert machine.Mesh(32, 2, 4).grid(chip).gathered("fsdp", 1.0) == 2 * 31
  # Along fsdp itself the two devices of a chip share what arrives.
  assert machine.Mesh(64, 1, 1).grid(chip).gathered("fsdp", 1.0) == 62
  assert machine.Mesh(32, 2, 4).grid(chip).gathered("expert", 1.0) == 0
  assert machine.Mesh(32, 2, 4).grid(chip).links == {"fsdp": 4, "expert": 0, "context": 2}
  assert machine.Mesh(64, 1, 1).grid(chip).links == {"fsdp": 6, "expert": 0, "context": 0}


@pytest.mark.parametrize(
  "changes, word",
  [
    ({"rows": 63}, "multiple"),
    ({"row_tokens": 65537}, "context"),
    ({"mesh": machine.Mesh(32, 3, 4), "rows": 96}, "experts"),
    ({"effective_length": 65537}, "at most"),
  ],
)
def test_impossible_workloads_are_refused(changes, word):
  with pytest.raises(roofline.RooflineError, match=word):
    cell(**changes)


def test_segment_mix():
  assert roofline.effective_length([100]) == 100
  assert roofline.effective_length([300, 100]) == 250


def test_json_and_plot_hold_the_table(tmp_path):
  priced = cell()
  report.write_json(priced, str(tmp_path / "out.json"))
  read = json.loads((tmp_path / "out.json").read_text())
  assert read["seconds"] == priced.seconds
  assert [c["name"] for c in read["components"]] == [c.name for c in priced.components]
  assert read["workload"]["mesh"] == "32x2x4"
  report.plot(priced, str(tmp_path / "out.png"))
  assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
  text = "\n".join(report.summary(priced, STEP_SECONDS))
  assert "4,589 tokens/s/chip" in text and "24.6%" in text


def test_dimensions_come_from_a_published_file_too():
  config = model_config.preset("27B")
  assert roofline.ModelDims.from_config({"text_config": dataclasses.asdict(config)}) == DENSE
  with pytest.raises(ValueError, match="hidden_size"):
    roofline.ModelDims.from_config({"vocab_size": 5})


def settings(**values):
  return options.Settings([main.RooflineOptions], values)


def test_flags_describe_the_cell():
  work = main.workload(settings(effective_length=32768.0, expert_dtype="fp8"))
  assert work == cell().workload
  mixed = main.workload(settings(segment_lengths=(300, 100), mesh="128x1x1", model_preset="27b"))
  assert mixed.segment_length == 250 and mixed.rows == 128
  with pytest.raises(options.UserError, match="does not fit a row"):
    main.workload(settings(segment_lengths=(70000,)))
  with pytest.raises(options.UserError, match="multiple"):
    main.workload(settings(rows=65))


@pytest.mark.parametrize("rule", main.RULES, ids=lambda r: r.name)
def test_refusals(rule):
  assert rule not in refusals.broken_rules(settings(**rule.accepted), main.RULES)
  assert refusals.broken_rules(settings(**rule.refused), main.RULES) == [rule]


def test_every_option_reaches_the_workload():
  """No flag of the workload may be inert."""
  base = main.workload(settings())
  other = {
    "model_preset": "122B-A10B", "mesh": "16x2x8", "rows": 128, "row_tokens": 32768, "micro_batches": 2,
    "effective_length": 9.0, "segment_lengths": (5,), "gdn_chunk_size": 32, "expert_dtype": "fp8",
    "weight_wire_dtype": "fp8", "dispatch_dtype": "bf16", "dispatch": "ragged", "replay": 0.5,
    "fp32_master_storage": "residual16", "optimizer_memory_host_offload": False,
    "optimizer_device_resident_gib": 1.0,
  }  # fmt: skip
  for name, value in other.items():
    changed = main.workload(settings(**{name: value}))
    assert changed != base, name
    assert roofline.price(changed).to_json() != roofline.price(base).to_json(), name
  written = {"chip", "json", "plot", "measured_seconds", "model_config"}
  assert {o.name for o in options.declared(main.RooflineOptions)} == set(other) | written
