"""RMS norm of whole rows: x / rms(x) * w, in float32, cast at the end."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels.base import implementation as implementation_lib
from kernels.base import shapes
from kernels.rms_norm import pallas_tpu


def plain(x: Float[Array, "... D"], w: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
  """The definition, in the type of `x`; `w` is float32."""
  wide = x.astype(jnp.float32)
  wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (wide * w).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _norm(x, w, eps, implementation):
  kernel = functools.partial(pallas_tpu.forward, eps=eps)
  reference = lambda x, w: plain(x, w[0], eps)
  return implementation_lib.dispatch(implementation, kernel, reference, x, w)


def _backward(eps, implementation, residuals, grad):
  kernel = functools.partial(pallas_tpu.backward, eps=eps)

  def reference(x, grad, w):
    dx, dw = jax.vjp(lambda x, w: plain(x, w, eps), x, w[0])[1](grad)
    return dx, dw

  x, w = residuals
  dx, dw = implementation_lib.dispatch(implementation, kernel, reference, x, grad, w)
  return dx, dw[None]


_norm.defvjp(
  lambda x, w, eps, implementation: (_norm(x, w, eps, implementation), (x, w)), _backward
)


def rms_norm(
  x: Float[Array, "... D"],
  w: Float[Array, " D"],
  eps: float,
  *,
  implementation: str = "reference",
) -> Float[Array, "... D"]:
  """x / rms(x) * w in the type of `x`.

  Args:
    x: bfloat16 or float32.
    w: Factor of each column, float32.
    eps: Added to the mean square.
    implementation: One of `kernels.base.implementation.IMPLEMENTATIONS`; columns that are no multiple of
      128 are plain JAX whatever it says.

  Raises:
    ValueError: `w` is not float32 [D], `x` empty or of another type, or the implementation is unknown.
  """
  implementation_lib.validate(implementation)
  if not x.size or not x.ndim:
    raise ValueError(f"x is {x.shape}: want at least one row of at least one column")
  if w.shape != x.shape[-1:] or w.dtype != jnp.float32:
    raise ValueError(f"want float32 factors [{x.shape[-1]}], got {w.dtype} {w.shape}")
  if x.shape[-1] % 128:
    implementation = "reference"
  shapes.check_types("rms_norm", kernels=implementation != "reference", values={"x": x})
  if implementation == "reference":
    return plain(x, w, eps)
  return _norm(x.reshape(-1, x.shape[-1]), w[None], eps, implementation).reshape(x.shape)
