"""RMS norm times a SiLU gate, per head, as transformers' `Qwen3_5RMSNormGated` rounds it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def gated_rms_norm(
  x: Float[Array, "... H D"],
  z: Float[Array, "... H D"],
  scale: Float[Array, " D"],
  eps: float,
) -> Float[Array, "... H D"]:
  """Normalises before the gate; the scale is plain (not 1 + scale).

  Args:
    x: Output of the gated delta rule.
    z: Gate before its SiLU.
    scale: One per channel of a head, shared by the heads.
    eps: Added to the mean square.

  Returns:
    scale * round(x / rms(x)) * silu(z), products in float32, in the type of `x`.
  """
  wide = x.astype(jnp.float32)
  normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  normed = scale.astype(jnp.float32) * normed.astype(x.dtype).astype(jnp.float32)
  return (normed * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
