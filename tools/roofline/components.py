"""FLOPs and bytes of a step by component, per chip; `roofline` says by which formulas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from model import flops
from tools.roofline.workload import BYTES, MASTER_BYTES, Workload

# Element-wise tensors cross HBM once forward and about one and a half times backward, and once
# more when the forward is replayed.
ELEMENTWISE_PASSES = 2.5


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
  return Component(name="MoE dispatch", hbm=hbm, wire=wire, dtype=work.dispatch_dtype)


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
  fwd = flops.attention(dims, work.segment_length)
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
  fwd, bwd = flops.delta_rule(dims, work.chunk)
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


COMPONENTS = (
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
