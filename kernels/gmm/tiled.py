"""Grouped matrix products as one batched product over tiles of rows, for the CPU.

XLA's CPU form of `ragged_dot` multiplies every row by every group.  Here each group's rows are
copied to whole tiles, each tile meets its group's matrix once, and the rows are copied back: the
work is that of the rows plus at most one partial tile per group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_LARGEST = 64


class Tiles(NamedTuple):
  """Where rows lie in tiles.

  Attributes:
    group: Group of each tile.
    rows: Row of `lhs` in each slot of each tile; any valid index where `real` is False.
    real: Whether a slot holds a row.
    slot: Flat slot of each row; any valid index for a row that no group owns.
    owned: Whether a group owns the row.
  """

  group: Int[Array, " n"]
  rows: Int[Array, "n t"]
  real: Bool[Array, "n t"]
  slot: Int[Array, " M"]
  owned: Bool[Array, " M"]


def tiles(group_sizes: Int[Array, " G"], rows: int) -> Tiles:
  """Lays `rows` rows out in tiles; static shapes, whatever the sizes."""
  groups = group_sizes.shape[0]
  size = min(_LARGEST, max(8, 1 << (max(1, rows // groups) - 1).bit_length()))
  count = -(-rows // size) + groups
  row_end = jnp.cumsum(group_sizes)
  row_start = row_end - group_sizes
  tile_end = jnp.cumsum(-(-group_sizes // size))
  tile_start = jnp.concatenate([jnp.zeros((1,), tile_end.dtype), tile_end[:-1]])

  index = jnp.arange(count)
  group = jnp.sum(index[:, None] >= tile_end, axis=1)
  inside = jnp.minimum(group, groups - 1)
  first = row_start[inside] + (index - tile_start[inside]) * size
  row = first[:, None] + jnp.arange(size)
  real = (row < row_end[inside][:, None]) & (group < groups)[:, None]

  index = jnp.arange(rows)
  owner = jnp.sum(index[:, None] >= row_end, axis=1)
  owned = owner < groups
  owner = jnp.minimum(owner, groups - 1)
  slot = tile_start[owner] * size + index - row_start[owner]
  return Tiles(inside, jnp.where(real, row, 0), real, jnp.where(owned, slot, 0), owned)


def _precision(dtype):
  return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def _fill(x, layout):
  return jnp.where(layout.real[..., None], x[layout.rows], 0)


def gmm(
  lhs: Float[Array, "M K"],
  rhs: Float[Array, "G K N"],
  group_sizes: Int[Array, " G"],
) -> Float[Array, "M N"]:
  """Same numbers as `reference.gmm`."""
  layout = tiles(group_sizes, lhs.shape[0])
  out = jnp.einsum(
    "ntk,nkf->ntf",
    _fill(lhs, layout),
    rhs[layout.group],
    precision=_precision(lhs.dtype),
    preferred_element_type=jnp.float32,
  )
  out = out.reshape(-1, rhs.shape[2]).astype(lhs.dtype)[layout.slot]
  return jnp.where(layout.owned[:, None], out, 0)


def tgmm(
  lhs: Float[Array, "M K"],
  grad: Float[Array, "M N"],
  group_sizes: Int[Array, " G"],
) -> Float[Array, "G K N"]:
  """Same numbers as `reference.tgmm`."""
  layout = tiles(group_sizes, lhs.shape[0])
  out = jnp.einsum(
    "ntk,ntf->nkf",
    _fill(lhs, layout),
    _fill(grad, layout),
    precision=_precision(lhs.dtype),
    preferred_element_type=jnp.float32,
  )
  return jax.ops.segment_sum(out, layout.group, group_sizes.shape[0])
