"""The gated delta rule of a row whose tokens are split over the ranks of a named axis, in order.

A run of tokens maps the state before it to M S + H.  Every rank

1. runs its tokens from a zero state, which yields H (and each chunk's inverse), and folds the
   chunks' transitions into M in one kernel ("m scan");
2. gathers the maps, and applies those of the ranks before it to get the state it starts from;
3. runs its tokens again from that state.

The gradient of the state runs the other way: dS = M^T dS' + G, where G is the gradient of the
rank's first state when nothing flows in from behind ("dh scan").  Segments need no care beyond
the segment that a rank's incoming state belongs to: M is exactly zero across a boundary.

The axis is one that shard_map binds.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.base import implementation as implementation_lib
from kernels.gdn import chunk_op, chunked, pallas_backward, pallas_forward

Matrix = Float[Array, "... dk dk"]
State = Float[Array, "... dk dv"]


def _matmul(a, b):
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def compose(later: tuple[Matrix, State], earlier: tuple[Matrix, State]) -> tuple[Matrix, State]:
  """The affine map that applies `earlier`, then `later`; associative."""
  m = _matmul(later[0], earlier[0])
  return m, _matmul(later[0], earlier[1]) + later[1]


def states_before(
  m: Float[Array, "R ... dk dk"],
  h: Float[Array, "R ... dk dv"],
  *,
  state_passing: bool = True,
) -> Float[Array, "R ... dk dv"]:
  """State that each of R ranks starts from, the first from zero.

  Args:
    m: Linear part of each rank's map.
    h: Constant part.
    state_passing: Apply the maps to states one after the other; False composes pairs of maps in
      a tree, which multiplies M by M.
  """
  zero = jnp.zeros_like(h[:1])
  if m.shape[0] == 1:
    return zero
  if state_passing:
    step = lambda state, pair: ((new := _matmul(pair[0], state) + pair[1]), new)
    return jnp.concatenate([zero, lax.scan(step, zero[0], (m[:-1], h[:-1]))[1]])
  combine = lambda earlier, later: compose(later, earlier)
  return jnp.concatenate([zero, lax.associative_scan(combine, (m[:-1], h[:-1]))[1]])


def cotangents_after(
  m: Float[Array, "R ... dk dk"],
  g: Float[Array, "R ... dk dv"],
  *,
  state_passing: bool = True,
) -> Float[Array, "R ... dk dv"]:
  """Gradient of the state behind each rank, zero behind the last; arguments as `states_before`."""
  turned = jnp.flip(jnp.swapaxes(m, -1, -2), 0)
  return jnp.flip(states_before(turned, jnp.flip(g, 0), state_passing=state_passing), 0)


def segment_before(segment_ids: Int[Array, "B S"], axis_name: str) -> Int[Array, " B"]:
  """Segment of the last real token on any rank before this one; 1 when there is none."""
  index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
  last = jnp.max(jnp.where(segment_ids > 0, index, -1), axis=1)
  owner = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
  owners = lax.all_gather(jnp.where(last >= 0, owner, 0), axis_name)
  rank = lax.axis_index(axis_name)
  step = lambda held, pair: (jnp.where((pair[0] < rank) & (pair[1] > 0), pair[1], held), None)
  ranks = jnp.arange(owners.shape[0], dtype=jnp.int32)
  return lax.scan(step, jnp.ones_like(owner), (ranks, owners))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rule(options, axis_name, state_passing, q, k, v, g, beta, segment_ids):
  return _forward(options, axis_name, state_passing, q, k, v, g, beta, segment_ids)[0]


def _mine(values, axis_name):
  return lax.dynamic_index_in_dim(values, lax.axis_index(axis_name), keepdims=False)


def _operands(options, q, k, v, g, beta, segment_ids, before):
  """q, k, v as the kernels read them; shape and gates of the forward kernel and of the scans."""
  flat = functools.partial(chunk_op.tokens, chunk=options.chunk)
  gated = lambda shape: (shape, chunk_op.gates(shape, g, beta, segment_ids, before))
  return flat(q), flat(k), flat(v), gated(options.shape(k, v)), gated(options.widest(k, v))


def _forward(options, axis_name, state_passing, q, k, v, g, beta, segment_ids):
  before = segment_before(segment_ids, axis_name)
  zero = jnp.zeros((q.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)

  def maps(q, k, v, g, beta, segment_ids, before, *, interpret):
    q, k, v_flat, (shape, gates), (wide, wide_gates) = _operands(
      options, q, k, v, g, beta, segment_ids, before
    )
    start = chunk_op.join_heads(zero, shape.key_heads)
    run = functools.partial(pallas_forward.forward, shape=shape, interpret=interpret)
    _, h, _ = run(q, k, v_flat, gates, start, want_output=False)
    m = pallas_forward.transition_product(k, wide_gates, shape=wide, interpret=interpret)
    return tuple(chunk_op.split_heads(x, v.shape[2]) for x in (m, h))

  def plain_maps(q, k, v, g, beta, segment_ids, before):
    # Linear in the state: the identity is another state, of a row without values.
    run = functools.partial(_plain, options, q, k)
    eye = jnp.broadcast_to(jnp.eye(k.shape[3]), (*zero.shape[:3], k.shape[3]))
    empty = jnp.zeros((*v.shape[:3], k.shape[3]), jnp.float32)
    m = run(empty, g, beta, eye, segment_ids, before)[1]
    return m, run(v, g, beta, zero, segment_ids, before)[1]

  local = (q, k, v, g, beta, segment_ids, before)
  m, h = implementation_lib.dispatch(options.implementation, maps, plain_maps, *local)
  every = [lax.all_gather(x, axis_name) for x in (m, h)]
  start = _mine(states_before(*every, state_passing=state_passing), axis_name)
  out, _ = chunk_op.gated_delta_rule(options, q, k, v, g, beta, start, segment_ids, before)
  return out, ((q, k, v, g, beta, segment_ids), before, every[0], start)


def _plain(options, q, k, v, g, beta, state, segment_ids, before):
  return chunked.chunked_gated_delta_rule(
    q, k, v, g, beta, segment_ids, state, before, chunk_size=options.chunk
  )


def _backward(options, axis_name, state_passing, residuals, d_out):
  (q, k, v, g, beta, segment_ids), before, every_m, start = residuals

  def first_gradient(q, k, v, g, beta, start, segment_ids, before, d_out, *, interpret):
    q, k, v_flat, (shape, gates), (wide, wide_gates) = _operands(
      options, q, k, v, g, beta, segment_ids, before
    )
    joined = chunk_op.join_heads(start, shape.key_heads)
    _, _, saved = pallas_forward.forward(
      q,
      k,
      v_flat,
      gates,
      joined,
      shape=shape,
      want_output=False,
      want_saved=True,
      interpret=interpret,
    )
    d_start = pallas_backward.state_gradient(
      q,
      k,
      wide_gates,
      saved.inverses,
      chunk_op.tokens(d_out, options.chunk),
      jnp.zeros_like(joined),
      shape=wide,
      interpret=interpret,
    )
    return chunk_op.split_heads(d_start, v.shape[2])

  def plain_gradient(q, k, v, g, beta, start, segment_ids, before, d_out):
    run = lambda state: _plain(options, q, k, v, g, beta, state, segment_ids, before)[0]
    return jax.vjp(run, start)[1](d_out)[0]

  local = (q, k, v, g, beta, start, segment_ids, before)
  gradient = implementation_lib.dispatch(
    options.implementation, first_gradient, plain_gradient, *local, d_out
  )
  every = lax.all_gather(gradient, axis_name)
  d_final = _mine(cotangents_after(every_m, every, state_passing=state_passing), axis_name)
  rule = functools.partial(chunk_op.gated_delta_rule, options)
  run = lambda *args: rule(*args, segment_ids, before)
  gradients = jax.vjp(run, q, k, v, g, beta, start)[1]((d_out, d_final))
  return *gradients[:5], np.zeros(segment_ids.shape, jax.dtypes.float0)


_rule.defvjp(_forward, _backward)


def gated_delta_rule(
  q: Float[Array, "B S nk dk"],
  k: Float[Array, "B S nk dk"],
  v: Float[Array, "B S nv dv"],
  g: Float[Array, "B S nv"],
  beta: Float[Array, "B S nv"],
  segment_ids: Int[Array, "B S"],
  *,
  axis_name: str,
  chunk_size: int = 64,
  implementation: str = "auto",
  head_group: int = 1,
  state_passing: bool = True,
) -> Float[Array, "B S nv dv"]:
  """`gdn.gated_delta_rule` of rows whose tokens lie on the ranks of an axis, in order.

  Args:
    q: This rank's queries.
    k: This rank's keys.
    v: This rank's values.
    g: Logarithm of the decay, float32, <= 0.
    beta: Writing strength.
    segment_ids: This rank's segments; 0 is padding.  An id names one segment of the whole row.
    axis_name: The axis of the ranks.
    chunk_size: Tokens per chunk, a power of two from 16 up.
    implementation: See `kernels.base.implementation`.
    head_group: Key heads per grid step of the forward kernel.
    state_passing: See `states_before`.
  """
  implementation_lib.validate(implementation)
  options = chunk_op.Options(
    implementation=implementation, chunk=chunk_size, group=head_group, keep_states=False
  )
  return _rule(options, axis_name, state_passing, q, k, v, g, beta, segment_ids)
