"""Tile sizes of the head's Pallas kernels."""

from __future__ import annotations

import dataclasses

LANES = 128
# Rows of a float32 register.
SUBLANES = 8
# Words come in two strips, each of whole registers of bfloat16.
_WORDS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTiles:
  """Tiles of one pass.

  Attributes:
    tokens: Tokens of a tile, a multiple of 128: they lie on lanes.
    words: Rows of the table of a tile, a multiple of 32.
  """

  tokens: int
  words: int

  def __post_init__(self) -> None:
    if self.tokens < 1 or self.tokens % LANES:
      raise ValueError(f"tokens={self.tokens}: want a multiple of {LANES}")
    if self.words < 1 or self.words % _WORDS:
      raise ValueError(f"words={self.words}: want a multiple of {_WORDS}")


def good(tokens: int, vocab: int, width: int, *, most_tokens: int, itemsize: int = 2) -> HeadTiles:
  """Tiles for operands of this size.

  Args:
    tokens: N.
    vocab: V.
    width: D.
    most_tokens: Tokens of a tile at D = 4096 in bfloat16; wider or longer rows take fewer, that
      tiles fit in VMEM.
    itemsize: Bytes of an element.
  """
  row = max(width * itemsize, 8192) // 8192
  most = max(LANES, most_tokens // (row * LANES) * LANES)
  words = max(2 * _WORDS, 512 // row // _WORDS * _WORDS)
  if vocab > words and vocab % words:
    # A divisor leaves no last tile that hangs over the edge.
    divisors = [w for w in range(words, words // 2, -_WORDS) if vocab % w == 0]
    words = divisors[0] if divisors else words
  return HeadTiles(
    tokens=min(most, -(-tokens // LANES) * LANES), words=min(words, -(-vocab // _WORDS) * _WORDS)
  )
