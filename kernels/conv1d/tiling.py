"""Tiles of the convolution's kernels, and which taps each token may use."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from kernels.base import words

# Rows of the neighbouring tiles that a tile reads.
HALO = words.REGISTER_ROWS
# Bit of the first tap towards later tokens, see `tap_bits`.
REACH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Tile sizes of the kernels; a tile is 128 channels wide.

  Attributes:
    tokens: Tokens per grid step, a multiple of `chunk`.
    chunk: Tokens per loop step where no tap is masked, a multiple of `masked_chunk`.
    masked_chunk: Tokens per loop step in chunks where some are; a multiple of 16.
  """

  tokens: int = 8192
  chunk: int = 1024
  masked_chunk: int = 128

  def __post_init__(self):
    if self.masked_chunk < HALO or self.masked_chunk % HALO:
      raise ValueError(f"masked_chunk={self.masked_chunk}: want a multiple of {HALO}")
    if self.chunk < 1 or self.chunk % self.masked_chunk:
      raise ValueError(f"chunk={self.chunk}: want a multiple of masked_chunk={self.masked_chunk}")
    if self.tokens < 1 or self.tokens % self.chunk:
      raise ValueError(f"tokens={self.tokens}: want a multiple of chunk={self.chunk}")

  def fit(self, length: int) -> Tiles:
    """Tiles no longer than a row of `length` tokens needs."""
    chunk = min(self.chunk, -(-length // HALO) * HALO)
    tokens = chunk * min(self.tokens // self.chunk, -(-length // chunk))
    return Tiles(tokens=tokens, chunk=chunk, masked_chunk=math.gcd(chunk, self.masked_chunk))


def lane_width(channels: int) -> int:
  """Channels of a tile."""
  return words.LANES if channels % words.LANES == 0 else channels


def tap_bits(
  segment_ids: Int[Array, "B S"], window_segment: Int[Array, " B"], taps: int
) -> Int[Array, "B S"]:
  """Which tokens near a token are of its segment; padding has no bits.

  Bit d is set where the token d before is, bit REACH + d where the token d after is; d < taps.
  """
  before = jnp.broadcast_to(window_segment[:, None], (segment_ids.shape[0], taps - 1))
  owner = jnp.concatenate([before.astype(segment_ids.dtype), segment_ids], axis=1)
  owner = jnp.pad(owner, ((0, 0), (0, taps - 1)))
  length = segment_ids.shape[1]
  bits = jnp.zeros(segment_ids.shape, jnp.int32)
  for distance in range(taps):
    for bit, start in ((distance, taps - 1 - distance), (REACH + distance, taps - 1 + distance)):
      same = (owner[:, start : start + length] == segment_ids) & (segment_ids > 0)
      bits |= same.astype(jnp.int32) << bit
  return bits


def full_chunks(bits, tiles: Tiles, taps: int, reach: bool):
  """[B, chunks]: 1 where every token of a chunk may use every tap (`reach`: both ways)."""
  want = ((1 << taps) - 1) * (1 + (reach << REACH))
  bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % tiles.tokens)))
  chunks = bits.reshape(bits.shape[0], -1, tiles.chunk)
  return jnp.all((chunks & want) == want, axis=-1).astype(jnp.int32)


def tile_bits(bits, tokens: int, parts: int):
  """[B, S] -> [B, tiles, parts, rows, 1]: per tile, even tokens then odd ones where words pair."""
  bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % tokens)))
  bits = bits.reshape(bits.shape[0], -1, tokens // parts, parts).swapaxes(-1, -2)
  return bits[..., None]


def window_rows(window, dtype):
  """The window as the last rows of a halo."""
  return jnp.pad(window.astype(dtype), ((0, 0), (HALO - window.shape[1], 0), (0, 0)))


def loop(count: int, body) -> None:
  """Runs body(i) for i < count."""

  def step(i, carry):
    body(i)
    return carry

  lax.fori_loop(0, count, step, 0)


def either(full, plain, masked) -> None:
  """Runs `plain()` on full chunks, `masked()` on others."""
  pl.when(full)(plain)
  pl.when(jnp.logical_not(full))(masked)
