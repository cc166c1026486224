"""What follows a grouped product, on the float32 sums of a strip of columns.

swiglu    silu(gate) * up.
dswiglu   the input gradient of a down-projection, a = dY Wo^T, turned into that of [gate | up]:
            s = sigmoid(gate);  h = gate s up
            d_weight = rowsum(a h);  da = weight a
            d_gate = da up s (1 + gate (1 - s));  d_up = da gate s
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def tanh_half(x):
  """x / 2 and its tanh: sigmoid(x) = (1 + tanh(x / 2)) / 2, one hardware instruction instead of an
  exponential and a division."""
  half = 0.5 * x
  return half, jnp.tanh(half)


def column(row):
  """[1, rows] on lanes -> [rows, 1] on sublanes."""
  return jnp.transpose(jnp.broadcast_to(row, (8, row.shape[1])))[:, :1]


def two_columns(first, second):
  """`column` of two rows at the cost of one: the unit that turns them is slow to begin."""
  shape = (8, first.shape[1])
  odd = lax.broadcasted_iota(jnp.int32, shape, 0) % 2 == 1
  both = jnp.where(odd, jnp.broadcast_to(second, shape), jnp.broadcast_to(first, shape))
  turned = jnp.transpose(both)
  return turned[:, :1], turned[:, 1:2]


def row(column_):
  """[rows, 1] on sublanes -> [1, rows] on lanes."""
  return jnp.transpose(jnp.broadcast_to(column_, (column_.shape[0], 128)))[:1]


def swiglu(gate, up):
  """silu(gate) * up."""
  half, tanh = tanh_half(gate)
  return half * (1.0 + tanh) * up


def dswiglu(grad, gate, up, weight=None):
  """Gradients of gate and up, and of the rows' weights.

  Args:
    grad: Strip of a, before the rows' weights.
    gate: The same columns of gate.
    up: The same columns of up.
    weight: [rows, 1], or None.

  Returns:
    d_gate, d_up, and this strip's part of d_weight [rows, 1], None without weights.
  """
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  half, tanh = tanh_half(gate)
  twice = 1.0 + tanh  # 2 sigmoid(gate)
  act = half * twice
  slope = (twice + act * (1.0 - tanh)) * up  # 2 up d silu / d gate
  d_up = grad * act
  if weight is None:
    return grad * 0.5 * slope, d_up, None
  part = jnp.sum(d_up * up, axis=1, keepdims=True)
  return grad * (0.5 * weight) * slope, d_up * weight, part
