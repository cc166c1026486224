"""Dispatch and combine with dense selection matrices: the definition of the sparse ones."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def selection(experts: Int[Array, "T K"], num_experts: int) -> Float[Array, "M T K"]:
  """1 where a row holds a (token, choice) pair.

  Rows are the pairs in a stable order by expert; pairs whose expert is outside
  [0, num_experts) have no row, and the rows left over at the end are empty.
  """
  tokens, choices = experts.shape
  flat = experts.reshape(-1)
  valid = (flat >= 0) & (flat < num_experts)
  order = jnp.argsort(jnp.where(valid, flat, num_experts), stable=True)
  chosen = jnp.eye(tokens * choices)[order] * valid[order][:, None]
  return chosen.reshape(-1, tokens, choices)


def dispatch(x: Float[Array, "T N"], select: Float[Array, "M T K"]) -> Float[Array, "M N"]:
  """Copies each token to the rows of its pairs."""
  return jnp.einsum("mtk,tn->mn", select, x, precision="highest")


def combine(
  y: Float[Array, "M N"], weights: Float[Array, "T K"], select: Float[Array, "M T K"]
) -> Float[Array, "T N"]:
  """Weighted sum of each token's rows."""
  return jnp.einsum("mtk,tk,mn->tn", select, weights, y, precision="highest")
