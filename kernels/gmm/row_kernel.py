"""Pallas TPU kernel of the products whose result has rows: forward and input gradient.

Grid (n tiles, visits, k tiles).  A visit multiplies one tile of rows by one group's matrix.  Where
the group covers the whole tile the product is one straight run; where it covers a part, only the
sub-tiles that hold its rows are multiplied and its rows alone are stored, so that what lies in
other rows (of other groups, or of nobody) never enters a result.

Epilogues (`epilogues.py`) work on the float32 sums of one strip of columns while the next strip is
multiplied.  swiglu takes one matrix [K, 2 F], gate columns then up columns.  dswiglu needs the whole
row for d_weight, so there is one n tile; with one k tile as well it is `dswiglu_kernel.py`'s.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.gmm import dswiglu_kernel, epilogues
from kernels.gmm import even as even_lib
from kernels.gmm import tiles as tiles_lib
from kernels.gmm import visits as visits_lib

EPILOGUES = ("none", "swiglu", "dswiglu")
_VMEM_LIMIT = 65472 << 10


def _precision(dtype):
  return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def _dot(lhs, rhs, transpose_rhs):
  return lax.dot_general(
    lhs,
    rhs,
    (((1,), (1 if transpose_rhs else 0,)), ((), ())),
    precision=_precision(lhs.dtype),
    preferred_element_type=jnp.float32,
  )


def _kernel(
  pairs,
  bounds,
  counts,
  *refs,
  tile,
  epilogue,
  transpose_rhs,
  k_size,
  row_scaled,
  column_scaled,
  weighted,
  even,
):
  if even is not None:
    pairs, bounds, counts = even.refs()
  it = iter(refs)
  lhs_ref = next(it)
  rhs_refs = [next(it)] + ([next(it)] if epilogue == "swiglu" else [])
  lhs_scale_ref = next(it) if row_scaled else None
  rhs_scale_refs = [next(it) for _ in rhs_refs] if column_scaled else []
  gate_up_ref = next(it) if epilogue == "dswiglu" else None
  weight_ref = next(it) if weighted else None
  out_ref = next(it)
  d_weight_ref = next(it) if weighted else None
  acc_refs = list(it)

  visit, k_step = pl.program_id(1), pl.program_id(2)
  k_steps = pl.num_programs(2)
  pair = pairs[visit]
  group, row_tile = visits_lib.group_of(pair), visits_lib.tile_of(pair)
  lo = jnp.maximum(bounds[group] - row_tile * tile.rows, 0)
  hi = jnp.minimum(bounds[group + 1] - row_tile * tile.rows, tile.rows)
  has_rows = visit < counts[1]
  full = has_rows & (lo == 0) & (hi == tile.rows)
  before = pairs[jnp.maximum(visit - 1, 0)]
  opens = (visit == 0) | (visits_lib.tile_of(before) != row_tile)
  width = rhs_refs[0].shape[1 if transpose_rhs else 2]
  strips = [(c, min(tile.columns, width - c)) for c in range(0, width, tile.columns)]

  # Rows of nobody are zero: the tile is cleared before the first group that covers it in part.
  @pl.when(opens & jnp.logical_not(full) & (visit < counts[0]) & (k_step == 0))
  def _():
    out_ref[...] = jnp.zeros_like(out_ref)
    if weighted:
      d_weight_ref[...] = jnp.zeros_like(d_weight_ref)

  def operand(ref, index, axis):
    value = ref[index]
    if k_size % tile.k:
      # The last k tile hangs over the edge, where anything may lie.
      at = lax.broadcasted_iota(jnp.int32, value.shape, axis) + k_step * tile.k
      value = jnp.where(at < k_size, value.astype(jnp.float32), 0.0).astype(value.dtype)
    return value

  def product(rows, which, start, size):
    lhs = operand(lhs_ref, (rows, slice(None)), 1)
    if transpose_rhs:
      rhs = operand(rhs_refs[which], (0, pl.ds(start, size), slice(None)), 1)
    else:
      rhs = operand(rhs_refs[which], (0, slice(None), pl.ds(start, size)), 0)
    return _dot(lhs, rhs, transpose_rhs)

  def finish(rows, sums, start, size, keep):
    """Stores one strip; returns its part of the row sums for d_weight."""
    if row_scaled:
      row_scale = epilogues.column(lhs_scale_ref[0, :, rows])
      sums = [s * row_scale for s in sums]
    if column_scaled:
      sums = [s * ref[0, :, start : start + size] for s, ref in zip(sums, rhs_scale_refs)]
    part = None
    if epilogue == "none":
      results = [(start, sums[0])]
    elif epilogue == "swiglu":
      results = [(start, epilogues.swiglu(*sums))]
    else:
      weight = epilogues.column(weight_ref[0, :, rows]) if weighted else None
      late = width + start
      gate, up = (gate_up_ref[rows, at : at + size] for at in (start, late))
      d_gate, d_up, part = epilogues.dswiglu(sums[0], gate, up, weight)
      results = [(start, d_gate), (late, d_up)]
    for at, value in results:
      columns = slice(at, at + size)
      value = value.astype(out_ref.dtype)
      out_ref[rows, columns] = keep(value, out_ref[rows, columns]) if keep else value
    return part

  def run(rows, keep):
    if acc_refs:
      for start, size in strips:
        sums = [product(rows, i, start, size) for i in range(len(rhs_refs))]
        columns = slice(start, start + size)

        @pl.when(k_step == 0)
        def _(sums=sums, columns=columns):
          for ref, value in zip(acc_refs, sums):
            ref[rows, columns] = value

        @pl.when(k_step > 0)
        def _(sums=sums, columns=columns):
          for ref, value in zip(acc_refs, sums):
            ref[rows, columns] += value

      @pl.when(k_step == k_steps - 1)
      def _():
        done = [finish(rows, [r[rows, s : s + z] for r in acc_refs], s, z, keep) for s, z in strips]
        store_weight(rows, done, keep)

      return
    parts, waiting = [], None
    for start, size in strips:
      sums = [product(rows, i, start, size) for i in range(len(rhs_refs))]
      if waiting:
        parts.append(finish(rows, *waiting, keep))
      waiting = sums, start, size
    parts.append(finish(rows, *waiting, keep))
    store_weight(rows, parts, keep)

  def store_weight(rows, parts, keep):
    if weighted:
      total = sum(parts[1:], parts[0])
      total = keep(total, jnp.zeros_like(total)) if keep else total
      if keep:
        d_weight_ref[0, :, rows] += epilogues.row(total)
      else:
        d_weight_ref[0, :, rows] = epilogues.row(total)

  @pl.when(full)
  def _():
    run(slice(None), None)

  @pl.when(has_rows & jnp.logical_not(full))
  def _():
    def one(step, carry):
      at = pl.multiple_of(step * tile.part, tile.part)
      index = at + lax.broadcasted_iota(jnp.int32, (tile.part, 1), 0)
      mine = (index >= lo) & (index < hi)
      run(pl.ds(at, tile.part), lambda new, old: jnp.where(mine, new, old))
      return carry

    lax.fori_loop(lax.div(lo, tile.part), lax.div(hi + tile.part - 1, tile.part), one, 0)


def _row_vector(x, tile_rows):
  """[M] -> [tiles, 1, tile_rows]: compact in HBM, and any tile of it is a legal block."""
  tiles = -(-x.shape[0] // tile_rows)
  x = jnp.pad(x.astype(jnp.float32), (0, tiles * tile_rows - x.shape[0]))
  return x.reshape(tiles, 1, tile_rows)


def grouped(
  lhs: Float[Array, "M K"],
  rhs: Float[Array, "G a b"],
  group_sizes: Int[Array, " G"],
  *,
  tile: tiles_lib.Tiles,
  transpose_rhs: bool = False,
  epilogue: str = "none",
  lhs_scale: Float[Array, " M"] | None = None,
  rhs_scale: Float[Array, "G N"] | None = None,
  gate_up: Float[Array, "M 2F"] | None = None,
  weights: Float[Array, " M"] | None = None,
  out_dtype=None,
  even: even_lib.Even | None = None,
  interpret: bool = False,
):
  """Rows times their group's matrix, then the epilogue.

  Args:
    lhs: Rows sorted by group.
    rhs: [G, K, N], or [G, N, K] with `transpose_rhs`.
    group_sizes: int32, sum <= M.
    tile: Tile sizes; larger than the operands is allowed.
    transpose_rhs: Contract over the last dimension of `rhs`, read as it lies.
    epilogue: One of EPILOGUES.
    lhs_scale: One float32 factor of each row's result.
    rhs_scale: One float32 factor of each group's result columns (of both halves in swiglu).
    gate_up: For dswiglu, what the forward's first product gave.
    weights: For dswiglu, the router weight of each row; adds the second result.
    out_dtype: Type of the rows; the type of `lhs` by default.
    even: For static profiles; see `even.Even`.
    interpret: Run the body in the Pallas interpreter, on any device.

  Returns:
    [M, N]; [M, N / 2] for swiglu; for dswiglu [M, 2 N], and with `weights` also float32 [M], the
    gradient of `weights`.  Rows beyond sum(group_sizes) are zero.

  Raises:
    ValueError: Shapes or tiles do not agree.
  """
  m, k = lhs.shape
  n = rhs.shape[1 if transpose_rhs else 2]
  if rhs.shape[2 if transpose_rhs else 1] != k:
    raise ValueError(f"contraction: lhs {lhs.shape}, rhs {rhs.shape}, {transpose_rhs=}")
  if epilogue not in EPILOGUES:
    raise ValueError(f"{epilogue=}: want one of {EPILOGUES}")
  if epilogue == "swiglu" and (transpose_rhs or n % 256):
    raise ValueError(
      "the fused SwiGLU wants gate and up columns in whole lanes, so N = 2 F a multiple of 256, and "
      f"untransposed matrices; got N={n}, {transpose_rhs=}; leave fused_swiglu out"
    )
  if epilogue == "dswiglu":
    if gate_up is None or gate_up.shape != (m, 2 * n) or n % 128:
      raise ValueError(f"dswiglu wants gate_up [{m}, {2 * n}] and N a multiple of 128")
  elif weights is not None or gate_up is not None:
    raise ValueError("gate_up and weights belong to dswiglu")
  width = n // 2 if epilogue == "swiglu" else n
  tile = tile.fit(m=m, k=k, n=width)
  if epilogue == "dswiglu" and tile.n < n:
    raise ValueError(f"dswiglu wants one n tile: n={tile.n}, N={n}")
  if epilogue == "swiglu" and width % tile.n:
    raise ValueError(f"swiglu wants a tile n={tile.n} that divides {width}")
  out_dtype = jnp.dtype(out_dtype or lhs.dtype)
  if epilogue == "dswiglu" and transpose_rhs and tile.k >= k:
    out = dswiglu_kernel.gradient(
      lhs,
      rhs,
      group_sizes,
      gate_up,
      tile=tile,
      lhs_scale=None if lhs_scale is None else _row_vector(lhs_scale, tile.rows),
      rhs_scale=rhs_scale,
      weights=None if weights is None else _row_vector(weights, tile.rows),
      out_dtype=out_dtype,
      even=even,
      interpret=interpret,
    )
    return out[0] if weights is None else (out[0], out[1].reshape(-1)[:m])
  list_ = visits_lib.make(group_sizes, m, tile.rows, visit_empty=False)
  grid = (pl.cdiv(width, tile.n), list_.pairs.shape[0], pl.cdiv(k, tile.k))

  # Block index functions take the grid position, then the prefetched arrays.
  def known(prefetched):
    return prefetched if even is None else even.refs()

  def lhs_tile(v, prefetched):
    pairs, _, counts = known(prefetched)
    return jnp.minimum(visits_lib.tile_of(pairs[v]), counts[2])

  def group(v, prefetched):
    return visits_lib.group_of(known(prefetched)[0][v])

  def out_tile(v, prefetched):
    return visits_lib.tile_of(known(prefetched)[0][v])

  def lhs_map(j, v, i, *prefetched):
    return lhs_tile(v, prefetched), i

  def rhs_map(half):
    def index(j, v, i, *prefetched):
      g, column = group(v, prefetched), j + half * (width // tile.n)
      return (g, column, i) if transpose_rhs else (g, i, column)

    return index

  def scale_map(half):
    return lambda j, v, i, *prefetched: (
      group(v, prefetched),
      0,
      j + half * (width // tile.n),
    )

  def vector_map(j, v, i, *prefetched):
    return lhs_tile(v, prefetched), 0, 0

  def out_map(j, v, i, *prefetched):
    return out_tile(v, prefetched), j

  def d_weight_map(j, v, i, *prefetched):
    return out_tile(v, prefetched), 0, 0

  rhs_block = (1, tile.n, tile.k) if transpose_rhs else (1, tile.k, tile.n)
  halves = range(2 if epilogue == "swiglu" else 1)
  operands = [lhs] + [rhs for _ in halves]
  in_specs = [pl.BlockSpec((tile.rows, tile.k), lhs_map)]
  in_specs += [pl.BlockSpec(rhs_block, rhs_map(h)) for h in halves]
  if lhs_scale is not None:
    operands += [_row_vector(lhs_scale, tile.rows)]
    in_specs += [pl.BlockSpec((1, 1, tile.rows), vector_map)]
  if rhs_scale is not None:
    operands += [rhs_scale.astype(jnp.float32)[:, None] for _ in halves]
    in_specs += [pl.BlockSpec((1, 1, tile.n), scale_map(h)) for h in halves]
  out_columns = width
  if epilogue == "dswiglu":
    out_columns = 2 * n
    operands.append(gate_up)
    in_specs.append(
      pl.BlockSpec((tile.rows, 2 * n), lambda j, v, i, *prefetched: (lhs_tile(v, prefetched), 0))
    )
  out_shape = [jax.ShapeDtypeStruct((m, out_columns), out_dtype)]
  out_block = (tile.rows, out_columns if epilogue == "dswiglu" else tile.n)
  out_specs = [pl.BlockSpec(out_block, out_map)]
  if weights is not None:
    row_tiles = pl.cdiv(m, tile.rows)
    operands.append(_row_vector(weights, tile.rows))
    in_specs.append(pl.BlockSpec((1, 1, tile.rows), vector_map))
    out_shape.append(jax.ShapeDtypeStruct((row_tiles, 1, tile.rows), jnp.float32))
    out_specs.append(pl.BlockSpec((1, 1, tile.rows), d_weight_map))
  scratch = []
  if grid[2] > 1:
    scratch = [pltpu.VMEM((tile.rows, tile.n), jnp.float32) for _ in halves]

  out = pl.pallas_call(
    functools.partial(
      _kernel,
      tile=tile,
      epilogue=epilogue,
      transpose_rhs=transpose_rhs,
      k_size=k,
      row_scaled=lhs_scale is not None,
      column_scaled=rhs_scale is not None,
      weighted=weights is not None,
      even=even,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=scratch,
    ),
    out_shape=out_shape,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=_VMEM_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * m * k * n,
      transcendentals=m * width if epilogue != "none" else 0,
      bytes_accessed=lhs.nbytes + rhs.nbytes + m * out_columns * out_dtype.itemsize,
    ),
    interpret=interpret,
    name=f"gmm_{'dlhs' if transpose_rhs else 'forward'}_{epilogue}",
  )(*list_, *operands)
  if weights is None:
    return out[0]
  return out[0], out[1].reshape(-1)[:m]
