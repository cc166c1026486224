"""Pallas TPU kernels of the causal convolution with SiLU, forward and backward.

Tokens lie on sublanes and channels on lanes, as the projection wrote them.  A tap is a roll along
the sublanes of the tile extended by the rows before it (and, backward, after it).  bfloat16 rows
are read as 32-bit words of two tokens: the even and the odd tokens then are separate float32
arrays of half the length, and one roll of the words serves two taps.

Which taps a token may use is one int32 of bits per token (see `tap_bits`), so the kernels know
nothing of segments; a tile whose bits are all set takes a path without masks.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

# Rows of the neighbouring tiles that a tile reads: one bfloat16 sublane tile.
_HALO = 16
_LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Tile sizes of the kernels.

  Attributes:
    tokens: Tokens per tile, a multiple of 16.
    channels: Channels per tile, a multiple of 128 or all of them.
  """

  tokens: int = 512
  channels: int = 512

  def __post_init__(self):
    if self.tokens < _HALO or self.tokens % _HALO:
      raise ValueError(f"tokens={self.tokens}: want a positive multiple of {_HALO}")
    if self.channels < 1:
      raise ValueError(f"channels={self.channels}: want a positive number")

  def fit(self, length: int, channels: int) -> tuple[int, int]:
    """Tile of an array: no longer than the row, and channels that divide."""
    tokens = min(self.tokens, -(-length // _HALO) * _HALO)
    lanes = min(self.channels, channels)
    while channels % lanes or (lanes % 128 and lanes != channels):
      lanes -= 1
      if lanes < 1:
        return tokens, channels
    return tokens, lanes


def tap_bits(
  segment_ids: Int[Array, "B S"], window_segment: Int[Array, " B"], taps: int
) -> Int[Array, "B S"]:
  """Bit j is set where tap j of a token reads a token of the same segment; padding has none."""
  before = jnp.broadcast_to(window_segment[:, None], (segment_ids.shape[0], taps - 1))
  owner = jnp.concatenate([before.astype(segment_ids.dtype), segment_ids], axis=1)
  length = segment_ids.shape[1]
  bits = jnp.zeros(segment_ids.shape, jnp.int32)
  for tap in range(taps):
    same = (owner[:, tap : tap + length] == segment_ids) & (segment_ids > 0)
    bits |= same.astype(jnp.int32) << tap
  return bits


def _full_tiles(bits, tokens, taps, ahead):
  """1 for tiles whose tokens, and `ahead` tokens after them, may use every tap."""
  length = bits.shape[1]
  full = jnp.pad((bits == (1 << taps) - 1), ((0, 0), (0, -length % tokens)))
  tiles = jnp.all(full.reshape(full.shape[0], -1, tokens), axis=-1)
  if ahead:
    first = jnp.all(full.reshape(full.shape[0], -1, tokens)[:, :, :ahead], axis=-1)
    # After the row there is nothing: the last tile always masks what lies behind it.
    tiles &= jnp.concatenate([first[:, 1:], jnp.zeros_like(first[:, :1])], axis=1)
  return tiles.astype(jnp.int32)


def _silu(x):
  half = 0.5 * x
  return half + half * jnp.tanh(half)


def _words(x):
  """Even and odd rows of a bfloat16 array as words, ready for `_even` and `_odd`."""
  return pltpu.bitcast(x, jnp.uint32)


def _even(words):
  return lax.bitcast_convert_type(words << 16, jnp.float32)


def _odd(words):
  return lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)


def _join(even, odd, interpret):
  """Rounds to bfloat16 and interleaves the rows again."""
  if interpret:  # The packing instruction exists on the TPU only.
    rows = jnp.stack([even, odd], axis=1).reshape(2 * even.shape[0], even.shape[1])
    return rows.astype(jnp.bfloat16)
  packed = pltpu.pack_elementwise([even, odd], packed_dtype=jnp.bfloat16)
  return pltpu.bitcast(packed, jnp.bfloat16)


def _earlier(ext, taps):
  """Rows t - (taps - 1) ... t for the rows t after the halo, as (even, odd) pairs or singles.

  Returns a list over taps of tuples of float32 arrays: one array of all rows for float32 inputs,
  (even rows, odd rows) for bfloat16.
  """
  if ext.dtype != jnp.bfloat16:
    wide = ext.astype(jnp.float32)
    return [
      ((pltpu.roll(wide, taps - 1 - tap, 0) if tap < taps - 1 else wide)[_HALO:],)
      for tap in range(taps)
    ]
  words = _words(ext)
  shifted = [words[_HALO // 2 :]]
  for back in range(1, taps // 2 + 1):
    shifted.append(pltpu.roll(words, back, 0)[_HALO // 2 :])
  # Row r = 2 i + parity of the result reads row r - d: word i - back, of either parity.
  result = []
  for tap in range(taps):
    distance = taps - 1 - tap
    pair = []
    for parity in (0, 1):
      back, other = (distance - parity + 1) // 2, (parity - distance) % 2
      pair.append((_odd if other else _even)(shifted[back]))
    result.append(tuple(pair))
  return result


def _parts(x):
  """A tile as float32 parts: (all,) or (even rows, odd rows)."""
  if x.dtype != jnp.bfloat16:
    return (x.astype(jnp.float32),)
  words = _words(x)
  return _even(words), _odd(words)


def _bit_parts(bits, packed):
  """Splits the bits' rows as `_parts` does; bits are [2, rows / 2, 1] when packed."""
  return (bits[0], bits[1]) if packed else (bits[0],)


def _keep(bits, tap, value):
  return jnp.where((bits & (1 << tap)) != 0, value, 0.0)


def _pre_activation(ext, kernel, bits, taps, masked):
  """Sum over the taps for the rows after the halo, and the masked inputs of each tap."""
  inputs = _earlier(ext, taps)
  if masked:
    parts = range(len(inputs[0]))
    inputs = [tuple(_keep(bits[p], tap, inputs[tap][p]) for p in parts) for tap in range(taps)]
  totals = []
  for part in range(len(inputs[0])):
    total = inputs[0][part] * kernel[0:1]
    for tap in range(1, taps):
      total += inputs[tap][part] * kernel[tap : tap + 1]
    totals.append(total)
  return totals, inputs


def _store(ref, at, parts, interpret):
  ref[0, :, at] = (
    parts[0].astype(ref.dtype) if len(parts) == 1 else _join(parts[0], parts[1], interpret)
  )


def _extended(x_ref, before_ref, window_ref, tile, at):
  before = jnp.where(tile == 0, window_ref[0, :, at], before_ref[0, :, at])
  return jnp.concatenate([before, x_ref[0, :, at]], axis=0)


def _for_each_lane_tile(lanes, body):
  """Runs `body(slice)` over lane tiles: a loop keeps the program short and registers few."""
  size = _LANES if lanes % _LANES == 0 else lanes

  def step(i, carry):
    body(pl.ds(pl.multiple_of(i * size, size), size))
    return carry

  lax.fori_loop(0, lanes // size, step, 0)


def _forward_kernel(
  full_ref, bits_ref, window_ref, before_ref, x_ref, kernel_ref, y_ref, *, taps, interpret
):
  row, tile = pl.program_id(0), pl.program_id(1)
  packed = x_ref.dtype == jnp.bfloat16

  def run(masked):
    bits = _bit_parts(bits_ref[0, 0], packed) if masked else None

    def lane_tile(at):
      ext = _extended(x_ref, before_ref, window_ref, tile, at)
      totals, _ = _pre_activation(ext, kernel_ref[:, at], bits, taps, masked)
      _store(y_ref, at, [_silu(total) for total in totals], interpret)

    _for_each_lane_tile(y_ref.shape[2], lane_tile)

  full = full_ref[row, tile] == 1
  pl.when(full)(functools.partial(run, False))
  pl.when(jnp.logical_not(full))(functools.partial(run, True))


def _tile_bits(bits, tokens, packed):
  """[B, S] -> [B, tiles, parts, rows, 1]: per tile, even rows then odd rows when packed."""
  bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % tokens)))
  bits = bits.reshape(bits.shape[0], -1, tokens)
  if packed:
    bits = bits.reshape(*bits.shape[:2], tokens // 2, 2).swapaxes(-1, -2)
  else:
    bits = bits[:, :, None]
  return bits[..., None]


def _window_rows(window, dtype):
  return jnp.pad(window.astype(dtype), ((0, 0), (_HALO - window.shape[1], 0), (0, 0)))


def _params():
  return pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3)


def forward(
  x: Float[Array, "B S C"],
  kernel: Float[Array, "taps C"],
  bits: Int[Array, "B S"],
  window: Float[Array, "B taps-1 C"],
  *,
  tiles: Tiles,
  interpret: bool,
) -> Float[Array, "B S C"]:
  """silu(convolution); see `conv1d.causal_conv1d_silu`.

  Args:
    x: Inputs.
    kernel: One filter per channel, up to 5 taps.
    bits: From `tap_bits`.
    window: Inputs before the row.
    tiles: Tile sizes.
    interpret: Runs the kernel's body without a TPU.
  """
  batch, length, channels = x.shape
  taps = kernel.shape[0]
  tokens, lanes = tiles.fit(length, channels)
  packed = x.dtype == jnp.bfloat16
  per_tile = tokens // _HALO
  tiled = _tile_bits(bits, tokens, packed)
  return pl.pallas_call(
    functools.partial(_forward_kernel, taps=taps, interpret=interpret),
    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(batch, tiled.shape[1], channels // lanes),
      in_specs=[
        pl.BlockSpec((1, 1, *tiled.shape[2:]), lambda b, i, c, _: (b, i, 0, 0, 0)),
        pl.BlockSpec((1, _HALO, lanes), lambda b, i, c, _: (b, 0, c)),
        pl.BlockSpec(
          (1, _HALO, lanes), lambda b, i, c, _: (b, jnp.maximum(i * per_tile - 1, 0), c)
        ),
        pl.BlockSpec((1, tokens, lanes), lambda b, i, c, _: (b, i, c)),
        pl.BlockSpec((taps, lanes), lambda b, i, c, _: (0, c)),
      ],
      out_specs=pl.BlockSpec((1, tokens, lanes), lambda b, i, c, _: (b, i, c)),
    ),
    compiler_params=_params(),
    interpret=interpret,
    name="causal_conv1d_silu",
  )(
    _full_tiles(bits, tokens, taps, 0),
    tiled,
    _window_rows(window, x.dtype),
    x,
    x,
    kernel.astype(jnp.float32),
  )


def _later(parts, distance):
  """Rows t + distance for the first rows; parts are float32 with the halo's rows at the end."""
  rows = parts[0].shape[0]
  if len(parts) == 1:
    shifted = pltpu.roll(parts[0], rows - distance, 0) if distance else parts[0]
    return (shifted[: rows - _HALO],)
  result = []
  for parity in (0, 1):
    ahead, other = (parity + distance) // 2, (parity + distance) % 2
    shifted = pltpu.roll(parts[other], rows - ahead, 0) if ahead else parts[other]
    result.append(shifted[: rows - _HALO // 2])
  return tuple(result)


def _sublane_sum(x):
  """[rows, C] -> [8, C], adding whole registers."""
  return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0)


def _backward_kernel(
  full_ref,
  bits_ref,
  next_bits_ref,
  window_ref,
  before_ref,
  x_ref,
  after_ref,
  dy_ref,
  dy_after_ref,
  kernel_ref,
  dx_ref,
  dw_ref,
  dbefore_ref,
  *,
  taps,
  interpret,
):
  row, tile, channel = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  packed = x_ref.dtype == jnp.bfloat16

  @pl.when((row == 0) & (tile == 0))
  def _():
    dw_ref[channel] = jnp.zeros(dw_ref.shape[1:], jnp.float32)

  def run(masked):
    bits = None
    if masked:
      own = _bit_parts(bits_ref[0, 0], packed)
      halo = _bit_parts(next_bits_ref[0, 0], packed)
      bits = [jnp.concatenate(pair, axis=0) for pair in zip(own, halo)]

    def lane_tile(at):
      kernel = kernel_ref[:, at]
      ext = _extended(x_ref, before_ref, window_ref, tile, at)
      ext = jnp.concatenate([ext, after_ref[0, :, at]], axis=0)
      d_out = _parts(jnp.concatenate([dy_ref[0, :, at], dy_after_ref[0, :, at]], axis=0))
      if masked:
        # What lies behind the row, or is padding, may hold anything.
        d_out = [jnp.where(bit != 0, d, 0.0) for bit, d in zip(bits, d_out)]
      totals, inputs = _pre_activation(ext, kernel, bits, taps, masked)
      d_total = []
      for total, d in zip(totals, d_out):
        half = 0.5 * total
        tanh = jnp.tanh(half)
        # silu' = s (1 + z (1 - s)) with s = (1 + tanh) / 2.
        d_total.append(d * ((0.5 + 0.5 * tanh) * (1.0 + half * (1.0 - tanh))))
      own_rows = d_total[0].shape[0] - (_HALO // 2 if packed else _HALO)
      dx = None
      for tap in range(taps):
        allowed = d_total
        if masked:
          allowed = [_keep(bit, tap, d) for bit, d in zip(bits, d_total)]
        terms = [part * kernel[tap : tap + 1] for part in _later(allowed, taps - 1 - tap)]
        dx = terms if dx is None else [a + b for a, b in zip(dx, terms)]
        # Masked inputs are zero already, so d_total needs no mask of its own here.
        grad = sum(
          _sublane_sum(d[:own_rows] * value[:own_rows]) for d, value in zip(d_total, inputs[tap])
        )
        dw_ref[channel, pl.ds(8 * tap, 8), at] += grad
      _store(dx_ref, at, dx, interpret)

      @pl.when(tile == 0)
      def _():
        # A row at -back is read by the tokens 0 ... taps - 1 - back.
        for back in range(1, taps):
          total = jnp.zeros((1, kernel.shape[1]), jnp.float32)
          for tap in range(taps - back):
            token = taps - 1 - tap - back
            part, index = (token % 2, token // 2) if packed else (0, token)
            d = d_total[part][index : index + 1]
            if masked:
              d = _keep(bits[part][index : index + 1], tap, d)
            total += d * kernel[tap : tap + 1]
          dbefore_ref[0, taps - 1 - back : taps - back, at] = total

    _for_each_lane_tile(dx_ref.shape[2], lane_tile)

  full = full_ref[row, tile] == 1
  pl.when(full)(functools.partial(run, False))
  pl.when(jnp.logical_not(full))(functools.partial(run, True))


def backward(
  x: Float[Array, "B S C"],
  kernel: Float[Array, "taps C"],
  bits: Int[Array, "B S"],
  window: Float[Array, "B taps-1 C"],
  dy: Float[Array, "B S C"],
  *,
  tiles: Tiles,
  interpret: bool,
) -> tuple[Float[Array, "B S C"], Float[Array, "taps C"], Float[Array, "B taps-1 C"]]:
  """Gradients of inputs, kernel (float32) and window (float32), from the inputs alone.

  Args:
    x: Inputs of the forward pass.
    kernel: Filters.
    bits: From `tap_bits`.
    window: Inputs before the row.
    dy: Gradient of the outputs; ignored on padding.
    tiles: Tile sizes.
    interpret: Runs the kernel's body without a TPU.
  """
  batch, length, channels = x.shape
  taps = kernel.shape[0]
  tokens, lanes = tiles.fit(length, channels)
  packed = x.dtype == jnp.bfloat16
  per_tile = tokens // _HALO
  tiled = _tile_bits(bits, tokens, packed)
  halo_bits = _tile_bits(bits, _HALO, packed)
  last = halo_bits.shape[1] - 1
  # The last tile has no rows after it: their bits are zero.
  halo_bits = jnp.pad(halo_bits, ((0, 0), (0, 1), (0, 0), (0, 0), (0, 0)))
  next_rows = lambda b, i, c, _: (b, jnp.minimum((i + 1) * per_tile, last), c)
  main = pl.BlockSpec((1, tokens, lanes), lambda b, i, c, _: (b, i, c))
  dx, dw, dbefore = pl.pallas_call(
    functools.partial(_backward_kernel, taps=taps, interpret=interpret),
    out_shape=(
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      jax.ShapeDtypeStruct((channels // lanes, 8 * taps, lanes), jnp.float32),
      jax.ShapeDtypeStruct((batch, taps - 1, channels), jnp.float32),
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(batch, tiled.shape[1], channels // lanes),
      in_specs=[
        pl.BlockSpec((1, 1, *tiled.shape[2:]), lambda b, i, c, _: (b, i, 0, 0, 0)),
        pl.BlockSpec(
          (1, 1, *halo_bits.shape[2:]),
          lambda b, i, c, _: (b, jnp.minimum((i + 1) * per_tile, last + 1), 0, 0, 0),
        ),
        pl.BlockSpec((1, _HALO, lanes), lambda b, i, c, _: (b, 0, c)),
        pl.BlockSpec(
          (1, _HALO, lanes), lambda b, i, c, _: (b, jnp.maximum(i * per_tile - 1, 0), c)
        ),
        main,
        pl.BlockSpec((1, _HALO, lanes), next_rows),
        main,
        pl.BlockSpec((1, _HALO, lanes), next_rows),
        pl.BlockSpec((taps, lanes), lambda b, i, c, _: (0, c)),
      ],
      out_specs=(
        main,
        pl.BlockSpec((channels // lanes, 8 * taps, lanes), lambda b, i, c, _: (0, 0, 0)),
        # Written by the first tile only; the index stays put until the row's channels move on.
        pl.BlockSpec(
          (1, taps - 1, lanes),
          lambda b, i, c, _: (b, 0, jnp.where(i == 0, c, channels // lanes - 1)),
        ),
      ),
    ),
    compiler_params=_params(),
    interpret=interpret,
    name="causal_conv1d_silu_backward",
  )(
    _full_tiles(bits, tokens, taps, taps - 1),
    tiled,
    halo_bits,
    _window_rows(window, x.dtype),
    x,
    x,
    x,
    dy,
    dy,
    kernel.astype(jnp.float32),
  )
  dw = jnp.sum(dw.reshape(-1, taps, 8, lanes), axis=2)
  return dx, dw.swapaxes(0, 1).reshape(taps, channels), dbefore
