"""Inverse of unit lower triangular matrices, safe in float32.

Forward substitution inside diagonal blocks of 16 rows, then pairs of blocks are merged.  Series
in powers of A (Neumann, Newton) are not usable here: with correlated keys those powers grow
binomially before they cancel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_HIGHEST = lax.Precision.HIGHEST
_BASE = 16


def _matmul(a, b):
  return jnp.matmul(a, b, precision=_HIGHEST)


def _diagonal_blocks(a, size: int, row: int, column: int, stride: int):
  """Blocks [..., m, size, size] at (row, column) inside each diagonal block of `stride` blocks."""
  step = size * stride
  starts = range(0, a.shape[-1], step)
  rows = [slice(i + size * row, i + size * (row + 1)) for i in starts]
  columns = [slice(i + size * column, i + size * (column + 1)) for i in starts]
  return jnp.stack([a[..., r, c] for r, c in zip(rows, columns)], axis=-3)


def _place(block, low: int, left: int):
  """A zero matrix of twice the size with `block` in one of its quarters."""
  size = block.shape[-1]
  sides = [(low * size, (1 - low) * size), (left * size, (1 - left) * size)]
  return jnp.pad(block, [(0, 0)] * (block.ndim - 2) + sides)


def _substitute(a):
  """(I + a)^-1 of small blocks [..., n, n], row by row."""
  start = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)

  def row(i, t):
    weights = lax.dynamic_index_in_dim(a, i, axis=-2, keepdims=False)
    # Rows >= i of `weights` are zero, so only finished rows of t are read.
    new = lax.dynamic_index_in_dim(t, i, axis=-2) - jnp.sum(
      weights[..., :, None] * t, axis=-2, keepdims=True
    )
    return lax.dynamic_update_slice_in_dim(t, new, i, axis=-2)

  return lax.fori_loop(1, a.shape[-1], row, start)


@jax.custom_vjp
def unit_lower_inverse(a: Float[Array, "... n n"]) -> Float[Array, "... n n"]:
  """(I + a)^-1 for strictly lower triangular `a`, n a power of two.

  Entries of `a` on and above the diagonal must be zero; they get no gradient.
  """
  size = min(_BASE, a.shape[-1])
  t = _substitute(_diagonal_blocks(a, size, 0, 0, 1))
  while size < a.shape[-1]:
    below = _diagonal_blocks(a, size, 1, 0, 2)
    top, bottom = t[..., 0::2, :, :], t[..., 1::2, :, :]
    corner = -_matmul(_matmul(bottom, below), top)
    t = _place(top, 0, 0) + _place(corner, 1, 0) + _place(bottom, 1, 1)
    size *= 2
  return t[..., 0, :, :]


def _forward(a):
  t = unit_lower_inverse(a)
  return t, t


def _backward(t, dt):
  transposed = jnp.swapaxes(t, -1, -2)
  return (-jnp.tril(_matmul(_matmul(transposed, dt), transposed), -1),)


unit_lower_inverse.defvjp(_forward, _backward)
