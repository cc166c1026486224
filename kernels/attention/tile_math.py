"""What the flash kernels share: products, the mask of a tile, ids turned from lanes to sublanes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128
LOG2_E = 1.4426950408889634
MASKED = -1e30
# The scoped limit of the trainer's compiler flags.
VMEM_BYTES = 65_472 * 1024
# Contraction of the last axis of both, of last with first, of the first of both.
NT, NN, TN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))


def dot(a, b, dimensions):
  """Product with float32 sums; of float32 operands an exact one."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
  return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def declared_cost(products: int, q, k, bytes_accessed: int) -> pl.CostEstimate:
  """What a kernel tells the compiler, of the half of all pairs that a causal row has.

  Args:
    products: Products over the pairs: 2 forward, 5 backward.
    q: Queries [B, nq, S, d].
    k: Keys [B, nkv, T, d].
    bytes_accessed: Bytes of operands and results, once each.
  """
  batch, heads, length, dim = q.shape
  pairs = batch * heads * length * k.shape[2] // 2
  return pl.CostEstimate(
    flops=2 * products * pairs * dim, transcendentals=pairs, bytes_accessed=bytes_accessed
  )


class Exponential(NamedTuple):
  """exp(scale x) as a power of e or of 2.

  Attributes:
    scale: Factor of the exponent.
    base2: Multiply by scale log2(e) at once, or not at all where that is 1: a hardware exponential
      is one to base 2.
  """

  scale: float
  base2: bool

  def exponent(self, x):
    """What `power` takes."""
    factor = self.scale * LOG2_E if self.base2 else self.scale
    return x if abs(factor - 1.0) < 1e-12 else x * factor

  def power(self, x):
    return jnp.exp2(x) if self.base2 else jnp.exp(x)

  def __call__(self, x):
    return self.power(self.exponent(x))

  def from_natural(self, x):
    """A natural logarithm as a logarithm to this base."""
    return x * LOG2_E if self.base2 else x


def when(condition):
  """`pl.when`, or a plain `if` where the condition is known."""
  if isinstance(condition, bool):
    return lambda body: body() if condition else None
  return pl.when(condition)


def column(row):
  """[1, n] to [n, LANES]: the row's values down the sublanes, the same on every lane."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def tiled(x, width):
  """[n, LANES] to [n, width]: lanes repeated."""
  return jnp.tile(x, (1, width // LANES)) if width % LANES == 0 else x[:, :width]
