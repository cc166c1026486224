"""Public op of the grouped matrix product, with its own derivative rule.

The derivative is written out because the automatic one is not usable: on some backends it gives
groups without rows a gradient that is not zero, and reads rows that no group owns.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.base import implementation as implementation_lib
from kernels.gmm import reference, row_kernel, tiled, weight_kernel
from kernels.gmm import tiles as tiles_lib


def multiply(
  lhs: Float[Array, "M K"],
  rhs: Float[Array, "G a b"],
  group_sizes: Int[Array, " G"],
  *,
  tile: tiles_lib.Tiles,
  implementation: str,
  transpose_rhs: bool = False,
) -> Float[Array, "M N"]:
  """One row pass, without a derivative rule; arguments as in `row_kernel.grouped`."""

  def kernel(lhs, rhs, group_sizes, *, interpret):
    return row_kernel.grouped(
      lhs, rhs, group_sizes, tile=tile, transpose_rhs=transpose_rhs, interpret=interpret
    )

  def plain(lhs, rhs, group_sizes):
    rhs = jnp.swapaxes(rhs, 1, 2) if transpose_rhs else rhs
    return lax.platform_dependent(lhs, rhs, group_sizes, cpu=tiled.gmm, default=reference.gmm)

  return implementation_lib.dispatch(implementation, kernel, plain, lhs, rhs, group_sizes)


def weight_gradient(
  lhs: Float[Array, "M K"],
  grad: Float[Array, "M N"],
  group_sizes: Int[Array, " G"],
  *,
  tile: tiles_lib.Tiles,
  implementation: str,
  out_dtype=jnp.float32,
) -> Float[Array, "G K N"]:
  """lhs^T grad within each group, summed in float32; exactly zero for a group without rows."""

  def kernel(lhs, grad, group_sizes, *, interpret):
    return weight_kernel.transposed(
      lhs, grad, group_sizes, tile=tile, out_dtype=out_dtype, interpret=interpret
    )

  def plain(lhs, grad, group_sizes):
    out = lax.platform_dependent(lhs, grad, group_sizes, cpu=tiled.tgmm, default=reference.tgmm)
    return out.astype(out_dtype)

  return implementation_lib.dispatch(implementation, kernel, plain, lhs, grad, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(lhs, rhs, group_sizes, tiles, implementation):
  return multiply(lhs, rhs, group_sizes, tile=tiles.forward, implementation=implementation)


def _forward(lhs, rhs, group_sizes, tiles, implementation):
  return _grouped(lhs, rhs, group_sizes, tiles, implementation), (lhs, rhs, group_sizes)


def _backward(tiles, implementation, residuals, grad):
  lhs, rhs, group_sizes = residuals
  d_lhs = multiply(
    grad, rhs, group_sizes, tile=tiles.dlhs, implementation=implementation, transpose_rhs=True
  )
  d_rhs = weight_gradient(
    lhs,
    grad,
    group_sizes,
    tile=tiles.drhs,
    implementation=implementation,
    out_dtype=rhs.dtype,
  )
  return d_lhs.astype(lhs.dtype), d_rhs, None


_grouped.defvjp(_forward, _backward)


def check(lhs, rhs, group_sizes) -> None:
  """Raises ValueError unless shapes and types are those of a grouped product."""
  if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
    raise ValueError(f"want lhs [M, K] and rhs [G, K, N], got {lhs.shape} and {rhs.shape}")
  if group_sizes.shape != rhs.shape[:1]:
    raise ValueError(f"{rhs.shape[0]} groups but group_sizes has shape {group_sizes.shape}")
  if not lhs.size or not rhs.size:
    raise ValueError(f"want rows, columns and groups, got lhs {lhs.shape} and rhs {rhs.shape}")
  if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
    raise ValueError(f"group_sizes must be integers, not {group_sizes.dtype}")
  for name, array in (("lhs", lhs), ("rhs", rhs)):
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} must be floating point numbers, not {array.dtype}")


def grouped_matmul(
  lhs: Float[Array, "M K"],
  rhs: Float[Array, "G K N"],
  group_sizes: Int[Array, " G"],
  *,
  implementation: str = "reference",
  tiles: tiles_lib.PassTiles | None = None,
) -> Float[Array, "M N"]:
  """Rows of `lhs`, sorted by group, each times its group's matrix.

  Args:
    lhs: Rows; group i owns `group_sizes[i]` consecutive ones, in order.
    rhs: One matrix per group, in the type of `lhs`.
    group_sizes: int32, sum <= M.
    implementation: One of `kernels.base.implementation.IMPLEMENTATIONS`; `reference` is
      `jax.lax.ragged_dot` (a batched product over tiles on a CPU).
    tiles: Tiles of the Pallas kernels; from the table by default.

  Returns:
    Products summed in float32, in the type of `lhs`.  Rows beyond sum(group_sizes) are exactly
    zero, and are read neither here nor in the gradient; the gradient of a matrix without rows is
    exactly zero.

  Raises:
    ValueError: Shapes or types do not agree.
  """
  check(lhs, rhs, group_sizes)
  if lhs.dtype != rhs.dtype:
    raise ValueError(f"lhs is {lhs.dtype} and rhs {rhs.dtype}: want one type")
  if implementation != "reference" and lhs.dtype not in (jnp.bfloat16, jnp.float32):
    raise ValueError(f"the kernels take bfloat16 or float32, not {lhs.dtype}")
  tiles = tiles or tiles_lib.good(*rhs.shape[1:])
  return _grouped(lhs, rhs, group_sizes.astype(jnp.int32), tiles, implementation)
