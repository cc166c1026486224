"""Log-prob head: log-probs and entropies of tokens without a [tokens, vocab] array.

With z = X W^T / T, lse = logsumexp(z), p = exp(z - lse) and m = sum_v p_v z_v, per token:

  logp = z[y] - lse                 d logp / d z = 1[v = y] - p
  entropy = lse - m                 d entropy / d z = -p (z - m)

The op and its derivative rule; `scans` is plain JAX, `pallas_forward` and `pallas_backward` are TPU
kernels.  Both keep two float32 a token for the backward pass, lse and the entropy, and both multiply
a token's own cotangents in before any sum over tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.base import implementation as implementation_lib
from kernels.logprob_head import pallas_backward, pallas_forward, scans


def logprob_head(
  hidden: Float[Array, "N D"],
  table: Float[Array, "V D"],
  targets: Int[Array, " N"],
  *,
  temperature: float = 1.0,
  token_chunk: int = 512,
  vocab_block: int | None = None,
  implementation: str = "reference",
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
  """Log-prob of each target and entropy of each distribution.

  Extra memory in plain JAX: about three float32 arrays of [token_chunk, vocab_block], in the backward
  pass four of [4 * token_chunk, vocab_block] and one float32 copy of the hidden states' gradient.  Of
  the kernels: next to nothing forward; backward up to 512 MiB, that float32 copy, and a copy of the
  table and of its gradient where no tile divides the vocabulary.

  Args:
    hidden: States after the final norm, float32 or bfloat16.
    table: Output projection, one row a token of the vocabulary, padding rows included: they are
      part of the softmax.  Cast to the dtype of `hidden` for the products; its gradient comes in
      its own dtype.
    targets: Token ids in [0, V); what comes of others is not defined.
    temperature: Logits are divided by it; above 0.
    token_chunk: Tokens per chunk: in plain JAX of the forward pass, whose backward pass takes four
      chunks at a time; in the kernels of the forward pass's tile, in whole lanes, at most 1,024.
    vocab_block: Rows of the table per block in plain JAX; None for 8,192 or a divisor of V near it.
    implementation: One of `kernels.base.implementation.IMPLEMENTATIONS`; states whose D is no
      multiple of 128 are plain JAX whatever it says.

  Returns:
    `(logprobs, entropies)`, float32 [N], in nats.  Both carry gradients to `hidden` and `table`.

  Raises:
    ValueError: Shapes, dtypes or sizes that do not fit, or an unknown implementation.
  """
  _validate(hidden, table, targets, temperature, token_chunk, vocab_block)
  implementation_lib.validate(implementation)
  if hidden.shape[1] % 128 or not hidden.shape[0]:
    implementation = "reference"
  block = min(vocab_block or scans.choose_block(table.shape[0]), table.shape[0])
  chunk = min(token_chunk, max(1, hidden.shape[0]))
  static = (implementation, float(temperature), chunk, block)
  return _head(hidden, table, targets.astype(jnp.int32), *static)


def _validate(hidden, table, targets, temperature, token_chunk, vocab_block) -> None:
  if hidden.ndim != 2 or table.ndim != 2 or hidden.shape[1] != table.shape[1]:
    raise ValueError(f"want hidden [N, D] and table [V, D], got {hidden.shape} and {table.shape}")
  if targets.shape != hidden.shape[:1]:
    raise ValueError(f"want a target for each of {hidden.shape[0]} tokens, got {targets.shape}")
  if not jnp.issubdtype(targets.dtype, jnp.integer):
    raise ValueError(f"targets must be integers, not {targets.dtype}")
  if not table.size:
    raise ValueError(f"want a vocabulary and a width of at least 1, got table {table.shape}")
  for name, array in (("hidden", hidden), ("table", table)):
    if array.dtype not in (jnp.float32, jnp.bfloat16):
      raise ValueError(f"{name} must be float32 or bfloat16, not {array.dtype}")
  if not temperature > 0:
    raise ValueError(f"temperature must be above 0, got {temperature}")
  for name, size in (("token_chunk", token_chunk), ("vocab_block", vocab_block)):
    if size is not None and (not isinstance(size, int) or size < 1):
      raise ValueError(f"{name}={size}: want an integer of at least 1")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _head(hidden, table, targets, implementation, temperature, chunk, block):
  return _forward(hidden, table, targets, implementation, temperature, chunk, block)[0]


def _forward(hidden, table, targets, implementation, temperature, chunk, block):
  def kernel(hidden, table, targets, *, interpret):
    table = table.astype(hidden.dtype)
    return pallas_forward.forward(
      hidden, table, targets, temperature=temperature, most_tokens=chunk, interpret=interpret
    )

  plain = functools.partial(scans.forward, temperature=temperature, chunk=chunk, block=block)
  logprobs, entropies, lse = implementation_lib.dispatch(
    implementation, kernel, plain, hidden, table, targets
  )
  return (logprobs, entropies), (hidden, table, targets, lse, entropies)


def _backward(implementation, temperature, chunk, block, residuals, cotangents):
  def kernel(hidden, table, *rest, interpret):
    return pallas_backward.backward(
      hidden,
      table.astype(hidden.dtype),
      *rest,
      temperature=temperature,
      table_dtype=table.dtype,
      interpret=interpret,
    )

  plain = functools.partial(scans.backward, temperature=temperature, chunk=chunk, block=block)
  cotangents = (c.astype(jnp.float32) for c in cotangents)
  dhidden, dtable = implementation_lib.dispatch(
    implementation, kernel, plain, *residuals, *cotangents
  )
  return dhidden, dtable, None


_head.defvjp(_forward, _backward)
