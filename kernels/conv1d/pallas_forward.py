"""Pallas TPU kernel of the causal convolution with SiLU, forward.

Tokens lie on sublanes and channels on lanes, as the projection wrote them; see `taps` for how a
tap is read.  Segments reach the kernel as bits per token (`tiling.tap_bits`); a chunk whose bits
are all set runs without masks.  The filter comes halved: with h half the sum, silu = h + h tanh h.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.base import words as words_lib
from kernels.conv1d import taps as taps_lib
from kernels.conv1d import tiling


def half_sums(earlier: taps_lib.Earlier, half_kernel, mask, taps: int):
  """Half the sum of taps of each part, and the inputs [part][distance] it was made of.

  Args:
    earlier: Inputs of the rows.
    half_kernel: Half the filter.
    mask: (part, distance) -> int32 mask, or None.
    taps: Taps of the filter.
  """
  sums, inputs = [], []
  for index in range(earlier.parts):
    bits = [earlier.bits(index, distance) for distance in range(taps)]
    if mask is not None:
      bits = [b & mask(index, distance) for distance, b in enumerate(bits)]
    values = [words_lib.as_float(b) for b in bits]
    total = values[0] * half_kernel[taps - 1 : taps]
    for distance in range(1, taps):
      total += values[distance] * half_kernel[taps - 1 - distance : taps - distance]
    sums.append(total)
    inputs.append(values)
  return sums, inputs


def for_each_step(start, count: int, step: int, body) -> None:
  """body(word to begin at, offset in the chunk) in straight-line code, one register at a time."""
  for offset in range(0, count, step):
    body(start + offset, offset)


def _kernel(
  full_ref, bits_ref, window_ref, before_ref, x_ref, kernel_ref, y_ref, inputs_ref, masks_ref,
  *, taps, tiles, interpret
):  # fmt: skip
  row, tile = pl.program_id(0), pl.program_id(1)
  parts = words_lib.parts_of(x_ref.dtype)
  halo, step = tiling.HALO // parts, tiling.HALO // parts
  kernel = kernel_ref[...]
  chunks = tiles.tokens // tiles.chunk
  before = words_lib.from_rows(jnp.where(tile == 0, window_ref[0], before_ref[0]))
  taps_lib.write(inputs_ref, 0, before, parts)

  def run(start, count, mask):
    def one(at, offset):
      at = pl.multiple_of(at, step)
      words = words_lib.load(x_ref.at[0], at, step, interpret)
      bits = taps_lib.write(inputs_ref, halo + at, words, parts)
      earlier = taps_lib.Earlier(inputs_ref, halo + at, step, parts, bits)
      own = mask and (lambda *which: mask(*which, offset, step))
      sums, _ = half_sums(earlier, kernel, own, taps)
      words_lib.store(y_ref.at[0], at, [h + h * jnp.tanh(h) for h in sums], interpret)

    for_each_step(start, count, step, one)

  def masked_part(start):
    count = tiles.masked_chunk // parts
    taps_lib.write_masks(masks_ref, bits_ref[0, 0, :, pl.ds(start, count)], 0, taps)
    run(start, count, lambda i, d, at, size: masks_ref[i * taps + d, at : at + size])

  def chunk(i):
    count, small = tiles.chunk // parts, tiles.masked_chunk // parts
    start = i * count
    tiling.either(
      full_ref[row, tile * chunks + i] == 1,
      lambda: run(start, count, None),
      lambda: tiling.loop(count // small, lambda j: masked_part(start + j * small)),
    )

  tiling.loop(chunks, chunk)


def forward(
  x: Float[Array, "B S C"],
  kernel: Float[Array, "taps C"],
  bits: Int[Array, "B S"],
  window: Float[Array, "B taps-1 C"],
  *,
  tiles: tiling.Tiles,
  interpret: bool,
) -> Float[Array, "B S C"]:
  """silu(convolution); see `conv1d.causal_conv1d_silu`.

  Args:
    x: Inputs.
    kernel: One filter per channel, 2 to 8 taps.
    bits: From `tiling.tap_bits`.
    window: Inputs before the row.
    tiles: Tile sizes.
    interpret: Runs the kernel's body without a TPU.
  """
  batch, length, channels = x.shape
  taps, parts = kernel.shape[0], words_lib.parts_of(x.dtype)
  tiles, width = tiles.fit(length), tiling.lane_width(channels)
  per_tile = tiles.tokens // tiling.HALO
  tiled = tiling.tile_bits(bits, tiles.tokens, parts)
  return pl.pallas_call(
    functools.partial(_kernel, taps=taps, tiles=tiles, interpret=interpret),
    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(batch, tiled.shape[1], channels // width),
      in_specs=[
        pl.BlockSpec((1, 1, *tiled.shape[2:]), lambda b, i, c, _: (b, i, 0, 0, 0)),
        pl.BlockSpec((1, tiling.HALO, width), lambda b, i, c, _: (b, 0, c)),
        pl.BlockSpec(
          (1, tiling.HALO, width), lambda b, i, c, _: (b, jnp.maximum(i * per_tile - 1, 0), c)
        ),
        pl.BlockSpec((1, tiles.tokens, width), lambda b, i, c, _: (b, i, c)),
        pl.BlockSpec((taps, width), lambda b, i, c, _: (0, c)),
      ],
      out_specs=pl.BlockSpec((1, tiles.tokens, width), lambda b, i, c, _: (b, i, c)),
      scratch_shapes=[
        pltpu.VMEM((tiles.tokens + tiling.HALO, width), jnp.int32),
        pltpu.VMEM((parts * taps, tiles.masked_chunk // parts, width), jnp.int32),
      ],
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
    cost_estimate=pl.CostEstimate(
      flops=2 * taps * x.size, transcendentals=x.size, bytes_accessed=2 * x.nbytes
    ),
    interpret=interpret,
    name="causal_conv1d_silu",
  )(
    tiling.full_chunks(bits, tiles, taps, reach=False),
    tiled,
    tiling.window_rows(window, x.dtype),
    x,
    x,
    0.5 * kernel.astype(jnp.float32),
  )
