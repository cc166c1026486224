"""Public op of causal softmax attention over packed rows, with grouped queries."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from kernels.attention import blockwise, reference

# Up to this many scores per head and row the whole matrix is cheaper than a loop over blocks.
_DENSE_SCORES = 1024 * 1024


def attention(
  q: Float[Array, "B S nq d"],
  k: Float[Array, "B T nkv d"],
  v: Float[Array, "B T nkv d"],
  *,
  q_segment_ids: Int[Array, "B S"],
  kv_segment_ids: Int[Array, "B T"],
  q_positions: Int[Array, "B S"],
  kv_positions: Int[Array, "B T"],
  scale: float,
  block_q: int = 512,
  block_kv: int = 512,
) -> Float[Array, "B S nq d"]:
  """Attention in which a query sees the keys of its segment at no later position.

  The mask comes from ids and positions alone, never from the order of the rows, so tokens may be
  permuted.  Padding (segment 0) sees nothing, is seen by nothing, and gives zeros.

  Args:
    q: Queries; query head h reads key/value head h // (nq / nkv).
    k: Keys.
    v: Values.
    q_segment_ids: Segments of the queries.
    kv_segment_ids: Segments of the keys.
    q_positions: Positions of the queries in their segments.
    kv_positions: Positions of the keys in their segments.
    scale: Factor of the scores.
    block_q: Queries per block on long rows, where memory stays linear in the row.
    block_kv: Keys per block on long rows.

  Raises:
    ValueError: Query heads are no multiple of key/value heads.
  """
  if q.shape[2] % k.shape[2]:
    raise ValueError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} key/value heads")
  ids = blockwise.Ids(q_segment_ids, kv_segment_ids, q_positions, kv_positions)
  if q.shape[1] * k.shape[1] <= _DENSE_SCORES:
    return reference.attention(q, k, v, reference.visible(*ids), scale)
  return blockwise.attention(q, k, v, ids, scale, block_q, block_kv)
