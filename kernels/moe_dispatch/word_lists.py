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
from jaxtyping import Array, Int

TOKENS = 128  # of a tile
TILES = 2  # of a visit
WORDS = 128  # of a tile in a visit


class WordLists(NamedTuple):
  """Visits of the un-sort kernel, in the order of their tiles.

  Attributes:
    strips: Which TILES * TOKENS tokens each visit is about; the last of them again after the last
      visit with work.
    counts: Words of each tile of each visit, flat; 0 after the last visit with work.
    words: Row of words to copy; any legal one beyond the count.
    places: Of the rows of each word: one plus the place in the tile of the token that owns it; 0
      where it belongs to another tile or to no one.  The second row's is in the upper 16 bits.
  """

  strips: Int[Array, " V"]
  counts: Int[Array, " V*S"]
  words: Int[Array, "V S W"]
  places: Int[Array, "V S W"]


def limit(rows: int, tokens: int, experts: int, per_word: int) -> int:
  """Static number of visits: every strip has one, and each `WORDS` words of a tile make one more.

  A run of r rows touches at most (r - 1) // per_word + 2 words, and there are no more runs than
  (expert, tile) pairs.
  """
  strips = -(-tokens // (TILES * TOKENS))
  words = rows if per_word == 1 else min(rows, rows // per_word + experts * strips * TILES + 1)
  return strips + words // WORDS


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
  borders = jnp.arange(tiles + 1, dtype=jnp.uint32) << bits
  starts = jnp.searchsorted(keys, borders, side="left").astype(jnp.int32)
  sizes = jnp.diff(starts).reshape(strips, TILES)
  starts = starts[:-1].reshape(strips, TILES)
  visits_of = jnp.maximum(-(-jnp.max(sizes, axis=1) // WORDS), 1)
  ends = jnp.cumsum(visits_of)
  visit = jnp.arange(limit(rows, tokens, group_sizes.shape[0], per_word), dtype=jnp.int32)
  of = jnp.searchsorted(ends, visit, side="right", method="compare_all")
  of = jnp.minimum(of, strips - 1).astype(jnp.int32)
  done = ((visit - (ends - visits_of)[of]) * WORDS)[:, None]
  counts = jnp.clip(sizes[of] - done, 0, WORDS)
  slot = jnp.arange(WORDS, dtype=jnp.int32)
  at = jnp.minimum((starts[of] + done)[..., None] + slot, rows - 1)
  row = jnp.minimum((keys[at] & ((1 << bits) - 1)).astype(jnp.int32), rows - 1)
  places = jnp.where(slot < counts[..., None], packed[row], 0)
  return WordLists(of, counts.reshape(-1), row // per_word, places)
