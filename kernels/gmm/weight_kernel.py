"""Pallas TPU kernel of the weight gradient: for each group, its rows of one side times the other's.

Grid (k tiles, n tiles, visits).  One [k, n] tile of the result stays in VMEM while the row tiles
of its group pass.  A group without rows gets one visit, which writes its exact zero.  Where a group
covers a part of a tile, both sides are masked: a zero on one side alone would not silence a NaN of
a row that the group does not own.
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
    lhs, rhs, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


def _kernel(pairs, bounds, counts, *refs, tile, scaled, even):
  if even is not None:
    pairs, bounds, counts = even.refs()
  it = iter(refs)
  lhs_ref, rhs_ref = next(it), next(it)
  lhs_scale_ref, rhs_scale_ref = (next(it), next(it)) if scaled else (None, None)
  out_ref = next(it)
  # A float32 result is summed where it lies; another type needs a float32 scratch.
  scratch_ref = next(it, None)
  acc_ref = out_ref.at[0] if scratch_ref is None else scratch_ref

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
  width = rhs_ref.shape[1]
  strips = [(c, min(tile.columns, width - c)) for c in range(0, width, tile.columns)]

  @pl.when(opens & jnp.logical_not(full))
  def _():
    acc_ref[...] = jnp.zeros_like(acc_ref)

  @pl.when(full & opens)
  def _():
    for start, size in strips:
      columns = slice(start, start + size)
      acc_ref[:, columns] = _dot(lhs_ref[...], rhs_ref[:, columns])

  @pl.when(full & jnp.logical_not(opens))
  def _():
    for start, size in strips:
      columns = slice(start, start + size)
      acc_ref[:, columns] += _dot(lhs_ref[...], rhs_ref[:, columns])

  @pl.when(works & jnp.logical_not(full) & (hi > lo))
  def _():
    def one(step, carry):
      at = pl.multiple_of(step * tile.part, tile.part)
      rows = pl.ds(at, tile.part)
      index = at + lax.broadcasted_iota(jnp.int32, (tile.part, 1), 0)
      mine = (index >= lo) & (index < hi)

      def owned(value):
        # Eight-bit values are selected as float32: there is no eight-bit select.
        wide = value.astype(jnp.float32)
        return jnp.where(mine, wide, 0.0).astype(value.dtype)

      lhs = owned(lhs_ref[rows, :])
      for start, size in strips:
        columns = slice(start, start + size)
        acc_ref[:, columns] += _dot(lhs, owned(rhs_ref[rows, columns]))
      return carry

    lax.fori_loop(lax.div(lo, tile.part), lax.div(hi + tile.part - 1, tile.part), one, 0)

  if scaled or scratch_ref is not None:

    @pl.when(closes)
    def _():
      if not scaled:
        out_ref[0] = acc_ref[...].astype(out_ref.dtype)
        return
      for start in range(0, acc_ref.shape[1], 128):
        columns = slice(start, start + 128)
        value = acc_ref[:, columns] * lhs_scale_ref[...] * rhs_scale_ref[:, columns]
        out_ref[0, :, columns] = value.astype(out_ref.dtype)


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
  scratch = []
  if out_dtype != jnp.float32:
    scratch = [pltpu.VMEM((tile.k, tile.n), jnp.float32)]

  return pl.pallas_call(
    functools.partial(_kernel, tile=tile, scaled=lhs_scale is not None, even=even),
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
