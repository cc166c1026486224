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
import math
from collections.abc import Sequence
from typing import Any

from kernels.base.mesh import AXES
from tools.roofline.dims import ModelDims
from tools.roofline.machine import TPU7X, Chip, Grid, Mesh

BYTES = {"bf16": 2, "fp8": 1, "f32": 4}
MASTER_BYTES = {"f32": 12.0, "residual16": 10.125}  # master and both moments
# Element-wise tensors cross HBM once forward and about one and a half times backward, and once
# more when the forward is replayed.
ELEMENTWISE_PASSES = 2.5


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


@dataclasses.dataclass(kw_only=True)
class Component:
  """One row of the table, per chip and step.

  Attributes:
    name: What it is.
    dtype: Operands of its products.
    forward: FLOPs of one forward pass.
    backward: FLOPs of the backward pass.
    replay: FLOPs of the forward repeated in the backward.
    hbm: Bytes read and written in HBM.
    wire: Bytes arriving by axis.
    host: Bytes to the host, and as many back.
    seconds: Time of compute, hbm, host and of each axis as "wire:AXIS".
  """

  name: str
  dtype: str = "bf16"
  forward: float = 0.0
  backward: float = 0.0
  replay: float = 0.0
  hbm: float = 0.0
  wire: dict[str, float] = dataclasses.field(default_factory=dict)
  host: float = 0.0
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def flops(self) -> float:
    """FLOPs of forward, backward and replay."""
    return self.forward + self.backward + self.replay

  @property
  def floor(self) -> float:
    """Least seconds, all its resources overlapped."""
    return max(self.seconds.values(), default=0.0)


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


def attention_flops(work: Workload) -> float:
  """Forward FLOPs per token of attention's scores and values, all layers."""
  dims = work.dims
  return 4 * (work.segment_length / 2) * dims.query_width * dims.attention_layers


def delta_rule_flops(work: Workload) -> tuple[float, float]:
  """FLOPs per token of the chunked delta rule, all layers: forward, backward."""
  dims, chunk = work.dims, work.chunk
  key, value = dims.linear_key_head_dim, dims.linear_value_head_dim
  key_heads = dims.linear_num_key_heads * 4 * chunk * key
  fwd = 2 * chunk**2 / 3 + 2 * chunk * (key + value) + 6 * key * value + 2 * chunk * value
  bwd = 14 * key * value + 18 * chunk * value
  heads, layers = dims.linear_num_value_heads, dims.gdn_layers
  return layers * (key_heads + heads * fwd), layers * (key_heads + heads * bwd)


def fold_flops(work: Workload) -> tuple[float, float]:
  """FLOPs per token of folding a rank's chunk transitions: forward, backward."""
  dims, chunk = work.dims, work.chunk
  if work.mesh.context == 1:
    return 0.0, 0.0
  key, value = dims.linear_key_head_dim, dims.linear_value_head_dim
  fwd = 2 * key**2 + (2 * key**3 + 2 * key**2 * value) / chunk
  bwd = 4 * key * value + 2 * key**2 * value / chunk
  heads = dims.gdn_layers * dims.linear_num_value_heads
  return heads * fwd, heads * bwd


def price(work: Workload) -> Roofline:
  """Prices one step.

  Args:
    work: The workload.

  Returns:
    Costs by component and in sum.
  """
  components = [c for make in _COMPONENTS if (c := make(work)) is not None]
  for component in components:
    # Attention and delta rule are replayed with the rest; the optimizer has no products.
    component.replay = work.replay * component.forward
    _time(component, work)
  seconds: dict[str, float] = {}
  for component in components:
    for resource, value in component.seconds.items():
      seconds[resource] = seconds.get(resource, 0.0) + value
  seconds["floor"] = max(seconds.values())
  mixing = attention_flops(work) + delta_rule_flops(work)[0]
  per_token = 6 * work.dims.active_params + 3 * mixing
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


def _product(
  name: str,
  work: Workload,
  params: float,
  widths: Sequence[tuple[int, int]],
  layers: int,
  dtype: str,
) -> Component:
  """A component of dense products: `widths` are (in, out) of each, `params` all its parameters.

  Activations cross HBM once in and once out of each product and pass, weights once a micro-batch
  and pass on each device; the weight gradient is written in float32.
  """
  tokens, size = work.chip_tokens, BYTES[dtype]
  passes = 2 + work.replay  # forward, input gradient, replay
  rows = sum(k * size + n * BYTES["bf16"] for k, n in widths) * layers
  streams = work.grid.devices_per_chip * work.micro_batches
  weights = streams * params * (passes * size + BYTES["f32"])
  operands = sum(k + n for k, n in widths) * layers * size  # of the weight gradient
  return Component(
    name=name,
    dtype=dtype,
    forward=2 * params * tokens,
    backward=4 * params * tokens,
    hbm=tokens * (passes * rows + operands) + weights,
    # Two gathers (forward, and again for the backward) and one reduce-scatter in bfloat16.
    wire={
      "fsdp": 3
      * work.micro_batches
      * work.grid.gathered("fsdp", params * BYTES["bf16"] / work.mesh.fsdp)
    },
  )


def _moe(work: Workload) -> Component | None:
  dims = work.dims
  if not dims.is_moe:
    return None
  tokens, size, layers = work.chip_tokens, BYTES[work.expert_dtype], dims.num_hidden_layers
  params = dims.num_experts_per_tok * dims.expert_params * layers
  hidden, inner = dims.hidden_size, dims.moe_intermediate_size
  copies = tokens * dims.num_experts_per_tok * layers
  streams = work.grid.devices_per_chip * layers * work.micro_batches
  # Every expert of a device's group is read once a pass.
  read = dims.num_experts / work.expert_groups * streams * dims.expert_params
  rows = lambda k, n: copies * (k * size + n * BYTES["bf16"])
  forward = rows(hidden, inner) + rows(inner, hidden) + read * size
  d_rows = rows(hidden, 2 * inner) + rows(2 * inner, hidden) + read * size
  d_weights = copies * (2 * hidden + 3 * inner) * size + read * BYTES["f32"]
  local = dims.num_experts * dims.expert_params / work.expert_groups * layers
  shard = local / work.mesh.fsdp
  wire = 2 * BYTES[work.weight_wire_dtype] + BYTES["bf16"]
  return Component(
    name="MoE routed GMMs",
    dtype=work.expert_dtype,
    forward=2 * params * tokens,
    backward=4 * params * tokens,
    hbm=(1 + work.replay) * forward + d_rows + d_weights,
    wire={"fsdp": work.micro_batches * work.grid.gathered("fsdp", shard * wire)},
  )


def _dispatch(work: Workload) -> Component | None:
  """Rows to the experts and back: in, out, replayed in, and both again in the backward."""
  dims = work.dims
  if not dims.is_moe:
    return None
  layers = dims.num_hidden_layers * work.micro_batches
  inward = BYTES[work.dispatch_dtype]
  row = dims.hidden_size * ((2 + work.replay) * inward + 2 * BYTES["bf16"])
  wire: dict[str, float]
  if work.dispatch == "ring":
    one = work.device_tokens * row * layers
    wire = {
      "context": work.grid.gathered("context", one),
      "expert": work.grid.gathered("expert", one * work.mesh.context),
    }
  else:
    inside = work.grid.on_chip
    stay = inside["context"] * inside["expert"] / work.expert_groups
    per_chip = work.chip_tokens / work.micro_batches * dims.num_experts_per_tok
    axis = "context" if work.grid.chip_extent["context"] > 1 else "expert"
    wire = {axis: layers * per_chip * row * (1 - stay)}
  k, hidden = dims.num_experts_per_tok, dims.hidden_size
  # Sort: read bfloat16, write the dispatch dtype; un-sort: read and reduce; the residual.
  touched = k * hidden * (2 + inward) + k * hidden * 2 + 3 * hidden * 2
  hbm = touched * (ELEMENTWISE_PASSES + work.replay) * dims.num_hidden_layers * work.chip_tokens
  return Component(name="MoE dispatch", hbm=hbm, wire=wire)


def _shared(work: Workload) -> Component | None:
  dims = work.dims
  if not dims.is_moe:
    return None
  d, inner, layers = dims.hidden_size, dims.shared_expert_intermediate_size, dims.num_hidden_layers
  widths = [(d, 2 * inner), (inner, d), (d, dims.num_experts + 1)]
  name = "shared expert+router"
  return _product(name, work, dims.shared_params * layers, widths, layers, work.expert_dtype)


def _mlp(work: Workload) -> Component | None:
  dims = work.dims
  if dims.is_moe:
    return None
  d, inner, layers = dims.hidden_size, dims.intermediate_size, dims.num_hidden_layers
  widths = [(d, 2 * inner), (inner, d)]
  return _product("dense MLP", work, dims.mlp_params * layers, widths, layers, "bf16")


def _gdn_projections(work: Workload) -> Component | None:
  dims, layers = work.dims, work.dims.gdn_layers
  if not layers:
    return None
  into = 2 * dims.gdn_key_width + 2 * dims.gdn_value_width + 2 * dims.linear_num_value_heads
  widths = [(dims.hidden_size, into), (dims.gdn_value_width, dims.hidden_size)]
  return _product("GDN projections", work, dims.gdn_params * layers, widths, layers, "bf16")


def _attention_projections(work: Workload) -> Component | None:
  dims, layers = work.dims, work.dims.attention_layers
  widths = [
    (dims.hidden_size, 2 * dims.query_width + 2 * dims.kv_width),
    (dims.query_width, dims.hidden_size),
  ]
  return _product("attn projections", work, dims.attention_params * layers, widths, layers, "bf16")


def _attention(work: Workload) -> Component | None:
  dims, tokens = work.dims, work.chip_tokens
  fwd = attention_flops(work)
  # Keys and values are gathered whole over context: forward, replay or backward, and the
  # reduce-scatter of their gradients.
  shard = work.device_tokens * 2 * dims.kv_width * BYTES["bf16"]
  passes = 3 * dims.attention_layers * work.micro_batches
  per_pass = (2 * dims.query_width + 2 * dims.kv_width) * BYTES["bf16"]
  return Component(
    name="attention core",
    forward=fwd * tokens,
    backward=2.5 * fwd * tokens,
    hbm=tokens * dims.attention_layers * per_pass * (3 + work.replay),
    wire={"context": passes * work.grid.gathered("context", shard)},
  )


def _delta_rule(work: Workload) -> Component | None:
  dims, tokens = work.dims, work.chip_tokens
  if not dims.gdn_layers:
    return None
  fwd, bwd = delta_rule_flops(work)
  qkv, value = 2 * dims.gdn_key_width + dims.gdn_value_width, dims.gdn_value_width
  # Projection out, convolution in and out, kernel in and out, gated norm in, in and out, and the
  # out-projection's operand.
  touched = BYTES["bf16"] * ((qkv + value) + 2 * qkv + qkv + value + 3 * value + value)
  return Component(
    name="GDN core",
    forward=fwd * tokens,
    backward=bwd * tokens,
    hbm=touched * (ELEMENTWISE_PASSES + work.replay) * dims.gdn_layers * tokens,
  )


def _folds(work: Workload) -> Component | None:
  """Folding chunk transitions and passing (M, H) between the ranks of a row."""
  dims = work.dims
  if not dims.gdn_layers or work.mesh.context == 1:
    return None
  fwd, bwd = fold_flops(work)
  key, value = dims.linear_key_head_dim, dims.linear_value_head_dim
  state = dims.linear_num_value_heads * key * (key + value) * BYTES["f32"]
  hops = math.ceil(math.log2(work.mesh.context))
  extent = work.grid.chip_extent["context"]
  row_parts = work.rows * work.mesh.context / work.chips if extent > 1 else 0
  return Component(
    name="GDN CP folds",
    forward=fwd * work.chip_tokens,
    backward=bwd * work.chip_tokens,
    wire={"context": work.micro_batches * dims.gdn_layers * 3 * hops * row_parts * state},
  )


def _head(work: Workload) -> Component | None:
  table, tokens = work.dims.table_params, work.chip_tokens
  streams = work.grid.devices_per_chip * work.micro_batches
  # The table passes every chip once a pass: the cores of a chip hold halves of the vocabulary.
  crosses = work.grid.chip_extent["fsdp"] > 1
  hidden = tokens * work.dims.hidden_size * BYTES["bf16"]
  return Component(
    name="log-prob head",
    forward=2 * table * tokens,
    backward=6 * table * tokens,
    hbm=streams * table * (2 * BYTES["bf16"] + BYTES["f32"]) + 4 * hidden,
    wire={"fsdp": work.micro_batches * 3 * table * BYTES["bf16"] if crosses else 0.0},
  )


def _norms(work: Workload) -> Component | None:
  """Norms and residual sums: eight passes over the residual stream a layer."""
  touched = 8 * work.dims.hidden_size * BYTES["bf16"]
  hbm = (
    touched * (ELEMENTWISE_PASSES + work.replay) * work.dims.num_hidden_layers * work.chip_tokens
  )
  return Component(name="norms+residual", hbm=hbm)


def _optimizer(work: Workload) -> Component | None:
  """Reads and writes master and moments once, reads the gradient, writes the weight."""
  per_param = MASTER_BYTES[work.master]
  params = work.dims.total_params / work.chips
  host = 0.0
  if work.host_offload:
    resident = work.resident_gib * 2**30 * work.grid.devices_per_chip
    host = max(0.0, params * per_param - resident)
  return Component(name="optimizer", hbm=params * (2 * per_param + 8), host=host)


_COMPONENTS = (
  _moe,
  _dispatch,
  _shared,
  _mlp,
  _gdn_projections,
  _attention_projections,
  _attention,
  _delta_rule,
  _folds,
  _head,
  _norms,
  _optimizer,
)


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


RESOURCES = ("compute", "hbm", *(f"wire:{axis}" for axis in AXES), "host")
