"""Flash attention with its own derivative: Pallas kernels on a TPU, the block loop elsewhere.

Only the output and the log-sum-exp are kept besides the inputs, named `context` for remat policies:
where a policy saves that name, the backward pass of a rematerialised layer does not run the forward
kernel again.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from kernels.attention import blockwise, pallas_backward, pallas_forward, schedule, tile_math
from kernels.attention import options as options_lib
from kernels.base import implementation as implementation_lib

SAVED_NAME = "context"


def _pad(x, axis, multiple):
  """Zeros up to a multiple: segment 0, which sees nothing and is seen by nothing."""
  short = -x.shape[axis] % multiple
  return x if not short else jnp.pad(x, [(0, short if a == axis else 0) for a in range(x.ndim)])


def _fit(block, length):
  """The block, or for a shorter row the row, up to whole lanes."""
  return min(block, -(-length // tile_math.LANES) * tile_math.LANES)


def _ids(segments, positions, multiple, padding):
  """[B, 2, tokens]; queries and keys name padding differently, so that it does not see itself."""
  segments, positions = (_pad(x.astype(jnp.int32), 1, multiple) for x in (segments, positions))
  return jnp.stack([jnp.where(segments > 0, segments, padding), positions], axis=1)


def _kinds(q_ids, kv_ids, block_q, part):
  halves = [x[:, i] for x in (q_ids, kv_ids) for i in range(2)]
  return schedule.kinds(*halves, block_q=block_q, block_kv=part)


def exact_factor(scale, given) -> float:
  """Factor of the queries, without rounding, that leaves scores with no factor to base 2, or 1."""
  mantissa, exponent = math.frexp(scale * tile_math.LOG2_E)
  exact = min(abs(mantissa - 0.5), abs(mantissa - 1.0)) < 1e-12
  return 2.0 ** (exponent - (mantissa < 0.75)) if exact and given.sa_use_base2_exp else 1.0


def _forward_kernel(q, k, v, ids, *, scale, given, interpret):
  length = q.shape[2]
  factor = exact_factor(scale, given)
  block_q = _fit(given.sa_block_q, length)
  part = _fit(given.sa_block_kv_compute, k.shape[2])
  block_kv = min(given.sa_block_kv, -(-k.shape[2] // part) * part)
  q_ids = _ids(ids.q_segment_ids, ids.q_positions, block_q, 0)
  kv_ids = _ids(ids.kv_segment_ids, ids.kv_positions, block_kv, -1)
  kinds = _kinds(q_ids, kv_ids, block_q, part)
  items = schedule.plan(kinds.reshape(*kinds.shape[:2], -1, block_kv // part))
  out, lse = pallas_forward.forward(
    _pad(q * factor, 2, block_q),
    _pad(k, 2, block_kv),
    _pad(v, 2, block_kv),
    q_ids,
    kv_ids,
    items,
    exponential=tile_math.Exponential(scale / factor, given.sa_use_base2_exp),
    block_q=block_q,
    block_kv=block_kv,
    part=part,
    interpret=interpret,
  )
  return out[:, :, :length], lse[:, :, :length]


def _backward_kernel(q, k, v, ids, out, lse, d_out, *, scale, given, interpret):
  length, keys = q.shape[2], k.shape[2]
  factor = exact_factor(scale, given)
  block_q = _fit(given.sa_block_q_dkv, length)
  part = _fit(given.sa_block_kv_dkv_compute, keys)
  block_kv = min(given.sa_block_kv_dkv, -(-keys // part) * part)
  q_ids = _ids(ids.q_segment_ids, ids.q_positions, block_q, 0)
  kv_ids = _ids(ids.kv_segment_ids, ids.kv_positions, block_kv, -1)
  kinds = _kinds(q_ids, kv_ids, block_q, part)
  kinds = kinds.reshape(*kinds.shape[:2], -1, block_kv // part)
  inner = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
  rows = lambda x: _pad(x, 2, block_q)
  dq, dk, dv = pallas_backward.backward(
    rows(q * factor),
    _pad(k, 2, block_kv),
    _pad(v, 2, block_kv),
    rows(d_out),
    rows(lse),
    rows(inner),
    q_ids,
    kv_ids,
    schedule.plan(jnp.swapaxes(kinds, 1, 2)),
    exponential=tile_math.Exponential(scale / factor, given.sa_use_base2_exp),
    block_q=block_q,
    block_kv=block_kv,
    part=part,
    buffers=given.dq_reduction_steps,
    interpret=interpret,
  )
  dq = (scale * jnp.sum(dq[:, :, :, :length], axis=0)).astype(q.dtype)
  return dq, dk[:, :, :keys], dv[:, :, :keys]


def _turned(x):
  """Tokens before heads from heads before tokens, and back."""
  return jnp.swapaxes(x, 1, 2)


def _forward_blockwise(q, k, v, ids, *, scale):
  out, lse = blockwise.forward(_turned(q), _turned(k), _turned(v), ids, scale=scale)
  return _turned(out), lse


def _backward_blockwise(q, k, v, ids, out, lse, d_out, *, scale):
  q, k, v, out, d_out = (_turned(x) for x in (q, k, v, out, d_out))
  gradients = blockwise.backward(q, k, v, ids, out, lse, d_out, scale=scale)
  return tuple(_turned(x) for x in gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attention(
  q: Float[Array, "B nq S d"],
  k: Float[Array, "B nkv T d"],
  v: Float[Array, "B nkv T d"],
  ids: blockwise.Ids,
  scale: float,
  implementation: str,
  given: options_lib.AttentionOptions,
) -> tuple[Float[Array, "B nq S d"], Float[Array, "B nq S"]]:
  """Output and log-sum-exp (natural, float32, no gradient); heads before tokens.

  Args:
    q: Queries; head h reads key/value head h // (nq / nkv).
    k: Keys.
    v: Values.
    ids: Segment ids and positions, as in `reference.visible`.
    scale: Factor of the scores, above 0.
    implementation: See `implementation.dispatch`; the reference is `blockwise`.
    given: Tiles and arithmetic of the kernels.
  """
  return _forward(q, k, v, ids, scale, implementation, given)[0]


def _forward(q, k, v, ids, scale, implementation, given):
  out, lse = implementation_lib.dispatch(
    implementation,
    functools.partial(_forward_kernel, scale=scale, given=given),
    functools.partial(_forward_blockwise, scale=scale),
    *(q, k, v, ids),
  )
  out, lse = (checkpoint_name(x, SAVED_NAME) for x in (out, lse))
  return (out, lse), (q, k, v, ids, out, lse)


def _backward(scale, implementation, given, residuals, cotangents):
  q, k, v, ids, out, lse = residuals
  # Whatever stands in padding's gradient, its queries' products with it are to be zero.
  d_out = jnp.where((ids.q_segment_ids > 0)[:, None, :, None], cotangents[0], 0)
  gradients = implementation_lib.dispatch(
    implementation,
    functools.partial(_backward_kernel, scale=scale, given=given),
    functools.partial(_backward_blockwise, scale=scale),
    *(q, k, v, ids, out, lse, d_out),
  )
  return *gradients, None


attention.defvjp(_forward, _backward)
