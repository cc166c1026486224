"""Public op of the grouped matrix product, with its own derivative rule.

The derivative is written out because the automatic one is not usable: on some backends it gives
groups without rows a gradient that is not zero, and reads rows that no group owns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.gmm import reference, tiled


def _gmm(lhs, rhs, group_sizes):
  return lax.platform_dependent(lhs, rhs, group_sizes, cpu=tiled.gmm, default=reference.gmm)


def _tgmm(lhs, grad, group_sizes):
  return lax.platform_dependent(lhs, grad, group_sizes, cpu=tiled.tgmm, default=reference.tgmm)


@jax.custom_vjp
def _grouped(lhs, rhs, group_sizes):
  return _gmm(lhs, rhs, group_sizes)


def _forward(lhs, rhs, group_sizes):
  return _gmm(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(residuals, grad):
  lhs, rhs, group_sizes = residuals
  d_lhs = _gmm(grad, jnp.swapaxes(rhs, 1, 2), group_sizes)
  d_rhs = _tgmm(lhs, grad, group_sizes)
  return d_lhs.astype(lhs.dtype), d_rhs.astype(rhs.dtype), None


_grouped.defvjp(_forward, _backward)


def grouped_matmul(
  lhs: Float[Array, "M K"],
  rhs: Float[Array, "G K N"],
  group_sizes: Int[Array, " G"],
) -> Float[Array, "M N"]:
  """Rows of `lhs`, sorted by group, each times its group's matrix.

  Args:
    lhs: Rows; group i owns `group_sizes[i]` consecutive ones, in order.
    rhs: One matrix per group, in the type of `lhs`.
    group_sizes: int32, sum <= M.

  Returns:
    Products summed in float32, in the type of `lhs`.  Rows beyond sum(group_sizes) are exactly
    zero, and are read neither here nor in the gradient; the gradient of a matrix without rows is
    exactly zero.

  Raises:
    ValueError: Shapes do not agree.
  """
  if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
    raise ValueError(f"want lhs [M, K] and rhs [G, K, N], got {lhs.shape} and {rhs.shape}")
  if group_sizes.shape != rhs.shape[:1]:
    raise ValueError(f"{rhs.shape[0]} groups but group_sizes has shape {group_sizes.shape}")
  return _grouped(lhs, rhs, group_sizes.astype(jnp.int32))
