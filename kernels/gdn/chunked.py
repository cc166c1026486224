"""The gated delta rule in chunks, plain JAX: matrix products instead of a loop over tokens.

Per chunk of C tokens with incoming state S, b = cumsum(g), Gam_ij = exp(b_i - b_j) for i >= j:

    A = strictly lower part of diag(beta) (K K^T) o Gam;      T = (I + A)^-1
    U = T (diag(beta) V - diag(beta exp(b)) K S)
    O = diag(exp(b)) Q S + lower part of ((Q K^T) o Gam) U
    S' = exp(b_C) S + (diag(exp(b_C - b)) K)^T U

Packed rows: Gam, exp(b), exp(b_C - b) and exp(b_C) are masked where they would join two
segments.  Exponents are masked before they are exponentiated, so nothing overflows and every
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

  rows = chunks * batch * nk

  def per_chunk(x, *head_shape):
    """[B, S, nk, (heads), ...] -> [N B nk, (heads), C, ...]: chunks first, tokens inside.

    All that is independent lies on few axes: XLA's CPU products (YNNPACK, jaxlib 0.10.2) crash on
    some transposed operands of six axes.
    """
    count = len(head_shape)
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(batch, chunks, chunk, *head_shape, *x.shape[3:])
    x = x.transpose(1, 0, *(3 + i for i in range(count)), 2, *range(3 + count, x.ndim))
    return x.reshape(rows, *x.shape[3:])

  q, k = per_chunk(q, nk), per_chunk(k, nk)
  v, g, beta = (per_chunk(x, nk, heads) for x in (v, g, beta))
  owner = jnp.pad(owner, ((0, 0), (0, pad)), mode="edge").reshape(batch, chunks, chunk)
  owner = owner.transpose(1, 0, 2)

  last = owner[..., -1]
  before = jnp.concatenate([initial_segment[None], last[:-1]])
  flat = lambda mask: mask.reshape(chunks * batch, *mask.shape[2:])
  expand = lambda mask: jnp.repeat(flat(mask), nk, axis=0)[:, None]
  joined = expand(owner[..., :, None] == owner[..., None, :])
  lower = joined & jnp.tril(jnp.ones((chunk, chunk), bool))
  reads_state = expand(owner == before[..., None])
  writes_state = expand(owner == last[..., None])
  keeps_state = expand(last == before)

  # Decays between tokens are summed, not subtracted from each other: far into a chunk a
  # difference of prefix sums would lose what a slow decay needs.
  strictly_lower = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
  gam = _masked_exp(jnp.cumsum(jnp.where(strictly_lower, g[..., None], 0.0), axis=-2), lower)
  b = jnp.cumsum(g, axis=-1)
  after = lax.cumsum(g, axis=g.ndim - 1, reverse=True) - g
  from_start = _masked_exp(b, reads_state)
  to_end = _masked_exp(after, writes_state)
  whole = _masked_exp(b[..., -1], keeps_state)

  kk = _einsum("mik,mjk->mij", k, k)[:, None]
  qk = _einsum("mik,mjk->mij", q, k)[:, None]
  matrices = lambda x: x.reshape(rows * heads, *x.shape[2:])
  t = inverse.unit_lower_inverse(matrices(jnp.tril(beta[..., None] * kk * gam, -1)))
  u0 = _einsum("mij,mjv->miv", t, matrices(beta[..., None] * v))
  t = t.reshape(rows, heads, chunk, chunk)
  w = _einsum("mhij,mjk->mhik", t * (beta * from_start)[..., None, :], k)
  scanned = lambda x: x.reshape(chunks, batch * nv, *x.shape[-2:])

  def step(state, per_chunk):
    u0_c, w_c, p_c, q_c, k_c, whole_c = per_chunk
    u = u0_c - _einsum("mik,mkv->miv", w_c, state)
    out = _einsum("mik,mkv->miv", q_c, state) + _einsum("mij,mjv->miv", p_c, u)
    state = whole_c[..., None, None] * state + _einsum("mik,miv->mkv", k_c, u)
    return state, out

  state = initial_state.astype(jnp.float32).reshape(batch * nv, dk, dv)
  inputs = (
    scanned(u0),
    scanned(w),
    scanned(qk * gam),
    scanned(q[:, None] * from_start[..., None]),
    scanned(k[:, None] * to_end[..., None]),
    whole.reshape(chunks, batch * nv),
  )
  state, out = lax.scan(step, state, inputs)
  out = out.reshape(chunks, batch, nv, chunk, dv).transpose(1, 0, 3, 2, 4)
  out = out.reshape(batch, chunks * chunk, nv, dv)[:, :length]
  out = jnp.where(tokens, out, 0.0)
  return out.astype(dtype), state.reshape(batch, nv, dk, dv)
