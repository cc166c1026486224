"""Which words of a buffer a tile of tokens needs, worked out before the un-sort kernel starts.

Rows of eight or sixteen bits lie in words of 32 bits, a pair of bfloat16 rows in one row of words,
and a row of words is the least that can be copied.  Rows of one expert are in the order of their
tokens, so the rows of a tile of tokens are one run an expert, and most words of a run are needed
whole: a word is listed once for each tile that needs any part of it.

A visit is `TILES` tiles side by side and at most `WORDS` words of each; tiles without words have one
visit too, which writes their zeros.  The number of visits depends on the routing but is bounded.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt

TOKENS = 128  # of a tile
TILES = 2  # of a visit
WORDS = 128  # of a tile in a visit


class WordLists(NamedTuple):
  """Visits of the un-sort kernel, in the order of their tiles.

  Attributes:
    strips: Which TILES * TOKENS tokens each visit is about.
    counts: Words of each tile of each visit, flat.
    words: Row of words to copy; beyond the count the last one again.
    places: Of the rows of each word: one plus the place in the tile of the token that owns it; 0
      where it belongs to another tile or to no one.  The second row's is in the upper 16 bits.
    visits: How many visits there are; what the others' entries say means nothing.
    unclean: The visit that has a word whose second row is nobody's, or -1.
  """

  strips: Int[Array, " V"]
  counts: Int[Array, " V*S"]
  words: Int[Array, "V*S W"]
  places: Int[Array, "V*S W"]
  visits: Int[Array, "1"]
  unclean: Int[Array, "1"]


def limit(rows: int, tokens: int, experts: int, per_word: int) -> int:
  """Static number of visits: every strip has one, and each `WORDS` words of a tile make one more.

  A run of r rows touches at most (r - 1) // per_word + 2 words, and there are no more runs than
  (expert, tile) pairs.
  """
  strips = -(-tokens // (TILES * TOKENS))
  words = rows if per_word == 1 else min(rows, rows // per_word + experts * strips * TILES + 1)
  return strips + words // WORDS


def lower_bounds(keys: UInt[Array, " N"], borders: UInt[Array, " B"]) -> Int[Array, " B"]:
  """How many of the sorted keys are below each border: a search in two steps, each of them a count.

  A binary search is a loop of small gathers, whose starts cost more than these comparisons.
  """
  size = 1 << (max(keys.shape[0].bit_length() - 1, 2) + 1) // 2
  blocks = jnp.pad(
    keys, (0, -keys.shape[0] % size), constant_values=jnp.uint32(0xFFFFFFFF)
  ).reshape(-1, size)
  # The last block that begins below a border; those after it have nothing below.
  block = jnp.sum(blocks[:, 0] < borders[:, None], axis=1, dtype=jnp.int32) - 1
  block = jnp.maximum(block, 0)
  inside = jnp.sum(blocks[block] < borders[:, None], axis=1, dtype=jnp.int32)
  return block * size + inside


def make(
  pairs: Int[Array, " M"],
  group_sizes: Int[Array, " E"],
  *,
  tokens: int,
  choices: int,
  per_word: int,
) -> WordLists:
  """Lists the visits.

  Args:
    pairs: Flat pair (token * choices + choice) of each row, rows sorted by expert, then by token.
    group_sizes: Rows of each expert; rows beyond their sum are nobody's.
    tokens: T.
    choices: K.
    per_word: Rows in a word, 1 or 2; divides the number of rows.

  Raises:
    ValueError: A tile and a row do not fit in a 32-bit sort key.
  """
  rows = pairs.shape[0]
  strips = -(-tokens // (TILES * TOKENS))
  tiles = strips * TILES
  bits = max(1, (rows - 1).bit_length())
  if (tiles + 1) << bits > 1 << 32:
    raise ValueError(f"{tiles} tiles of tokens x {rows} rows do not fit in a 32-bit sort key")
  token = pairs // choices
  index = jnp.arange(rows, dtype=jnp.int32)
  tile = jnp.where(index < jnp.sum(group_sizes), token // TOKENS, tiles)
  place = token % TOKENS + 1
  entry, packed = tile, place
  if per_word == 2:
    # An entry is the first row of its tile in a word; it speaks for the row after it too.  Shifted
    # copies of flat arrays: a last dimension of two would fill one lane in sixty-four.
    first = index % 2 == 0
    entry = jnp.where(first | (tile != jnp.roll(tile, 1)), tile, tiles)
    second = jnp.where(tile == jnp.roll(tile, -1), jnp.roll(place, -1), 0)
    packed = jnp.where(first, place | second << 16, place << 16)
  keys = (entry.astype(jnp.uint32) << bits) | index.astype(jnp.uint32)
  keys = lax.sort(keys, is_stable=False)

  # Every entry of a tile, from where its keys begin to where the next tile's do.
  starts = lower_bounds(keys, jnp.arange(tiles + 1, dtype=jnp.uint32) << bits)
  sizes = jnp.diff(starts)
  visits_of = jnp.maximum(-(-jnp.max(sizes.reshape(strips, TILES), axis=1) // WORDS), 1)
  ends = jnp.cumsum(visits_of)
  visits = limit(rows, tokens, group_sizes.shape[0], per_word)
  # One row a tile of a visit: a dimension of two would fill two sublanes of eight.
  part = jnp.arange(visits * TILES, dtype=jnp.int32)
  visit = part // TILES
  of = jnp.sum(ends[None] <= visit[:, None], axis=1, dtype=jnp.int32)
  of = jnp.minimum(of, strips - 1)
  done = (visit - (ends - visits_of)[of]) * WORDS
  tile = of * TILES + part % TILES
  counts = jnp.clip(sizes[tile] - done, 0, WORDS)
  slot = jnp.arange(WORDS, dtype=jnp.int32)
  # The last one again beyond the count: copies are rounded up, and must not bring what is nobody's.
  last = (starts[tile] + sizes[tile] - 1)[:, None]
  at = jnp.clip((starts[tile] + done)[:, None] + slot, 0, last)
  row = (keys[at] & ((1 << bits) - 1)).astype(jnp.int32)
  places = jnp.where(slot < counts[:, None], packed[row], 0)
  word = row // per_word
  total = jnp.sum(group_sizes)
  half = jnp.where(total % per_word > 0, total // per_word, -1)
  holds = jnp.any((word == half) & (slot < counts[:, None]), axis=1)
  unclean = jnp.max(jnp.where(holds, visit, -1), keepdims=True)
  return WordLists(of[::TILES], counts, word, places, ends[-1:], unclean)
