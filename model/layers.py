"""Building blocks shared by the layers: projection, norm, rotary positions, gated MLP."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.rms_norm import rms_norm as rms_norm_lib
from model import config as config_lib


class Context(NamedTuple):
  """What every layer needs to know about the tokens.

  Attributes:
    segment_ids: 0 is padding.
    positions: Position of each token in its segment.
    cos: Cosines of the rotary angles, in the activations' type.
    sin: Their sines.
  """

  segment_ids: Int[Array, "B S"]
  positions: Int[Array, "B S"]
  cos: Float[Array, "B S half"]
  sin: Float[Array, "B S half"]


def precision(dtype) -> lax.Precision:
  """float32 runs are exact on every device; bfloat16 runs use its native product."""
  return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def weight_dtype(options: config_lib.ModelOptions):
  """Type in which most weights are kept."""
  return jnp.dtype(options.weight_dtype)


def normal(key, shape, config: config_lib.ModelConfig, options: config_lib.ModelOptions):
  """transformers' initial distribution of every matrix: normal, std initializer_range."""
  value = config.initializer_range * jax.random.normal(key, shape, jnp.float32)
  return value.astype(weight_dtype(options))


class Linear(nnx.Module):
  """x @ kernel without bias, in the type of x.

  Attributes:
    kernel: [inputs, outputs].
  """

  def __init__(self, inputs, outputs, axes, config, options, *, rngs: nnx.Rngs):
    self.kernel = nnx.Param(
      normal(rngs.params(), (inputs, outputs), config, options), logical_axes=axes
    )

  def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
    return jnp.matmul(x, self.kernel[...].astype(x.dtype), precision=precision(x.dtype))


class RmsNorm(nnx.Module):
  """x / rms(x) * (1 + scale), in float32, cast at the end.

  Attributes:
    scale: Zero at the start.
  """

  def __init__(self, size, config, options, axis: str = "norm", *, kernel: bool = False):
    self.eps = config.rms_norm_eps
    # Of heads, XLA's norm is one pass with the rotation that follows it.
    self.implementation = options.kernel_implementation if kernel else "reference"
    self.scale = nnx.Param(jnp.zeros((size,), weight_dtype(options)), logical_axes=(axis,))

  def __call__(self, x: Float[Array, "... D"], factor: float = 1.0) -> Float[Array, "... D"]:
    return rms_norm(x, self.scale[...], self.eps, factor, self.implementation)


def rms_norm(
  x: Float[Array, "... D"],
  scale: Float[Array, " D"],
  eps: float,
  factor: float = 1.0,
  implementation: str = "reference",
) -> Float[Array, "... D"]:
  """x / rms(x) * (1 + scale) * factor in float32, in the type of x."""
  scale = 1.0 + scale.astype(jnp.float32)
  scale = scale if factor == 1.0 else factor * scale
  return rms_norm_lib.rms_norm(x, scale, eps, implementation=implementation)


def rotary_angles(
  positions: Int[Array, "B S"], config: config_lib.ModelConfig, dtype
) -> tuple[Float[Array, "B S half"], Float[Array, "B S half"]]:
  """Cosines and sines, computed in float32 and rounded once.

  The interleaved three-row positions of the multimodal model are plain positions for text.
  """
  half = config.rotary_dim // 2
  frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None].astype(jnp.float32) * frequency
  return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rotate(
  x: Float[Array, "B S H D"], cos: Float[Array, "B S half"], sin: Float[Array, "B S half"]
) -> Float[Array, "B S H D"]:
  """Rotates the pairs (i, i + half) of the first 2 * half dimensions; the rest pass through."""
  half = cos.shape[-1]
  cos, sin = cos[:, :, None], sin[:, :, None]
  first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


class GatedMlp(nnx.Module):
  """down(silu(gate(x)) * up(x)); names its projections for remat policies."""

  def __init__(self, inner, axis: str, config, options, *, rngs: nnx.Rngs):
    hidden = config.hidden_size
    up, down = ("embed", axis), (axis, "embed")
    self.gate_proj = Linear(hidden, inner, up, config, options, rngs=rngs)
    self.up_proj = Linear(hidden, inner, up, config, options, rngs=rngs)
    self.down_proj = Linear(inner, hidden, down, config, options, rngs=rngs)

  def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
    gate, up = (checkpoint_name(part(x), "mlpwi") for part in (self.gate_proj, self.up_proj))
    return checkpoint_name(self.down_proj(jax.nn.silu(gate) * up), "mlpwo")
