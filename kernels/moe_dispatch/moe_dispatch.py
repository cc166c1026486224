"""Sends tokens to the rows of their experts and brings results back.

One sort of packed integer keys orders the (token, choice) pairs by expert, stably; everything
else is a gather, in plain JAX or (`dispatch`, `sum_rows`) by a Pallas kernel.  The transpose of each
gather is written as the other gather, so that no gradient scatters rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.base import implementation as implementation_lib
from kernels.base import shapes
from kernels.fp8 import fp8
from kernels.moe_dispatch import gather, unsort, word_lists


class Plan(NamedTuple):
  """Where each (token, choice) pair goes.

  Attributes:
    pairs: Flat pair (token * K + choice) of each row of the buffer, rows sorted by expert; rows
      beyond sum(group_sizes) hold pairs that go nowhere.
    rows: Row of each pair.  Of a pair that goes nowhere: any legal row, and `sent` is False.
    group_sizes: Rows of each expert in the buffer, int32.
    sent: Whether a row of the buffer holds the pair.
    overflow: Whether pairs of these experts were left out because the buffer is full.
  """

  pairs: Int[Array, " M"]
  rows: Int[Array, "T K"]
  group_sizes: Int[Array, " E"]
  sent: Bool[Array, "T K"]
  overflow: Bool[Array, ""]


def plan(
  experts: Int[Array, "T K"],
  num_experts: int,
  *,
  first_expert: Int[Array, ""] | int = 0,
  buffer_rows: int | None = None,
  spread_masked: bool = False,
) -> Plan:
  """Orders pairs by expert, pairs of one expert by token.

  Args:
    experts: Chosen experts; a value outside [first_expert, first_expert + num_experts) goes
      nowhere (padding, or another device's expert).
    num_experts: E, experts of this device.
    first_expert: The first of them; may be traced.
    buffer_rows: M; T * K by default, which never overflows.  With fewer, the last rows in order
      are left out and `overflow` is set.
    spread_masked: Pairs that go nowhere name rows spread over the buffer, instead of all row 0: a
      gather does not then read one row over and over.  What they name is never used.

  Raises:
    ValueError: `experts` are no integers [T, K], E is below 1, E * T * K does not fit in 32 bits, or
      `buffer_rows` is not in [1, T * K].
  """
  shapes.check("plan", experts=(experts, ("T", "K")))
  shapes.check_types("plan", kernels=False, values={}, ids={"experts": experts})
  tokens, choices = experts.shape
  count = tokens * choices
  if num_experts < 1:
    raise ValueError(f"num_experts={num_experts}: want at least 1")
  buffer_rows = count if buffer_rows is None else buffer_rows
  if not 1 <= buffer_rows <= count:
    raise ValueError(f"buffer_rows={buffer_rows}: want 1 to {count} (tokens x choices)")
  bits = max(1, (count - 1).bit_length())
  if (num_experts + 1) << bits > 1 << 32:
    raise ValueError(f"{num_experts} experts x {count} pairs do not fit in a 32-bit sort key")
  # One choice of all tokens after the other, as they lie: a token's few choices would fill a few lanes.
  flat = experts.T.reshape(-1).astype(jnp.int32) - first_expert
  flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts).astype(jnp.uint32)
  shape = (choices, tokens)
  token, choice = (lax.broadcasted_iota(jnp.uint32, shape, axis).reshape(-1) for axis in (1, 0))
  keys = lax.sort((flat << bits) | (token * choices + choice), is_stable=False)
  pairs = (keys & ((1 << bits) - 1)).astype(jnp.int32)
  place = pairs % choices * tokens + pairs // choices
  order = jnp.arange(count, dtype=jnp.int32)
  rows = jnp.zeros((count,), jnp.int32).at[place].set(order, unique_indices=True)
  borders = jnp.arange(1, num_experts + 1, dtype=jnp.uint32) << bits
  ends = word_lists.lower_bounds(keys, borders)
  held = jnp.minimum(ends, buffer_rows)
  sizes = jnp.diff(held, prepend=jnp.zeros((1,), jnp.int32))
  sent = rows < held[-1]
  elsewhere = rows % buffer_rows if spread_masked else 0
  return Plan(
    pairs[:buffer_rows],
    jnp.where(sent, rows, elsewhere).reshape(shape).T,
    sizes,
    sent.reshape(shape).T,
    ends[-1] > buffer_rows,
  )


def _owned(p: Plan):
  return (jnp.arange(p.pairs.shape[0]) < jnp.sum(p.group_sizes))[:, None]


def _gathered(x, axes, travel, implementation):
  """All ranks' tokens: as they are for `reference`, else as words of the kernel."""
  plain = implementation == "reference"
  gather_rows = lambda x: lax.all_gather(x, axes, axis=0, tiled=True) if axes else x
  if travel is not None:
    q = fp8.quantise_rows(x, travel)
    q = fp8.Quantised(gather_rows(q.values), gather_rows(q.scale))
    return fp8.dequantise(q, x.dtype) if plain else gather.dequantised_words(q, x.dtype)
  # Words are a pass over all tokens, so they are made before those are gathered.
  return gather_rows(x if plain else gather.to_words(x))


def _take_tokens(x, p: Plan, implementation, axes, travel):
  if not axes:  # With them x is a rank's part.
    shapes.check("dispatch", x=(x, (p.rows.shape[0], "N")))
  choices, shape = p.rows.shape[1], {"width": x.shape[1], "dtype": x.dtype}
  words = _gathered(x, axes, travel, implementation)

  def plain(words, pairs, sizes):
    x = words if implementation == "reference" else gather.from_words(words, **shape)
    owned = jnp.arange(pairs.shape[0]) < jnp.sum(sizes)
    return jnp.where(owned[:, None], x[pairs // choices], 0)

  def kernel(words, pairs, sizes, *, interpret):
    at, total = pairs // choices, jnp.sum(sizes)
    return gather.take_words(words, at, total, interpret=interpret, **shape)

  return implementation_lib.dispatch(implementation, kernel, plain, words, p.pairs, p.group_sizes)


def _take_rows(y, p: Plan):
  """[T, K, N]: the row of each pair, zero where the pair went nowhere."""
  return jnp.where(p.sent[..., None], y[p.rows], 0)


def _sum(y, p: Plan, implementation, axes):
  shapes.check("sum_rows", y=(y, (p.pairs.shape[0], "N")))
  tokens, choices = p.rows.shape

  def plain(y, p):
    return jnp.sum(_take_rows(y, p).astype(jnp.float32), axis=1).astype(y.dtype)

  def kernel(y, p, *, interpret):
    shape = {"tokens": tokens, "choices": choices}
    return unsort.sum_rows(y, p.pairs, p.group_sizes, interpret=interpret, **shape)

  sums = implementation_lib.dispatch(implementation, kernel, plain, y, p)
  return lax.psum_scatter(sums, axes, scatter_dimension=0, tiled=True) if axes else sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dispatch(
  x: Float[Array, "T N"],
  p: Plan,
  implementation: str = "reference",
  axes: tuple[str, ...] = (),
  travel: Any = None,
) -> Float[Array, "M N"]:
  """Copies each token to the rows of its pairs; rows that no expert owns are zero.

  Args:
    x: Tokens, or with `axes` this rank's part of them; bfloat16 or float32 for the kernel.
    p: Where they go.
    implementation: One of `kernels.base.implementation.IMPLEMENTATIONS`, also of the derivative, which
      is `sum_rows`.
    axes: Of the mesh, over whose ranks the tokens are gathered; the gradient is a sum over them in the
      type of `x`.
    travel: Eight-bit type in which they are, with a scale a token; the gradient does not see the
      rounding.  None: their own.
  """
  return _take_tokens(x, p, implementation, axes, travel)


dispatch.defvjp(
  lambda x, p, *how: (_take_tokens(x, p, *how), p),
  lambda implementation, axes, travel, p, grad: (_sum(grad, p, implementation, axes), None),
)


@jax.custom_vjp
def combine(y: Float[Array, "M N"], weights: Float[Array, "T K"], p: Plan) -> Float[Array, "T N"]:
  """Weighted sum of each token's rows in float32, in the type of `y`.

  Pairs that went nowhere add nothing and their weights get no gradient; rows that no expert owns
  are not read.
  """
  return _combine(y, weights, p)


def _combine(y, weights, p):
  shapes.check("combine", y=(y, (p.pairs.shape[0], "N")), weights=(weights, p.rows.shape))
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
  d_rows = jnp.where(_owned(p), d_rows, 0.0)
  return d_rows.astype(y.dtype), d_weights.astype(weights.dtype), None


combine.defvjp(lambda y, w, p: (_combine(y, w, p), (y, w, p)), _combine_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def sum_rows(
  y: Float[Array, "M N"],
  p: Plan,
  implementation: str = "reference",
  axes: tuple[str, ...] = (),
  travel: Any = None,
) -> Float[Array, "T N"]:
  """Sum of each token's rows in float32, for rows that carry their weight already.

  Args:
    y: Rows of the buffer; rows that no expert owns are not read.
    p: Where they belong.
    implementation: As of `dispatch`, which is the derivative.  The kernel reads the rows that there
      are; plain JAX gathers a row for every pair.
    axes: Of the mesh, over whose ranks the sums are added, each rank keeping its part of the tokens.
    travel: Of the gradient, as of `dispatch`.
  """
  return _sum(y, p, implementation, axes)


sum_rows.defvjp(
  lambda y, p, implementation, axes, travel: (_sum(y, p, implementation, axes), p),
  lambda implementation, axes, travel, p, grad: (
    _take_tokens(grad, p, implementation, axes, travel),
    None,
  ),
)


def _take_weights(weights, p):
  shapes.check("dispatch_weights", weights=(weights, p.rows.shape))
  return jnp.where(_owned(p)[:, 0], weights.reshape(-1)[p.pairs], 0)


@jax.custom_vjp
def dispatch_weights(weights: Float[Array, "T K"], p: Plan) -> Float[Array, " M"]:
  """Weight of each row's pair; zero in rows that no expert owns."""
  return _take_weights(weights, p)


dispatch_weights.defvjp(
  lambda weights, p: (_take_weights(weights, p), p),
  lambda p, grad: (jnp.where(p.sent, grad[p.rows], 0), None),
)


def take_quantised(q: fp8.Quantised, p: Plan, dtype) -> Float[Array, "M N"]:
  """Rows of tokens that came as eight-bit values with a scale each, back in `dtype`.

  The values and the scales [T, 1] are gathered as they are and multiplied afterwards: a row costs
  N + 4 bytes to read.  No derivative: see `dispatch_quantised`.

  Raises:
    ValueError: Values or scales are not those of the plan's tokens.
  """
  tokens, choices = p.rows.shape
  shapes.check("take_quantised", values=(q.values, (tokens, "N")), scale=(q.scale, (tokens, 1)))
  at = p.pairs // choices
  rows = fp8.dequantise(fp8.Quantised(q.values[at], q.scale[at]), dtype)
  return jnp.where(_owned(p), rows, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatch_quantised(x: Float[Array, "T N"], p: Plan, dtype=fp8.E4M3) -> Float[Array, "M N"]:
  """`dispatch` of tokens rounded to eight bits with a scale a row; gradients pass straight through."""
  return take_quantised(fp8.quantise_rows(x, dtype), p, x.dtype)


dispatch_quantised.defvjp(
  lambda x, p, dtype: (dispatch_quantised(x, p, dtype), p),
  lambda dtype, p, grad: (_sum(grad, p, "reference", ()), None),
)
