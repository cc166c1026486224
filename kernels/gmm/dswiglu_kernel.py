"""Pallas TPU kernel of an input gradient with the d-SwiGLU epilogue, whose sums wait for one tile.

Beside the products of a tile stands the epilogue of the tile before, which does not depend on them:
the scheduler puts it into the slots that they leave, where an epilogue of their own sums would stand
alone at the end.  So a step of the grid multiplies its visit's rows into a stage in VMEM, and finishes
the tile of the step before where its own tile is another; one step more than visits finishes the last.

Rows that no group owns hold anything in the stage and in [gate | up], and are made zero when their
tile is finished.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.gmm import epilogues
from kernels.gmm import even as even_lib
from kernels.gmm import tiles as tiles_lib
from kernels.gmm import visits as visits_lib

_VMEM_LIMIT = 65472 << 10


def _piece(tile, itemsize):
  """Rows of the waiting tile that are finished at a time.

  A piece turns its rows' weights on to sublanes, and the next waits for that unit: so the compiler
  spreads the pieces over the products.  Too many take longer than the products, too few are bunched at
  the end.
  """
  return 32 if itemsize > 1 and tile.k * tile.n >= 4 << 20 else 128


def _kernel(
  pairs, bounds, counts, *refs, tile, k_size, groups, scaled, column_scaled, weighted, even
):
  if even is not None:
    pairs, bounds, counts = even.refs()
  it = iter(refs)
  lhs_ref, rhs_ref = next(it), next(it)
  row_scale_ref = next(it) if scaled else None
  column_scale_ref = next(it) if column_scaled else None
  gate_up_ref = next(it)
  weight_ref = next(it) if weighted else None
  out_ref = next(it)
  d_weight_ref = next(it) if weighted else None
  stage_ref = next(it)

  step = pl.program_id(0)
  pair, before = pairs[jnp.minimum(step, pl.num_programs(0) - 2)], pairs[jnp.maximum(step - 1, 0)]
  group, row_tile = visits_lib.group_of(pair), visits_lib.tile_of(pair)
  lo = jnp.maximum(bounds[group] - row_tile * tile.rows, 0)
  hi = jnp.minimum(bounds[group + 1] - row_tile * tile.rows, tile.rows)
  has_rows = step < counts[1]
  full = has_rows & (lo == 0) & (hi == tile.rows)
  waiting = visits_lib.tile_of(before)
  leaves = (step > 0) & (step <= counts[0]) & ((step == counts[0]) | (waiting != row_tile))
  width = rhs_ref.shape[1]
  strips = [slice(c, min(c + tile.columns, width)) for c in range(0, width, tile.columns)]

  def operand(ref, index):
    value = ref[index]
    if k_size % tile.k:
      # The k tile hangs over the edge, where anything may lie.
      at = lax.broadcasted_iota(jnp.int32, value.shape, 1)
      value = jnp.where(at < k_size, value.astype(jnp.float32), 0.0).astype(value.dtype)
    return value

  def product(rows, strip):
    lhs, rhs = operand(lhs_ref, (rows, slice(None))), operand(rhs_ref, (0, strip, slice(None)))
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else lax.Precision.DEFAULT
    sums = lax.dot_general(
      lhs, rhs, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    # The groups of a tile have each their own scales of columns, and one epilogue.
    return sums * column_scale_ref[0, :, strip] if column_scaled else sums

  def finish(rows, strip, keep):
    """Stores the results of a piece of the waiting tile; returns its part of d_weight."""
    weight, sums = None, stage_ref[rows, strip]
    if scaled and weighted:
      scale, weight = epilogues.two_columns(row_scale_ref[0, :, rows], weight_ref[0, :, rows])
      sums = sums * scale
    elif scaled:
      sums = sums * epilogues.column(row_scale_ref[0, :, rows])
    elif weighted:
      weight = epilogues.column(weight_ref[0, :, rows])
    late = slice(width + strip.start, width + strip.stop)
    *results, part = epilogues.dswiglu(
      sums, gate_up_ref[rows, strip], gate_up_ref[rows, late], weight
    )
    for columns, value in zip((strip, late), results, strict=True):
      out_ref[rows, columns] = keep(value).astype(out_ref.dtype)
    return part

  def store_weight(rows, parts, keep):
    if weighted:
      d_weight_ref[0, :, rows] = epilogues.row(keep(sum(parts[1:], parts[0])))

  # At the first step the tile that is finished holds anything; the next finishes it again.
  @pl.when(full)
  def _():
    same = lambda value: value
    everything, parts = slice(0, tile.rows), []
    height = min(_piece(tile, lhs_ref.dtype.itemsize), tile.rows)
    for strip in strips:
      pieces = (slice(r, min(r + height, tile.rows)) for r in range(0, tile.rows, height))
      done = [finish(piece, strip, same) for piece in pieces]
      if weighted:
        parts.append(jnp.concatenate(done, axis=0))
      stage_ref[:, strip] = product(everything, strip)
    store_weight(everything, parts, same)

  def rows_of(index):
    at = pl.multiple_of(index * tile.part, tile.part)
    return pl.ds(at, tile.part), at + lax.broadcasted_iota(jnp.int32, (tile.part, 1), 0)

  @pl.when(leaves & jnp.logical_not(full))
  def _():
    owned = bounds[groups] - waiting * tile.rows

    def one(index, carry):
      rows, number = rows_of(index)
      keep = lambda value: jnp.where(number < owned, value, 0.0)
      store_weight(rows, [finish(rows, strip, keep) for strip in strips], keep)
      return carry

    lax.fori_loop(0, tile.rows // tile.part, one, 0)

  @pl.when(has_rows & jnp.logical_not(full))
  def _():
    def one(index, carry):
      rows, number = rows_of(index)
      mine = (number >= lo) & (number < hi)
      for strip in strips:
        stage_ref[rows, strip] = jnp.where(mine, product(rows, strip), stage_ref[rows, strip])
      return carry

    lax.fori_loop(lax.div(lo, tile.part), lax.div(hi + tile.part - 1, tile.part), one, 0)


def gradient(
  lhs: Float[Array, "M K"],
  rhs: Float[Array, "G N K"],
  group_sizes: Int[Array, " G"],
  gate_up: Float[Array, "M 2N"],
  *,
  tile: tiles_lib.Tiles,
  lhs_scale: Float[Array, "tiles 1 rows"] | None,
  rhs_scale: Float[Array, "G N"] | None,
  weights: Float[Array, "tiles 1 rows"] | None,
  out_dtype,
  even: even_lib.Even | None,
  interpret: bool,
):
  """`row_kernel.grouped` with epilogue dswiglu, on a tile that holds the whole of K and N.

  Arguments are those of `row_kernel.grouped`, checked; vectors over rows are in tiles.

  Returns:
    [M, 2 N]; with `weights` also float32 [tiles, 1, rows].
  """
  m, k = lhs.shape
  n, groups = rhs.shape[1], rhs.shape[0]
  list_ = visits_lib.make(group_sizes, m, tile.rows, visit_empty=False)
  visits = list_.pairs.shape[0]

  def known(prefetched):
    return prefetched if even is None else even.refs()

  def visited(v, prefetched):
    """The step's own visit, of which the products are."""
    return known(prefetched)[0][jnp.minimum(v, visits - 1)]

  def waiting(v, prefetched):
    """The tile that the step finishes."""
    return visits_lib.tile_of(known(prefetched)[0][jnp.maximum(v - 1, 0)])

  def lhs_map(v, *prefetched):
    return jnp.minimum(visits_lib.tile_of(visited(v, prefetched)), known(prefetched)[2][2]), 0

  def rhs_map(v, *prefetched):
    return visits_lib.group_of(visited(v, prefetched)), 0, 0

  def in_tile(v, prefetched):
    return jnp.minimum(waiting(v, prefetched), known(prefetched)[2][2])

  def vector_map(v, *prefetched):
    return in_tile(v, prefetched), 0, 0

  operands = [lhs, rhs]
  in_specs = [
    pl.BlockSpec((tile.rows, tile.k), lhs_map),
    pl.BlockSpec((1, tile.n, tile.k), rhs_map),
  ]
  if lhs_scale is not None:
    operands.append(lhs_scale)
    in_specs.append(pl.BlockSpec((1, 1, tile.rows), vector_map))
  if rhs_scale is not None:
    operands.append(rhs_scale.astype(jnp.float32)[:, None])
    in_specs.append(pl.BlockSpec((1, 1, tile.n), rhs_map))
  operands.append(gate_up)
  in_specs.append(pl.BlockSpec((tile.rows, 2 * n), lambda v, *p: (in_tile(v, p), 0)))
  out_shape = [jax.ShapeDtypeStruct((m, 2 * n), out_dtype)]
  out_specs = [pl.BlockSpec((tile.rows, 2 * n), lambda v, *p: (waiting(v, p), 0))]
  if weights is not None:
    operands.append(weights)
    in_specs.append(pl.BlockSpec((1, 1, tile.rows), vector_map))
    out_shape.append(jax.ShapeDtypeStruct((pl.cdiv(m, tile.rows), 1, tile.rows), jnp.float32))
    out_specs.append(pl.BlockSpec((1, 1, tile.rows), lambda v, *p: (waiting(v, p), 0, 0)))

  return pl.pallas_call(
    functools.partial(
      _kernel,
      tile=tile,
      k_size=k,
      groups=groups,
      scaled=lhs_scale is not None,
      column_scaled=rhs_scale is not None,
      weighted=weights is not None,
      even=even,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(visits + 1,),
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=[pltpu.VMEM((tile.rows, n), jnp.float32)],
    ),
    out_shape=out_shape,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * m * k * n,
      transcendentals=m * n,
      bytes_accessed=lhs.nbytes + rhs.nbytes + gate_up.nbytes + 2 * m * n * out_dtype.itemsize,
    ),
    interpret=interpret,
    name="gmm_dlhs_dswiglu",
  )(*list_, *operands)
