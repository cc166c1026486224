"""Pallas TPU kernel of the un-sort: each token's rows of the experts' buffer, summed in float32.

A device of an expert group owns few of a token's rows.  Per tile of tokens the kernel copies the
words that hold any of them (`word_lists.py`) from HBM, each word's row by a copy of its own, the next
visit's while this one's are summed; what lies in a word but belongs to another tile or to nobody is
masked; and a product with a one-hot side adds the rows.  Live rows are read about 1.2 times and
tokens written once, whatever the number of choices.

Prior art of the idea, a gather-reduce over the rows that exist: MaxText's
kernels/ragged/ragged_gather_reduce_v2.py, which runs on SparseCores.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.moe_dispatch import row_copies, word_lists

_COLUMNS = 512  # of the result, multiplied at a time


def _selection(places, per_word):
  """[TOKENS, rows] of ones where a row of a word is a token's: the words' first rows, then the second.

  Args:
    places: [1, WORDS] of a tile.
    per_word: Rows in a word.
  """
  token = 1 + lax.broadcasted_iota(jnp.int32, (word_lists.TOKENS, word_lists.WORDS), 0)
  if per_word == 1:
    return jnp.where(token == places, 1.0, 0.0)
  halves = places & 0xFFFF, lax.shift_right_logical(places, 16)
  ones = [jnp.where(token == half, 1.0, 0.0).astype(jnp.bfloat16) for half in halves]
  return jnp.concatenate(ones, axis=1)


def _rows(words):
  """[WORDS, N] words as [2 * WORDS, N] of bfloat16, in the order of `_selection`; float32 as it is."""
  if words.dtype != jnp.uint32:
    return words
  halves = [part.astype(jnp.uint16) for part in (words, words >> 16)]
  return lax.bitcast_convert_type(jnp.concatenate(halves, axis=0), jnp.bfloat16)


def _clean(buffer_ref, places):
  """Zero in the halves of a tile's words that are not somebody's."""
  live = jnp.where(places & 0xFFFF > 0, 1, 0) | jnp.where(places >> 16 > 0, 2, 0)
  live = row_copies.columns(live)
  mask = jnp.where(live & 1 > 0, 0xFFFF, 0) | jnp.where(live & 2 > 0, -0x10000, 0)
  mask = mask.astype(jnp.uint32).reshape(-1, row_copies.COPIES, 128)
  for at in range(buffer_ref.shape[1]):
    buffer_ref[:, at] = buffer_ref[:, at] & mask


class _Static:
  """Stands in for prefetched numbers that the compiler is to know."""

  def __init__(self, value):
    self._value = value

  def __getitem__(self, index):
    return self._value(index)


def _kernel(
  strips, counts, unclean, first_ref, next_ref, places_ref, y_ref, out_ref, buffer, sums, semaphores,
  *, even, interpret
):  # fmt: skip
  if even:
    strips, counts, unclean = (_Static(f) for f in (lambda v: v, lambda v: even, lambda v: -1))
  visit, last = pl.program_id(0), pl.num_programs(0) - 1
  slot = lax.rem(visit, 2)
  words_ref = row_copies.as_words(y_ref)
  per_word = row_copies.rows_in_word(y_ref.dtype)
  tiles = range(word_lists.TILES)
  part = lambda t: slice(t * word_lists.WORDS, (t + 1) * word_lists.WORDS)

  def start_visit(visit, slot, index_ref):
    for t in tiles:
      count = counts[visit * word_lists.TILES + t]
      target = buffer.at[slot, t], semaphores.at[slot]
      indices = index_ref.at[0, 0, pl.ds(part(t).start, word_lists.WORDS)]
      row_copies.start(words_ref, 8 // per_word, indices, count, *target, interpret)

  @pl.when(visit == 0)
  def _():
    # What no copy has filled is multiplied by zero, and so must be finite.
    buffer[...] = jnp.zeros_like(buffer)
    start_visit(0, 0, first_ref)

  @pl.when(visit < last)
  def _():
    start_visit(visit + 1, 1 - slot, next_ref)

  count = [counts[visit * word_lists.TILES + t] for t in tiles]
  some = functools.reduce(jnp.logical_or, [c > 0 for c in count])
  strip = strips[visit]
  opens = (visit == 0) | (strips[jnp.maximum(visit - 1, 0)] != strip)
  closes = (visit == last) | (strips[jnp.minimum(visit + 1, last)] != strip)
  for t in tiles:
    row_copies.wait(count[t], buffer.at[slot, t], semaphores.at[slot])

  if per_word == 2:

    @pl.when(visit == unclean[0])
    def _():
      for t in tiles:
        _clean(buffer.at[slot, t], places_ref[0, :, part(t)])

  def products(store):
    width = out_ref.shape[1]
    every = slice(0, word_lists.WORDS)
    chosen = [_selection(places_ref[0, :, part(t)], per_word) for t in tiles]
    for at in range(0, width, _COLUMNS):
      size = min(_COLUMNS, width - at)
      for t in tiles:
        lanes = range(at, at + size, 128)
        rows = [_rows(row_copies.read(buffer.at[slot, t], every, lane)) for lane in lanes]
        place = slice(t * word_lists.TOKENS, (t + 1) * word_lists.TOKENS), slice(at, at + size)
        store(place, row_copies.product(chosen[t], jnp.concatenate(rows, axis=1)))

  @pl.when(some & opens & closes)
  def _():
    def store(place, value):
      out_ref[place] = value.astype(out_ref.dtype)

    products(store)

  @pl.when(some & jnp.logical_not(opens & closes))
  def _():
    def store(place, value):
      total = jnp.where(opens, 0.0, sums[place]) + value
      sums[place] = total
      out_ref[place] = total.astype(out_ref.dtype)

    products(store)

  @pl.when(jnp.logical_not(some) & opens)
  def _():
    out_ref[...] = jnp.zeros_like(out_ref)


@functools.partial(jax.jit, static_argnames=("tokens", "choices", "interpret"))
def sum_rows(
  y: Float[Array, "M N"],
  pairs: Int[Array, " M"],
  group_sizes: Int[Array, " E"],
  *,
  tokens: int,
  choices: int,
  interpret: bool = False,
) -> Float[Array, "T N"]:
  """Sum of each token's rows in float32, in the type of `y`.

  Args:
    y: Rows, bfloat16 or float32; those of nobody are not used.  A value of the others that is not
      finite reaches any tokens of its tile and later ones.
    pairs: Flat pair of each row, as of `moe_dispatch.Plan`.
    group_sizes: Rows of each expert.
    tokens: T.
    choices: K.
    interpret: Run the kernel in the Pallas interpreter, on any device.

  Raises:
    ValueError: `y` has another type, or see `word_lists.make`.
  """
  per_word = row_copies.rows_in_word(y.dtype)
  width = y.shape[1]
  y = row_copies.whole(y)
  pairs = jnp.pad(pairs, (0, y.shape[0] - pairs.shape[0]))
  lists = word_lists.make(pairs, group_sizes, tokens=tokens, choices=choices, per_word=per_word)
  return sum_listed(y, lists, tokens=tokens, interpret=interpret)[:, :width]


def sum_listed(
  y: Float[Array, "M N"],
  lists: word_lists.WordLists,
  *,
  tokens: int,
  even: int = 0,
  interpret: bool = False,
) -> Float[Array, "T N"]:
  """`sum_rows` of whole tiles of memory, with lists that were made before.

  Args:
    y: Rows; a multiple of eight words of them, and of 128 columns.
    lists: From `word_lists.make`.
    tokens: T.
    even: For static profiles, which cannot follow data: words of each tile, one visit each.
    interpret: As of `sum_rows`.
  """
  tokens_of = word_lists.TILES * word_lists.TOKENS
  strips = -(-tokens // tokens_of)
  per_word, wide = row_copies.rows_in_word(y.dtype), y.shape[1]
  listed = (1, 1, word_lists.TILES * word_lists.WORDS)
  flat = lambda a: a.reshape(-1, *listed[1:])
  words = flat(row_copies.first_pieces(lists.words, y.dtype, wide))
  scalars = lambda index: pl.BlockSpec(listed, index, memory_space=pltpu.SMEM)
  return pl.pallas_call(
    functools.partial(_kernel, even=even, interpret=interpret),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      # Few visits in practice, and an idle one costs as much as ten copies.
      grid=(strips if even else lists.visits[0],),
      in_specs=[
        scalars(lambda v, *_: (0, 0, 0)),
        scalars(lambda v, *_: (jnp.minimum(v + 1, words.shape[0] - 1), 0, 0)),
        pl.BlockSpec(listed, lambda v, *_: (v, 0, 0)),
        pl.BlockSpec(memory_space=pl.ANY),
      ],
      out_specs=pl.BlockSpec(
        (tokens_of, wide), lambda v, strips, *_: (v if even else strips[v], 0)
      ),
      scratch_shapes=[
        pltpu.VMEM(
          (2, word_lists.TILES, *row_copies.buffer_shape(word_lists.WORDS, wide)),
          row_copies.word_type(y.dtype),
        ),
        pltpu.VMEM((tokens_of, wide), jnp.float32),
        pltpu.SemaphoreType.DMA((2,)),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct((tokens, wide), y.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",),
      vmem_limit_bytes=row_copies.vmem_limit(even),
      **row_copies.UNCHECKED,
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * strips * tokens_of * word_lists.WORDS * per_word * wide,
      bytes_accessed=(y.size // 2 + tokens * wide) * y.dtype.itemsize,
      transcendentals=0,
    ),
    interpret=interpret,
    name="moe_unsort",
  )(lists.strips, lists.counts, lists.unclean, words, words, flat(lists.places),
    row_copies.pieces(y, interpret))  # fmt: skip
