"""Refused combinations of the mesh and of the options of a model that crosses it.

A part of the one table in `refusals`.
"""

from __future__ import annotations

import math

from kernels.base.mesh import MeshShape
from kernels.base.options import Settings, declared
from kernels.base.refusals import Rule
from model.sharded.options import DENSE_AXES, SAVED, ShardedOptions
from rl import known_model

CELL = {"mesh": "2x2x2", "micro_batch_rows": 4, "model_preset": "tiny_moe"}
RING = {
  "custom_mesh_and_rule": "cp-as-ep",
  "use_ring_of_experts": True,
  "use_ragged_sort": True,
}
_FP8 = {**RING, "fp8_moe_fake_quant": True}
_CUSTOM = {**CELL, "remat_policy": "custom", "key_proj": "device"}
_SAVED = ("decoder_layer_input", *SAVED)
_ROUTED = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")
_FUSED = ("moe_wi_gmm_fused_swiglu", "moe_wo_gmm_fused_dswiglu")
_FUSIBLE = {
  "model_preset": "35B-A3B",
  "kernel_implementation": "auto",
  "use_tokamax_gmm": True,
  "use_gmm_v2": True,
  "use_gmm_v2_heuristic_tiling": False,
  "prefuse_moe_weights": True,
  "wo_tile_dlhs_mlp_dim": 512,
}
_MOE = (
  "use_ring_of_experts",
  "use_ragged_sort",
  "num_moe_token_chunks",
  "moe_chunk_pipeline",
  "moe_expert_weight_prefetch",
  "ragged_buffer_factor",
  "retry_when_tokens_dropped",
  "ragged_unsort_spread_masked_indices",
  "fp8_moe_fake_quant",
  "fp8_moe_fake_quant_hoist",
  "moe_fp8_token_all_gather",
  "moe_fp8_bwd_dispatch",
)


def shape(settings: Settings) -> MeshShape:
  """Devices along each axis; one device without a mesh."""
  return MeshShape.parse(settings.mesh or "1x1x1")


def expert_ranks(settings: Settings) -> int:
  """Ranks that the experts are split over."""
  mesh = shape(settings)
  return mesh.expert * (1 if settings.custom_mesh_and_rule == "default" else mesh.context)


def dense_ranks(settings: Settings) -> int:
  """Devices that a dense weight is split over."""
  mesh = shape(settings)
  axes = DENSE_AXES[settings.custom_mesh_and_rule]
  return math.prod(getattr(mesh, axis) for axis in axes)


def _experts_travel(settings: Settings) -> bool:
  """Whether a layer gathers experts' weights from other devices."""
  return shape(settings).fsdp > 1 or (
    not settings.use_ring_of_experts and expert_ranks(settings) > 1
  )


SHARDED_RULES = (
  Rule(
    name="rows-divide-over-mesh",
    keys=("mesh", "micro_batch_rows"),
    broken=lambda s: (
      s.mesh is not None and s.micro_batch_rows % (shape(s).fsdp * shape(s).expert) != 0
    ),
    reason="every fsdp and expert shard has as many rows of a micro-batch; make --micro_batch_rows "
    "a multiple of the product of the mesh's first two numbers",
    accepted={"mesh": "2x1x1", "micro_batch_rows": 6},
    refused={"mesh": "2x2x1", "micro_batch_rows": 6},
  ),
  Rule(
    name="row-divides-over-context",
    keys=("mesh", "row_tokens", "context_parallel_attention_load_balance"),
    broken=lambda s: (
      s.row_tokens % (shape(s).context * (1 + s.context_parallel_attention_load_balance)) != 0
    ),
    reason="a row is cut into as many equal parts as there are context ranks, twice as many with "
    "the load balance; give a multiple of that as --row_tokens",
    accepted={**CELL, "row_tokens": 512},
    refused={**CELL, "row_tokens": 511},
  ),
  Rule(
    name="sharded-options-need-mesh",
    keys=("mesh", *(option.name for option in declared(ShardedOptions))),
    broken=lambda s: s.mesh is None and s.of(ShardedOptions) != ShardedOptions(),
    reason="these options say how a model crosses a mesh; add --mesh",
    accepted={**CELL, **RING},
    refused={"mesh": None, **RING},
  ),
  Rule(
    name="rule-set-needs-ranks",
    keys=("custom_mesh_and_rule", "mesh"),
    broken=lambda s: (
      s.custom_mesh_and_rule != "default"
      and s.mesh is not None
      and shape(s).fsdp == shape(s).devices
    ),
    reason="over fsdp alone every rule set is the default one; leave custom_mesh_and_rule out",
    accepted={**CELL, "custom_mesh_and_rule": "cp-as-ep"},
    refused={**CELL, "mesh": "4x1x1", "custom_mesh_and_rule": "cp-as-ep"},
  ),
  Rule(
    name="ring-needs-expert-ranks",
    keys=("use_ring_of_experts", "mesh", "custom_mesh_and_rule"),
    broken=lambda s: s.use_ring_of_experts and expert_ranks(s) < 2,
    reason="with one expert rank no token has anywhere to travel; take a mesh whose expert axis "
    "(cp-as-ep: or context) is above 1",
    accepted={**CELL, **RING},
    refused={
      **CELL,
      "mesh": "2x1x2",
      "micro_batch_rows": 2,
      "use_ring_of_experts": True,
      "use_ragged_sort": True,
    },
  ),
  Rule(
    name="ring-needs-ragged-sort",
    keys=("use_ring_of_experts", "use_ragged_sort"),
    broken=lambda s: s.use_ring_of_experts and not s.use_ragged_sort,
    reason="a rank of the ring sorts by its own experts alone, which the argsort of all pairs does "
    "not; add --use_ragged_sort",
    accepted={**CELL, **RING},
    refused={**CELL, "use_ring_of_experts": True},
  ),
  Rule(
    name="spread-indices-need-ring",
    keys=("ragged_unsort_spread_masked_indices", "use_ring_of_experts"),
    broken=lambda s: s.ragged_unsort_spread_masked_indices and not s.use_ring_of_experts,
    reason="without the ring every pair has a row of its own but padding's, and nothing is masked "
    "worth spreading; add --use_ring_of_experts and --use_ragged_sort",
    accepted={**CELL, **RING, "ragged_unsort_spread_masked_indices": True},
    refused={**CELL, "use_ragged_sort": True, "ragged_unsort_spread_masked_indices": True},
  ),
  Rule(
    name="buffer-factor-needs-ring",
    keys=("ragged_buffer_factor", "use_ring_of_experts"),
    broken=lambda s: s.ragged_buffer_factor != -1 and not s.use_ring_of_experts,
    reason="a rank that runs all experts has exactly one row for each of its pairs; add "
    "--use_ring_of_experts or leave the factor at -1",
    accepted={**CELL, **RING, "ragged_buffer_factor": 2.0},
    refused={**CELL, "ragged_buffer_factor": 2.0},
  ),
  Rule(
    name="pipeline-needs-chunks",
    keys=("moe_chunk_pipeline", "num_moe_token_chunks"),
    broken=lambda s: s.moe_chunk_pipeline and s.num_moe_token_chunks == 1,
    reason="one chunk has no other to run beside; add --num_moe_token_chunks=2",
    accepted={**CELL, **RING, "moe_chunk_pipeline": True, "num_moe_token_chunks": 2},
    refused={**CELL, **RING, "moe_chunk_pipeline": True},
  ),
  Rule(
    name="prefetch-needs-gathered-experts",
    keys=("moe_expert_weight_prefetch", "mesh", "use_ring_of_experts", "custom_mesh_and_rule"),
    broken=lambda s: (
      s.moe_expert_weight_prefetch != "none" and s.mesh is not None and not _experts_travel(s)
    ),
    reason="with the ring of experts and one fsdp rank every device holds its experts whole, so no "
    "weight has to travel early; take a mesh whose fsdp is above 1 or leave the prefetch out",
    accepted={**CELL, **RING, "moe_expert_weight_prefetch": "forward"},
    refused={**CELL, **RING, "mesh": "1x4x2", "moe_expert_weight_prefetch": "forward"},
  ),
  Rule(
    name="token-chunks-divide",
    keys=("num_moe_token_chunks", "mesh", "micro_batch_rows", "row_tokens"),
    broken=lambda s: (
      s.num_moe_token_chunks > 1
      and s.micro_batch_rows * s.row_tokens % (shape(s).devices * s.num_moe_token_chunks) != 0
    ),
    reason="a device's tokens (rows x row tokens / devices) are cut into equal chunks; give a "
    "divisor of them",
    accepted={**CELL, "num_moe_token_chunks": 2},
    refused={**CELL, "num_moe_token_chunks": 3, "row_tokens": 64},
  ),
  Rule(
    name="fp8-dispatch-needs-fake-quant",
    keys=(
      "moe_fp8_token_all_gather",
      "moe_fp8_bwd_dispatch",
      "fp8_moe_fake_quant",
      "use_ring_of_experts",
    ),
    broken=lambda s: (
      (s.moe_fp8_token_all_gather or s.moe_fp8_bwd_dispatch)
      and not (s.fp8_moe_fake_quant and s.use_ring_of_experts)
    ),
    reason="tokens travel only with --use_ring_of_experts, and in eight bits only where weights are "
    "rounded to eight bits too; add both",
    accepted={**CELL, **_FP8, "moe_fp8_token_all_gather": True},
    refused={**CELL, **RING, "moe_fp8_bwd_dispatch": True},
  ),
  Rule(
    name="hoist-needs-fake-quant",
    keys=("fp8_moe_fake_quant_hoist", "fp8_moe_fake_quant"),
    broken=lambda s: s.fp8_moe_fake_quant_hoist and not s.fp8_moe_fake_quant,
    reason="there is no rounding to move; add --fp8_moe_fake_quant",
    accepted={**CELL, **_FP8, "fp8_moe_fake_quant_hoist": True},
    refused={**CELL, **RING, "fp8_moe_fake_quant_hoist": True},
  ),
  Rule(
    name="moe-options-need-moe",
    keys=("model_preset", "checkpoint", *_MOE),
    broken=lambda s: (
      known_model.dense(s)
      and any(getattr(s, key) != getattr(ShardedOptions(), key) for key in _MOE)
    ),
    reason="the model has no experts; leave its options out or take a sparse model",
    accepted={**CELL, **RING},
    refused={**CELL, **RING, "model_preset": "tiny"},
  ),
  Rule(
    name="saved-tensors-need-custom",
    keys=("remat_policy", *_SAVED),
    broken=lambda s: (
      (s.remat_policy == "custom") != any(getattr(s, name) != "remat" for name in _SAVED)
    ),
    reason="remat_policy=custom keeps the tensors whose options say device or offload, and only it "
    "reads those options; give both or neither",
    accepted={**CELL, "remat_policy": "custom", "query_proj": "device"},
    refused={**CELL, "remat_policy": "custom"},
  ),
  Rule(
    name="query-gather-needs-replay",
    keys=("query_proj_kernel_gather_once", "remat_policy", "query_proj"),
    broken=lambda s: (
      s.query_proj_kernel_gather_once and (s.remat_policy != "custom" or s.query_proj != "remat")
    ),
    reason="one gather serves the recomputed query projection and its gradient, so the backward pass "
    "must recompute it tensor by tensor; take --remat_policy=custom with --query_proj=remat",
    accepted={**_CUSTOM, "query_proj_kernel_gather_once": True},
    refused={**_CUSTOM, "query_proj": "device", "query_proj_kernel_gather_once": True},
  ),
  Rule(
    name="query-gather-needs-shards",
    keys=("query_proj_kernel_gather_once", "mesh", "custom_mesh_and_rule"),
    broken=lambda s: s.query_proj_kernel_gather_once and s.mesh is not None and dense_ranks(s) == 1,
    reason="on this mesh every device holds the query kernel whole, and nothing is gathered; leave "
    "the option out",
    accepted={**_CUSTOM, "query_proj_kernel_gather_once": True},
    refused={**_CUSTOM, "mesh": "1x2x2", "query_proj_kernel_gather_once": True},
  ),
  Rule(
    name="kernel-tensors-need-kernels",
    keys=("context", "gdn_states", "kernel_implementation"),
    broken=lambda s: (
      s.kernel_implementation == "reference" and (s.context != "remat" or s.gdn_states != "remat")
    ),
    reason="plain JAX has no such tensors; add --kernel_implementation=auto",
    accepted={
      **CELL,
      "remat_policy": "custom",
      "context": "device",
      "kernel_implementation": "auto",
    },
    refused={**CELL, "remat_policy": "custom", "gdn_states": "device"},
  ),
  Rule(
    name="kept-states-need-whole-rows",
    keys=("gdn_states", "gdn_cp_mode", "mesh"),
    broken=lambda s: s.gdn_states != "remat" and s.gdn_cp_mode == "seq" and shape(s).context > 1,
    reason="a rank of a split row computes its states again from those that others send; take "
    "--gdn_cp_mode=head or leave gdn_states at remat",
    accepted={
      **CELL,
      "remat_policy": "custom",
      "gdn_states": "device",
      "kernel_implementation": "auto",
    },
    refused={
      **CELL,
      "remat_policy": "custom",
      "gdn_states": "device",
      "kernel_implementation": "auto",
      "gdn_cp_mode": "seq",
    },
  ),
  Rule(
    name="routed-tensors-need-moe",
    keys=("moe_x_sorted", *_ROUTED, "model_preset", "checkpoint"),
    broken=lambda s: (
      any(getattr(s, name) != "remat" for name in ("moe_x_sorted", *_ROUTED))
      and known_model.dense(s)
    ),
    reason="the model has no experts, so none of their tensors; leave the moe_ options out",
    accepted={**CELL, "remat_policy": "custom", "moe_x_sorted": "device"},
    refused={**CELL, "model_preset": "tiny", "remat_policy": "custom", "moe_x_sorted": "device"},
  ),
  Rule(
    name="fused-epilogues-write-no-halves",
    keys=("moe_mlpwi_0", "moe_mlpwi_1", *_FUSED),
    broken=lambda s: (
      any(getattr(s, name) for name in _FUSED)
      and (s.moe_mlpwi_0 != "remat" or s.moe_mlpwi_1 != "remat")
    ),
    reason="a fused epilogue turns gate and up into what follows on the chip, and nothing is there to "
    "be kept; leave moe_mlpwi_0 and moe_mlpwi_1 at remat or the fusions out",
    accepted={**_CUSTOM, "moe_mlpwi_0": "device", "moe_mlpwi_1": "device"},
    refused={**_CUSTOM, **_FUSIBLE, "moe_wo_gmm_fused_dswiglu": True, "moe_mlpwi_1": "device"},
  ),
  Rule(
    name="kept-outputs-need-a-reader",
    keys=("moe_mlpwo", "moe_router_grad_from_wo_input"),
    broken=lambda s: s.moe_mlpwo != "remat" and s.moe_router_grad_from_wo_input,
    reason="the experts' outputs are read for the gradient of the router's weights alone, which "
    "moe_router_grad_from_wo_input takes from elsewhere; leave one of them out",
    accepted={**_CUSTOM, "moe_mlpwo": "device"},
    refused={
      **_CUSTOM,
      **_FUSIBLE,
      "moe_router_grad_from_wo_input": True,
      "moe_mlpwo": "device",
    },
  ),
  Rule(
    name="hoisted-ids-need-custom",
    keys=("context_parallel_attention_load_balance_hoist_ids", "remat_policy"),
    broken=lambda s: (
      s.context_parallel_attention_load_balance_hoist_ids and s.remat_policy != "custom"
    ),
    reason="what is made before the layers is kept for their recomputation, which is what custom "
    "says; add --remat_policy=custom",
    accepted={
      **CELL,
      "context_parallel_attention_load_balance": True,
      "context_parallel_attention_load_balance_hoist_ids": True,
      "remat_policy": "custom",
      "key_proj": "device",
    },
    refused={
      **CELL,
      "context_parallel_attention_load_balance": True,
      "context_parallel_attention_load_balance_hoist_ids": True,
    },
  ),
  Rule(
    name="stack-axis-is-first",
    keys=("param_scan_axis", "scan_layers"),
    broken=lambda s: s.param_scan_axis != 0,
    reason="groups of layers are scanned along the leading axis of their weights, where a group is "
    "one piece of memory that the loop reads in place; along axis 1 every program would first copy "
    "all weights. Leave param_scan_axis at 0",
    accepted={"scan_layers": False},
    refused={"param_scan_axis": 1},
  ),
  Rule(
    name="hoisted-ids-need-scan",
    keys=("context_parallel_attention_load_balance_hoist_ids", "scan_layers"),
    broken=lambda s: s.context_parallel_attention_load_balance_hoist_ids and not s.scan_layers,
    reason="ids are hoisted out of the scan over layers; leave --scan_layers at true",
    accepted={
      **_CUSTOM,
      "context_parallel_attention_load_balance": True,
      "context_parallel_attention_load_balance_hoist_ids": True,
    },
    refused={
      **_CUSTOM,
      "context_parallel_attention_load_balance": True,
      "context_parallel_attention_load_balance_hoist_ids": True,
      "scan_layers": False,
    },
  ),
  Rule(
    name="load-balance-needs-even-context",
    keys=("context_parallel_attention_load_balance", "mesh"),
    broken=lambda s: (
      s.context_parallel_attention_load_balance
      and (shape(s).context < 2 or shape(s).context % 2 == 1)
    ),
    reason="early and late chunks of a row are paired over an even number of context ranks; take "
    "a mesh whose context is even, or leave the balance out",
    accepted={**CELL, "context_parallel_attention_load_balance": True},
    refused={**CELL, "mesh": "2x2x1", "context_parallel_attention_load_balance": True},
  ),
  Rule(
    name="reordering-needs-load-balance",
    keys=(
      "context_parallel_attention_load_balance_hoist_ids",
      "context_parallel_attention_load_balance_order",
      "context_parallel_attention_load_balance",
    ),
    broken=lambda s: (
      not s.context_parallel_attention_load_balance
      and (
        s.context_parallel_attention_load_balance_hoist_ids
        or s.context_parallel_attention_load_balance_order != "dual_chunk_swap"
      )
    ),
    reason="without the load balance nothing is re-ordered; add "
    "--context_parallel_attention_load_balance",
    accepted={
      **CELL,
      "context_parallel_attention_load_balance": True,
      "context_parallel_attention_load_balance_order": "dual_chunk_swap_local_self",
    },
    refused={
      **CELL,
      "context_parallel_attention_load_balance_order": "dual_chunk_swap_local_self",
    },
  ),
  Rule(
    name="seq-mode-needs-context",
    keys=("gdn_cp_mode", "mesh"),
    broken=lambda s: s.gdn_cp_mode == "seq" and shape(s).context < 2,
    reason="ranks exchange states only where a row is split over context; take such a mesh or "
    "leave gdn_cp_mode out",
    accepted={**CELL, "gdn_cp_mode": "seq"},
    refused={**CELL, "mesh": "2x2x1", "gdn_cp_mode": "seq"},
  ),
  Rule(
    name="seq-mode-chunk",
    keys=("gdn_cp_mode", "gdn_chunk_size"),
    broken=lambda s: s.gdn_cp_mode == "seq" and s.gdn_chunk_size < 16,
    reason="the states of ranks are folded over chunks of 16 tokens and more; raise gdn_chunk_size",
    accepted={**CELL, "gdn_cp_mode": "seq", "gdn_chunk_size": 16},
    refused={**CELL, "gdn_cp_mode": "seq", "gdn_chunk_size": 8},
  ),
  Rule(
    name="dense-reduce-needs-rule",
    keys=("dense_grad_reduce", "custom_mesh_and_rule"),
    broken=lambda s: (
      s.dense_grad_reduce == "all_reduce" and s.custom_mesh_and_rule != "cp-as-ep-dense-no-cp"
    ),
    reason="only cp-as-ep-dense-no-cp leaves gradients of dense weights to be reduced over context "
    "at the update; add that rule set",
    accepted={
      **CELL,
      "dense_grad_reduce": "all_reduce",
      "custom_mesh_and_rule": "cp-as-ep-dense-no-cp",
    },
    refused={**CELL, "dense_grad_reduce": "all_reduce"},
  ),
)
