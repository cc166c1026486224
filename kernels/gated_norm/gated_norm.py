"""Public op of the gated RMS norm that follows the gated delta rule."""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels.gated_norm import reference


def gated_rms_norm(
  x: Float[Array, "... H D"],
  z: Float[Array, "... H D"],
  scale: Float[Array, " D"],
  eps: float = 1e-6,
) -> Float[Array, "... H D"]:
  """rms_norm(x) * scale * silu(z) per head; see `reference` for the order of roundings."""
  return reference.gated_rms_norm(x, z, scale, eps)
