"""Pallas TPU kernel of the dispatch: tokens copied to the rows of the experts' buffer.

A row of bfloat16 shares its 32-bit words with the row beside it and cannot be copied alone, so tokens
come with the words of one row made of its left and its right half (`to_words`).  Each row of a tile
is one copy from HBM; the next tile's copies run while this one's words are taken apart.  Tiles that
no expert owns read nothing.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from kernels.fp8 import fp8
from kernels.moe_dispatch import row_copies

ROWS = 256  # of a tile
_STEP = 64  # rows taken at a time


def to_words(x: Float[Array, "T N"]) -> Shaped[Array, "T W"]:
  """Tokens as words of 32 bits: column c of bfloat16 below, column c + N / 2 above; float32 as it is.

  Columns of zeros are appended where N is not in whole tiles of memory.

  Raises:
    ValueError: `x` has another type.
  """
  return _joined(*_halves(x, x.dtype))


def dequantised_words(q: fp8.Quantised, dtype) -> Shaped[Array, "T W"]:
  """`to_words` of rounded tokens in `dtype`.

  The halves are dequantised apart: XLA would keep a whole that is used twice.
  """
  parts = _halves(q.values, dtype)
  return _joined(*(fp8.dequantise(fp8.Quantised(part, q.scale), dtype) for part in parts))


def _halves(x, dtype):
  """Left and right columns of tokens of bfloat16, or all of them where `dtype` is float32."""
  parts = row_copies.rows_in_word(jnp.dtype(dtype))
  x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (128 * parts))))
  return jnp.split(x, parts, axis=1)


def _joined(low, high=None):
  if high is None:
    return low
  low, high = (lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (low, high))
  return low | high << 16


def from_words(words: Shaped[Array, "T W"], width: int, dtype) -> Float[Array, "T N"]:
  """What `to_words` was given."""
  if words.dtype != jnp.uint32:
    return words[:, :width]
  bits = jnp.concatenate([words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)], axis=1)
  return lax.bitcast_convert_type(bits, dtype)[:, :width]


def _kernel(total, first_ref, next_ref, words_ref, out_ref, buffer, semaphores, *, even, interpret):
  tile, last = pl.program_id(0), pl.num_programs(0) - 1
  slot = lax.rem(tile, 2)
  held = lambda t: ROWS if even else jnp.clip(total[0] - t * ROWS, 0, ROWS)

  def start(t, slot, index_ref):
    target = buffer.at[slot], semaphores.at[slot]
    row_copies.start(words_ref, 8, index_ref.at[0, 0], held(t), *target, interpret)

  @pl.when(tile == 0)
  def _():
    start(0, 0, first_ref)

  @pl.when(tile < last)
  def _():
    start(tile + 1, 1 - slot, next_ref)

  count = held(tile)
  row_copies.wait(count, buffer.at[slot], semaphores.at[slot])

  def take(whole):
    half = buffer.shape[2] * 128
    for row in range(0, ROWS, _STEP):
      rows = slice(row, row + _STEP)
      live = row + lax.broadcasted_iota(jnp.int32, (_STEP, 128), 0) < count
      for at in range(0, half, 128):
        words = row_copies.read(buffer.at[slot], rows, at)
        if not whole:
          words = jnp.where(live, words, jnp.zeros_like(words))
        if buffer.dtype == out_ref.dtype:
          out_ref[rows, at : at + 128] = words
          continue
        for part, place in ((words, at), (words >> 16, half + at)):
          bits = part.astype(jnp.uint16)
          out_ref[rows, place : place + 128] = lax.bitcast_convert_type(bits, out_ref.dtype)

  @pl.when(count == ROWS)
  def _():
    take(True)

  @pl.when((count > 0) & (count < ROWS))
  def _():
    take(False)

  @pl.when(count == 0)
  def _():
    out_ref[...] = jnp.zeros_like(out_ref)


@functools.partial(jax.jit, static_argnames=("width", "dtype", "even", "interpret"))
def take_words(
  words: Shaped[Array, "T W"],
  tokens: Int[Array, " M"],
  total: Int[Array, ""],
  *,
  width: int,
  dtype,
  even: bool = False,
  interpret: bool = False,
) -> Float[Array, "M N"]:
  """The token of each row; zero from row `total` on.

  Args:
    words: Tokens, from `to_words`.
    tokens: Token of each row; legal in every row.
    total: Rows that are somebody's.
    width: N.
    dtype: Of the tokens, bfloat16 or float32.
    even: For static profiles, which cannot follow data: all rows are.
    interpret: Run the kernel in the Pallas interpreter, on any device.
  """
  rows, columns, dtype = tokens.shape[0], words.shape[1], jnp.dtype(dtype)
  words = jnp.pad(words, ((0, -words.shape[0] % 8), (0, 0)))
  wide, tiles = columns * row_copies.rows_in_word(dtype), -(-rows // ROWS)
  tokens = jnp.pad(tokens, (0, tiles * ROWS - rows)).reshape(tiles, 1, ROWS)
  first = row_copies.first_pieces(tokens, words.dtype, columns)
  listed = (1, 1, ROWS)
  scalars = lambda index: pl.BlockSpec(listed, index, memory_space=pltpu.SMEM)
  out = pl.pallas_call(
    functools.partial(_kernel, even=even, interpret=interpret),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(tiles,),
      in_specs=[
        scalars(lambda t, *_: (0, 0, 0)),
        scalars(lambda t, *_: (jnp.minimum(t + 1, tiles - 1), 0, 0)),
        pl.BlockSpec(memory_space=pl.ANY),
      ],
      out_specs=pl.BlockSpec((ROWS, wide), lambda t, *_: (t, 0)),
      scratch_shapes=[
        pltpu.VMEM((2, *row_copies.buffer_shape(ROWS, columns)), words.dtype),
        pltpu.SemaphoreType.DMA((2,)),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct((rows, wide), dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",),
      vmem_limit_bytes=row_copies.vmem_limit(even),
      **row_copies.UNCHECKED,
    ),
    cost_estimate=pl.CostEstimate(
      flops=0, bytes_accessed=2 * rows * columns * 4, transcendentals=0
    ),
    interpret=interpret,
    name="moe_gather",
  )(jnp.reshape(total, (1,)).astype(jnp.int32), first, first, row_copies.pieces(words, interpret))
  return out[:, :width]
