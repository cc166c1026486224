"""Collectives of a sharded step and their derivatives, for use inside a shard_map.

What a rank computes from its own shards is differentiated rank by rank: a collective's transpose
carries what other ranks contribute.  A gather's transpose reduces and scatters; where every rank
computes the same from the gathered value, the transpose must take one rank's share alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float, Shaped

from kernels.fp8 import fp8
from model.sharded.layout import Axes, Leaf

Tree = Any


def gather_weights(weights: Tree, leaves: Tree, dtype) -> Tree:
  """Whole weights of a layer from its shards; the transpose reduces gradients in `dtype`.

  Args:
    weights: Shards, without the axes of the stack.
    leaves: Their plan.
    dtype: Type that split weights are cast to before they travel: the one they are multiplied in.
  """

  def one(path, weight, leaf: Leaf):
    # A name for reports: the gather and its transpose belong to the block that they serve.
    with jax.named_scope(_served(jax.tree_util.keystr(path, simple=True, separator="/"))):
      if leaf.gather and not leaf.exact:
        weight = weight.astype(dtype)
      for dim, axes in leaf.gather:
        weight = lax.all_gather(weight, axes, axis=weight.ndim + dim, tiled=True)
      return weight

  return jax.tree_util.tree_map_with_path(one, weights, leaves)


def _served(name: str) -> str:
  """`mlp/wi` -> `weights/moe/wi`: the routed experts' are told from a dense block's."""
  if name.endswith(("/wi", "/wo", "/router/kernel")):
    name = name.replace("mlp/", "moe/", 1)
  return f"weights/{name}" if name else "weights"


@jax.custom_vjp
def together(values: Tree) -> Tree:
  """The values, none of which a program has before it has them all; gradients do not wait."""
  return lax.optimization_barrier(values)


together.defvjp(lambda values: (together(values), None), lambda _, grads: (grads,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_shared(x: Shaped[Array, "..."], axis_name: str, axis: int) -> Shaped[Array, "..."]:
  """Gathers what all ranks then use alike: each takes its own share of the gradient."""
  return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def _shared_forward(x, axis_name, axis):
  return gather_shared(x, axis_name, axis), None


def _shared_backward(axis_name, axis, _, grad):
  return (own_part(grad, axis_name, axis),)


gather_shared.defvjp(_shared_forward, _shared_backward)


def own_part(x: Shaped[Array, "..."], axis_name: str | Axes, axis: int) -> Shaped[Array, "..."]:
  """This rank's share of a value that every rank holds whole."""
  share = x.shape[axis] // lax.axis_size(axis_name)
  return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * share, share, axis)


def _gather_rows(x, axes):
  return lax.all_gather(x, axes, axis=0, tiled=True)


def _scatter_sum(x, axes):
  return lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)


def _gather_quantised(x, axes, dtype):
  q = fp8.quantise_rows(x, dtype)
  whole = fp8.Quantised(_gather_rows(q.values, axes), _gather_rows(q.scale, axes))
  return fp8.dequantise(whole, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_tokens(x: Float[Array, "T h"], axes: Axes, quantised: bool) -> Float[Array, "R*T h"]:
  """Tokens of all ranks of `axes`; as e4m3 with a scale a token where `quantised`.

  The gradient is summed over the ranks in the type of `x` and does not see the rounding.
  """
  return _gather_quantised(x, axes, fp8.E4M3) if quantised else _gather_rows(x, axes)


gather_tokens.defvjp(
  lambda x, axes, quantised: (gather_tokens(x, axes, quantised), None),
  lambda axes, quantised, _, grad: (_scatter_sum(grad, axes),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sum_tokens(y: Float[Array, "R*T h"], axes: Axes, quantised: bool) -> Float[Array, "T h"]:
  """Sum over the ranks of `axes` of their parts of this rank's tokens.

  The gradient is gathered; as e5m2 with a scale a token where `quantised`.
  """
  return _scatter_sum(y, axes)


sum_tokens.defvjp(
  lambda y, axes, quantised: (sum_tokens(y, axes, quantised), None),
  lambda axes, quantised, _, grad: (
    _gather_quantised(grad, axes, fp8.E5M2) if quantised else _gather_rows(grad, axes),
  ),
)


def from_rank_before(x: Shaped[Array, "..."], axis_name: str) -> Shaped[Array, "..."]:
  """The value of the rank before; zeros on the first."""
  ranks = lax.axis_size(axis_name)
  return lax.ppermute(x, axis_name, [(i, i + 1) for i in range(ranks - 1)])


def heads_to_ranks(x: Shaped[Array, "B S H ..."], axis_name: str) -> Shaped[Array, "B T h ..."]:
  """From a rank's tokens of all heads to all tokens of a rank's heads."""
  return lax.all_to_all(x, axis_name, split_axis=2, concat_axis=1, tiled=True)


def tokens_to_ranks(x: Shaped[Array, "B T h ..."], axis_name: str) -> Shaped[Array, "B S H ..."]:
  """The way back of `heads_to_ranks`."""
  return lax.all_to_all(x, axis_name, split_axis=1, concat_axis=2, tiled=True)
