"""Rounding to eight-bit floats: saturating casts, scales, quantised rows, fake quantisation.

Two grids: e4m3 (largest value 448, no infinity: a plain cast beyond it gives NaN) for values, and
e5m2 (57,344) where range matters more, as for gradients.  Values are divided by a float32 scale,
absmax / largest value, that is shared along the reduced axes.

Fake quantisation follows the usual quantisation-aware training rule (as in qwix): the forward sees
dequantise(quantise(w)), the gradient passes as if nothing had happened.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
TYPES = (E4M3, E5M2)

# Smallest scale: the smallest normal float32, so that neither it nor its inverse leaves the normal
# range, where a TPU would flush it to zero.
_TINY = 2.0**-126


class Quantised(NamedTuple):
  """Values on a grid: x is about values * scale.

  Attributes:
    values: Eight-bit floats.
    scale: float32, with size 1 along the axes that share a scale.
  """

  values: Float[Array, "..."]
  scale: Float[Array, "..."]


def largest(dtype) -> float:
  """Largest finite value of an eight-bit type.

  Raises:
    ValueError: Another type.
  """
  if dtype not in TYPES:
    raise ValueError(f"{dtype}: want one of {[jnp.dtype(t).name for t in TYPES]}")
  return float(jnp.finfo(dtype).max)


def saturating_cast(x: Float[Array, "..."], dtype) -> Float[Array, "..."]:
  """Rounds to nearest even; beyond the largest value, infinities too, gives the largest value.

  NaN stays NaN: a broken value must not turn into a number.
  """
  limit = largest(dtype)
  return jnp.clip(x.astype(jnp.float32), -limit, limit).astype(dtype)


def scale_of(absmax: Float[Array, "..."], dtype) -> Float[Array, "..."]:
  """float32 scale of a block whose largest magnitude is `absmax`.

  Never zero and never denormal: a block of zeros or of denormals gets the smallest normal scale.
  """
  # A product, since XLA turns a division by a constant into one: the same bits compiled or not.
  return jnp.maximum(absmax.astype(jnp.float32) * (1.0 / largest(dtype)), _TINY)


def quantise(
  x: Float[Array, "..."],
  axis: int | tuple[int, ...],
  dtype=E4M3,
  *,
  axis_name: str | tuple[str, ...] | None = None,
) -> Quantised:
  """Rounds `x` with one scale along `axis`.

  Args:
    x: Values; a NaN or infinity makes its block NaN.
    axis: Axes that share a scale.
    dtype: Eight-bit type.
    axis_name: Mesh axes over which `axis` is sharded, inside a shard_map: the scale is theirs all.
  """
  absmax = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, keepdims=True)
  if axis_name is not None:
    absmax = lax.pmax(absmax, axis_name)
  scale = scale_of(absmax, dtype)
  return Quantised(saturating_cast(x.astype(jnp.float32) / scale, dtype), scale)


def dequantise(q: Quantised, dtype=jnp.float32) -> Float[Array, "..."]:
  """values * scale, rounded once."""
  return (q.values.astype(jnp.float32) * q.scale).astype(dtype)


def quantise_rows(x: Float[Array, "M N"], dtype=E4M3) -> Quantised:
  """One scale a row, which travels with it: scale has shape [M, 1].

  No row looks at another, so what lies in unused rows stays there.
  """
  return quantise(x, -1, dtype)


def quantise_columns(x: Float[Array, "M N"], owned: Bool[Array, " M"], dtype=E4M3) -> Quantised:
  """One scale a column, from owned rows alone: scale has shape [1, N].

  For a product that contracts over the rows.  Rows that are not owned come out as zero.
  """
  return quantise(jnp.where(owned[:, None], x, 0), 0, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def fake_quant(
  w: Float[Array, "*E K N"],
  axis: int = -2,
  dtype=E4M3,
  axis_name: str | tuple[str, ...] | None = None,
) -> Float[Array, "*E K N"]:
  """Puts weights on the eight-bit grid; the gradient passes through unchanged.

  Args:
    w: Weights; with the default axis, one scale per expert and output channel.
    axis: Contraction axis, which shares a scale.
    dtype: Eight-bit type.
    axis_name: As in `quantise`.

  Returns:
    dequantise(quantise(w)) in the type of `w`.
  """
  return dequantise(quantise(w, axis, dtype, axis_name=axis_name), w.dtype)


fake_quant.defvjp(
  lambda w, axis, dtype, axis_name: (fake_quant(w, axis, dtype, axis_name), None),
  lambda axis, dtype, axis_name, _, grad: (grad,),
)
