"""The log-prob head in plain JAX: loops over chunks of tokens and blocks of the vocabulary.

With z = X W^T / T, lse = logsumexp(z), p = exp(z - lse) and m = sum_v p_v z_v, per token:

  logp = z[y] - lse                 d logp / d z = 1[v = y] - p
  entropy = lse - m                 d entropy / d z = -p (z - m)

Forward: for one chunk of tokens after another, over blocks of the vocabulary, an online maximum,
sum of exponentials and sum of z times exponentials (Milakov and Gimelshein 2018).  Only lse and m
are kept for the backward pass, two float32 a token.

Backward: vocabulary-major.  For a block of the table, over the chunks of tokens,

  dz = c (1[v = y] - p) - e p (z - m)

with the tokens' own cotangents c and e inside, before any sum over tokens; a head that sums first
and scales after is right only for equal cotangents, which policy gradients never have.  A block's
table gradient is complete, in float32, when its tokens are done, and is rounded once.

Arithmetic: products accumulate in float32; the float32 dz is multiplied as two bfloat16 parts where
the operands are bfloat16, since one rounding of it would cost as much as the output's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_DEFAULT_BLOCK = 8192
_LANES = 256
# Chunks of the forward pass that one of the backward pass holds.
_BACKWARD_CHUNKS = 4


def choose_block(vocab: int) -> int:
  """The largest divisor of the vocabulary in [4096, 8192] that fills a TPU's arrays, else 8192.

  A last block that starts early costs less than products of which every tile's edge is waste: the
  published vocabulary's divisor 7,760 is no multiple of 128.
  """
  for block in range(min(_DEFAULT_BLOCK, vocab) // _LANES * _LANES, 4095, -_LANES):
    if vocab % block == 0:
      return block
  return min(_DEFAULT_BLOCK, vocab)


def _blocks(vocab: int, block: int) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
  """Start of each block, and the first column of it that no earlier block holds.

  The last block of a ragged vocabulary starts early, to be whole; its overlap counts once.
  """
  wanted = jnp.arange(0, vocab, block, dtype=jnp.int32)
  starts = jnp.minimum(wanted, vocab - block)
  return starts, wanted


def _chunked(array: jax.Array, chunk: int) -> jax.Array:
  """[N, ...] to [chunks, chunk, ...], zeros at the end."""
  count = -(-array.shape[0] // chunk)
  pad = count * chunk - array.shape[0]
  array = jnp.pad(array, [(0, pad)] + [(0, 0)] * (array.ndim - 1))
  return array.reshape(count, chunk, *array.shape[1:])


def _logits(x: jax.Array, rows: jax.Array, temperature: float) -> jax.Array:
  """Float32 [chunk, block]."""
  z = lax.dot_general(
    x,
    rows,
    (((1,), (1,)), ((), ())),
    precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )
  return z if temperature == 1.0 else z / temperature


def _twice(b: jax.Array) -> jax.Array:
  """The right operand of `_dot_float32`, which needs it once for each part of the left one."""
  return b if b.dtype == jnp.float32 else jnp.concatenate([b, b], axis=0)


def _dot_float32(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
  """Product over an axis of a float32 `a` with the rows of `b`, accurate in float32.

  A bfloat16 `b` comes `_twice`: high and low parts of `a` are one product of twice the length, so
  that its result, which may be large, crosses memory once.
  """
  dims = (((axis,), (0,)), ((), ()))
  if b.dtype == jnp.float32:
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST)
  # reduce_precision, not a cast there and back, which a compiler may drop.
  high = lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)
  parts = jnp.concatenate([high.astype(jnp.bfloat16), (a - high).astype(jnp.bfloat16)], axis=axis)
  return lax.dot_general(parts, b, dims, preferred_element_type=jnp.float32)


def forward(
  hidden: Float[Array, "N D"],
  table: Float[Array, "V D"],
  targets: Int[Array, " N"],
  *,
  temperature: float,
  chunk: int,
  block: int,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
  """Log-prob of each target, entropy, and log-sum-exp of the logits over the temperature.

  Peak extra memory is about three float32 arrays of [chunk, block].
  """
  starts, firsts = _blocks(table.shape[0], block)
  ragged = table.shape[0] % block != 0
  columns = jnp.arange(block, dtype=jnp.int32)

  def one_chunk(_, inputs):
    x, y = inputs

    def one_block(carry, where):
      top, total, weighted, chosen = carry
      start, first = where
      rows = lax.dynamic_slice_in_dim(table, start, block).astype(x.dtype)
      z = _logits(x, rows, temperature)
      ids = start + columns
      chosen += jnp.sum(jnp.where((ids == y[:, None]) & (ids >= first), z, 0.0), axis=-1)
      if ragged:
        z = jnp.where(ids >= first, z, -jnp.inf)
      new_top = jnp.maximum(top, jnp.max(z, axis=-1))
      scale = jnp.exp(top - new_top)
      shifted = z - new_top[:, None]
      mass = jnp.exp(shifted)
      # `weighted` is the sum of exp(z - top) (z - top): shifting the maximum shifts both factors.
      moved = jnp.where(total > 0, (top - new_top) * total, 0.0)
      weighted = scale * (weighted + moved)
      weighted += jnp.sum(jnp.where(mass > 0, mass * shifted, 0.0), axis=-1)
      return (new_top, scale * total + jnp.sum(mass, axis=-1), weighted, chosen), None

    zeros = jnp.zeros(x.shape[0], jnp.float32)
    start = (jnp.full(x.shape[0], -jnp.inf), zeros, zeros, zeros)
    (top, total, weighted, chosen), _ = lax.scan(one_block, start, (starts, firsts))
    lse = top + jnp.log(total)
    mean = top + weighted / total
    return None, (chosen - lse, lse - mean, lse)

  inputs = (_chunked(hidden, chunk), _chunked(targets, chunk))
  _, found = lax.scan(one_chunk, None, inputs)
  logprobs, entropies, lse = (a.reshape(-1)[: hidden.shape[0]] for a in found)
  return logprobs, entropies, lse


def backward(
  hidden: Float[Array, "N D"],
  table: Float[Array, "V D"],
  targets: Int[Array, " N"],
  lse: Float[Array, " N"],
  entropies: Float[Array, " N"],
  dlogprobs: Float[Array, " N"],
  dentropies: Float[Array, " N"],
  *,
  temperature: float,
  chunk: int,
  block: int,
) -> tuple[Float[Array, "N D"], Float[Array, "V D"]]:
  """Gradients of the hidden states and of the table.

  Peak extra memory is about four float32 arrays of [4 * chunk, block] and a float32 copy of the
  hidden states' gradient.
  """
  mean = lse - entropies
  # A block's gradient crosses memory once a chunk.
  chunk = min(_BACKWARD_CHUNKS * chunk, max(1, hidden.shape[0]))
  vocab, width = table.shape
  starts, firsts = _blocks(vocab, block)
  ragged = vocab % block != 0
  columns = jnp.arange(block, dtype=jnp.int32)
  per_token = tuple(_chunked(a, chunk) for a in (hidden, targets, lse, mean, dlogprobs, dentropies))

  def one_block(carry, where):
    dhidden, dtable = carry
    start, first = where
    rows = lax.dynamic_slice_in_dim(table, start, block).astype(hidden.dtype)
    rows_twice = _twice(rows)
    ids = start + columns

    def one_chunk(drows, inputs):
      x, y, log_sum, average, c, e, dx = inputs
      z = _logits(x, rows, temperature)
      p = jnp.exp(z - log_sum[:, None])
      dz = c[:, None] * (jnp.where(ids == y[:, None], 1.0, 0.0) - p)
      dz -= e[:, None] * (p * (z - average[:, None]))
      if ragged:
        dz = jnp.where(ids >= first, dz, 0.0)
      if temperature != 1.0:
        dz /= temperature
      dx += _dot_float32(dz, rows_twice, 1)
      drows += _dot_float32(dz, _twice(x), 0)
      return drows, dx

    drows, dhidden = lax.scan(
      one_chunk, jnp.zeros((block, width), jnp.float32), (*per_token, dhidden)
    )
    if ragged:
      # The overlap with the block before keeps what that block wrote.
      old = lax.dynamic_slice_in_dim(dtable, start, block)
      drows = jnp.where((ids >= first)[:, None], drows, old.astype(jnp.float32))
    drows = drows.astype(table.dtype)
    return (dhidden, lax.dynamic_update_slice_in_dim(dtable, drows, start, 0)), None

  start = (jnp.zeros(per_token[0].shape, jnp.float32), jnp.zeros_like(table))
  (dhidden, dtable), _ = lax.scan(one_block, start, (starts, firsts))
  dhidden = dhidden.reshape(-1, width)[: hidden.shape[0]].astype(hidden.dtype)
  return dhidden, dtable
