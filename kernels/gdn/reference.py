"""The gated delta rule token by token: the definition that every faster form is held to.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), as transformers'
`torch_recurrent_gated_delta_rule` computes it for Qwen3.5.  With state S [dk, dv] per value head:

    S~ = exp(g_t) S;  u = beta_t (v_t - S~^T k_t);  S = S~ + k_t u^T;  o_t = S^T q_t
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_HIGHEST = lax.Precision.HIGHEST


def l2_normalize(x: Float[Array, "... d"], eps: float = 1e-6) -> Float[Array, "... d"]:
  """x / sqrt(sum(x^2) + eps) in float32 over the last axis; its gradient at 0 is finite."""
  x = x.astype(jnp.float32)
  return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def owner_segments(segment_ids: Int[Array, "B S"], start: Int[Array, " B"]) -> Int[Array, "B S"]:
  """Gives the padding tokens (id 0) of a row the id of its last segment.

  Padding neither writes nor decays the state; counted as part of the last segment, padding at
  the end of a row keeps that segment's state, and padding elsewhere changes nothing.

  Args:
    segment_ids: Segment of each token; ids grow along a row, 0 is padding.
    start: Segment that the incoming state belongs to, for a row of padding alone.
  """
  last = jnp.max(segment_ids, axis=1)
  last = jnp.where(last > 0, last, start)
  return jnp.where(segment_ids > 0, segment_ids, last[:, None])


def recurrent_gated_delta_rule(
  q: Float[Array, "B S nk dk"],
  k: Float[Array, "B S nk dk"],
  v: Float[Array, "B S nv dv"],
  g: Float[Array, "B S nv"],
  beta: Float[Array, "B S nv"],
  segment_ids: Int[Array, "B S"],
  initial_state: Float[Array, "B nv dk dv"],
  initial_segment: Int[Array, " B"],
) -> tuple[Float[Array, "B S nv dv"], Float[Array, "B nv dk dv"]]:
  """One token at a time, in float32.

  Args:
    q: Queries before normalisation, per key head.
    k: Keys before normalisation, per key head; value head j reads key head j // (nv / nk).
    v: Values.
    g: Logarithm of the decay, <= 0.
    beta: Writing strength in [0, 1].
    segment_ids: 0 is padding; the state starts from zero wherever the id changes.
    initial_state: State that the row starts from.
    initial_segment: Segment that this state belongs to.

  Returns:
    Outputs in the type of `v` (zero on padding) and the state after the last real token, float32.
  """
  repeat = v.shape[2] // k.shape[2]
  q = jnp.repeat(l2_normalize(q) * q.shape[-1] ** -0.5, repeat, axis=2)
  k = jnp.repeat(l2_normalize(k), repeat, axis=2)

  def step(carry, token):
    state, segment = carry
    q_t, k_t, v_t, g_t, beta_t, id_t = token
    real = (id_t > 0)[:, None]
    state = jnp.where((real[:, 0] & (id_t != segment))[:, None, None, None], 0.0, state)
    state = state * jnp.where(real, jnp.exp(g_t), 1.0)[..., None, None]
    read = jnp.einsum("bhkv,bhk->bhv", state, k_t, precision=_HIGHEST)
    u = jnp.where(real, beta_t, 0.0)[..., None] * (v_t - read)
    state = state + k_t[..., :, None] * u[..., None, :]
    out = jnp.einsum("bhkv,bhk->bhv", state, q_t, precision=_HIGHEST)
    return (state, jnp.where(id_t > 0, id_t, segment)), jnp.where(real[..., None], out, 0.0)

  per_token = (q, k, v.astype(jnp.float32), g, beta.astype(jnp.float32), segment_ids)
  start = (initial_state.astype(jnp.float32), initial_segment)
  (state, _), out = lax.scan(step, start, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), per_token))
  return jnp.moveaxis(out, 0, 1).astype(v.dtype), state
