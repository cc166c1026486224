"""A small model on the cell's mesh: what the tests on 256 mocked devices share."""

from __future__ import annotations

import dataclasses
from typing import Any

from kernels.base.mesh import MeshShape
from model import config as model_config
from model.sharded.options import ShardedOptions
from rl import packing
from tests import mesh_parity

SHAPE = MeshShape.parse("32x2x4")
ROWS, TOKENS = 64, 64

CONFIG = dataclasses.replace(
  model_config.preset("tiny_moe"),
  vocab_size=256,
  hidden_size=256,
  num_attention_heads=4,
  head_dim=16,
  mrope_section=(1, 1, 0),
  linear_num_key_heads=4,
  linear_num_value_heads=8,
  linear_key_head_dim=8,
  linear_value_head_dim=8,
  num_experts=64,
  num_experts_per_tok=2,
  moe_intermediate_size=16,
  shared_expert_intermediate_size=16,
  # A head of random weights gives logits in proportion to them, and N4 counts in nats.
  initializer_range=0.015,
)

# Every key of the mesh that loses nothing, and chooses no kernel.
LOSSLESS = ShardedOptions(
  custom_mesh_and_rule="cp-as-ep-dense-no-cp",
  use_ring_of_experts=True,
  use_ragged_sort=True,
  moe_expert_weight_prefetch="forward",
  num_moe_token_chunks=2,
  moe_chunk_pipeline=True,
  ragged_buffer_factor=2.75,
  ragged_unsort_spread_masked_indices=True,
  context_parallel_attention_load_balance=True,
  context_parallel_attention_load_balance_hoist_ids=True,
  context_parallel_attention_load_balance_order="dual_chunk_swap_local_self",
  dense_grad_reduce="all_reduce",
  decoder_layer_input="offload",
  query_proj_kernel_gather_once=True,
  key_proj="device",
  value_proj="device",
  attention_out="device",
  out_proj="device",
  gdn="device",
  gdn_conv="device",
  moe_x_sorted="device",
  mlpwi="device",
  mlpwo="device",
)


def batches() -> list[packing.PackedBatch]:
  """Two micro-batches whose routing is recorded on most tokens."""
  return [mesh_parity.batch(CONFIG, ROWS, TOKENS, seed, replay="some") for seed in (0, 1)]


def everything() -> dict[str, Any]:
  """The trainer's options with every key of the mesh on, lossy ones too."""
  return dataclasses.asdict(LOSSLESS) | {
    "mesh": str(SHAPE),
    "remat_policy": "custom",
    "float32_gate_logits": True,
    "retry_when_tokens_dropped": True,
    "kernel_implementation": "auto",
    "context": "device",
    "gdn_states": "device",
    "use_tokamax_gmm": True,
    "use_gmm_v2": True,
    "prefuse_moe_weights": True,
    "moe_router_grad_from_wo_input": True,
    "router_replay": True,
    "moe_fallback_topk_capacity": 8,
    "fp8_moe_fake_quant": True,
    "fp8_moe_fake_quant_hoist": True,
    "moe_fp8_token_all_gather": True,
    "moe_fp8_bwd_dispatch": True,
  }
