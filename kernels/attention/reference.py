"""Softmax attention with the whole score matrix: the definition the other forms are held to."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30


def visible(
  q_segment_ids: Int[Array, "B S"],
  kv_segment_ids: Int[Array, "B T"],
  q_positions: Int[Array, "B S"],
  kv_positions: Int[Array, "B T"],
) -> Bool[Array, "B S T"]:
  """Which key each query sees: same segment, not padding, not later in position."""
  same = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
  causal = q_positions[:, :, None] >= kv_positions[:, None, :]
  return same & causal & (q_segment_ids > 0)[:, :, None]


def precision(dtype) -> lax.Precision:
  """float32 runs are exact runs; lower types keep the device's native product."""
  return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def attention(
  q: Float[Array, "B S nq d"],
  k: Float[Array, "B T nkv d"],
  v: Float[Array, "B T nkv d"],
  mask: Bool[Array, "B S T"],
  scale: float,
) -> Float[Array, "B S nq d"]:
  """softmax(scale q k^T) v with float32 scores; a query that sees nothing gives zeros.

  Args:
    q: Queries; query head h reads key/value head h // (nq / nkv).
    k: Keys.
    v: Values.
    mask: True where a query sees a key.
    scale: Factor of the scores.
  """
  batch, length, nq, dim = q.shape
  nkv = k.shape[2]
  exact = precision(q.dtype)
  grouped = q.reshape(batch, length, nkv, nq // nkv, dim)
  scores = scale * jnp.einsum(
    "bsgrd,btgd->bgrst", grouped, k, precision=exact, preferred_element_type=jnp.float32
  )
  mask = mask[:, None, None]
  scores = jnp.where(mask, scores, _MASKED)
  scores -= lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.where(mask, jnp.exp(scores), 0.0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights = (weights / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
  out = jnp.einsum(
    "bgrst,btgd->bsgrd", weights, v, precision=exact, preferred_element_type=jnp.float32
  )
  return out.reshape(q.shape).astype(q.dtype)
