"""The mixture of experts without sorting: every expert sees every token, masked by weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def one_hot_weights(
  experts: Int[Array, "T K"], weights: Float[Array, "T K"], num_experts: int
) -> Float[Array, "T E"]:
  """Weight of each expert for each token; choices outside [0, num_experts) count for nothing."""
  return jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=weights.dtype) * weights[..., None], 1)
