"""Builders for the kernels of kernels/gmm."""

from __future__ import annotations

from typing import Any

from kernels.gmm import even as even_lib
from kernels.gmm import row_kernel, weight_kernel
from kernels.gmm import tiles as tiles_lib
from tools.kernel_report import public_kernels

# What the cell's programs are compiled with: a kernel may use all of VMEM.
_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": "65472"}


def product(
  *,
  which: str,
  groups: int,
  rows: int,
  group_rows: int,
  k: int,
  n: int,
  left: str = "bfloat16",
  right: str = "bfloat16",
  out: str = "bfloat16",
  epilogue: str = "none",
  weighted: bool = False,
  tile: dict[str, int] | None = None,
) -> Any:
  """One pass of a grouped product.

  Args:
    which: forward, dlhs or drhs.
    groups: G.
    rows: M.
    group_rows: Rows of each group where the layout is to be followed by the compiler; 0 takes it
      from prefetched group sizes, as a training step does.
    k: Contraction of forward and dlhs, left side of the result of drhs.
    n: Columns of the result.
    left: Type of the rows; eight-bit types come with scales.
    right: Type of the matrices, or of the second rows of drhs.
    out: Type of the result.
    epilogue: One of `row_kernel.EPILOGUES`.
    weighted: Whether each row's result takes a float32 factor; with dswiglu, whose gradient is a
      result.
    tile: Sizes that replace those of the table.
  """
  import dataclasses

  import jax.numpy as jnp

  table = tiles_lib.good(n, k) if which == "dlhs" else tiles_lib.good(k, n)
  tiles = dataclasses.replace(getattr(table, which), **(tile or {}))
  if epilogue == "swiglu":
    tiles = dataclasses.replace(tiles, n=tiles.n // 2)
  even = None
  if group_rows:
    even = even_lib.Even(groups=groups, group_rows=group_rows, tile_rows=tiles.rows)
  float32, scaled = jnp.float32, jnp.dtype(left).itemsize == 1
  sizes = ((groups,), jnp.int32)

  def lower(*arguments):
    return public_kernels.lower_on_one_slice(*arguments), _OPTIONS

  if which == "drhs":

    def weight_gradient(x, dy, sizes, *scales):
      return weight_kernel.transposed(
        x, dy, sizes, tile=tiles, out_dtype=out, even=even, **dict(zip(names, scales))
      )

    names = ("lhs_scale", "rhs_scale") if scaled else ()
    scales = [((c,), float32) for c in (k, n)] if scaled else []
    return lower(weight_gradient, ((rows, k), left), ((rows, n), right), sizes, *scales)

  more: dict[str, Any] = {}
  if scaled:
    more.update(lhs_scale=((rows,), float32), rhs_scale=((groups, n), float32))
  if epilogue == "dswiglu":
    more.update(gate_up=((rows, 2 * n), jnp.bfloat16))
    if weighted:
      more.update(weights=((rows,), float32))
  elif weighted:
    more.update(lhs_scale=((rows,), float32))

  def row_product(x, w, sizes, *values):
    return row_kernel.grouped(
      x,
      w,
      sizes,
      tile=tiles,
      transpose_rhs=which == "dlhs",
      epilogue=epilogue,
      out_dtype=out,
      even=even,
      **dict(zip(more, values)),
    )

  matrix = (groups, n, k) if which == "dlhs" else (groups, k, n)
  return lower(row_product, ((rows, k), left), (matrix, right), sizes, *more.values())
