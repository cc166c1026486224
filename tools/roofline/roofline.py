"""Analytic cost of one training step: FLOPs, bytes and the least seconds, by component.

The step is `micro_batches` packed micro-batches of `rows` rows, forward and backward with replay,
and one optimizer update.  Every figure is per chip and step.  Compute, HBM, wire and host time
are each the work over the peak rate; a component's floor is the largest of its own, the step's
floor the largest of the sums: perfect overlap, nothing better.

What is counted, per token and layer, with d = hidden size, C = chunk of the delta rule,
K = key dim, W = value dim of a Gated DeltaNet head:
  products     2 x parameters forward, twice that backward
  attention    4 x (S_eff / 2) x query width, 2.5 times that backward (scores are recomputed);
               S_eff = sum(len^2) / sum(len) over the packed segments: the causal half is real
  delta rule   key heads 4CK; value heads 2C^2/3 + 2C(K+W) + 6KW + 2CW forward,
               4CK and 14KW + 18CW backward
  folds        with the row split over context: 2K^2 + (2K^3 + 2K^2 W)/C a value head forward,
               4KW + 2K^2 W/C backward (the transposed product is free)
  head         2 x table forward, 6 x table backward (one recompute of the logits)
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kernels.base.mesh import AXES
from model import flops
from model.dims import ModelDims as ModelDims
from tools.roofline.components import COMPONENTS, Component
from tools.roofline.workload import BYTES
from tools.roofline.workload import MASTER_BYTES as MASTER_BYTES
from tools.roofline.workload import RooflineError as RooflineError
from tools.roofline.workload import Workload as Workload
from tools.roofline.workload import effective_length as effective_length

RESOURCES = ("compute", "hbm", *(f"wire:{axis}" for axis in AXES), "host")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
  """The cost of a workload's step.

  Attributes:
    workload: What was priced.
    components: Rows of the table.
    seconds: Sums over components by resource, with "floor" the largest of them.
    model_flops: FLOPs per chip and step that count for MFU: six times the active parameters and
      three times the forward of attention and delta rule, without replay or folds.
    notes: Sizes worth knowing, by name, in bytes.
  """

  workload: Workload
  components: tuple[Component, ...]
  seconds: dict[str, float]
  model_flops: float
  notes: dict[str, float]

  @property
  def floor(self) -> float:
    """Least seconds of a step with perfect overlap."""
    return self.seconds["floor"]

  def compute_seconds(self, *, replay: bool) -> float:
    """Seconds of all products, with or without the replayed forward."""
    chip = self.workload.chip
    return sum(
      (c.flops if replay else c.forward + c.backward) / chip.peak(c.dtype) for c in self.components
    )

  def mfu(self, seconds: float) -> float:
    """Model FLOPs of a step that takes `seconds`, over the bfloat16 peak."""
    return self.model_flops / seconds / self.workload.chip.bf16_flops

  def tokens_per_second_per_chip(self, seconds: float) -> float:
    """Throughput of a step that takes `seconds`."""
    return self.workload.chip_tokens / seconds

  def component(self, name: str) -> Component:
    """The row of that name; KeyError if there is none."""
    return {c.name: c for c in self.components}[name]

  def to_json(self) -> dict[str, Any]:
    """Everything as plain numbers and strings."""
    work = dataclasses.asdict(self.workload)
    return {
      "workload": work | {"mesh": str(self.workload.mesh), "chip": self.workload.chip.name},
      "components": [dataclasses.asdict(c) | {"floor": c.floor} for c in self.components],
      "seconds": self.seconds,
      "tokens_per_chip": self.workload.chip_tokens,
      "model_flops": self.model_flops,
      "mfu_at_floor": self.mfu(self.floor),
      "tokens_per_second_per_chip_at_floor": self.tokens_per_second_per_chip(self.floor),
      "total_params": self.workload.dims.total_params,
      "active_params": self.workload.dims.active_params,
      "notes": self.notes,
    }


def price(work: Workload) -> Roofline:
  """Prices one step.

  Args:
    work: The workload.

  Returns:
    Costs by component and in sum.
  """
  components = [c for make in COMPONENTS if (c := make(work)) is not None]
  for component in components:
    # Attention and delta rule are replayed with the rest; the optimizer has no products.
    component.replay = work.replay * component.forward
    _time(component, work)
  seconds: dict[str, float] = {}
  for component in components:
    for resource, value in component.seconds.items():
      seconds[resource] = seconds.get(resource, 0.0) + value
  seconds["floor"] = max(seconds.values())
  per_token = flops.per_trained_token(work.dims, work.segment_length, work.chunk)
  return Roofline(
    workload=work,
    components=tuple(components),
    seconds=seconds,
    model_flops=per_token * work.chip_tokens,
    notes=_notes(work),
  )


def _time(component: Component, work: Workload) -> None:
  chip, links = work.chip, work.grid.links
  component.wire = {axis: n for axis, n in component.wire.items() if n}
  component.seconds = {
    "compute": component.flops / chip.peak(component.dtype),
    "hbm": component.hbm / chip.hbm_bytes_per_second,
    "host": component.host / chip.host_bytes_per_second,
  } | {
    f"wire:{axis}": n / (links[axis] * chip.link_bytes_per_second)
    for axis, n in component.wire.items()
  }


def _notes(work: Workload) -> dict[str, float]:
  dims = work.dims
  notes = {
    "logits of a micro-batch per device, float32": work.device_tokens * dims.vocab_size * 4,
    "head gradient, float32": dims.table_params * 4,
  }
  if dims.gdn_layers:
    per_token = dims.linear_num_value_heads * (
      dims.linear_key_head_dim * dims.linear_value_head_dim / work.chunk + work.chunk
    )
    states = work.device_tokens * per_token * BYTES["f32"]
    notes["GDN chunk states and T per layer and device, float32"] = states
  return notes
