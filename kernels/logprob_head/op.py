"""Log-prob head: log-probs and entropies of tokens without a [tokens, vocab] array.

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

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_DEFAULT_BLOCK = 8192
_LANES = 256
# Chunks of the forward pass that one of the backward pass holds.
_BACKWARD_CHUNKS = 4


def logprob_head(
  hidden: Float[Array, "N D"],
  table: Float[Array, "V D"],
  targets: Int[Array, " N"],
  *,
  temperature: float = 1.0,
  token_chunk: int = 512,
  vocab_block: int | None = None,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
  """Log-prob of each target and entropy of each distribution.

  Peak extra memory is about three float32 arrays of [token_chunk, vocab_block], and in the backward
  pass four of [4 * token_chunk, vocab_block] and one float32 copy of the hidden states' gradient.

  Args:
    hidden: States after the final norm, float32 or bfloat16.
    table: Output projection, one row a token of the vocabulary, padding rows included: they are
      part of the softmax.  Cast to the dtype of `hidden` for the products; its gradient comes in
      its own dtype.
    targets: Token ids in [0, V).
    temperature: Logits are divided by it; above 0.
    token_chunk: Tokens per chunk; the backward pass takes four chunks at a time.
    vocab_block: Rows of the table per block; None for 8,192 or a divisor of V near it.

  Returns:
    `(logprobs, entropies)`, float32 [N], in nats.  Both carry gradients to `hidden` and `table`.

  Raises:
    ValueError: Shapes, dtypes or sizes that do not fit.
  """
  _validate(hidden, table, targets, temperature, token_chunk, vocab_block)
  block = min(vocab_block or _choose_block(table.shape[0]), table.shape[0])
  chunk = min(token_chunk, max(1, hidden.shape[0]))
  return _head(hidden, table, targets.astype(jnp.int32), float(temperature), chunk, block)


def _validate(hidden, table, targets, temperature, token_chunk, vocab_block) -> None:
  if hidden.ndim != 2 or table.ndim != 2 or hidden.shape[1] != table.shape[1]:
    raise ValueError(f"want hidden [N, D] and table [V, D], got {hidden.shape} and {table.shape}")
  if targets.shape != hidden.shape[:1]:
    raise ValueError(f"want a target for each of {hidden.shape[0]} tokens, got {targets.shape}")
  for name, array in (("hidden", hidden), ("table", table)):
    if array.dtype not in (jnp.float32, jnp.bfloat16):
      raise ValueError(f"{name} must be float32 or bfloat16, not {array.dtype}")
  if not temperature > 0:
    raise ValueError(f"temperature must be above 0, got {temperature}")
  if token_chunk < 1 or (vocab_block is not None and vocab_block < 1):
    raise ValueError("token_chunk and vocab_block must be at least 1")


def _choose_block(vocab: int) -> int:
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _head(hidden, table, targets, temperature, chunk, block):
  outputs, _ = _head_forward(hidden, table, targets, temperature, chunk, block)
  return outputs


def _head_forward(hidden, table, targets, temperature, chunk, block):
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
    return None, (chosen - lse, lse - mean, lse, mean)

  inputs = (_chunked(hidden, chunk), _chunked(targets, chunk))
  _, found = lax.scan(one_chunk, None, inputs)
  logprobs, entropies, lse, mean = (a.reshape(-1)[: hidden.shape[0]] for a in found)
  return (logprobs, entropies), (hidden, table, targets, lse, mean)


def _head_backward(temperature, chunk, block, residuals, cotangents):
  hidden, table, targets, lse, mean = residuals
  # A block's gradient crosses memory once a chunk.
  chunk = min(_BACKWARD_CHUNKS * chunk, max(1, hidden.shape[0]))
  dlogp, dentropy = (c.astype(jnp.float32) for c in cotangents)
  vocab, width = table.shape
  starts, firsts = _blocks(vocab, block)
  ragged = vocab % block != 0
  columns = jnp.arange(block, dtype=jnp.int32)
  per_token = tuple(_chunked(a, chunk) for a in (hidden, targets, lse, mean, dlogp, dentropy))

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
  return dhidden, dtable, None


_head.defvjp(_head_forward, _head_backward)
