"""Public op of the causal convolution, its one-token step, and its window for decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.conv1d import reference


def causal_conv1d_silu(
  x: Float[Array, "B S C"],
  kernel: Float[Array, "taps C"],
  segment_ids: Int[Array, "B S"],
  window: Float[Array, "B taps-1 C"] | None = None,
  window_segment: Int[Array, " B"] | None = None,
) -> Float[Array, "B S C"]:
  """silu(causal depthwise convolution) whose taps never cross a segment boundary.

  Args:
    x: Inputs, any float type; sums are float32.
    kernel: One filter per channel; the last tap multiplies the current token.
    segment_ids: 0 is padding, whose outputs are zero.
    window: The taps - 1 inputs before the row; zeros when absent.
    window_segment: Segment the window belongs to; 1 when absent.
  """
  batch, _, channels = x.shape
  if window is None:
    window = jnp.zeros((batch, kernel.shape[0] - 1, channels), x.dtype)
  if window_segment is None:
    window_segment = jnp.ones((batch,), segment_ids.dtype)
  return reference.causal_conv1d_silu(x, kernel, segment_ids, window, window_segment)


def causal_conv1d_silu_step(
  x: Float[Array, "B C"],
  kernel: Float[Array, "taps C"],
  window: Float[Array, "B taps-1 C"],
) -> tuple[Float[Array, "B C"], Float[Array, "B taps-1 C"]]:
  """One token; returns its output and the window that the next token needs."""
  full = jnp.concatenate([window.astype(x.dtype), x[:, None]], axis=1)
  total = jnp.sum(full.astype(jnp.float32) * kernel.astype(jnp.float32), axis=1)
  return jax.nn.silu(total).astype(x.dtype), full[:, 1:].astype(window.dtype)


def next_window(
  x: Float[Array, "B S C"],
  window: Float[Array, "B taps-1 C"],
  lengths: Int[Array, " B"],
) -> Float[Array, "B taps-1 C"]:
  """The last taps - 1 inputs of rows whose first `lengths` tokens are real.

  A row of length 0 keeps its window.
  """
  full = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
  index = lengths[:, None] + jnp.arange(window.shape[1])
  return jnp.take_along_axis(full, index[..., None], axis=1)
