"""A float32 master stored as the bfloat16 weight it trains with, plus what that weight lost.

`split` keeps, beside the bfloat16 weight w, the low 16 bits of the float32 and one bit "up": whether
the cast rounded away from zero.  `join` rebuilds the float32 bit for bit.  Storage is
2 + 2 + 1/8 bytes a parameter, where a float32 master beside the weight takes 2 + 4.

Why it is exact: the bit pattern of a float is monotone in its magnitude, so a cast either keeps the
top 16 bits or adds one to them, carrying from mantissa to exponent to infinity; subtracting the bit
undoes any carry.  The bit must be stored, since a tie rounded to even ends even in both directions.
Any cast whose weight differs from the top half by 0 or 1 is rebuilt; every other element is counted
as a violation.  Only NaN can be one.

Everything works on integers: a float operation may flush denormals.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float32, Int32, UInt8, UInt16


class Split(NamedTuple):
  """A float32 array in parts.

  Attributes:
    weight: The cast value.
    low: Low 16 bits of the float32.
    up: Whether the cast added one to the top 16 bits.
    violations: Number of elements that `join` does not rebuild, int32.
  """

  weight: BFloat16[Array, "..."]
  low: UInt16[Array, "..."]
  up: Bool[Array, "..."]
  violations: Int32[Array, ""]


def _halves(x):
  if x.dtype != jnp.float32:
    raise TypeError(f"want float32, got {x.dtype}")
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  return (bits >> 16).astype(jnp.uint16), (bits & 0xFFFF).astype(jnp.uint16)


def _weight(high, low, up):
  nan = ((high & 0x7F80) == 0x7F80) & (((high & 0x7F) | low) != 0)
  # A NaN stays one whatever its payload: the quiet bit is set and nothing is added.
  bits = jnp.where(nan, high | jnp.uint16(0x40), high + up.astype(jnp.uint16))
  return lax.bitcast_convert_type(bits, jnp.bfloat16)


def round_to_nearest_even(x: Float32[Array, "..."]) -> BFloat16[Array, "..."]:
  """The usual cast to bfloat16, on integers; denormals are kept."""
  high, low = _halves(x)
  return _weight(high, low, (low > 0x8000) | ((low == 0x8000) & ((high & 1) == 1)))


def truncate(x: Float32[Array, "..."]) -> BFloat16[Array, "..."]:
  """Cast towards zero, on integers."""
  high, low = _halves(x)
  return _weight(high, low, jnp.zeros(high.shape, bool))


def split(x: Float32[Array, "..."], weight: BFloat16[Array, "..."] | None = None) -> Split:
  """Takes a float32 array apart.

  Args:
    x: Any values; those that are not NaN are rebuilt by `join` bit for bit.
    weight: The bfloat16 values that training uses, if another cast made them; rounding to nearest
      even by default.

  Raises:
    TypeError: `x` is not float32 or `weight` not bfloat16.
    ValueError: Shapes differ.
  """
  high, low = _halves(x)
  if weight is None:
    weight = round_to_nearest_even(x)
  if weight.dtype != jnp.bfloat16:
    raise TypeError(f"want a bfloat16 weight, got {weight.dtype}")
  if weight.shape != x.shape:
    raise ValueError(f"weight has shape {weight.shape}, the master {x.shape}")
  added = lax.bitcast_convert_type(weight, jnp.uint16) - high
  return Split(weight, low, added == 1, jnp.sum((added > 1).astype(jnp.int32)))


def join(
  weight: BFloat16[Array, "..."], low: UInt16[Array, "..."], up: Bool[Array, "..."]
) -> Float32[Array, "..."]:
  """The float32 array that `split` took apart.

  Raises:
    TypeError: A part has another type than `split` gives it; `unpack` packed bits first.
    ValueError: Shapes differ.
  """
  for name, part, dtype in (
    ("weight", weight, jnp.bfloat16),
    ("low", low, jnp.uint16),
    ("up", up, bool),
  ):
    if part.dtype != dtype:
      raise TypeError(f"join wants {name} in {jnp.dtype(dtype)}, got {part.dtype}")
  if not weight.shape == low.shape == up.shape:
    raise ValueError(f"join: weight {weight.shape}, low {low.shape}, up {up.shape}: want one shape")
  high = lax.bitcast_convert_type(weight, jnp.uint16) - up.astype(jnp.uint16)
  bits = (high.astype(jnp.uint32) << 16) | low.astype(jnp.uint32)
  return lax.bitcast_convert_type(bits, jnp.float32)


def packed_length(length: int) -> int:
  """Bytes that hold `length` bits."""
  return -(-length // 8)


def pack(bits: Bool[Array, "..."], axis: int) -> UInt8[Array, "..."]:
  """Eight bits a byte along `axis`, the first in the lowest place, the last byte filled with 0.

  Raises:
    TypeError: `bits` are not bool.
  """
  if bits.dtype != bool:
    raise TypeError(f"pack wants bool, got {bits.dtype}")
  axis = range(bits.ndim)[axis]
  length = bits.shape[axis]
  fill = [(0, 0)] * bits.ndim
  fill[axis] = (0, packed_length(length) * 8 - length)
  x = jnp.pad(bits.astype(jnp.uint8), fill)
  x = x.reshape(*x.shape[:axis], packed_length(length), 8, *x.shape[axis + 1 :])
  places = jnp.arange(8, dtype=jnp.uint8).reshape(8, *[1] * (bits.ndim - axis - 1))
  return jnp.sum(x << places, axis=axis + 1, dtype=jnp.uint8)


def unpack(packed: UInt8[Array, "..."], length: int, axis: int) -> Bool[Array, "..."]:
  """The `length` bits along `axis` that `pack` packed.

  Raises:
    TypeError: `packed` is not uint8.
    ValueError: `packed` does not hold as many.
  """
  if packed.dtype != jnp.uint8:
    raise TypeError(f"unpack wants uint8, got {packed.dtype}")
  axis = range(packed.ndim)[axis]
  if packed.shape[axis] != packed_length(length):
    raise ValueError(f"{packed.shape[axis]} bytes along axis {axis} do not hold {length} bits")
  places = jnp.arange(8, dtype=jnp.uint8).reshape(8, *[1] * (packed.ndim - axis - 1))
  x = (jnp.expand_dims(packed, axis + 1) >> places) & 1
  x = x.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])
  return lax.slice_in_dim(x, 0, length, axis=axis).astype(bool)
