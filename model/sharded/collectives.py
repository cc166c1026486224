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
from jaxtyping import Array, Shaped

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
