"""The gated delta rule in chunks, plain JAX: matrix products instead of a loop over tokens.

Per chunk of C tokens with incoming state S, b = cumsum(g), Gam_ij = exp(b_i - b_j) for i >= j:

    A = strictly lower part of diag(beta) (K K^T) o Gam;      T = (I + A)^-1
    U = T (diag(beta) V - diag(beta exp(b)) K S)
    O = diag(exp(b)) Q S + lower part of ((Q K^T) o Gam) U
    S' = exp(b_C) S + (diag(exp(b_C - b)) K)^T U

Packed rows: Gam, exp(b), exp(b_C - b) and exp(b_C) are masked where they would join two
segments.  Differences are masked before they are exponentiated, so nothing overflows and every
gradient is finite.  Everything inside is float32.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.gdn import inverse, reference

_HIGHEST = lax.Precision.HIGHEST


def _einsum(spec, *operands):
  return jnp.einsum(spec, *operands, precision=_HIGHEST)


def _masked_exp(x, mask):
  return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0.0)), 0.0)


def chunked_gated_delta_rule(
  q: Float[Array, "B S nk dk"],
  k: Float[Array, "B S nk dk"],
  v: Float[Array, "B S nv dv"],
  g: Float[Array, "B S nv"],
  beta: Float[Array, "B S nv"],
  segment_ids: Int[Array, "B S"],
  initial_state: Float[Array, "B nv dk dv"],
  initial_segment: Int[Array, " B"],
  *,
  chunk_size: int = 64,
) -> tuple[Float[Array, "B S nv dv"], Float[Array, "B nv dk dv"]]:
  """Same arguments, results and numbers as `reference.recurrent_gated_delta_rule`.

  Args:
    q: Queries before normalisation, per key head.
    k: Keys before normalisation; value head j reads key head j // (nv / nk).
    v: Values.
    g: Logarithm of the decay, float32, <= 0.
    beta: Writing strength.
    segment_ids: 0 is padding; the ids of a row's segments must grow along it.
    initial_state: State that the row starts from.
    initial_segment: Segment that this state belongs to.
    chunk_size: Tokens per chunk, a power of two; S is padded up to a multiple.
  """
  batch, length, nv, dv = v.shape
  dtype = v.dtype
  nk, dk = k.shape[2:]
  heads = nv // nk
  chunk = min(chunk_size, max(1, 1 << (length - 1).bit_length()))
  chunks = -(-length // chunk)
  pad = chunks * chunk - length

  real = segment_ids > 0
  owner = reference.owner_segments(segment_ids, initial_segment)
  g = jnp.where(real[..., None], g.astype(jnp.float32), 0.0)
  beta = jnp.where(real[..., None], beta.astype(jnp.float32), 0.0)
  # What lies in padding is not read: zero times it could still be NaN.
  tokens = real[..., None, None]
  q = reference.l2_normalize(jnp.where(tokens, q, 0)) * dk**-0.5
  k = reference.l2_normalize(jnp.where(tokens, k, 0))
  v = jnp.where(tokens, v, 0).astype(jnp.float32)

  def per_head(x, *heads_shape):
    """[B, S, heads, ...] -> [N, B, heads..., C, ...]: the scan's axis first, tokens inside."""
    count = len(heads_shape)
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(batch, chunks, chunk, *heads_shape, *x.shape[3:])
    return x.transpose(1, 0, *(3 + i for i in range(count)), 2, *range(3 + count, x.ndim))

  q, k = per_head(q, nk), per_head(k, nk)
  v = per_head(v, nk, heads)
  g, beta = per_head(g, nk, heads), per_head(beta, nk, heads)
  owner = jnp.pad(owner, ((0, 0), (0, pad)), mode="edge").reshape(batch, chunks, chunk)
  owner = owner.transpose(1, 0, 2)

  last = owner[..., -1]
  before = jnp.concatenate([initial_segment[None], last[:-1]])
  expand = lambda mask: mask[:, :, None, None]
  joined = expand(owner[..., :, None] == owner[..., None, :])
  lower = joined & jnp.tril(jnp.ones((chunk, chunk), bool))
  reads_state = expand(owner == before[..., None])
  writes_state = expand(owner == last[..., None])
  keeps_state = expand(last == before)

  b = jnp.cumsum(g, axis=-1)
  gam = _masked_exp(b[..., :, None] - b[..., None, :], lower)
  from_start = _masked_exp(b, reads_state)
  to_end = _masked_exp(b[..., -1:] - b, writes_state)
  whole = _masked_exp(b[..., -1], keeps_state)

  kk = _einsum("nbgik,nbgjk->nbgij", k, k)[:, :, :, None]
  qk = _einsum("nbgik,nbgjk->nbgij", q, k)[:, :, :, None]
  t = inverse.unit_lower_inverse(jnp.tril(beta[..., None] * kk * gam, -1))
  u0 = _einsum("nbghij,nbghjv->nbghiv", t, beta[..., None] * v)
  w = _einsum("nbghij,nbgjk->nbghik", t * (beta * from_start)[..., None, :], k)
  p = qk * gam
  q_in = q[:, :, :, None] * from_start[..., None]
  k_out = k[:, :, :, None] * to_end[..., None]

  def step(state, per_chunk):
    u0_c, w_c, p_c, q_c, k_c, whole_c = per_chunk
    u = u0_c - _einsum("bghik,bghkv->bghiv", w_c, state)
    out = _einsum("bghik,bghkv->bghiv", q_c, state) + _einsum("bghij,bghjv->bghiv", p_c, u)
    state = whole_c[..., None, None] * state + _einsum("bghik,bghiv->bghkv", k_c, u)
    return state, out

  state = initial_state.astype(jnp.float32).reshape(batch, nk, heads, dk, dv)
  state, out = lax.scan(step, state, (u0, w, p, q_in, k_out, whole))
  out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, chunks * chunk, nv, dv)[:, :length]
  out = jnp.where(tokens, out, 0.0)
  return out.astype(dtype), state.reshape(batch, nv, dk, dv)
