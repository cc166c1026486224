"""One step on one slice: what is priced."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from model.dims import ModelDims
from tools.roofline.machine import TPU7X, Chip, Grid, Mesh

BYTES = {"bf16": 2, "fp8": 1, "f32": 4}
MASTER_BYTES = {"f32": 12.0, "residual16": 10.125}  # master and both moments


class RooflineError(ValueError):
  """A workload that cannot exist: what was given, what is allowed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """One step on one slice.

  Attributes:
    dims: The model.
    mesh: Devices along fsdp, expert and context.
    chip: The chip.
    rows: Packed rows of a micro-batch, over the whole slice.
    row_tokens: Tokens of a row.
    micro_batches: Micro-batches of a step.
    effective_length: S_eff, tokens; None means one segment a row.
    chunk: Tokens in a chunk of the delta rule.
    expert_dtype: Products of routed and shared experts and router: bf16 or fp8.
    weight_wire_dtype: Expert weights on the wire: bf16 or fp8.
    dispatch_dtype: Rows gathered to the experts, and their cotangents: bf16 or fp8.
    dispatch: ring (token all-gather and reduce-scatter) or ragged (all-to-all of the copies).
    replay: Part of the forward pass that the backward pass repeats, 0 to 1.
    master: Optimizer storage: f32 or residual16.
    host_offload: Whether the optimizer lives in host memory.
    resident_gib: GiB a device of it that stay in HBM.
  """

  dims: ModelDims
  mesh: Mesh
  chip: Chip = TPU7X
  rows: int
  row_tokens: int
  micro_batches: int = 1
  effective_length: float | None = None
  chunk: int = 64
  expert_dtype: str = "bf16"
  weight_wire_dtype: str = "bf16"
  dispatch_dtype: str = "fp8"
  dispatch: str = "ring"
  replay: float = 1.0
  master: str = "f32"
  host_offload: bool = True
  resident_gib: float = 0.0

  def __post_init__(self):
    """Refuses what cannot exist.

    Raises:
      RooflineError: Rows do not divide over the mesh, or experts over their groups, or the
        effective length is longer than a row.
    """
    shards = self.mesh.fsdp * self.mesh.expert
    if self.rows % shards:
      raise RooflineError(
        f"{self.rows} rows do not divide over fsdp x expert = {shards}; give a multiple"
      )
    if self.row_tokens % self.mesh.context:
      raise RooflineError(
        f"rows of {self.row_tokens} tokens do not divide over context = {self.mesh.context}"
      )
    if self.dims.is_moe and self.dims.num_experts % self.expert_groups:
      raise RooflineError(
        f"{self.dims.num_experts} experts do not divide over context x expert ="
        f" {self.expert_groups}"
      )
    if not 0 < self.segment_length <= self.row_tokens:
      raise RooflineError(
        f"effective length {self.segment_length:g}: want more than 0, at most the row's"
        f" {self.row_tokens} tokens"
      )
    _ = self.grid.on_chip  # refuses a mesh that does not fill its chips

  @property
  def segment_length(self) -> float:
    """S_eff in tokens."""
    return float(self.row_tokens if self.effective_length is None else self.effective_length)

  @property
  def grid(self) -> Grid:
    """The mesh's axes and their links."""
    return self.mesh.grid(self.chip)

  @property
  def expert_groups(self) -> int:
    """Devices over which the experts are split: context x expert."""
    return self.mesh.context * self.mesh.expert

  @property
  def chips(self) -> int:
    """Chips of the slice."""
    return self.mesh.chips(self.chip)

  @property
  def step_tokens(self) -> int:
    """Tokens of a step, all chips."""
    return self.micro_batches * self.rows * self.row_tokens

  @property
  def chip_tokens(self) -> float:
    """Tokens of a step per chip."""
    return self.step_tokens / self.chips

  @property
  def device_tokens(self) -> float:
    """Tokens of one micro-batch on one device."""
    return self.rows * self.row_tokens / self.mesh.devices


def effective_length(lengths: Sequence[int]) -> float:
  """S_eff of a mix of segments: sum(len^2) / sum(len), tokens."""
  return sum(n * n for n in lengths) / sum(lengths)
