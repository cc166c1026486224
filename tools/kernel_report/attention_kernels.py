"""Builders for the flash kernels of kernels/attention."""

from __future__ import annotations

from typing import Any

from kernels.attention import pallas_backward, pallas_forward, schedule, tile_math
from tools.kernel_report import public_kernels

_KINDS = {"visible": schedule.FULL, "masked": schedule.PARTIAL, "one segment": schedule.ONE}


def flash(
  *,
  which: str,
  queries: int,
  keys: int,
  heads: int,
  kv_heads: int,
  head_dim: int,
  block_q: int,
  block_kv: int,
  part: int,
  kind: str = "listed",
  buffers: int = 1,
) -> Any:
  """One pass of flash attention, exponentials to base 2 without a factor.

  Args:
    which: forward or backward.
    queries: Queries of one row on a device.
    keys: Keys of the row.
    heads: Query heads.
    kv_heads: Key heads.
    head_dim: Channels of a head.
    block_q: Queries per block.
    block_kv: Keys per block.
    part: Keys per product.
    kind: `visible`, `masked` or `one segment` (masked): every pair of blocks is, which the compiler
      knows; `listed` takes pairs of blocks from prefetched lists, as a training step does.
    buffers: Partial sums of the queries' gradient.
  """
  import math

  import jax.numpy as jnp

  outer, inner = queries // block_q, keys // block_kv
  if which == "backward":
    outer, inner = inner, outer
  known = None
  if kind != "listed":
    known = schedule.Known(outer, inner, _KINDS[kind])
  common: dict[str, Any] = {
    "exponential": tile_math.Exponential(math.log(2.0), True),
    "block_q": block_q,
    "block_kv": block_kv,
    "part": part,
    "known": known,
  }

  def forward(q, k, v, q_ids, kv_ids, blocks, parts, count):
    items = schedule.Schedule(blocks, parts, count[0])
    return pallas_forward.forward(q, k, v, q_ids, kv_ids, items, **common)

  def backward(q, k, v, q_ids, kv_ids, blocks, parts, count, d_out, lse, inner_products):
    items = schedule.Schedule(blocks, parts, count[0])
    rows = (lse, inner_products)
    return pallas_backward.backward(
      q, k, v, d_out, *rows, q_ids, kv_ids, items, buffers=buffers, **common
    )

  bf16, int32, float32 = jnp.bfloat16, jnp.int32, jnp.float32
  q = ((1, heads, queries, head_dim), bf16)
  kv = ((1, kv_heads, keys, head_dim), bf16)
  ids = [((1, 2, n), int32) for n in (queries, keys)]
  items = [((n,), int32) for n in (outer * inner, outer * inner, 1)]
  lower = public_kernels.lower_on_one_slice
  if which == "forward":
    return lower(forward, q, kv, kv, *ids, *items)
  rows = [((1, heads, queries), float32)] * 2
  return lower(backward, q, kv, kv, *ids, *items, q, *rows)
