"""The two mixers on a rank's share of the tokens.

Attention gathers keys and values over context (2 KiB a token in the largest model) and keeps its
queries; a causal row gives later ranks more to do, so a layer may work in zig-zag order.  Keys stay
in the order in which the ranks hold them: ids say what a query sees.

Gated DeltaNet takes the last inputs of the rank before into its convolution, and either moves to
all tokens of some heads for its core (`head`) or exchanges what each rank does to the state (`seq`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from kernels.attention import attention as attention_op
from kernels.attention import zigzag
from kernels.conv1d import conv1d
from kernels.gated_norm import gated_norm
from kernels.gdn import context as gdn_context
from kernels.gdn import gdn
from model import attention as attention_lib
from model import gated_delta_net as gdn_lib
from model import layers
from model.sharded import collectives
from model.sharded.cell import CONTEXT, Cell, Rows, attention_order
from model.sharded.layout import Leaf

Tree = Any


def split_query_kernel(cell: Cell, leaves: Tree) -> tuple[Tree, Leaf | None]:
  """The plan of an attention layer's weights with the query kernel left a shard, and that kernel's.

  Where the backward pass does not gather it for each use: the plan as it is, and None.
  """
  if not cell.regathers_query_kernel:
    return leaves, None
  inner = leaves["attention"]
  leaf = inner["q_proj"]["kernel"]
  shard = dataclasses.replace(leaf, gather=())
  return {**leaves, "attention": {**inner, "q_proj": {"kernel": shard}}}, leaf


def _matmul(x, kernel):
  return jnp.matmul(x, kernel.astype(x.dtype), precision=layers.precision(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project(x: Float[Array, "B T h"], shard: Float[Array, "s O"], leaf: Leaf):
  """x times the kernel that `shard` is a part of; each pass gathers it for itself."""
  return _matmul(x, collectives.gather_weights(shard, leaf, x.dtype))


def _project_backward(leaf, residuals, grad):
  x, shard = residuals
  # Tied to the gradient: of two gathers of one shard the compiler would make one that it keeps.
  shard, grad = lax.optimization_barrier((shard, grad))
  kernel, to_shard = jax.vjp(lambda s: collectives.gather_weights(s, leaf, x.dtype), shard)
  d_x, d_kernel = jax.vjp(_matmul, x, kernel)[1](grad)
  return d_x, *to_shard(d_kernel)


_project.defvjp(lambda x, shard, leaf: (_project(x, shard, leaf), (x, shard)), _project_backward)


def attention(
  cell: Cell,
  module: attention_lib.Attention,
  x: Float[Array, "B T h"],
  rows: Rows,
  query_leaf: Leaf | None = None,
) -> Float[Array, "B T h"]:
  """Softmax attention of this rank's tokens to those of the whole row.

  Args:
    cell: The model on its mesh.
    module: Its weights, gathered.
    x: Normalised input.
    rows: Ids of the rows.
    query_leaf: The query kernel's plan where the module holds its shard instead of the whole.
  """
  config = cell.config
  order = cell.options.context_parallel_attention_load_balance_order
  ids = attention_order(cell, rows) if rows.attention is None else rows.attention
  if cell.balanced:
    x = zigzag.to_zigzag(x, CONTEXT, order=order)
  batch, length, _ = x.shape
  heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
  if query_leaf is None:
    query_and_gate = module.q_proj(x)
  else:
    query_and_gate = _project(x, module.q_proj.kernel[...], query_leaf)
  query_and_gate = checkpoint_name(query_and_gate, "query_proj")
  query_and_gate = query_and_gate.reshape(batch, length, heads, 2 * dim)
  q, gate = query_and_gate[..., :dim], query_and_gate[..., dim:]
  k = checkpoint_name(module.k_proj(x), "key_proj").reshape(batch, length, groups, dim)
  v = checkpoint_name(module.v_proj(x), "value_proj").reshape(batch, length, groups, dim)
  factor, scale = attention_lib.query_factors(dim, cell.model_options)
  q = layers.rotate(module.q_norm(q, factor), ids.cos, ids.sin)
  k = layers.rotate(module.k_norm(k), ids.cos, ids.sin)
  k, v = (lax.all_gather(a, CONTEXT, axis=1, tiled=True) for a in (k, v))
  out = attention_op.attention(
    q,
    k,
    v,
    q_segment_ids=ids.segment_ids,
    kv_segment_ids=ids.key_segment_ids,
    q_positions=ids.positions,
    kv_positions=ids.key_positions,
    scale=scale,
    implementation=cell.implementation,
    given=cell.model_options,
  )
  out = (out * jax.nn.sigmoid(gate)).reshape(batch, length, heads * dim)
  out = module.o_proj(checkpoint_name(out, "attention_out"))
  if cell.balanced:
    out = zigzag.from_zigzag(out, CONTEXT, order=order)
  return checkpoint_name(out, "out_proj")


def gated_delta_net(
  cell: Cell, module: gdn_lib.GatedDeltaNet, x: Float[Array, "B T h"], rows: Rows
) -> Float[Array, "B T h"]:
  """The Gated DeltaNet mixer of this rank's tokens."""
  config, kernels = cell.config, cell.implementation
  batch, length, _ = x.shape
  qkv = module.in_proj_qkv(x)
  mixed = conv1d.causal_conv1d_silu(
    qkv,
    module.conv1d.kernel[...],
    rows.segment_ids,
    *_halo(cell, qkv, rows),
    implementation=kernels,
  )
  mixed = checkpoint_name(mixed, "gdn_conv")
  q, k, v = jnp.split(mixed, [config.key_dim, 2 * config.key_dim], axis=-1)
  keys = (config.linear_num_key_heads, config.linear_key_head_dim)
  values = (config.linear_num_value_heads, config.linear_value_head_dim)
  q, k = q.reshape(batch, length, *keys), k.reshape(batch, length, *keys)
  v = v.reshape(batch, length, *values)
  beta = jax.nn.sigmoid(module.in_proj_b(x))
  decay = jax.nn.softplus(module.in_proj_a(x).astype(jnp.float32) + module.dt_bias[...])
  g = -jnp.exp(module.A_log[...]) * decay

  chunk = cell.model_options.gdn_chunk_size
  group = cell.model_options.gdn_fwd_kernel_head_group_size
  if cell.ranks > 1 and cell.options.gdn_cp_mode == "seq":
    out = gdn_context.gated_delta_rule(
      q,
      k,
      v,
      g,
      beta,
      rows.segment_ids,
      axis_name=CONTEXT,
      chunk_size=chunk,
      implementation=kernels,
      head_group=group,
    )
  else:
    if cell.ranks > 1:
      q, k, v, g, beta = (collectives.heads_to_ranks(a, CONTEXT) for a in (q, k, v, g, beta))
    out, _ = gdn.gated_delta_rule(
      q,
      k,
      v,
      g,
      beta,
      rows.whole_segment_ids,
      chunk_size=chunk,
      implementation=kernels,
      head_group=group,
      keep_states=cell.options.gdn_states != "remat",
    )
    if cell.ranks > 1:
      out = collectives.tokens_to_ranks(out, CONTEXT)
  out = checkpoint_name(out, "gdn")
  z = module.in_proj_z(x).reshape(batch, length, *values)
  out = gated_norm.gated_rms_norm(
    out, z, module.norm.scale[...], config.rms_norm_eps, implementation=kernels
  )
  return module.out_proj(out.reshape(batch, length, config.value_dim))


def _halo(cell: Cell, qkv: Float[Array, "B T C"], rows: Rows):
  """The convolution's window before this rank's tokens, and the segment it belongs to.

  The window is of one segment, that of its last token: ids grow along a row, so a token before
  another segment's is seen by no token of this rank.
  """
  if cell.ranks == 1:
    return None, None
  taps = cell.config.linear_conv_kernel_dim - 1
  window = collectives.from_rank_before(qkv[:, -taps:], CONTEXT)
  start = lax.axis_index(CONTEXT) * qkv.shape[1]
  padded = jnp.pad(rows.whole_segment_ids, ((0, 0), (taps, 0)))
  segments = lax.dynamic_slice_in_dim(padded, start, taps, axis=1)
  owner = segments[:, -1]
  return jnp.where((segments == owner[:, None])[..., None], window, 0), owner
