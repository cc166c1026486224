"""Attention by blocks of queries and keys with an online softmax: memory linear in the row.

Dao, "FlashAttention-2" (arXiv:2307.08691), in plain JAX.  Only the output and the log-sum-exp are
kept for the backward pass, which recomputes the scores of a block at a time.  Block pairs of which
no query sees any key are skipped at run time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.attention import reference

_MASKED = -1e30


class Ids(NamedTuple):
  """What decides who sees whom: int32 segment ids and positions of queries and keys."""

  q_segment_ids: Int[Array, "B S"]
  kv_segment_ids: Int[Array, "B T"]
  q_positions: Int[Array, "B S"]
  kv_positions: Int[Array, "B T"]


def _blocks(x, size):
  """[B, S, ...] -> [S / size, B, size, ...], padded with zeros (segment 0 sees nothing)."""
  pad = -x.shape[1] % size
  x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
  return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _unblock(x, length):
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _einsum(spec, a, b, dtype):
  return jnp.einsum(
    spec, a, b, precision=reference.precision(dtype), preferred_element_type=jnp.float32
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attention(
  q: Float[Array, "B S nq d"],
  k: Float[Array, "B T nkv d"],
  v: Float[Array, "B T nkv d"],
  ids: Ids,
  scale: float,
  block_q: int,
  block_kv: int,
) -> Float[Array, "B S nq d"]:
  """Same numbers as `reference.attention` under the mask of `reference.visible`.

  Args:
    q: Queries; query head h reads key/value head h // (nq / nkv).
    k: Keys.
    v: Values.
    ids: Segment ids and positions.
    scale: Factor of the scores.
    block_q: Queries per block.
    block_kv: Keys per block.
  """
  return forward(q, k, v, ids, scale=scale, block_q=block_q, block_kv=block_kv)[0]


def _split(q, k, v, ids, block_q, block_kv):
  batch, length, nq, dim = q.shape
  nkv = k.shape[2]
  queries = _blocks(q.reshape(batch, length, nkv, nq // nkv, dim), block_q)
  keys, values = _blocks(k, block_kv), _blocks(v, block_kv)
  q_ids = (_blocks(ids.q_segment_ids, block_q), _blocks(ids.q_positions, block_q))
  kv_ids = (_blocks(ids.kv_segment_ids, block_kv), _blocks(ids.kv_positions, block_kv))
  return queries, q_ids, (keys, values, kv_ids)


def forward(
  q: Float[Array, "B S nq d"],
  k: Float[Array, "B T nkv d"],
  v: Float[Array, "B T nkv d"],
  ids: Ids,
  *,
  scale: float,
  block_q: int = 512,
  block_kv: int = 512,
) -> tuple[Float[Array, "B S nq d"], Float[Array, "B nq S"]]:
  """Output, and the natural log of each query's sum of exponentials (0 where it sees nothing)."""
  dtype = q.dtype
  queries, q_ids, key_blocks = _split(q, k, v, ids, block_q, block_kv)

  def one_query_block(args):
    q_b, (q_seg, q_pos) = args
    batch, size, groups, heads, dim = q_b.shape

    def one_key_block(carry, block):
      k_b, v_b, (kv_seg, kv_pos) = block
      mask = reference.visible(q_seg, kv_seg, q_pos, kv_pos)[:, None, None]

      def update(carry):
        top, total, acc = carry
        scores = jnp.where(mask, scale * _einsum("bsgrd,btgd->bgrst", q_b, k_b, dtype), _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        add = _einsum("bgrst,btgd->bgrsd", weights.astype(dtype), v_b, dtype)
        return new_top, total * shrink + jnp.sum(weights, -1), acc * shrink[..., None] + add

      return lax.cond(jnp.any(mask), update, lambda c: c, carry), None

    rows = (batch, groups, heads, size)
    start = (jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros((*rows, dim)))
    (top, total, acc), _ = lax.scan(one_key_block, start, key_blocks)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    return jnp.moveaxis(acc / total[..., None], 3, 1), jnp.where(seen, top + jnp.log(total), 0.0)

  out, lse = lax.map(one_query_block, (queries, q_ids))
  out = _unblock(out, q.shape[1]).reshape(q.shape).astype(dtype)
  # [blocks, B, groups, heads, size] -> [B, heads of all groups, S]
  lse = jnp.moveaxis(lse, 0, 3).reshape(q.shape[0], q.shape[2], -1)
  return out, lse[:, :, : q.shape[1]]


def backward(
  q: Float[Array, "B S nq d"],
  k: Float[Array, "B T nkv d"],
  v: Float[Array, "B T nkv d"],
  ids: Ids,
  out: Float[Array, "B S nq d"],
  lse: Float[Array, "B nq S"],
  d_out: Float[Array, "B S nq d"],
  *,
  scale: float,
  block_q: int = 512,
  block_kv: int = 512,
) -> tuple[Float[Array, "B S nq d"], Float[Array, "B T nkv d"], Float[Array, "B T nkv d"]]:
  """Gradients of q, k, v from what `forward` returned and the output's gradient."""
  dtype = q.dtype
  queries, q_ids, key_blocks = _split(q, k, v, ids, block_q, block_kv)
  inner = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
  groups, heads = queries.shape[3:5]
  shape = (*d_out.shape[:2], groups, heads, d_out.shape[-1])
  d_outs = _blocks(d_out.reshape(shape), block_q)
  inner = jnp.moveaxis(_blocks(inner.reshape(shape[:-1]), block_q), 2, -1)
  lse = jnp.moveaxis(_blocks(jnp.moveaxis(lse, 1, 2).reshape(shape[:-1]), block_q), 2, -1)
  query_blocks = (queries, d_outs, lse, inner, q_ids)

  def one_key_block(d_queries, block):
    k_b, v_b, (kv_seg, kv_pos) = block

    def one_query_block(carry, args):
      (q_b, do_b, lse_b, inner_b, (q_seg, q_pos)), dq_b = args
      mask = reference.visible(q_seg, kv_seg, q_pos, kv_pos)[:, None, None]

      def update(operand):
        dk, dv, dq_b = operand
        scores = scale * _einsum("bsgrd,btgd->bgrst", q_b, k_b, dtype) - lse_b[..., None]
        p = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0.0)), 0.0)
        dp = _einsum("bsgrd,btgd->bgrst", do_b, v_b, dtype)
        ds = (scale * p * (dp - inner_b[..., None])).astype(dtype)
        dv += _einsum("bgrst,bsgrd->btgd", p.astype(dtype), do_b, dtype)
        dk += _einsum("bgrst,bsgrd->btgd", ds, q_b, dtype)
        return dk, dv, dq_b + _einsum("bgrst,btgd->bsgrd", ds, k_b, dtype)

      dk, dv, dq_b = lax.cond(jnp.any(mask), update, lambda o: o, (*carry, dq_b))
      return (dk, dv), dq_b

    zero = jnp.zeros(k_b.shape, jnp.float32)
    (dk, dv), d_queries = lax.scan(one_query_block, (zero, zero), (query_blocks, d_queries))
    return d_queries, (dk, dv)

  start = jnp.zeros(queries.shape, jnp.float32)
  d_queries, (dk, dv) = lax.scan(one_key_block, start, key_blocks)
  dq = _unblock(d_queries, q.shape[1]).reshape(q.shape).astype(q.dtype)
  length = k.shape[1]
  return dq, _unblock(dk, length).astype(k.dtype), _unblock(dv, length).astype(v.dtype)


def _save(q, k, v, ids, scale, block_q, block_kv):
  out, lse = forward(q, k, v, ids, scale=scale, block_q=block_q, block_kv=block_kv)
  return out, (q, k, v, ids, out, lse)


def _gradients(scale, block_q, block_kv, residuals, d_out):
  q, k, v, ids, out, lse = residuals
  sizes = {"scale": scale, "block_q": block_q, "block_kv": block_kv}
  return *backward(q, k, v, ids, out, lse, d_out, **sizes), None


attention.defvjp(_save, _gradients)
