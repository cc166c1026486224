"""Routed experts on a rank's tokens.

With the ring of experts tokens are gathered over the ranks that split the experts, every rank sorts
them by its own experts, runs those, and the ranks' partial sums are reduced and scattered back.
Without it a layer gathers the experts and every rank keeps its tokens.

A buffer of fewer rows than the worst case drops the last pairs in order and counts them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.fp8 import fp8
from kernels.gmm import expert_mlp
from kernels.moe_dispatch import moe_dispatch
from model import moe
from model.sharded import collectives
from model.sharded.cell import Cell

# What ties the experts' gathered weights to the tokens that are about to be routed.
_TIES = {
  "none": lambda values: values,
  "forward": collectives.together,
  "forward_backward": lax.optimization_barrier,
}


class Routed(NamedTuple):
  """What a sparse layer reports.

  Attributes:
    experts: Experts used, int16; -1 on padding.
    dropped: Pairs of this rank's experts for which its buffer had no row, int32.
  """

  experts: Int[Array, "B T K"]
  dropped: Int[Array, ""]


def sparse_mlp(
  cell: Cell,
  module: moe.SparseMoe,
  x: Float[Array, "B T h"],
  segment_ids: Int[Array, "B T"],
  replay: Int[Array, "B T K"] | None,
) -> tuple[Float[Array, "B T h"], Routed]:
  """The sparse feed-forward layer; arguments as of `model.moe.SparseMoe`."""
  config = cell.config
  tokens = x.reshape(-1, config.hidden_size)
  float32_logits = cell.model_options.float32_gate_logits
  logits = module.router(tokens.astype(jnp.float32) if float32_logits else tokens)
  wi, wo = module.wi[...].astype(x.dtype), module.wo[...].astype(x.dtype)
  tie = _TIES[cell.options.moe_expert_weight_prefetch]
  sent, logits, wi, wo = tie((tokens, logits, wi, wo))
  if replay is not None:
    replay = replay.reshape(-1, config.num_experts_per_tok)
  real = (segment_ids.reshape(-1) > 0)[:, None]
  capacity = cell.model_options.moe_fallback_topk_capacity
  if replay is not None and capacity:
    # Padding chooses nothing: it must not take the place of a token that does.
    replay = jnp.where(real, replay, 0)
  experts, weights = moe.route(logits, config.num_experts_per_tok, replay, capacity)
  experts = jnp.where(real, experts, -1)
  # As the unsharded layer: weights in the activations' type.
  weights = weights.astype(x.dtype)

  routed, dropped = _in_chunks(cell, sent, experts, weights, wi, wo)
  shared = jax.nn.sigmoid(module.shared_expert_gate(tokens)) * module.shared_expert(tokens)
  kept = experts.astype(jnp.int16).reshape(*x.shape[:2], -1)
  return (routed + shared).reshape(x.shape), Routed(kept, dropped)


def _in_chunks(cell: Cell, tokens, experts, weights, wi, wo):
  chunks = cell.options.num_moe_token_chunks
  if chunks == 1:
    return _run(cell, tokens, experts, weights, wi, wo)
  if tokens.shape[0] % chunks:
    raise ValueError(f"{tokens.shape[0]} tokens a device do not split into {chunks} chunks")
  parts = [a.reshape(chunks, -1, a.shape[1]) for a in (tokens, experts, weights)]
  if cell.options.moe_chunk_pipeline:
    done = [_run(cell, parts[0][i], parts[1][i], parts[2][i], wi, wo) for i in range(chunks)]
    outs, dropped = zip(*done, strict=True)
    return jnp.concatenate(outs), sum(dropped)
  # Recomputed chunk by chunk in the backward pass: one chunk's buffers are alive at a time.
  run = lambda t, e, w: _run(cell, t, e, w, wi, wo)
  body = jax.checkpoint(run, prevent_cse=False)
  outs, dropped = lax.map(lambda part: body(*part), tuple(parts))
  return outs.reshape(tokens.shape), jnp.sum(dropped)


def buffer_rows(factor: float, pairs: int, groups: int) -> int:
  """Rows of a rank's buffer for `pairs` (token, choice) pairs over `groups` expert ranks."""
  if factor < 0:
    return pairs
  return max(1, min(pairs, math.ceil(factor * pairs / groups)))


def _products(cell: Cell, rows, row_weights, wi, wo, group_sizes):
  """The experts' weighted results on rows sorted by expert."""
  options, model = cell.options, cell.model_options
  if model.use_tokamax_gmm and not model.use_gmm_v2:
    out = moe.plain_rows(model, rows, wi, wo, group_sizes)
    return (out.astype(jnp.float32) * row_weights[:, None]).astype(rows.dtype)
  saved = tuple(name for name in expert_mlp.SAVED_NAMES if getattr(options, name) != "remat")
  form = moe.form_of(model, saved)
  return expert_mlp.expert_mlp(rows, wi, wo, row_weights, group_sizes, form=form)


def _argsorted(cell: Cell, tokens, experts, weights, wi, wo):
  """All experts' weighted sum of this rank's tokens by argsort and scatter; nothing is dropped."""
  count, choices = wi.shape[0], experts.shape[1]
  flat = experts.reshape(-1)
  flat = jnp.where(flat >= 0, flat, count)
  pairs = jnp.argsort(flat, stable=True)
  token = pairs // choices
  sizes = jnp.bincount(flat, length=count + 1)[:count]
  rows = checkpoint_name(tokens[token], "moe_x_sorted")
  row_weights = weights.reshape(-1)[pairs].astype(jnp.float32)
  rows = _products(cell, rows, row_weights, wi, wo, sizes)
  owned = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]
  rows = jnp.where(owned, rows, 0).astype(jnp.float32)
  out = jnp.zeros(tokens.shape, jnp.float32).at[token].add(rows).astype(tokens.dtype)
  return out, jnp.int32(0)


def _run(cell: Cell, tokens, experts, weights, wi, wo):
  """Experts' weighted sum of one chunk of tokens, and the pairs that found no room."""
  options = cell.options
  if not (options.use_ragged_sort or options.use_ring_of_experts):
    return _argsorted(cell, tokens, experts, weights, wi, wo)
  axes = tuple(a for a in cell.layout.experts if cell.layout.size(a) > 1)
  ring = options.use_ring_of_experts and bool(axes)
  first, groups = 0, 1
  if ring:
    groups = cell.layout.size(axes)
    first = lax.axis_index(axes) * wi.shape[0]
    experts = lax.all_gather(experts, axes, axis=0, tiled=True)
    weights = lax.all_gather(weights, axes, axis=0, tiled=True)
  kernels = cell.implementation
  plan = moe_dispatch.plan(
    experts,
    wi.shape[0],
    first_expert=first,
    buffer_rows=buffer_rows(options.ragged_buffer_factor, experts.size, groups),
    spread_masked=options.ragged_unsort_spread_masked_indices,
  )
  # The dispatch gathers the tokens and scatters their sums, in a form that its kernel likes.
  over = axes if ring else ()
  forth = fp8.E4M3 if ring and options.moe_fp8_token_all_gather else None
  back = fp8.E5M2 if ring and options.moe_fp8_bwd_dispatch else None
  rows = moe_dispatch.dispatch(tokens, plan, kernels, over, forth)
  rows = checkpoint_name(rows, "moe_x_sorted")
  row_weights = moe_dispatch.dispatch_weights(weights, plan).astype(jnp.float32)
  rows = _products(cell, rows, row_weights, wi, wo, plan.group_sizes)
  out = moe_dispatch.sum_rows(rows, plan, kernels, over, back)
  here = jnp.sum((experts >= first) & (experts < first + wi.shape[0]), dtype=jnp.int32)
  return out, here - jnp.sum(plan.group_sizes)
