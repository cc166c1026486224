"""Inputs of the taps as words (`kernels.base.words`), and the masks of taps.

A shifted array is a load at another row of a scratch array that is one lane tile wide, so that a
tap costs no vector operation.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from kernels.base import words


def source(parts: int, index: int, distance: int) -> tuple[int, int]:
  """Where the value `distance` tokens before (negative: after) a part's row lies.

  Returns:
    How many words before, and which part of them.
  """
  if parts == 1:
    return distance, 0
  return (distance - index + 1) // 2, (index - distance) % 2


class Earlier:
  """Inputs of the taps of some words.

  Attributes:
    read: (words before) -> the words so many before.
    parts: From `words.parts_of`.
  """

  def __init__(self, read, parts: int):
    self.read, self.parts = read, parts
    self._known: dict[tuple[int, int], Array] = {}

  def bits(self, index: int, distance: int):
    """Bits of the inputs `distance` tokens before the rows of a part."""
    back, other = source(self.parts, index, distance)
    if (back, other) not in self._known:
      self._known[back, other] = words.part(self.read(back), self.parts, other)
    return self._known[back, other]


def write_masks(ref, bits, first: int, taps: int, at: int = 0) -> None:
  """Spreads bits over the lanes: all ones where a bit is set.

  Args:
    ref: int32 [entries, >= rows, lanes]; entry at + part * taps + distance.
    bits: int32 [parts, rows, 1], see `tiling.tap_bits`.
    first: Bit of distance 0.
    taps: Taps of the filter.
    at: First entry to write.
  """
  rows = bits.shape[1]
  for index in range(bits.shape[0]):
    wide = jnp.broadcast_to(bits[index], (rows, ref.shape[2]))
    for distance in range(taps):
      ref[at + index * taps + distance, :rows] = (wide << (31 - first - distance)) >> 31
