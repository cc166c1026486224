"""Pallas TPU kernel of the weight gradient: for each group, its rows of one side times the other's.

Grid (k tiles, n tiles, visits).  One [k, n] tile of the result stays in VMEM while the row tiles
of its group pass.  A group without rows gets one visit, which writes its exact zero.  Where a group
covers a part of a tile, both sides are masked: a zero on one side alone would not silence a NaN of
a row that the group does not own.

Both sides come with rows on sublanes, and the product wants them on the lanes of its left side.  So
the left side is turned, each piece once, into VMEM, beside the product of the piece before.  A piece
is as many rows of the result as the array's result registers hold twice: then they sum over all rows
of the tile, and each sum of the result is read and written once a visit.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.gmm import even as even_lib
from kernels.gmm import tiles as tiles_lib
from kernels.gmm import visits as visits_lib

_VMEM_LIMIT = 65472 << 10


def _dot(lhs, rhs):
  precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else lax.Precision.DEFAULT
  return lax.dot_general(
    lhs, rhs, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


def _turn(value):
  # Eight-bit values are turned as bfloat16, which holds them all: turning them as they are takes
  # more than the product.
  wide = value.astype(jnp.bfloat16) if value.dtype.itemsize == 1 else value
  return jnp.transpose(wide).astype(value.dtype)


def _owned(value, first, lo, hi):
  """Rows lo to hi of what begins at row `first`, and zero elsewhere, whatever lies there."""
  packed = 4 // value.dtype.itemsize
  # A word holds `packed` rows.  Its mask has the value's shape: one column of masks would be
  # broadcast along lanes, by the unit that turns the left side.
  words = pltpu.bitcast(value, jnp.int32)
  row = first + packed * lax.broadcasted_iota(jnp.int32, words.shape, 0)
  mask = jnp.zeros_like(row)
  for i in range(packed):
    bits = -1 if packed == 1 else ((1 << 32 // packed) - 1) << 32 // packed * i
    bits = jnp.int32(bits - (1 << 32) if bits >= 1 << 31 else bits)
    mask |= jnp.where((row + i >= lo) & (row + i < hi), bits, 0)
  return pltpu.bitcast(words & mask, value.dtype)


def _kernel(pairs, bounds, counts, *refs, tile, scaled, summed_in_place, even):
  if even is not None:
    pairs, bounds, counts = even.refs()
  it = iter(refs)
  lhs_ref, rhs_ref = next(it), next(it)
  lhs_scale_ref, rhs_scale_ref = (next(it), next(it)) if scaled else (None, None)
  out_ref, turned_ref, owned_ref = next(it), next(it), next(it)
  # A float32 result is summed where it lies; another type needs a float32 scratch.
  acc_ref = out_ref.at[0] if summed_in_place else next(it)

  visit = pl.program_id(2)
  pair = pairs[visit]
  group, row_tile = visits_lib.group_of(pair), visits_lib.tile_of(pair)
  lo = jnp.maximum(bounds[group] - row_tile * tile.rows, 0)
  hi = jnp.minimum(bounds[group + 1] - row_tile * tile.rows, tile.rows)
  works = visit < counts[0]
  full = works & (lo == 0) & (hi == tile.rows)
  last = pl.num_programs(2) - 1
  before = visits_lib.group_of(pairs[jnp.maximum(visit - 1, 0)])
  after = visits_lib.group_of(pairs[jnp.minimum(visit + 1, last)])
  opens = works & ((visit == 0) | (before != group))
  closes = works & ((visit == counts[0] - 1) | (after != group))
  ends = closes if scaled or not summed_in_place else False
  # With scales the last visit is no copy of the code: the static profile aborts on two of them.
  stores_last = ends is not False and not scaled
  height, width = lhs_ref.shape[1], rhs_ref.shape[1]
  # Eight-bit rows are multiplied twice as fast: a piece of twice the height hides its start.
  size = tile.columns * (2 if lhs_ref.dtype.itemsize == 1 else 1)
  pieces = [slice(r, min(r + size, height)) for r in range(0, height, size)]

  def store(piece, sums):
    """Stores finished rows of the result."""
    if not scaled:
      out_ref[0, piece, :] = sums.astype(out_ref.dtype)
      return
    for start in range(0, width, 128):
      columns = slice(start, start + 128)
      value = sums[:, columns] * lhs_scale_ref[piece, :] * rhs_scale_ref[:, columns]
      out_ref[0, piece, columns] = value.astype(out_ref.dtype)

  def accumulate(rows, count, right_ref, fresh, keep, write):
    """Adds the product of `count` rows; the first of a group overwrites what lies in the tile."""

    def turn(piece):
      turned_ref[piece, :count] = _turn(keep(lhs_ref[rows, piece]))

    turn(pieces[0])
    for piece, following in zip(pieces, [*pieces[1:], None]):
      if following:
        turn(following)
      sums = _dot(turned_ref[piece, :count], right_ref[...])
      write(piece, jnp.where(fresh, 0.0, acc_ref[piece, :]) + sums)

  def add(piece, sums):
    acc_ref[piece, :] = sums

  whole = functools.partial(accumulate, slice(None), tile.rows, rhs_ref, opens, lambda value: value)

  @pl.when(full & jnp.logical_not(ends) if stores_last else full)
  def _():
    whole(add)

  if stores_last:

    @pl.when(full & ends)
    def _():
      whole(store)

  def by_rows(write):
    """Runs a pass over the result, in a loop that keeps its code short."""

    def one(step, carry):
      write(pl.ds(pl.multiple_of(step * 128, 128), 128))
      return carry

    lax.fori_loop(0, height // 128, one, 0)

  @pl.when(works & (hi <= lo))
  def _():
    def clear(rows):
      acc_ref[rows, :] = jnp.zeros((128, width), jnp.float32)

    by_rows(clear)

  @pl.when(works & jnp.logical_not(full) & (hi > lo))
  def _():
    first = lax.div(lo, tile.part)

    def one(step, carry):
      at = pl.multiple_of(step * tile.part, tile.part)
      rows = pl.ds(at, tile.part)
      keep = lambda value: _owned(value, at, lo, hi)
      owned_ref[...] = keep(rhs_ref[rows, :])
      accumulate(rows, tile.part, owned_ref, opens & (step == first), keep, add)
      return carry

    lax.fori_loop(first, lax.div(hi + tile.part - 1, tile.part), one, 0)

  if ends is not False:

    @pl.when(ends & jnp.logical_not(full) if stores_last else ends)
    def _():
      by_rows(lambda rows: store(rows, acc_ref[rows, :]))


def transposed(
  lhs: Float[Array, "M K"],
  rhs: Float[Array, "M N"],
  group_sizes: Int[Array, " G"],
  *,
  tile: tiles_lib.Tiles,
  lhs_scale: Float[Array, " K"] | None = None,
  rhs_scale: Float[Array, " N"] | None = None,
  out_dtype=jnp.float32,
  even: even_lib.Even | None = None,
  interpret: bool = False,
) -> Float[Array, "G K N"]:
  """lhs^T rhs within each group.

  Args:
    lhs: Rows sorted by group.
    rhs: Rows in the same order.
    group_sizes: int32, sum <= M.
    tile: Tile sizes; larger than the operands is allowed.
    lhs_scale: One float32 scale a column of `lhs`; with `rhs_scale`.  Scales of rows could not
      leave the product, which contracts over them.
    rhs_scale: One float32 scale a column of `rhs`.
    out_dtype: Type of the result; sums are float32 either way.
    even: For static profiles; see `even.Even`.
    interpret: Run the body in the Pallas interpreter, on any device.

  Returns:
    The gradients; exactly zero for a group without rows.  Rows of no group are not used.

  Raises:
    ValueError: Shapes do not agree.
  """
  m, k = lhs.shape
  n, groups = rhs.shape[1], group_sizes.shape[0]
  if rhs.shape[0] != m:
    raise ValueError(f"rows: lhs {lhs.shape}, rhs {rhs.shape}")
  if (lhs_scale is None) != (rhs_scale is None):
    raise ValueError("lhs_scale and rhs_scale go together")
  tile = tile.fit(m=m, k=k, n=n)
  out_dtype = jnp.dtype(out_dtype)
  list_ = visits_lib.make(group_sizes, m, tile.rows, visit_empty=True)
  grid = (pl.cdiv(k, tile.k), pl.cdiv(n, tile.n), list_.pairs.shape[0])

  def known(prefetched):
    return prefetched if even is None else even.refs()

  def row_tile(v, prefetched):
    return visits_lib.tile_of(known(prefetched)[0][v])

  def out_map(i, j, v, *prefetched):
    return visits_lib.group_of(known(prefetched)[0][v]), i, j

  operands = [lhs, rhs]
  in_specs = [
    pl.BlockSpec((tile.rows, tile.k), lambda i, j, v, *p: (row_tile(v, p), i)),
    pl.BlockSpec((tile.rows, tile.n), lambda i, j, v, *p: (row_tile(v, p), j)),
  ]
  if lhs_scale is not None:
    # The scale of a row of the result stands in every lane: no broadcast in the kernel.
    rows = jnp.broadcast_to(lhs_scale.astype(jnp.float32)[:, None], (k, 128))
    operands += [rows, rhs_scale.astype(jnp.float32)[None]]
    in_specs += [
      pl.BlockSpec((tile.k, 128), lambda i, j, v, *p: (i, 0)),
      pl.BlockSpec((1, tile.n), lambda i, j, v, *p: (0, j)),
    ]
  scratch = [pltpu.VMEM((tile.k, tile.rows), lhs.dtype), pltpu.VMEM((tile.part, tile.n), rhs.dtype)]
  if out_dtype != jnp.float32:
    scratch.append(pltpu.VMEM((tile.k, tile.n), jnp.float32))

  return pl.pallas_call(
    functools.partial(
      _kernel,
      tile=tile,
      scaled=lhs_scale is not None,
      summed_in_place=out_dtype == jnp.float32,
      even=even,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=grid,
      in_specs=in_specs,
      out_specs=pl.BlockSpec((1, tile.k, tile.n), out_map),
      scratch_shapes=scratch,
    ),
    out_shape=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=_VMEM_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * m * k * n,
      transcendentals=0,
      bytes_accessed=lhs.nbytes + rhs.nbytes + groups * k * n * out_dtype.itemsize,
    ),
    interpret=interpret,
    name="gmm_drhs",
  )(*list_, *operands)
