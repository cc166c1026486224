"""Pallas TPU kernel of the dispatch: tokens copied to the rows of the experts' buffer.

Each row of a tile is one copy from HBM, of the word row (two bfloat16 tokens) that holds its token;
the next tile's copies run while of this one's words the wanted halves are taken.  Tiles that no
expert owns read nothing.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.moe_dispatch import row_copies

ROWS = 256  # of a tile
_STEP = 64  # rows taken at a time, whose masks stay in registers


def _kernel(total, first_ref, next_ref, token_ref, x_ref, out_ref, buffer, semaphores, *, even):
  tile, last = pl.program_id(0), pl.num_programs(0) - 1
  slot = lax.rem(tile, 2)
  words_ref = row_copies.as_words(x_ref)
  per_word = row_copies.rows_in_word(x_ref.dtype)
  held = lambda t: ROWS if even else jnp.clip(total[0] - t * ROWS, 0, ROWS)

  def start(t, slot, index_ref):
    target = buffer.at[slot], semaphores.at[slot]
    row_copies.start(words_ref, index_ref.at[0, 0], held(t), *target)

  @pl.when(tile == 0)
  def _():
    start(0, 0, first_ref)

  @pl.when(tile < last)
  def _():
    start(tile + 1, 1 - slot, next_ref)

  count = held(tile)
  row_copies.wait(count, buffer.at[slot], semaphores.at[slot])

  @pl.when(count > 0)
  def _():
    width = out_ref.shape[1]
    words = buffer.at[slot].reshape(ROWS, width)
    live = lax.broadcasted_iota(jnp.int32, (ROWS, 128), 0) < count
    if per_word == 2:
      # The lower half's bits go to the upper half, where bfloat16 is a float32 of zero low bits.
      odd = row_copies.columns(token_ref[0] & 1) > 0
      shift, keep = jnp.where(odd, 0, 16), jnp.where(live, -0x10000, 0)
      shift, keep = shift.astype(jnp.uint32), keep.astype(jnp.uint32)
    for row in range(0, ROWS, _STEP):
      rows = slice(row, row + _STEP)
      for at in range(0, width, 128):
        columns = slice(at, at + 128)
        if per_word == 2:
          taken = (words[rows, columns] << shift[rows]) & keep[rows]
          taken = lax.bitcast_convert_type(taken, jnp.float32)
        else:
          taken = jnp.where(live[rows], words[rows, columns], 0.0)
        out_ref[rows, columns] = taken.astype(out_ref.dtype)

  @pl.when(count == 0)
  def _():
    out_ref[...] = jnp.zeros_like(out_ref)


@functools.partial(jax.jit, static_argnames=("even", "interpret"))
def take(
  x: Float[Array, "T N"],
  tokens: Int[Array, " M"],
  total: Int[Array, ""],
  *,
  even: bool = False,
  interpret: bool = False,
) -> Float[Array, "M N"]:
  """The token of each row; zero from row `total` on.

  Args:
    x: Tokens, bfloat16 or float32.
    tokens: Token of each row; legal in every row.
    total: Rows that are somebody's.
    even: For static profiles, which cannot follow data: all rows are.
    interpret: Run the kernel in the Pallas interpreter, on any device.

  Raises:
    ValueError: `x` has another type.
  """
  rows, width = tokens.shape[0], x.shape[1]
  x = row_copies.whole(x)
  wide, tiles = x.shape[1], -(-rows // ROWS)
  tokens = jnp.pad(tokens, (0, tiles * ROWS - rows)).reshape(tiles, 1, ROWS)
  words = tokens // row_copies.rows_in_word(x.dtype)
  listed = (1, 1, ROWS)
  scalars = lambda index: pl.BlockSpec(listed, index, memory_space=pltpu.SMEM)
  out = pl.pallas_call(
    functools.partial(_kernel, even=even),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(tiles,),
      in_specs=[
        scalars(lambda t, *_: (0, 0, 0)),
        scalars(lambda t, *_: (jnp.minimum(t + 1, tiles - 1), 0, 0)),
        pl.BlockSpec(listed, lambda t, *_: (t, 0, 0)),
        pl.BlockSpec(memory_space=pl.ANY),
      ],
      out_specs=pl.BlockSpec((ROWS, wide), lambda t, *_: (t, 0)),
      scratch_shapes=[
        pltpu.VMEM(
          (2, ROWS // row_copies.COPIES, row_copies.COPIES, wide), row_copies.word_type(x.dtype)
        ),
        pltpu.SemaphoreType.DMA((2,)),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct((rows, wide), x.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",),
      vmem_limit_bytes=row_copies.vmem_limit(even),
      **row_copies.UNCHECKED,
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * tiles * ROWS * ROWS * 128,
      # At worst every row reads a whole row of words.
      bytes_accessed=rows * wide * (4 + x.dtype.itemsize),
      transcendentals=0,
    ),
    interpret=interpret,
    name="moe_gather",
  )(jnp.reshape(total, (1,)).astype(jnp.int32), words, words, tokens, x)
  return out[:, :width]
