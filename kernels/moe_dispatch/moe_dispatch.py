"""Sends tokens to the rows of their experts and brings results back, in plain JAX.

One sort of packed integer keys orders the (token, choice) pairs by expert, stably; everything
else is a gather.  The transpose of each gather is written as the other gather, so that no
gradient scatters rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class Plan(NamedTuple):
  """Where each (token, choice) pair goes.

  Attributes:
    pairs: Flat pair (token * K + choice) of each row, rows sorted by expert; rows beyond
      sum(group_sizes) hold the pairs that go nowhere.
    rows: Row of each pair.
    group_sizes: Rows of each expert, int32.
  """

  pairs: Int[Array, " M"]
  rows: Int[Array, "T K"]
  group_sizes: Int[Array, " E"]


def plan(experts: Int[Array, "T K"], num_experts: int) -> Plan:
  """Orders pairs by expert, pairs of one expert by token.

  Args:
    experts: Chosen experts; a value outside [0, num_experts) goes nowhere (padding).
    num_experts: E.

  Raises:
    ValueError: E * T * K does not fit in 32 bits.
  """
  tokens, choices = experts.shape
  count = tokens * choices
  bits = max(1, (count - 1).bit_length())
  if (num_experts + 1) << bits > 1 << 32:
    raise ValueError(f"{num_experts} experts x {count} pairs do not fit in a 32-bit sort key")
  flat = experts.reshape(-1).astype(jnp.int32)
  flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts).astype(jnp.uint32)
  index = jnp.arange(count, dtype=jnp.uint32)
  keys = lax.sort((flat << bits) | index, is_stable=False)
  pairs = (keys & ((1 << bits) - 1)).astype(jnp.int32)
  rows = (
    jnp.zeros((count,), jnp.int32)
    .at[pairs]
    .set(jnp.arange(count, dtype=jnp.int32), unique_indices=True)
  )
  ends = jnp.searchsorted(
    keys >> bits, jnp.arange(num_experts, dtype=jnp.uint32), side="right"
  ).astype(jnp.int32)
  sizes = jnp.diff(ends, prepend=jnp.zeros((1,), jnp.int32))
  return Plan(pairs, rows.reshape(tokens, choices), sizes)


def _owned(group_sizes, rows):
  return (rows < jnp.sum(group_sizes))[..., None]


def _take_tokens(x, p: Plan):
  choices = p.rows.shape[1]
  return jnp.where(_owned(p.group_sizes, jnp.arange(p.pairs.shape[0])), x[p.pairs // choices], 0)


def _take_rows(y, p: Plan):
  """[T, K, N]: the row of each pair, zero where the pair went nowhere."""
  return jnp.where(_owned(p.group_sizes, p.rows), y[p.rows], 0)


@jax.custom_vjp
def dispatch(x: Float[Array, "T N"], p: Plan) -> Float[Array, "M N"]:
  """Copies each token to the rows of its pairs; rows that no expert owns are zero."""
  return _take_tokens(x, p)


def _dispatch_backward(p, grad):
  total = jnp.sum(_take_rows(grad, p).astype(jnp.float32), axis=1)
  return total.astype(grad.dtype), None


dispatch.defvjp(lambda x, p: (_take_tokens(x, p), p), _dispatch_backward)


@jax.custom_vjp
def combine(y: Float[Array, "M N"], weights: Float[Array, "T K"], p: Plan) -> Float[Array, "T N"]:
  """Weighted sum of each token's rows in float32, in the type of `y`.

  Pairs that went nowhere add nothing and their weights get no gradient; rows that no expert owns
  are not read.
  """
  return _combine(y, weights, p)


def _combine(y, weights, p):
  picked = _take_rows(y, p).astype(jnp.float32)
  return jnp.sum(picked * weights.astype(jnp.float32)[..., None], axis=1).astype(y.dtype)


def _combine_backward(residuals, grad):
  y, weights, p = residuals
  choices = weights.shape[1]
  d_weights = jnp.sum(
    _take_rows(y, p).astype(jnp.float32) * grad.astype(jnp.float32)[:, None], axis=-1
  )
  row_weights = weights.reshape(-1)[p.pairs].astype(jnp.float32)
  d_rows = grad.astype(jnp.float32)[p.pairs // choices] * row_weights[:, None]
  d_rows = jnp.where(_owned(p.group_sizes, jnp.arange(p.pairs.shape[0])), d_rows, 0.0)
  return d_rows.astype(y.dtype), d_weights.astype(weights.dtype), None


combine.defvjp(lambda y, w, p: (_combine(y, w, p), (y, w, p)), _combine_backward)
