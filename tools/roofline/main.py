"""Prices one training step of any preset on any mesh: table, JSON, bar chart.

./bazelw run //tools:roofline -- --model_preset=397B-A17B --mesh=32x2x4 --rows=64 \
  --row_tokens=65536 --micro_batches=9 --effective_length=32768 --expert_dtype=fp8
"""

from __future__ import annotations

import dataclasses
import os

from kernels.base import cli, mesh, options, outputs, refusals
from model import config as model_config
from tools.roofline import machine, roofline

_PRESETS = {name.lower(): name for name in model_config.PRESETS}


def _preset_fault(text: str) -> str | None:
  return None if text.lower() in _PRESETS else f"want one of {', '.join(model_config.PRESETS)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineOptions:
  """The workload, the machine and what to write."""

  model_preset: str = options.option(
    "397B-A17B", help="Published model size; case does not matter.", check=_preset_fault
  )
  model_config: str | None = options.option(
    None, help="A Hugging Face config.json instead of a preset."
  )
  mesh: str = options.option(
    "32x2x4",
    help="Devices: fsdp x expert x context. Experts lie over context x expert, as with the trainer's "
    "custom_mesh_and_rule=cp-as-ep-dense-no-cp.",
    check=mesh.fault,
  )
  chip: str = options.option("tpu7x", help="Chip.", choices=tuple(machine.CHIPS))
  rows: int | None = options.option(
    None, help="Packed rows of a micro-batch; empty: one per fsdp x expert shard.", minimum=1
  )
  row_tokens: int = options.option(65536, help="Tokens of a packed row.", minimum=1)
  micro_batches: int = options.option(9, help="Micro-batches of a step.", minimum=1)
  effective_length: float | None = options.option(
    None, help="sum(len^2)/sum(len) over packed segments, tokens; empty: one segment a row."
  )
  segment_lengths: tuple[int, ...] = options.option(
    (), help="The mix of packed segment lengths, instead of effective_length.", minimum=1
  )
  gdn_chunk_size: int = options.option(
    64,
    help="Tokens per chunk of the delta rule; a power of two.",
    minimum=1,
    check=lambda n: None if n & (n - 1) == 0 else "want a power of two",
  )
  expert_dtype: str = options.option(
    "bf16", help="Operands of expert products.", choices=("bf16", "fp8")
  )
  weight_wire_dtype: str = options.option(
    "bf16", help="Expert weights on the wire.", choices=("bf16", "fp8")
  )
  dispatch_dtype: str = options.option(
    "fp8", help="Rows on the wire to the experts.", choices=("bf16", "fp8")
  )
  dispatch: str = options.option(
    "ring",
    help="ring: token all-gather and reduce-scatter; ragged: all-to-all of every copy.",
    choices=("ring", "ragged"),
  )
  replay: float = options.option(
    1.0, help="Part of the forward repeated in the backward.", minimum=0.0, maximum=1.0
  )
  fp32_master_storage: str = options.option(
    "f32", help="Optimizer storage.", choices=tuple(roofline.MASTER_BYTES)
  )
  optimizer_memory_host_offload: bool = options.option(
    True, help="Optimizer leaves live in host memory."
  )
  optimizer_device_resident_gib: float = options.option(
    0.0, help="GiB a device of optimizer leaves that stay in HBM.", minimum=0.0
  )
  measured_seconds: float | None = options.option(
    None, help="A step time to give throughput and MFU for.", minimum=1e-9
  )
  json: str | None = options.option(None, help="File to write everything to as JSON.", writes=True)
  plot: str | None = options.option(
    None,
    help="File to write the bar chart to: .png, .pdf or .svg.",
    check=outputs.chart_fault,
    writes=True,
  )


RULES = (
  refusals.Rule(
    name="one-model",
    keys=("model_config", "model_preset"),
    broken=lambda s: s.model_config is not None and s.model_preset != "397B-A17B",
    reason="give model_config or model_preset, not both",
    accepted={"model_config": "config.json"},
    refused={"model_config": "config.json", "model_preset": "9B"},
  ),
  refusals.Rule(
    name="one-effective-length",
    keys=("effective_length", "segment_lengths"),
    broken=lambda s: s.effective_length is not None and bool(s.segment_lengths),
    reason="give effective_length, or the segment_lengths it follows from, not both",
    accepted={"segment_lengths": (8192, 16384)},
    refused={"segment_lengths": (8192, 16384), "effective_length": 8192.0},
  ),
  refusals.Rule(
    name="resident-needs-offload",
    keys=("optimizer_device_resident_gib", "optimizer_memory_host_offload"),
    broken=lambda s: s.optimizer_device_resident_gib > 0 and not s.optimizer_memory_host_offload,
    reason="without host offload the whole optimizer is resident; leave the GiB at 0",
    accepted={"optimizer_device_resident_gib": 6.0},
    refused={"optimizer_device_resident_gib": 6.0, "optimizer_memory_host_offload": False},
  ),
)


def workload(settings: options.Settings) -> roofline.Workload:
  """The workload that the flags describe.

  Raises:
    options.UserError: Rows, experts or lengths do not fit the mesh or the row.
  """
  if settings.model_config:
    config = model_config.ModelConfig.from_file(settings.model_config)
  else:
    config = model_config.preset(_PRESETS[settings.model_preset.lower()])
  shape = machine.Mesh.parse(settings.mesh)
  length = settings.effective_length
  if settings.segment_lengths:
    if max(settings.segment_lengths) > settings.row_tokens:
      raise options.UserError(
        f"a segment of {max(settings.segment_lengths)} tokens does not fit a row of"
        f" {settings.row_tokens}"
      )
    length = roofline.effective_length(settings.segment_lengths)
  try:
    return roofline.Workload(
      dims=roofline.ModelDims.from_config(config),
      mesh=shape,
      chip=machine.CHIPS[settings.chip],
      rows=settings.rows or shape.fsdp * shape.expert,
      row_tokens=settings.row_tokens,
      micro_batches=settings.micro_batches,
      effective_length=length,
      chunk=settings.gdn_chunk_size,
      expert_dtype=settings.expert_dtype,
      weight_wire_dtype=settings.weight_wire_dtype,
      dispatch_dtype=settings.dispatch_dtype,
      dispatch=settings.dispatch,
      replay=settings.replay,
      master=settings.fp32_master_storage,
      host_offload=settings.optimizer_memory_host_offload,
      resident_gib=settings.optimizer_device_resident_gib,
    )
  except ValueError as error:
    raise options.UserError(str(error)) from error


def run(settings: options.Settings) -> int:
  """Prices, prints and writes."""
  from tools.roofline import report

  # `./bazelw run` starts in the runfiles; files are meant where the user stands.
  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  priced = roofline.price(workload(settings))
  report.show(priced, settings.measured_seconds)
  if settings.json:
    report.write_json(priced, settings.json)
  if settings.plot:
    report.plot(priced, settings.plot)
  return 0


if __name__ == "__main__":
  cli.main(
    run,
    components=[RooflineOptions],
    rules=RULES,
    description=__doc__,
    # A file of the user's is read when it starts.
    judge=lambda settings: None if settings.model_config else workload(settings),
  )
