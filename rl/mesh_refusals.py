"""Refused combinations of a mesh and the sizes of the model and rows that are to cross it.

A part of the one table in `refusals`.
"""

from __future__ import annotations

from kernels.base.options import declared
from kernels.base.refusals import Rule
from model.sharded.options import ShardedOptions
from rl import known_model
from rl.sharded_refusals import CELL, RING, dense_ranks, expert_ranks, shape

_SHARDED = tuple(o.name for o in declared(ShardedOptions))
_DEFAULT_TAPS = 4  # of the convolution, where the model is not known


def _indivisible(settings) -> list[str]:
  """Sizes of the model that the mesh's ranks do not divide."""
  model = known_model.of(settings)
  if settings.mesh is None or model is None:
    return []
  mesh, dense = shape(settings), dense_ranks(settings)
  sizes = [("hidden_size", model.hidden_size, dense)]
  # As in `placed.layout_of`: the partitioner takes uneven parts, written collectives do not.
  partitioned = settings.kernel_implementation == "reference" and not any(
    name in settings.changed for name in _SHARDED
  )
  if mesh.devices != mesh.fsdp or not partitioned:
    sizes.append(("vocab_size", model.vocab_size, dense))
    if model.is_moe:
      sizes.append(("num_experts", model.num_experts, expert_ranks(settings)))
  return [f"{name}={n} over {ranks} devices" for name, n, ranks in sizes if n % ranks]


def _short_parts(settings) -> bool:
  model, ranks = known_model.of(settings), shape(settings).context
  taps = model.linear_conv_kernel_dim if model else _DEFAULT_TAPS
  return ranks > 1 and settings.row_tokens // ranks < taps - 1


MESH_RULES = (
  Rule(
    name="model-divides-over-mesh",
    keys=("mesh", "custom_mesh_and_rule", "kernel_implementation", "model_preset", "checkpoint"),
    broken=lambda s: bool(_indivisible(s)),
    detail=lambda s: "; ".join(_indivisible(s)),
    reason="every device holds an equal part of the hidden size, the vocabulary and the experts; take "
    "a mesh that divides them",
    accepted=CELL,
    refused={**CELL, "mesh": "1x16x1", "micro_batch_rows": 16},
  ),
  Rule(
    name="row-parts-hold-the-convolution",
    keys=("mesh", "row_tokens", "model_preset", "checkpoint"),
    broken=_short_parts,
    reason="a rank hands the next one the last inputs of the causal convolution, one fewer than its "
    "taps (3 for Qwen3.5), and must own as many tokens of a row; raise --row_tokens",
    accepted={**CELL, "row_tokens": 6},
    refused={**CELL, "row_tokens": 4},
  ),
  Rule(
    name="head-mode-splits-heads",
    keys=("gdn_cp_mode", "mesh", "model_preset", "checkpoint"),
    broken=lambda s: (
      s.gdn_cp_mode == "head"
      and (model := known_model.of(s)) is not None
      and model.linear_num_key_heads % shape(s).context != 0
    ),
    reason="head mode gives every context rank as many key heads; take a context that divides "
    "them, or --gdn_cp_mode=seq",
    accepted=CELL,
    refused={**CELL, "mesh": "1x1x8"},
    effective=True,
  ),
  Rule(
    name="head-group-divides-rank",
    keys=("gdn_fwd_kernel_head_group_size", "gdn_cp_mode", "mesh", "model_preset", "checkpoint"),
    broken=lambda s: (
      s.gdn_cp_mode == "head"
      and (model := known_model.of(s)) is not None
      and model.linear_num_key_heads % shape(s).context == 0
      and model.linear_num_key_heads // shape(s).context % s.gdn_fwd_kernel_head_group_size != 0
      and model.linear_num_key_heads % s.gdn_fwd_kernel_head_group_size == 0
    ),
    reason="head mode leaves a context rank its share of the key heads, and a grid step takes whole "
    "groups of them; lower the group",
    accepted={
      **CELL,
      "mesh": "2x2x1",
      "kernel_implementation": "auto",
      "gdn_fwd_kernel_head_group_size": 2,
    },
    refused={**CELL, "kernel_implementation": "auto", "gdn_fwd_kernel_head_group_size": 2},
  ),
  Rule(
    name="retry-needs-a-bound",
    keys=("retry_when_tokens_dropped", "ragged_buffer_factor", "use_ring_of_experts"),
    broken=lambda s: s.retry_when_tokens_dropped and s.ragged_buffer_factor < 0,
    reason="a buffer without a bound never overflows, and nothing would ever run again; add "
    "--use_ring_of_experts with a --ragged_buffer_factor, or leave the retry out",
    accepted={**CELL, **RING, "ragged_buffer_factor": 2.0, "retry_when_tokens_dropped": True},
    refused={**CELL, **RING, "retry_when_tokens_dropped": True},
  ),
  Rule(
    name="buffer-factor-bounds-something",
    keys=("ragged_buffer_factor", "mesh", "custom_mesh_and_rule"),
    broken=lambda s: s.use_ring_of_experts and s.ragged_buffer_factor >= expert_ranks(s) > 1,
    reason="at a factor of as many as there are expert ranks a buffer holds every pair, as at -1; lower "
    "the factor or leave it at -1",
    accepted={**CELL, **RING, "ragged_buffer_factor": 3.5},
    refused={**CELL, **RING, "ragged_buffer_factor": 4.0},
  ),
  Rule(
    name="dense-reduce-needs-context",
    keys=("dense_grad_reduce", "mesh"),
    broken=lambda s: (
      s.dense_grad_reduce == "all_reduce" and s.mesh is not None and shape(s).context == 1
    ),
    reason="with one context rank no gradient of a dense weight waits to be reduced; leave the key out",
    accepted={
      **CELL,
      "dense_grad_reduce": "all_reduce",
      "custom_mesh_and_rule": "cp-as-ep-dense-no-cp",
    },
    refused={
      **CELL,
      "mesh": "4x2x1",
      "micro_batch_rows": 8,
      "dense_grad_reduce": "all_reduce",
      "custom_mesh_and_rule": "cp-as-ep-dense-no-cp",
    },
  ),
)
