"""Public op of the gated RMS norm that follows the gated delta rule."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.base import implementation as implementation_lib
from kernels.base import shapes
from kernels.gated_norm import pallas_tpu, reference

LAYOUTS = ("head_minor", "token_minor")
Tiles = pallas_tpu.Tiles


def gated_rms_norm(
  x: Float[Array, "... H D"],
  z: Float[Array, "... H D"],
  scale: Float[Array, " D"],
  eps: float = 1e-6,
  *,
  layout: str = "head_minor",
  implementation: str = "reference",
  tiles: Tiles | None = None,
) -> Float[Array, "... H D"]:
  """rms_norm(x) * scale * silu(z) per head.

  The reference rounds the normalised value to the type of `x` before the gate, as transformers
  does; the Pallas kernels round once, at the end.  The gradient of the scale is summed in float32.

  Args:
    x: Output of the gated delta rule: [..., H, D] head-minor, [B, H, D, S] token-minor.
    z: Gate before its SiLU, laid out as `x`.
    scale: One per channel of a head, shared by the heads.
    eps: Added to the mean square.
    layout: `head_minor`, or `token_minor` for arrays whose last axis is the tokens'.
    implementation: See `kernels.base.implementation`; `auto` is the reference for heads whose
      channels do not fill a TPU's lanes.
    tiles: Tile sizes of the Pallas kernels.

  Raises:
    ValueError: Unknown layout or implementation, or shapes or types that do not fit.
  """
  implementation_lib.validate(implementation)
  if layout not in LAYOUTS:
    raise ValueError(f"layout={layout!r}: want one of {', '.join(LAYOUTS)}")
  least = 2 if layout == "head_minor" else 4
  if not x.size or x.ndim < least or (layout == "token_minor" and x.ndim != 4):
    raise ValueError(
      f"gated_rms_norm: x is {x.shape}; want [..., H, D] head-minor or [B, H, D, S] token-minor, not empty"
    )
  channels = x.shape[-1 if layout == "head_minor" else -2]
  shapes.check("gated_rms_norm", z=(z, x.shape), scale=(scale, (channels,)))
  shapes.check_types(
    "gated_rms_norm", kernels=implementation != "reference", values={"x": x, "z": z}
  )
  if x.dtype != z.dtype and implementation != "reference":
    raise ValueError(f"gated_rms_norm: x is {x.dtype} and z {z.dtype}; the kernels take one type")
  if implementation == "auto" and scale.shape[0] % 128:
    implementation = "reference"
  if implementation == "reference":
    return _plain(layout, eps, x, z, scale)
  return _norm(implementation, layout, eps, tiles or Tiles(), x, z, scale)


def _plain(layout, eps, x, z, scale):
  if layout == "head_minor":
    return reference.gated_rms_norm(x, z, scale, eps)
  tokens_first = lambda a: jnp.moveaxis(a, -1, 1)
  y = reference.gated_rms_norm(tokens_first(x), tokens_first(z), scale, eps)
  return jnp.moveaxis(y, 1, -1)


def _flat(layout, x):
  return x.reshape(-1, x.shape[-2] * x.shape[-1]) if layout == "head_minor" else x


def _kernel(layout):
  return pallas_tpu.head_minor if layout == "head_minor" else pallas_tpu.token_minor


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _norm(implementation, layout, eps, tiles, x, z, scale):
  def pallas(x, z, scale, *, interpret):
    flat = functools.partial(_flat, layout)
    y = _kernel(layout)(flat(x), flat(z), scale, eps=eps, tiles=tiles, interpret=interpret)
    return y.reshape(x.shape)

  plain = functools.partial(_plain, layout, eps)
  return implementation_lib.dispatch(implementation, pallas, plain, x, z, scale)


def _norm_forward(implementation, layout, eps, tiles, *operands):
  return _norm(implementation, layout, eps, tiles, *operands), operands


def _norm_backward(implementation, layout, eps, tiles, operands, dy):
  def pallas(x, z, scale, dy, *, interpret):
    flat = functools.partial(_flat, layout)
    dx, dz, dscale = _kernel(layout)(
      flat(x), flat(z), scale, flat(dy), eps=eps, tiles=tiles, interpret=interpret
    )
    return dx.reshape(x.shape), dz.reshape(z.shape), dscale.astype(scale.dtype)

  def plain(x, z, scale, dy):
    return jax.vjp(functools.partial(_plain, layout, eps), x, z, scale)[1](dy)

  return implementation_lib.dispatch(implementation, pallas, plain, *operands, dy)


_norm.defvjp(_norm_forward, _norm_backward)
