"""Rows of a tile as 32-bit words inside Pallas TPU kernels.

bfloat16 rows are read as words of two rows: the even and the odd rows are separate float32 arrays
("parts") of half the length, made by one integer operation each.  float32 rows are one part.
Tiles whose lanes are one register wide (128) are read and written in whole registers this way.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Rows of one bfloat16 register.
REGISTER_ROWS = 16
LANES = 128
_HIGH = -65536  # 0xFFFF0000


def parts_of(dtype) -> int:
  """2 where words hold two rows, else 1."""
  return 2 if dtype == jnp.bfloat16 else 1


def from_rows(x):
  """[rows, C] -> int32 [rows / parts, C]."""
  if x.dtype == jnp.bfloat16:
    return pltpu.bitcast(x, jnp.int32)
  return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def load(ref, start, count: int, interpret: bool):
  """`count` words of ref [rows, C] from word `start` on.

  On the TPU the reference is read as words: a value that is bitcast stays in half registers.
  """
  parts = parts_of(ref.dtype)
  if parts == 1 or interpret:
    return from_rows(ref[pl.ds(start * parts, count * parts)])
  return ref.bitcast(jnp.int32)[pl.ds(start, count)]


def part(words, parts: int, index: int):
  """Bits of float32 values: of the even (0) or odd (1) rows, or of all of them."""
  if parts == 1:
    return words
  return words & _HIGH if index else words << 16


def as_float(bits):
  """float32 values of int32 bits."""
  return lax.bitcast_convert_type(bits, jnp.float32)


def floats(words, parts: int):
  """The parts of words as float32 values."""
  return [as_float(part(words, parts, index)) for index in range(parts)]


def store(ref, start, values, interpret: bool) -> None:
  """Writes parts, float32, as rows of ref [rows, C] from word `start` on."""
  count = values[0].shape[0]
  if len(values) == 1:
    ref[pl.ds(start, count)] = values[0].astype(ref.dtype)
  elif interpret:  # The packing instruction exists on the TPU only.
    both = jnp.stack(values, axis=1).reshape(2 * count, values[0].shape[1])
    ref[pl.ds(2 * start, 2 * count)] = both.astype(ref.dtype)
  else:
    packed = pltpu.pack_elementwise(values, packed_dtype=ref.dtype)
    ref.bitcast(jnp.uint32)[pl.ds(start, count)] = packed
