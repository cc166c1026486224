"""The gated delta rule with its own derivative rule, over the Pallas kernels.

Rows are padded to whole chunks, the gates are laid out once, and the states of the value heads
that share a key head are put side by side, as the kernels hold them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.base import implementation as implementation_lib
from kernels.gdn import chunked, head_groups, layout, pallas_backward, pallas_forward

# One bfloat16 sublane tile.
MIN_CHUNK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Static arguments of the op.

  Attributes:
    implementation: See `kernels.base.implementation`; not `reference`.
    chunk: Tokens per chunk, a power of two from 16 up.
    group: Key heads per grid step of the forward kernel.
    keep_states: Keep the chunks' states and inverses instead of replaying them.
  """

  implementation: str
  chunk: int
  group: int
  keep_states: bool

  def shape(self, k, v) -> layout.Shape:
    """Static shape of the forward kernel's call on keys and values [B, S, heads, channels]."""
    key_heads = k.shape[2]
    return layout.Shape(
      chunk=self.chunk,
      key_heads=key_heads,
      heads=v.shape[2] // key_heads,
      group=self.group,
    )

  def widest(self, k, v) -> layout.Shape:
    """The same for the kernels whose group is not chosen: as wide as fits."""
    shape = self.shape(k, v)
    sizes = {"dk": k.shape[3], "dv": v.shape[3], "itemsize": k.dtype.itemsize}
    group = head_groups.widest(shape.key_heads, shape.heads, chunk=shape.chunk, **sizes)
    return dataclasses.replace(shape, group=group)


def join_heads(state: Float[Array, "B nv dk dv"], key_heads: int) -> Float[Array, "B nk dk n"]:
  """Puts the states of the value heads of each key head side by side on the last axis."""
  batch, heads, dk, dv = state.shape
  grouped = state.reshape(batch, key_heads, heads // key_heads, dk, dv)
  return grouped.swapaxes(2, 3).reshape(batch, key_heads, dk, -1)


def split_heads(state: Float[Array, "B nk dk n"], heads: int) -> Float[Array, "B nv dk dv"]:
  """Inverse of `join_heads`; `heads` is the number of value heads."""
  batch, key_heads, dk, width = state.shape
  per_key = heads // key_heads
  grouped = state.reshape(batch, key_heads, dk, per_key, width // per_key)
  return grouped.swapaxes(2, 3).reshape(batch, heads, dk, -1)


def pad(x, chunk):
  """Pads the tokens of [B, S, ...] with zeros to whole chunks."""
  return jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk)) + ((0, 0),) * (x.ndim - 2))


def tokens(x, chunk):
  """[B, S, heads, channels] -> [B, padded S, heads * channels], the kernels' layout."""
  return pad(x.reshape(*x.shape[:2], -1), chunk)


def gates(shape, g, beta, segment_ids, initial_segment) -> layout.Gates:
  """`layout.pack_gates` on padded rows."""
  g, beta, segment_ids = (pad(x, shape.chunk) for x in (g, beta, segment_ids))
  return layout.pack_gates(g, beta, segment_ids, initial_segment, shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_delta_rule(
  options: Options,
  q: Float[Array, "B S nk dk"],
  k: Float[Array, "B S nk dk"],
  v: Float[Array, "B S nv dv"],
  g: Float[Array, "B S nv"],
  beta: Float[Array, "B S nv"],
  initial_state: Float[Array, "B nv dk dv"],
  segment_ids: Int[Array, "B S"],
  initial_segment: Int[Array, " B"],
) -> tuple[Float[Array, "B S nv dv"], Float[Array, "B nv dk dv"]]:
  """See `gdn.gated_delta_rule`."""
  operands = (q, k, v, g, beta, initial_state, segment_ids, initial_segment)
  return _run(options, False, *operands)[:2]


def _plain(options, q, k, v, g, beta, initial_state, segment_ids, initial_segment):
  return chunked.chunked_gated_delta_rule(
    q, k, v, g, beta, segment_ids, initial_state, initial_segment, chunk_size=options.chunk
  )


def _saved_shapes(options, k, v):
  """Shapes of `pallas_forward.Saved`."""
  shape = options.shape(k, v)
  start = (k.shape[0], -(-k.shape[1] // options.chunk), shape.key_heads)
  packs = shape.heads // shape.pack
  states = (*start, k.shape[3], shape.heads * v.shape[3])
  return states, (*start, packs, options.chunk, shape.pack * options.chunk)


def _run(options, want_saved, *operands):
  def pallas(q, k, v, g, beta, initial_state, segment_ids, initial_segment, *, interpret):
    shape = options.shape(k, v)
    flat = functools.partial(tokens, chunk=options.chunk)
    out, final, saved = pallas_forward.forward(
      flat(q),
      flat(k),
      flat(v),
      gates(shape, g, beta, segment_ids, initial_segment),
      join_heads(initial_state, shape.key_heads),
      shape=shape,
      want_saved=want_saved,
      interpret=interpret,
    )
    out = out[:, : v.shape[1]].reshape(v.shape)
    return out, split_heads(final, v.shape[2]), tuple(saved) if want_saved else ()

  def plain(*operands):
    # The reference needs nothing but its operands; the kept arrays only have their shapes.
    shapes = _saved_shapes(options, *operands[1:3]) if want_saved else ()
    saved = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    return *_plain(options, *operands), saved

  return implementation_lib.dispatch(options.implementation, pallas, plain, *operands)


def _forward(options, *operands):
  out, final, saved = _run(options, options.keep_states, *operands)
  saved = tuple(checkpoint_name(x, "gdn_states") for x in saved)
  return (out, final), (operands, saved)


def _backward(options, residuals, cotangents):
  operands, saved = residuals
  d_out, d_final = cotangents

  def pallas(operands, saved, d_out, d_final, *, interpret):
    q, k, v, g, beta, initial_state, segment_ids, initial_segment = operands
    shape = options.widest(k, v)
    flat = functools.partial(tokens, chunk=options.chunk)
    packed = functools.partial(
      gates, g=g, beta=beta, segment_ids=segment_ids, initial_segment=initial_segment
    )
    if not options.keep_states:
      _, _, saved = pallas_forward.forward(
        flat(q),
        flat(k),
        flat(v),
        packed(options.shape(k, v)),
        join_heads(initial_state, shape.key_heads),
        shape=options.shape(k, v),
        want_output=False,
        want_saved=True,
        interpret=interpret,
      )
    dq, dk, dv, d_columns, d_rows, d_start = pallas_backward.backward(
      flat(q),
      flat(k),
      flat(v),
      packed(shape),
      pallas_forward.Saved(*saved),
      flat(d_out),
      join_heads(d_final, shape.key_heads),
      shape=shape,
      interpret=interpret,
    )
    d_g, d_beta = layout.unpack_gradients(d_columns, d_rows, pad(segment_ids, options.chunk), shape)
    length = k.shape[1]
    back = lambda d, x: d[:, :length].reshape(x.shape).astype(x.dtype)
    results = (back(dq, q), back(dk, k), back(dv, v), back(d_g, g), back(d_beta, beta))
    return *results, split_heads(d_start, v.shape[2])

  def plain(operands, saved, d_out, d_final):
    del saved
    differentiable, ids = operands[:6], operands[6:]
    run = lambda *args: _plain(options, *args, *ids)
    return jax.vjp(run, *differentiable)[1]((d_out, d_final))

  gradients = implementation_lib.dispatch(
    options.implementation, pallas, plain, operands, saved, d_out, d_final
  )
  return *gradients, *(np.zeros(ids.shape, jax.dtypes.float0) for ids in operands[6:])


gated_delta_rule.defvjp(_forward, _backward)
