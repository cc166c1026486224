"""Reductions over the segments of packed rows.

A row of S tokens holds segments 1..K, and 0 is padding.  Sums are masked reductions rather than
scatters: K is small, XLA fuses the masks away, and the result does not depend on a row's order.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def segment_sum(
  values: Float[Array, "R S"], segment_ids: Int[Array, "R S"], max_segments: int
) -> Float[Array, "R K"]:
  """Sum of each segment's values, 0 for segments that are not there; padding counts nowhere."""
  ids = jnp.arange(1, max_segments + 1)
  here = segment_ids[:, :, None] == ids
  return jnp.sum(jnp.where(here, values[:, :, None], 0.0), axis=1)


def spread(per_segment: Float[Array, "R K"], segment_ids: Int[Array, "R S"]) -> Float[Array, "R S"]:
  """Each token's segment's value, 0 on padding."""
  ids = jnp.arange(1, per_segment.shape[1] + 1)
  here = segment_ids[:, :, None] == ids
  return jnp.sum(jnp.where(here, per_segment[:, None, :], 0.0), axis=2)


def segment_mean(
  values: Float[Array, "R S"],
  mask: Float[Array, "R S"],
  segment_ids: Int[Array, "R S"],
  max_segments: int,
) -> Float[Array, "R K"]:
  """Mean of each segment's values over its masked tokens, 0 where there are none."""
  kept = jnp.where(mask > 0, values, 0.0)
  total = segment_sum(kept, segment_ids, max_segments)
  count = segment_sum(mask, segment_ids, max_segments)
  return total / jnp.maximum(count, 1.0)
