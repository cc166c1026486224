"""Public op of the gated delta rule, and its one-token step for decoding."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.base import implementation as implementation_lib
from kernels.base import shapes
from kernels.gdn import chunk_op, chunked, reference

_HIGHEST = lax.Precision.HIGHEST
_LANES = 128


def gated_delta_rule(
  q: Float[Array, "B S nk dk"],
  k: Float[Array, "B S nk dk"],
  v: Float[Array, "B S nv dv"],
  g: Float[Array, "B S nv"],
  beta: Float[Array, "B S nv"],
  segment_ids: Int[Array, "B S"],
  initial_state: Float[Array, "B nv dk dv"] | None = None,
  initial_segment: Int[Array, " B"] | None = None,
  *,
  chunk_size: int = 64,
  implementation: str = "reference",
  head_group: int = 1,
  keep_states: bool = False,
) -> tuple[Float[Array, "B S nv dv"], Float[Array, "B nv dk dv"]]:
  """The gated delta rule over packed rows; see `reference` for the definition.

  Args:
    q: Queries before the L2 norm, per key head.
    k: Keys before the L2 norm; value head j reads key head j // (nv / nk).
    v: Values.
    g: Logarithm of the decay, float32, <= 0.
    beta: Writing strength.
    segment_ids: 0 is padding, which neither writes nor decays the state; the state starts from
      zero wherever the id changes.  Ids must grow along a row (0 aside).
    initial_state: State the rows start from; zero when absent.
    initial_segment: Segment this state belongs to; 1 when absent.
    chunk_size: Tokens per chunk, a power of two.
    implementation: See `kernels.base.implementation`; `auto` is the reference for heads whose
      channels do not fill a TPU's lanes.
    head_group: Key heads per grid step of the forward kernel; the backward takes as many as fit.
    keep_states: The Pallas forward pass keeps each chunk's state and inverse for the backward
      pass, named "gdn_states" for remat policies; otherwise the backward pass replays them.

  Returns:
    Outputs in the type of `v`, zero on padding, and the float32 state after each row's last real
    token.

  Raises:
    ValueError: Shapes or types do not fit, heads or the head group do not divide, the chunk is no power of two, or the
      implementation is unknown.
  """
  implementation_lib.validate(implementation)
  shapes.check(
    "gated_delta_rule",
    k=(k, ("B", "S", "nk", "dk")),
    q=(q, ("B", "S", "nk", "dk")),
    v=(v, ("B", "S", "nv", "dv")),
    g=(g, ("B", "S", "nv")),
    beta=(beta, ("B", "S", "nv")),
    segment_ids=(segment_ids, ("B", "S")),
  )
  shapes.check_types(
    "gated_delta_rule",
    kernels=implementation != "reference",
    values={"k": k, "q": q, "v": v, "g": g, "beta": beta},
    ids={"segment_ids": segment_ids},
  )
  batch, _, nv, dv = v.shape
  nk, dk = k.shape[2:]
  if nv % nk:
    raise ValueError(f"{nv} value heads are no multiple of {nk} key heads")
  if head_group < 1 or nk % head_group:
    raise ValueError(f"head_group={head_group}: want a divisor of the {nk} key heads")
  if chunk_size < 1 or chunk_size & (chunk_size - 1):
    raise ValueError(f"chunk_size={chunk_size}: want a power of two")
  if initial_state is None:
    initial_state = jnp.zeros((batch, nv, dk, dv), jnp.float32)
  if initial_segment is None:
    initial_segment = jnp.ones((batch,), segment_ids.dtype)
  shapes.check(
    "gated_delta_rule",
    initial_state=(initial_state, (batch, nv, dk, dv)),
    initial_segment=(initial_segment, (batch,)),
  )
  types = {"values": {"initial_state": initial_state}, "ids": {"initial_segment": initial_segment}}
  shapes.check_types("gated_delta_rule", kernels=False, **types)
  if implementation == "auto" and (dk % _LANES or dv % _LANES):
    implementation = "reference"
  if implementation == "reference":
    return chunked.chunked_gated_delta_rule(
      q, k, v, g, beta, segment_ids, initial_state, initial_segment, chunk_size=chunk_size
    )
  options = chunk_op.Options(
    implementation=implementation,
    chunk=max(chunk_size, chunk_op.MIN_CHUNK),
    group=head_group,
    keep_states=keep_states,
  )
  return chunk_op.gated_delta_rule(
    options, q, k, v, g, beta, initial_state.astype(jnp.float32), segment_ids, initial_segment
  )


def gated_delta_step(
  q: Float[Array, "B nk dk"],
  k: Float[Array, "B nk dk"],
  v: Float[Array, "B nv dv"],
  g: Float[Array, "B nv"],
  beta: Float[Array, "B nv"],
  state: Float[Array, "B nv dk dv"],
) -> tuple[Float[Array, "B nv dv"], Float[Array, "B nv dk dv"]]:
  """One token of the recurrence, in float32.

  Args:
    q: Query before the L2 norm, per key head.
    k: Key before the L2 norm.
    v: Value.
    g: Logarithm of the decay.
    beta: Writing strength.
    state: State before the token.

  Returns:
    The output in the type of `v`, and the state after the token.

  Raises:
    ValueError: Shapes do not fit, or heads do not divide.
  """
  shapes.check(
    "gated_delta_step",
    k=(k, ("B", "nk", "dk")),
    q=(q, ("B", "nk", "dk")),
    v=(v, ("B", "nv", "dv")),
    g=(g, ("B", "nv")),
    beta=(beta, ("B", "nv")),
    state=(state, ("B", "nv", "dk", "dv")),
  )
  if v.shape[1] % k.shape[1]:
    raise ValueError(f"{v.shape[1]} value heads are no multiple of {k.shape[1]} key heads")
  batch, nv, dv = v.shape
  nk, dk = k.shape[1:]
  q = reference.l2_normalize(q) * dk**-0.5
  k = reference.l2_normalize(k)
  grouped = state.reshape(batch, nk, nv // nk, dk, dv)
  grouped = grouped * jnp.exp(g.astype(jnp.float32)).reshape(batch, nk, nv // nk, 1, 1)
  read = jnp.einsum("bghkv,bgk->bghv", grouped, k, precision=_HIGHEST)
  u = v.astype(jnp.float32).reshape(read.shape) - read
  u = u * beta.astype(jnp.float32).reshape(batch, nk, nv // nk, 1)
  grouped = grouped + k[:, :, None, :, None] * u[..., None, :]
  out = jnp.einsum("bghkv,bgk->bghv", grouped, q, precision=_HIGHEST)
  return out.reshape(batch, nv, dv).astype(v.dtype), grouped.reshape(state.shape)
