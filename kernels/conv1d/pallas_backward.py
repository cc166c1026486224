"""Pallas TPU kernel of the causal convolution with SiLU, backward, from the inputs alone.

With h half the sum of taps, t = tanh h and u = 1 + t:  2 silu' = u (1 + h (1 - t)).  Everything
is done on twice the gradient of the sum: the filter comes halved, and the filter's gradient is
halved outside.  Chunks run from last to first, so that the gradients of the tokens after a chunk
are there when its inputs' gradient needs them; those after the tile are computed first.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.base import words as words_lib
from kernels.conv1d import pallas_forward, tiling
from kernels.conv1d import taps as taps_lib


def _twice_gradient(h, d_out):
  tanh = jnp.tanh(h)
  return d_out * ((1.0 + tanh) * (1.0 + h * (1.0 - tanh)))


def _sublane_sum(x):
  """[rows, C] -> [8, C], adding whole registers."""
  return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0)


def _kernel(
  full_ref, bits_ref, next_bits_ref, window_ref, before_ref, x_ref, after_ref, dy_ref, dy_after_ref,
  kernel_ref, dx_ref, dw_ref, dbefore_ref, inputs_ref, d_ref, masks_ref, *, taps, tiles, interpret
):  # fmt: skip
  row, tile, channel = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  parts = words_lib.parts_of(x_ref.dtype)
  halo = step = tiling.HALO // parts
  kernel = kernel_ref[...]
  chunks, words = tiles.tokens // tiles.chunk, tiles.tokens // parts
  indices, stride = range(parts), words + halo

  @pl.when((row == 0) & (tile == 0))
  def _():
    dw_ref[channel] = jnp.zeros(dw_ref.shape[1:], jnp.float32)

  before = words_lib.from_rows(jnp.where(tile == 0, window_ref[0], before_ref[0]))
  taps_lib.write(inputs_ref, 0, before, parts)
  # The last inputs of this tile are taps of the tokens after it.
  tail = words_lib.from_rows(x_ref[0, tiles.tokens - tiling.HALO :])
  taps_lib.write(inputs_ref, words, tail, parts)
  taps_lib.write(inputs_ref, words + halo, words_lib.from_rows(after_ref[0]), parts)

  def gradient(at, d_words, mask):
    """Writes twice the gradient of the sums of `step` words; returns it and the inputs."""
    earlier = taps_lib.Earlier(inputs_ref, halo + at, step, parts)
    sums, inputs = pallas_forward.half_sums(earlier, kernel, mask, taps)
    result = []
    for i in indices:
      d_bits = words_lib.part(d_words, parts, i)
      if mask is not None:  # What lies behind the row, or is padding, may hold anything.
        d_bits = d_bits & mask(i, 0)
      result.append(_twice_gradient(sums[i], words_lib.as_float(d_bits)))
      d_ref[pl.ds(i * stride + at, step)] = result[i]
    return result, inputs

  def write_before(at, may_be_first):
    """Writes the words before word `at`; a step reads its own, written by the step after it."""
    source = jnp.maximum(at - step, 0) if may_be_first else at - step
    words = words_lib.load(x_ref.at[0], pl.multiple_of(source, step), step, interpret)
    if may_be_first:
      words = jnp.where(at == 0, before, words)
    taps_lib.write(inputs_ref, at + halo - step, words, parts)

  masks = lambda i, d, at, first: masks_ref[first + i * taps + d, at : at + step]
  taps_lib.write_masks(masks_ref, next_bits_ref[0, 0], 0, taps)
  gradient(words, words_lib.from_rows(dy_after_ref[0]), lambda i, d: masks(i, d, 0, 0))

  def run(start, count, masked):
    sums = [jnp.zeros((8, kernel.shape[1]), jnp.float32) for _ in range(taps)]
    for offset in reversed(range(0, count, step)):
      at = pl.multiple_of(start + offset, step)
      write_before(at, offset == 0)
      mask = (lambda i, d, offset=offset: masks(i, d, offset, 0)) if masked else None
      d_total, inputs = gradient(at, words_lib.load(dy_ref.at[0], at, step, interpret), mask)
      d_inputs = []
      for i in indices:
        total = None
        for distance in range(taps):
          back, other = taps_lib.source(parts, i, -distance)
          d = d_ref[pl.ds(other * stride + at - back, step)] if distance else d_total[i]
          if masked:
            reach = masks(i, distance, offset, parts * taps)
            d = words_lib.as_float(jax.lax.bitcast_convert_type(d, jnp.int32) & reach)
          term = d * kernel[taps - 1 - distance : taps - distance]
          total = term if total is None else total + term
        d_inputs.append(total)
      words_lib.store(dx_ref.at[0], at, d_inputs, interpret)
      for distance in range(taps):
        for i in indices:
          sums[distance] += _sublane_sum(d_total[i] * inputs[i][distance])
    for distance in range(taps):
      tap = taps - 1 - distance
      dw_ref[channel, 8 * tap : 8 * tap + 8] += sums[distance]

  def masked_part(start):
    count = tiles.masked_chunk // parts
    bits = bits_ref[0, 0, :, pl.ds(start, count)]
    taps_lib.write_masks(masks_ref, bits, 0, taps)
    taps_lib.write_masks(masks_ref, bits, tiling.REACH, taps, parts * taps)
    run(start, count, True)

  def chunk(i):
    i = chunks - 1 - i
    count, small = tiles.chunk // parts, tiles.masked_chunk // parts
    start, pieces = i * count, tiles.chunk // tiles.masked_chunk
    tiling.either(
      full_ref[row, tile * chunks + i] == 1,
      lambda: run(start, count, False),
      lambda: tiling.loop(pieces, lambda j: masked_part(start + (pieces - 1 - j) * small)),
    )

  tiling.loop(chunks, chunk)

  @pl.when(tile == 0)
  def _():
    # A row at -back is read by the tokens 0 ... taps - 1 - back.
    for back in range(1, taps):
      total = jnp.zeros((1, kernel.shape[1]), jnp.float32)
      for token in range(taps - back):
        i, index = token % parts, token // parts
        used = (bits_ref[0, 0, i, index : index + 1] & (1 << (token + back))) != 0
        tap = taps - 1 - back - token
        term = d_ref[i * stride + index : i * stride + index + 1] * kernel[tap : tap + 1]
        total += jnp.where(used, term, 0.0)
      dbefore_ref[0, taps - 1 - back : taps - back] = total


def backward(
  x: Float[Array, "B S C"],
  kernel: Float[Array, "taps C"],
  bits: Int[Array, "B S"],
  window: Float[Array, "B taps-1 C"],
  dy: Float[Array, "B S C"],
  *,
  tiles: tiling.Tiles,
  interpret: bool,
) -> tuple[Float[Array, "B S C"], Float[Array, "taps C"], Float[Array, "B taps-1 C"]]:
  """Gradients of inputs, kernel (float32) and window (float32), from the inputs alone.

  Args:
    x: Inputs of the forward pass.
    kernel: Filters.
    bits: From `tiling.tap_bits`.
    window: Inputs before the row.
    dy: Gradient of the outputs; ignored on padding.
    tiles: Tile sizes.
    interpret: Runs the kernel's body without a TPU.
  """
  batch, length, channels = x.shape
  taps, parts = kernel.shape[0], words_lib.parts_of(x.dtype)
  tiles, width = tiles.fit(length), tiling.lane_width(channels)
  per_tile, count = tiles.tokens // tiling.HALO, channels // width
  tiled = tiling.tile_bits(bits, tiles.tokens, parts)
  halo_bits = tiling.tile_bits(bits, tiling.HALO, parts)
  last = halo_bits.shape[1] - 1
  # The last tile has no rows after it: their bits are zero.
  halo_bits = jnp.pad(halo_bits, ((0, 0), (0, 1), (0, 0), (0, 0), (0, 0)))
  halo = lambda index: pl.BlockSpec((1, tiling.HALO, width), index)
  next_rows = halo(lambda b, i, c, _: (b, jnp.minimum((i + 1) * per_tile, last), c))
  main = pl.BlockSpec((1, tiles.tokens, width), lambda b, i, c, _: (b, i, c))
  masked_rows = max(tiles.masked_chunk, tiling.HALO) // parts
  dx, dw, dbefore = pl.pallas_call(
    functools.partial(_kernel, taps=taps, tiles=tiles, interpret=interpret),
    out_shape=(
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      jax.ShapeDtypeStruct((count, 8 * taps, width), jnp.float32),
      jax.ShapeDtypeStruct((batch, taps - 1, channels), jnp.float32),
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(batch, tiled.shape[1], count),
      in_specs=[
        pl.BlockSpec((1, 1, *tiled.shape[2:]), lambda b, i, c, _: (b, i, 0, 0, 0)),
        pl.BlockSpec(
          (1, 1, *halo_bits.shape[2:]),
          lambda b, i, c, _: (b, jnp.minimum((i + 1) * per_tile, last + 1), 0, 0, 0),
        ),
        halo(lambda b, i, c, _: (b, 0, c)),
        halo(lambda b, i, c, _: (b, jnp.maximum(i * per_tile - 1, 0), c)),
        main,
        next_rows,
        main,
        next_rows,
        pl.BlockSpec((taps, width), lambda b, i, c, _: (0, c)),
      ],
      out_specs=(
        main,
        pl.BlockSpec((count, 8 * taps, width), lambda b, i, c, _: (0, 0, 0)),
        # Written by the first tile only; the index stays put until the row's channels move on.
        pl.BlockSpec(
          (1, taps - 1, width), lambda b, i, c, _: (b, 0, jnp.where(i == 0, c, count - 1))
        ),
      ),
      scratch_shapes=[
        pltpu.VMEM((tiles.tokens + 2 * tiling.HALO, width), jnp.int32),
        pltpu.VMEM((tiles.tokens + tiling.HALO, width), jnp.float32),
        pltpu.VMEM((2 * parts * taps, masked_rows, width), jnp.int32),
      ],
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
    cost_estimate=pl.CostEstimate(
      flops=6 * taps * x.size, transcendentals=x.size, bytes_accessed=3 * x.nbytes
    ),
    interpret=interpret,
    name="causal_conv1d_silu_backward",
  )(
    tiling.full_chunks(bits, tiles, taps, reach=True),
    tiled,
    halo_bits,
    tiling.window_rows(window, x.dtype),
    x,
    x,
    x,
    dy,
    dy,
    0.5 * kernel.astype(jnp.float32),
  )
  dw = 0.5 * jnp.sum(dw.reshape(-1, taps, 8, width), axis=2)
  return dx, dw.swapaxes(0, 1).reshape(taps, channels), dbefore
