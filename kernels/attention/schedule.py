"""Which block pairs of queries and keys the flash kernels visit, and how, from ids and positions.

A key is visible where its segment is the query's and its position is not later.  Order pairs
(segment, position) by segment first: a visible key's pair is at most the query's.  So a block of
keys is dead for a block of queries when its least pair is above their greatest, or its greatest
segment below their least.  That needs no order of the tokens: zig-zag chunks and packed segments
are skipped alike; an arbitrary permutation is right too, only less is skipped.

Live pairs are listed one after the other; the kernels' grid runs over the list, whose length is
known when the program runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

# ONE is partial too, for queries of one segment.  A block of queries has parts of kinds DEAD and PARTIAL,
# or of DEAD, FULL and ONE: `FULL & ONE` tells which.
DEAD, PARTIAL, FULL, ONE = 0, 1, 2, 3
# Bits of `Schedule.blocks`: row of the batch, outer block, inner block.
_INNER_BITS, _OUTER_BITS, _BATCH_BITS = 11, 11, 9
# Bits of `Schedule.parts`: first and last item of the outer block, then two for each part.
FIRST, LAST, PART_SHIFT = 1, 2, 2
_FAR = 2**30


class Schedule(NamedTuple):
  """Items in order: by row, then outer block, then inner block.

  Attributes:
    blocks: Where: packed row, outer and inner block; see `unpack`.
    parts: FIRST, LAST and the kind of each part of the key block, two bits each.
    count: Items that are there; those behind mean nothing.
  """

  blocks: Int[Array, " W"]
  parts: Int[Array, " W"]
  count: Int[Array, ""]


class Known(NamedTuple):
  """A schedule that is known when the kernel is compiled: one row, every pair of blocks alike.

  For static profiles, whose compiler follows no data.

  Attributes:
    outer: Outer blocks.
    inner: Inner blocks of each.
    kind: Kind of every part.
  """

  outer: int
  inner: int
  kind: int


class Item(NamedTuple):
  """One item as a kernel sees it: numbers, or scalars that are traced.

  Attributes:
    first: Whether its outer block begins with it.
    last: Whether its outer block ends with it.
    kinds: Kinds of the parts of its key block, two bits each; see `kind_of`.
    known: The schedule, if it is known.
  """

  first: Any
  last: Any
  kinds: Any
  known: Known | None

  def kind_of(self, start, some: int):
    """Kinds of `some` parts from part `start` on, two bits each."""
    if self.known is not None:
      return sum(self.known.kind << 2 * i for i in range(some))
    return (self.kinds >> (2 * start)) & (4**some - 1)


def all_full(parts: int) -> int:
  """Kinds of parts that are all FULL."""
  return sum(FULL << 2 * i for i in range(parts))


def of_one_segment(kinds, parts: int):
  """Not 0 where parts, some of them live, are visited by queries of one segment, none padding."""
  return kinds & sum((FULL & ONE) << 2 * i for i in range(parts))


def unpack(packed):
  """(row, outer block, inner block) of an item."""
  inner = packed & (2**_INNER_BITS - 1)
  outer = (packed >> _INNER_BITS) & (2**_OUTER_BITS - 1)
  return packed >> (_INNER_BITS + _OUTER_BITS), outer, inner


def where(blocks_ref, index, known: Known | None):
  """(row, outer block, inner block) of the item at an index of the grid."""
  if known is None:
    return unpack(blocks_ref[index])
  return 0, lax.div(index, known.inner), lax.rem(index, known.inner)


def read(parts_ref, index, known: Known | None) -> Item:
  """The item at an index of the grid."""
  if known is None:
    word = parts_ref[index]
    return Item(word & FIRST != 0, word & LAST != 0, word >> PART_SHIFT, None)
  inner = lax.rem(index, known.inner)
  return Item(inner == 0, inner == known.inner - 1, None, known)


class _Bounds(NamedTuple):
  """Bounds of blocks of tokens, [B, blocks] each; padding counts in `same` only."""

  least: tuple[Array, Array]  # least (segment, position)
  greatest: tuple[Array, Array]  # greatest (segment, position)
  positions: tuple[Array, Array]  # least and greatest position
  same: Array  # all tokens of one segment, none padding


def _bounds(segments, positions, block) -> _Bounds:
  batch, length = segments.shape
  segments, positions = (x.reshape(batch, length // block, block) for x in (segments, positions))
  real = segments > 0
  low = jnp.min(jnp.where(real, segments, _FAR), axis=-1)
  high = jnp.max(jnp.where(real, segments, -1), axis=-1)
  at = lambda segment: segments == segment[..., None]
  low_position = jnp.min(jnp.where(at(low), positions, _FAR), axis=-1)
  high_position = jnp.max(jnp.where(at(high), positions, -1), axis=-1)
  return _Bounds(
    (low, low_position),
    (high, high_position),
    (jnp.min(positions, axis=-1), jnp.max(positions, axis=-1)),
    jnp.all(real, axis=-1) & (low == high),
  )


def kinds(
  q_segment_ids: Int[Array, "B S"],
  q_positions: Int[Array, "B S"],
  kv_segment_ids: Int[Array, "B T"],
  kv_positions: Int[Array, "B T"],
  *,
  block_q: int,
  block_kv: int,
) -> Int[Array, "B S/block_q T/block_kv"]:
  """Kind of each pair of blocks: DEAD (nothing visible), FULL (everything), or in between.

  In between is ONE where all queries are of one segment, none padding, else PARTIAL.
  """
  q = _bounds(q_segment_ids, q_positions, block_q)
  k = _bounds(kv_segment_ids, kv_positions, block_kv)
  q = jax.tree.map(lambda x: x[:, :, None], q)
  k = jax.tree.map(lambda x: x[:, None], k)
  reached = (k.least[0] < q.greatest[0]) | (
    (k.least[0] == q.greatest[0]) & (k.least[1] <= q.greatest[1])
  )
  live = reached & (k.greatest[0] >= q.least[0])
  full = q.same & k.same & (q.least[0] == k.least[0]) & (q.positions[0] >= k.positions[1])
  return jnp.where(full, FULL, jnp.where(live, jnp.where(q.same, ONE, PARTIAL), DEAD))


def plan(kind_of_parts: Int[Array, "B outer inner parts"]) -> Schedule:
  """Lists live pairs of blocks; each outer block has at least one item, to write its result.

  Args:
    kind_of_parts: Kind of each part of a pair's key block.

  Raises:
    ValueError: More blocks than an item's word holds.
  """
  batch, outer, inner, parts = kind_of_parts.shape
  if batch > 2**_BATCH_BITS or outer > 2**_OUTER_BITS or inner > 2**_INNER_BITS:
    raise ValueError(
      f"{batch} rows of {outer} x {inner} blocks: at most {2**_BATCH_BITS} rows and"
      f" {2**_OUTER_BITS} blocks each way; take larger blocks"
    )
  live = jnp.any(kind_of_parts != DEAD, axis=-1)
  live = live.at[:, :, 0].set(live[:, :, 0] | ~jnp.any(live, axis=-1))
  seen = jnp.cumsum(live, axis=-1)
  edges = jnp.where(seen == 1, FIRST, 0) + jnp.where(seen == seen[..., -1:], LAST, 0)
  shifts = PART_SHIFT + 2 * jnp.arange(parts)
  words = edges + jnp.sum(kind_of_parts << shifts, axis=-1)
  at = lambda size, axis: jnp.arange(size).reshape([-1 if a == axis else 1 for a in range(3)])
  packed = (at(batch, 0) << (_INNER_BITS + _OUTER_BITS)) + (at(outer, 1) << _INNER_BITS)
  packed = packed + at(inner, 2)
  live = live.reshape(-1)
  slot = jnp.where(live, jnp.cumsum(live) - 1, live.size)
  put = lambda x: jnp.zeros(live.size, jnp.int32).at[slot].set(x.reshape(-1), mode="drop")
  return Schedule(put(packed), put(words), jnp.sum(live, dtype=jnp.int32))
