"""The model on one rank of a mesh, for use inside a shard_map around forward and backward.

A program has one body of each kind of layer however deep the model is: groups are scanned, and
inside a group its Gated DeltaNet layers.  A layer gathers its weights inside its own checkpoint, so
that the backward pass gathers them again instead of keeping them; the transpose of a gather is the
reduce-scatter of the gradient, inside the loop too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.fp8 import fp8
from model import layers, qwen3_5
from model.sharded import cell as cell_lib
from model.sharded import collectives, experts, mixers
from model.sharded.cell import Cell, Rows

Tree = Any

_EXPERTS = ("wi", "wo")


class Output(NamedTuple):
  """What a rank's forward pass gives.

  Attributes:
    hidden: After the final norm.
    routed_experts: int16 experts used, -1 on padding; None for a dense model.
    dropped: (token, choice) pairs for which this rank's expert buffers had no row, over all layers.
  """

  hidden: Float[Array, "B T h"]
  routed_experts: Int[Array, "B T L K"] | None
  dropped: Int[Array, ""]


def fake_quant_experts(weights: Tree) -> Tree:
  """Weights with those of routed experts on the e4m3 grid, of a layer or of a stack of layers.

  A scale is an expert's and an output channel's: those of wi need the largest value over fsdp,
  which splits its inputs.
  """

  def one(path, weight):
    name = getattr(path[-1], "key", None)
    if name not in _EXPERTS:
      return weight
    return fp8.fake_quant(weight, -2, fp8.E4M3, "fsdp" if name == "wi" else None)

  return jax.tree_util.tree_map_with_path(one, weights)


def is_expert(weights: Tree) -> Tree:
  """True on the weights of routed experts."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: getattr(path[-1], "key", None) in _EXPERTS, weights
  )


def _layer(cell: Cell, kind, leaves, weights, x, rows: Rows, replay):
  """One layer from its shards."""
  if cell.options.fp8_moe_fake_quant and cell.config.is_moe:
    weights = fake_quant_experts(weights)
  x = checkpoint_name(x, "decoder_layer_input")
  query_leaf = None
  if kind is qwen3_5.AttentionLayer:
    leaves, query_leaf = mixers.split_query_kernel(cell, leaves)
  weights = collectives.gather_weights(weights, leaves, cell.dtype)
  definition, _ = qwen3_5.abstract_layer(kind, cell.config, cell.model_options)
  module = nnx.merge(definition, weights)
  with jax.named_scope(kind.scope):
    normed = module.input_norm(x)
    if kind is qwen3_5.GdnLayer:
      x = x + mixers.gated_delta_net(cell, module.gdn, normed, rows)
    else:
      x = x + mixers.attention(cell, module.attention, normed, rows, query_leaf)
  with jax.named_scope("moe" if cell.config.is_moe else "mlp"):
    normed = module.post_norm(x)
    if not cell.config.is_moe:
      return x + module.mlp(normed), None
    out, routed = experts.sparse_mlp(cell, module.mlp, normed, rows.segment_ids, replay)
    return x + out, routed


def _policy(cell: Cell):
  """What a layer's checkpoint keeps besides its input; None for nothing."""
  if cell.model_options.remat_policy != "custom":
    return None
  return jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=cell.options.kept("device"),
    names_which_can_be_offloaded=cell.options.kept("offload"),
    offload_src="device",
    offload_dst="pinned_host",
  )


def _apply(cell: Cell, kind, leaves, weights, x, rows, replay):
  run = lambda weights, x, rows, replay: _layer(cell, kind, leaves, weights, x, rows, replay)
  if cell.model_options.remat_policy != "none":
    # Inside a scan nothing can be merged across the recomputation, so no barrier is needed.
    prevent_cse = not cell.model_options.scan_layers
    run = jax.checkpoint(run, prevent_cse=prevent_cse, policy=_policy(cell))
  return run(weights, x, rows, replay)


def run_layers(cell: Cell, params: Tree, x: Float[Array, "B T h"], rows: Rows, replay):
  """All layers; `replay` has a leading axis of layers, or is None.

  Returns:
    The last layer's output; `Routed` of the groups' Gated DeltaNet layers [G, n, ...], of the
    attention layers [G, ...], of the tail [r, ...], None where there are none.
  """
  config, leaves = cell.config, cell.layout.leaves
  groups, per_group = config.num_groups, config.gdn_per_group
  unroll = not cell.model_options.scan_layers

  def scan_gdn(x, weights, leaves, replay):
    body = lambda x, one: _apply(cell, qwen3_5.GdnLayer, leaves, one[0], x, rows, one[1])
    return jax.lax.scan(body, x, (weights, replay), unroll=unroll)

  def group(x, values):
    weights, replay = values
    gdn_out = None
    if per_group:
      gdn_replay = None if replay is None else replay[:per_group]
      x, gdn_out = scan_gdn(x, weights["gdn"], leaves["groups"]["gdn"], gdn_replay)
    attn_replay = None if replay is None else replay[per_group]
    attn = (weights["attn"], x, rows, attn_replay)
    x, attn_out = _apply(cell, qwen3_5.AttentionLayer, leaves["groups"]["attn"], *attn)
    return x, (gdn_out, attn_out)

  group_replay = tail_replay = None
  if replay is not None:
    in_groups = groups * config.full_attention_interval
    shape = (groups, config.full_attention_interval, *replay.shape[1:])
    group_replay, tail_replay = replay[:in_groups].reshape(shape), replay[in_groups:]
  x, (gdn_out, attn_out) = jax.lax.scan(group, x, (params["groups"], group_replay), unroll=unroll)
  tail_out = None
  if config.num_tail_layers:
    x, tail_out = scan_gdn(x, params["tail"], leaves["tail"], tail_replay)
  return x, (gdn_out, attn_out, tail_out)


def table(cell: Cell, params: Tree, name: str, key: str) -> Float[Array, "V h"]:
  """A whole table from its shards, in the activations' type."""
  leaf = cell.layout.leaves[name][key]
  return collectives.gather_weights(params[name][key], leaf, cell.dtype)


def head_table(cell: Cell, params: Tree) -> Float[Array, "V h"]:
  """The output embedding."""
  tied = "lm_head" not in params
  return table(cell, params, *(("embed", "embedding") if tied else ("lm_head", "kernel")))


def forward(
  cell: Cell,
  params: Tree,
  tokens: Int[Array, "B S"],
  segment_ids: Int[Array, "B S"],
  positions: Int[Array, "B S"],
  routed_experts: Int[Array, "B T L K"] | None,
) -> Output:
  """Runs a rank's share of packed rows through the model.

  Args:
    cell: The model on its mesh.
    params: This rank's shards.
    tokens: Of whole rows, as are the next two: a rank takes its share of the work itself.
    segment_ids: 0 is padding.
    positions: In the segment.
    routed_experts: Experts to use, of this rank's tokens alone; None to route live.

  Raises:
    ValueError: Rows do not divide over the context ranks, or are too short for them.
  """
  length, ranks = tokens.shape[1], cell.ranks
  parts = 2 * ranks if cell.balanced else ranks
  if length % parts or length // ranks < cell.config.linear_conv_kernel_dim - 1:
    raise ValueError(f"rows of {length} tokens do not divide into {parts} parts over context")
  rows = cell_lib.make_rows(cell, segment_ids, positions)
  with jax.named_scope("embed"):
    own = collectives.own_part(tokens, cell_lib.CONTEXT, 1)
    x = table(cell, params, "embed", "embedding")[own]
  replay = None if routed_experts is None else jnp.moveaxis(routed_experts, 2, 0)
  x, routed = run_layers(cell, params, x, rows, replay)
  hidden = layers.rms_norm(x, params["final_norm"]["scale"], cell.config.rms_norm_eps)
  if not cell.config.is_moe:
    return Output(hidden, None, jnp.int32(0))
  dropped = jnp.sum(jnp.stack([jnp.sum(r.dropped) for r in routed if r is not None]))
  in_order = qwen3_5.in_layer_order([None if r is None else r.experts for r in routed])
  return Output(hidden, jnp.moveaxis(in_order, 0, 2), dropped)
