"""Which tile of rows meets which group, worked out before a kernel starts.

A visit is one (group, tile) pair that share rows.  Visits are ordered by row, so a tile that two
groups share is visited twice in a row, and a group's matrix stays in VMEM while its tiles pass.
Their number depends on the group sizes, but never exceeds tiles + groups - 1: that is the static
length of the list.  One int32 holds a visit, so that the list fits in scalar memory for 512 groups
at millions of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

TILE_BITS = 20
MAX_GROUPS = 1 << (31 - TILE_BITS)
MAX_TILES = 1 << TILE_BITS
# Scalar memory is 1 MiB; the list must leave room for everything else that lives there.
MAX_VISITS = 1 << 17


class Visits(NamedTuple):
  """What a kernel prefetches into scalar memory.

  Attributes:
    pairs: group * 2^20 + tile of each visit.
    bounds: First row of each group, and the end of the last.
    counts: Number of visits that have work; number of those that have rows; last tile with rows.
  """

  pairs: Int[Array, " V"]
  bounds: Int[Array, " G+1"]
  counts: Int[Array, " 3"]


def group_of(pair):
  """Group of an entry of `Visits.pairs`."""
  return jax.lax.shift_right_logical(pair, TILE_BITS)


def tile_of(pair):
  """Tile of an entry of `Visits.pairs`."""
  return jax.lax.bitwise_and(pair, MAX_TILES - 1)


def limit(rows: int, groups: int, tile_rows: int) -> int:
  """Static number of visits.

  Raises:
    ValueError: The list would not fit in scalar memory, or a visit not in 31 bits.
  """
  tiles = -(-rows // tile_rows)
  visits = tiles + groups - 1
  if groups > MAX_GROUPS or tiles > MAX_TILES or visits > MAX_VISITS:
    raise ValueError(
      f"{rows} rows in tiles of {tile_rows} for {groups} groups make {visits} visits; at most "
      f"{MAX_VISITS} visits, {MAX_GROUPS} groups and {MAX_TILES} tiles fit: take a larger row tile"
    )
  return visits


def make(group_sizes: Int[Array, " G"], rows: int, tile_rows: int, *, visit_empty: bool) -> Visits:
  """Lists the visits.

  Args:
    group_sizes: Rows of each group, int32, sum <= rows.
    rows: M.
    tile_rows: Rows of a tile.
    visit_empty: True gives every group without rows one visit (to write its zero result); False
      gives every tile without rows one visit after the others (to write its zero rows).
  """
  groups = group_sizes.shape[0]
  tiles = -(-rows // tile_rows)
  ends = jnp.cumsum(group_sizes)
  starts = ends - group_sizes
  first = starts // tile_rows
  last = (ends - 1) // tile_rows
  tiles_of = jnp.where(group_sizes > 0, last - first + 1, int(visit_empty))
  visit_ends = jnp.cumsum(tiles_of)
  real = visit_ends[-1]
  tiles_with_rows = -(-ends[-1] // tile_rows)

  index = jnp.arange(limit(rows, groups, tile_rows), dtype=jnp.int32)
  group = jnp.minimum(jnp.sum(index[:, None] >= visit_ends, axis=1), groups - 1)
  tile = first[group] + index - (visit_ends - tiles_of)[group]
  if visit_empty:
    work = real
  else:
    # Tail visits keep the last group with rows, so that no matrix is fetched for them.
    held = jnp.max(jnp.where(group_sizes > 0, jnp.arange(groups), 0))
    group = jnp.where(index < real, group, held)
    tile = jnp.where(index < real, tile, tiles_with_rows + index - real)
    work = real + tiles - tiles_with_rows
  tile = jnp.clip(tile, 0, tiles - 1)
  return Visits(
    (group.astype(jnp.int32) << TILE_BITS) | tile.astype(jnp.int32),
    jnp.concatenate([jnp.zeros((1,), jnp.int32), ends.astype(jnp.int32)]),
    jnp.stack([work, real, jnp.maximum(tiles_with_rows - 1, 0)]).astype(jnp.int32),
  )
