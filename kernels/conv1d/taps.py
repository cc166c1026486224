"""Inputs of the taps as parts of words (`kernels.base.words`), and the masks of taps.

Each part of the inputs, float32 by its bits, lies in a scratch array that is one lane tile wide.  A
shifted array is a load at another row of it, so that a tap costs no vector operation, and an input
is widened once, not once a shift.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from kernels.base.words import part


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
    ref: int32 scratch, [parts * stride, lanes]: the bits of one part after the other.
    at: Row of the words in a part.
    step: How many words.
    parts: From `words.parts_of`.
    own: Bits of the words' own parts, where they are at hand.
  """

  def __init__(self, ref, at, step: int, parts: int, own=None):
    self.ref, self.at, self.step, self.parts = ref, at, step, parts
    self._stride = ref.shape[0] // parts
    self._known: dict[tuple[int, int], Array] = {(0, i): b for i, b in enumerate(own or ())}

  def bits(self, index: int, distance: int):
    """Bits of the inputs `distance` tokens before the rows of a part."""
    back, other = source(self.parts, index, distance)
    if (back, other) not in self._known:
      start = other * self._stride + self.at - back
      self._known[back, other] = self.ref[pl.ds(start, self.step)]
    return self._known[back, other]


def write(ref, at, words, parts: int) -> list[Array]:
  """Writes the parts of words to rows from `at` on of an `Earlier`'s scratch; returns their bits."""
  stride, bits = ref.shape[0] // parts, []
  for index in range(parts):
    bits.append(part(words, parts, index))
    ref[pl.ds(index * stride + at, words.shape[0])] = bits[-1]
  return bits


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
