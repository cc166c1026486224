"""Public op of the causal convolution, its one-token step, and its window for decoding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.base import implementation as implementation_lib
from kernels.base import shapes
from kernels.conv1d import pallas_backward, pallas_forward, reference, tiling

Tiles = tiling.Tiles


def causal_conv1d_silu(
  x: Float[Array, "B S C"],
  kernel: Float[Array, "taps C"],
  segment_ids: Int[Array, "B S"],
  window: Float[Array, "B taps-1 C"] | None = None,
  window_segment: Int[Array, " B"] | None = None,
  *,
  implementation: str = "reference",
  tiles: Tiles | None = None,
) -> Float[Array, "B S C"]:
  """silu(causal depthwise convolution) whose taps never cross a segment boundary.

  The backward pass recomputes the sum of taps from `x`, which is all that is kept.  The gradient
  of the kernel is summed in float32.

  Args:
    x: Inputs, float32 or bfloat16; sums are float32.
    kernel: One filter per channel; the last tap multiplies the current token.
    segment_ids: 0 is padding, whose outputs are zero.
    window: The taps - 1 inputs before the row; zeros when absent.
    window_segment: Segment the window belongs to; 1 when absent.
    implementation: See `kernels.base.implementation`; `auto` is the reference for channels that
      do not fill a TPU's lanes.
    tiles: Tile sizes of the Pallas kernels.

  Raises:
    ValueError: Unknown implementation, shapes or types that do not fit, or a filter the Pallas kernels do not take.
  """
  implementation_lib.validate(implementation)
  shapes.check(
    "causal_conv1d_silu",
    x=(x, ("B", "S", "C")),
    kernel=(kernel, ("taps", "C")),
    segment_ids=(segment_ids, ("B", "S")),
  )
  shapes.check_types(
    "causal_conv1d_silu",
    kernels=implementation != "reference",
    values={"x": x, "kernel": kernel},
    ids={"segment_ids": segment_ids},
  )
  batch, _, channels = x.shape
  if window is None:
    window = jnp.zeros((batch, kernel.shape[0] - 1, channels), x.dtype)
  if window_segment is None:
    window_segment = jnp.ones((batch,), segment_ids.dtype)
  before = kernel.shape[0] - 1
  shapes.check(
    "causal_conv1d_silu",
    window=(window, (batch, before, channels)),
    window_segment=(window_segment, (batch,)),
  )
  types = {"values": {"window": window}, "ids": {"window_segment": window_segment}}
  shapes.check_types("causal_conv1d_silu", kernels=False, **types)
  if implementation == "auto" and channels % 128:
    implementation = "reference"
  if implementation == "reference":
    return reference.causal_conv1d_silu(x, kernel, segment_ids, window, window_segment)
  if not 2 <= kernel.shape[0] <= 8:
    raise ValueError(f"{kernel.shape[0]} taps: the Pallas kernels take 2 to 8")
  tiles = tiles or Tiles()
  return _conv(
    implementation, tiles, x, kernel, window.astype(x.dtype), segment_ids, window_segment
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv(implementation, tiles, x, kernel, window, segment_ids, window_segment):
  def pallas(x, kernel, window, segment_ids, window_segment, *, interpret):
    bits = tiling.tap_bits(segment_ids, window_segment, kernel.shape[0])
    return pallas_forward.forward(x, kernel, bits, window, tiles=tiles, interpret=interpret)

  def plain(x, kernel, window, segment_ids, window_segment):
    return reference.causal_conv1d_silu(x, kernel, segment_ids, window, window_segment)

  return implementation_lib.dispatch(
    implementation, pallas, plain, x, kernel, window, segment_ids, window_segment
  )


def _conv_forward(implementation, tiles, *operands):
  return _conv(implementation, tiles, *operands), operands


def _conv_backward(implementation, tiles, operands, dy):
  def pallas(x, kernel, window, segment_ids, window_segment, dy, *, interpret):
    bits = tiling.tap_bits(segment_ids, window_segment, kernel.shape[0])
    dx, dw, dwindow = pallas_backward.backward(
      x, kernel, bits, window, dy, tiles=tiles, interpret=interpret
    )
    return dx, dw.astype(kernel.dtype), dwindow.astype(window.dtype)

  def plain(x, kernel, window, segment_ids, window_segment, dy):
    run = lambda *args: reference.causal_conv1d_silu(
      args[0], args[1], segment_ids, args[2], window_segment
    )
    return jax.vjp(run, x, kernel, window)[1](dy)

  dx, dw, dwindow = implementation_lib.dispatch(implementation, pallas, plain, *operands, dy)
  no_gradient = [np.zeros(ids.shape, jax.dtypes.float0) for ids in operands[3:]]
  return dx, dw, dwindow, *no_gradient


_conv.defvjp(_conv_forward, _conv_backward)


def causal_conv1d_silu_step(
  x: Float[Array, "B C"],
  kernel: Float[Array, "taps C"],
  window: Float[Array, "B taps-1 C"],
) -> tuple[Float[Array, "B C"], Float[Array, "B taps-1 C"]]:
  """One token; returns its output and the window that the next token needs.

  Raises:
    ValueError: Shapes do not fit.
  """
  shapes.check(
    "causal_conv1d_silu_step",
    x=(x, ("B", "C")),
    kernel=(kernel, ("taps", "C")),
    window=(window, ("B", kernel.shape[0] - 1, "C")),
  )
  full = jnp.concatenate([window.astype(x.dtype), x[:, None]], axis=1)
  total = jnp.sum(full.astype(jnp.float32) * kernel.astype(jnp.float32), axis=1)
  return jax.nn.silu(total).astype(x.dtype), full[:, 1:].astype(window.dtype)


def next_window(
  x: Float[Array, "B S C"],
  window: Float[Array, "B taps-1 C"],
  lengths: Int[Array, " B"],
) -> Float[Array, "B taps-1 C"]:
  """The last taps - 1 inputs of rows whose first `lengths` tokens are real.

  A row of length 0 keeps its window.  Lengths are at most S.

  Raises:
    ValueError: Shapes do not fit.
  """
  shapes.check(
    "next_window",
    x=(x, ("B", "S", "C")),
    window=(window, ("B", window.shape[1], "C")),
    lengths=(lengths, ("B",)),
  )
  full = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
  index = lengths[:, None] + jnp.arange(window.shape[1])
  return jnp.take_along_axis(full, index[..., None], axis=1)
