"""How a model lies on a mesh of devices and what its ranks exchange: the options.

No JAX is imported here: a launcher or a flag check reads this module in milliseconds.
"""

from __future__ import annotations

import dataclasses

from kernels.base import options

# Rule sets by name: the mesh axes that split a dense weight.
DENSE_AXES = {
  "default": ("fsdp",),
  "cp-as-ep": ("fsdp", "context", "expert"),
  "cp-as-ep-dense-no-cp": ("fsdp", "expert"),
}
RULE_SETS = tuple(DENSE_AXES)

# Named tensors of a layer that remat_policy=custom may keep for the backward pass.
SAVED = {
  "query_proj": "queries and output gates of an attention layer",
  "key_proj": "its keys before norm and rotation",
  "value_proj": "its values",
  "context": "output and log-sum-exp of its kernel, which then does not run again",
  "attention_out": "its gated heads, before the output projection",
  "out_proj": "its output",
  "gdn_conv": "convolved queries, keys and values of a Gated DeltaNet layer",
  "gdn_states": "chunk states and inverses of its kernel, which then need not be replayed",
  "gdn": "output of its delta rule",
  "moe_x_sorted": "tokens in the experts' rows",
  "moe_mlpwi_0": "gate projections of the routed experts",
  "moe_mlpwi_1": "their up projections",
  "moe_mlpwo": "their outputs, before the router's weights",
  "mlpwi": "gate and up projections of the dense or shared feed-forward",
  "mlpwo": "its output",
}


def _saved(name: str):
  return options.option(
    "remat",
    help=f"With remat_policy=custom, {SAVED[name]}: recomputed, kept on the device, or kept in host "
    "memory.",
    choices=("remat", "device", "offload"),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedOptions:
  """Where weights lie on the mesh, and how experts, attention and Gated DeltaNet cross it."""

  custom_mesh_and_rule: str = options.option(
    "default",
    help="Where weights lie. default: dense ones over fsdp, experts over expert. cp-as-ep: dense "
    "ones over every device, experts over context and expert. cp-as-ep-dense-no-cp: the same, but "
    "dense ones over fsdp and expert only, while what the optimizer keeps of them is split over "
    "every device.",
    choices=RULE_SETS,
  )
  use_ring_of_experts: bool = options.option(
    False,
    help="Tokens travel to the experts (gathered over the expert ranks, summed back) instead of "
    "all experts to every device.",
  )
  use_ragged_sort: bool = options.option(
    False,
    help="Tokens reach the rows of their experts by one sort of packed keys and gathers alone, in a "
    "buffer that may hold a part of all pairs; otherwise by an argsort of all pairs, and their sums "
    "come back by a scatter of rows.",
  )
  num_moe_token_chunks: int = options.option(
    1,
    help="Parts in which a device's tokens go through the experts, one after another: a part's "
    "buffers are as much smaller.",
    minimum=1,
  )
  moe_expert_weight_prefetch: str = options.option(
    "none",
    help="When routed experts' gathered weights must be there. none: when the first product reads "
    "them. forward: before a layer's tokens are routed and sent, so that they travel while attention "
    "or Gated DeltaNet is computed; so they do when the layer is recomputed. forward_backward: "
    "besides, gradients of tokens go on to the mixer only once those of the weights are there to be "
    "reduced beside it.",
    choices=("none", "forward", "forward_backward"),
  )
  moe_chunk_pipeline: bool = options.option(
    False,
    help="Token chunks are laid out one behind the other instead of in a loop, so that one "
    "chunk's exchange can run beside another's products.",
  )
  ragged_buffer_factor: float = options.option(
    -1.0,
    help="Rows of an expert rank's buffer, in multiples of what balanced routing needs; -1 for the "
    "worst case, which drops nothing.",
    check=lambda x: None if x == -1 or x > 0 else "want -1, or a number above 0",
  )
  retry_when_tokens_dropped: bool = options.option(
    False,
    help="A micro-batch that overflowed an expert rank's buffer is discarded and run again in a "
    "program with room for the worst case, so that no token is lost.",
  )
  ragged_unsort_spread_masked_indices: bool = options.option(
    False,
    help="Pairs that a rank's buffer does not hold name rows spread over it instead of row 0, so "
    "that a gather does not read one row over and over.",
  )
  fp8_moe_fake_quant: bool = options.option(
    False,
    help="Routed expert weights are rounded to the e4m3 grid in the forward pass, one scale per "
    "expert and output channel; gradients pass straight through.",
  )
  fp8_moe_fake_quant_hoist: bool = options.option(
    False,
    help="That rounding is done once a step on every device's shard, outside layers, recomputation "
    "and micro-batches.",
  )
  moe_fp8_token_all_gather: bool = options.option(
    False, help="Tokens travel to the experts as e4m3 with a scale each."
  )
  moe_fp8_bwd_dispatch: bool = options.option(
    False,
    help="In the backward pass the gradients of the experts' sums travel as e5m2 with a scale each.",
  )
  context_parallel_attention_load_balance: bool = options.option(
    False,
    help="Attention layers work in zig-zag order, in which every context rank sees as many keys.",
  )
  context_parallel_attention_load_balance_hoist_ids: bool = options.option(
    False,
    help="Positions and segment ids in zig-zag order are made once, before the layers, instead of "
    "in every layer and every recomputation.",
  )
  context_parallel_attention_load_balance_order: str = options.option(
    "dual_chunk_swap",
    help="dual_chunk_swap_local_self takes a chunk that stays on its rank without sending it.",
    choices=("dual_chunk_swap", "dual_chunk_swap_local_self"),
  )
  gdn_cp_mode: str = options.option(
    "head",
    help="Gated DeltaNet over context. head: every rank runs some heads of the whole row. seq: "
    "every rank runs its own tokens, and ranks exchange what they do to the state.",
    choices=("head", "seq"),
  )
  dense_grad_reduce: str = options.option(
    "reduce_scatter",
    help="How the update sums the gradients of dense weights that are whole over context: a "
    "reduce-scatter to the optimizer's shards, or an all-reduce of which each rank takes its share.",
    choices=("reduce_scatter", "all_reduce"),
  )
  decoder_layer_input: str = options.option(
    "remat",
    help="With remat_policy=custom, each layer's input, which is always kept: on the device, or "
    "(offload) in host memory.",
    choices=("remat", "offload"),
  )
  query_proj_kernel_gather_once: bool = options.option(
    False,
    help="With remat_policy=custom and query_proj=remat, the query kernel that the backward pass "
    "gathers for the recomputed projection is kept for the input's gradient, past the attention "
    "between them; otherwise it is let go and gathered again.",
  )
  query_proj: str = _saved("query_proj")
  key_proj: str = _saved("key_proj")
  value_proj: str = _saved("value_proj")
  context: str = _saved("context")
  attention_out: str = _saved("attention_out")
  out_proj: str = _saved("out_proj")
  gdn_conv: str = _saved("gdn_conv")
  gdn_states: str = _saved("gdn_states")
  gdn: str = _saved("gdn")
  moe_x_sorted: str = _saved("moe_x_sorted")
  moe_mlpwi_0: str = _saved("moe_mlpwi_0")
  moe_mlpwi_1: str = _saved("moe_mlpwi_1")
  moe_mlpwo: str = _saved("moe_mlpwo")
  mlpwi: str = _saved("mlpwi")
  mlpwo: str = _saved("mlpwo")

  def kept(self, where: str) -> list[str]:
    """Names of the tensors that are kept on `device` or in host memory (`offload`)."""
    names = ("decoder_layer_input", *SAVED)
    return [name for name in names if getattr(self, name) == where]
