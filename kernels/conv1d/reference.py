"""Causal depthwise convolution followed by SiLU, with taps that stop at segment boundaries.

    y_t = silu(sum_j w[j] x[t - (taps - 1) + j]),  tap j only where segment[t - ...] == segment[t]

The last tap multiplies the current token, as in torch's `Conv1d` weight [C, 1, taps].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_conv1d_silu(
  x: Float[Array, "B S C"],
  kernel: Float[Array, "taps C"],
  segment_ids: Int[Array, "B S"],
  window: Float[Array, "B taps-1 C"],
  window_segment: Int[Array, " B"],
) -> Float[Array, "B S C"]:
  """Sum over shifted copies in float32, one rounding at the end.

  Args:
    x: Inputs of the row.
    kernel: One filter per channel.
    segment_ids: 0 is padding: its outputs are zero and no tap reads it.
    window: Inputs that come before the row.
    window_segment: Segment the window belongs to.
  """
  taps, length = kernel.shape[0], x.shape[1]
  kernel = kernel.astype(jnp.float32)
  owner = jnp.broadcast_to(window_segment[:, None], (x.shape[0], taps - 1))
  owner = jnp.concatenate([owner.astype(segment_ids.dtype), segment_ids], axis=1)
  padded = jnp.concatenate([window.astype(x.dtype), x], axis=1)
  total = jnp.zeros(x.shape, jnp.float32)
  for tap in range(taps):
    same = (owner[:, tap : tap + length] == segment_ids) & (segment_ids > 0)
    value = padded[:, tap : tap + length].astype(jnp.float32)
    total += jnp.where(same[..., None], value, 0.0) * kernel[tap]
  return jax.nn.silu(total).astype(x.dtype)
