"""Grouped matrix products on `jax.lax.ragged_dot`: the definition of the other forms.

Rows of `lhs` are sorted by group; group i owns `group_sizes[i]` consecutive rows and multiplies
them by `rhs[i]`.  Rows beyond sum(group_sizes) belong to nobody: they are never read and their
results are exactly zero, whatever lies in them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def _precision(dtype):
  return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def owned(x: Float[Array, "M N"], group_sizes: Int[Array, " G"]) -> Float[Array, "M N"]:
  """Zero in the rows beyond sum(group_sizes)."""
  return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(group_sizes))[:, None], x, 0)


def gmm(
  lhs: Float[Array, "M K"],
  rhs: Float[Array, "G K N"],
  group_sizes: Int[Array, " G"],
) -> Float[Array, "M N"]:
  """Rows of each group times that group's matrix; float32 sums, result in the type of `lhs`."""
  out = lax.ragged_dot(
    owned(lhs, group_sizes),
    rhs,
    group_sizes,
    precision=_precision(lhs.dtype),
    preferred_element_type=jnp.float32,
  )
  return owned(out, group_sizes).astype(lhs.dtype)


def tgmm(
  lhs: Float[Array, "M K"],
  grad: Float[Array, "M N"],
  group_sizes: Int[Array, " G"],
) -> Float[Array, "G K N"]:
  """lhs^T grad within each group, float32; exactly zero for a group without rows."""
  dimensions = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  out = lax.ragged_dot_general(
    owned(lhs, group_sizes),
    owned(grad, group_sizes),
    group_sizes,
    dimensions,
    precision=_precision(lhs.dtype),
    preferred_element_type=jnp.float32,
  )
  return jnp.where((group_sizes > 0)[:, None, None], out, 0.0)
