"""Builders for programs of XLA's own operations: RMS norm, `ragged_dot`."""

from __future__ import annotations

from typing import Any

from tools.kernel_report import public_kernels


def rms_norm(*, which: str, tokens: int, width: int, implementation: str = "reference") -> Any:
  """The norm before a layer's two halves, or its gradients; by XLA or by the kernels."""
  import jax
  import jax.numpy as jnp

  from model import layers

  run = lambda x, scale: layers.rms_norm(x, scale, 1e-6, implementation=implementation)
  x, scale = ((tokens, width), jnp.bfloat16), ((width,), jnp.float32)
  lower = public_kernels.lower_on_one_slice
  if which == "forward":
    return lower(run, x, scale)
  return lower(lambda x, scale, d: jax.vjp(run, x, scale)[1](d), x, scale, x)


def ragged_dot(*, which: str, groups: int, rows: int, k: int, n: int) -> Any:
  """`jax.lax.ragged_dot`, or its input gradient."""
  import jax
  import jax.numpy as jnp

  bf16 = jnp.bfloat16
  matrices, sizes = ((groups, k, n), bf16), ((groups,), jnp.int32)
  lower = public_kernels.lower_on_one_slice
  run = lambda x, w, s: jax.lax.ragged_dot(x, w, s, preferred_element_type=jnp.float32).astype(bf16)
  if which == "forward":
    return lower(run, ((rows, k), bf16), matrices, sizes)

  def gradient(d, w, s):
    return jax.vjp(lambda x: run(x, w, s), jnp.zeros((rows, k), bf16))[1](d)[0]

  return lower(gradient, ((rows, n), bf16), matrices, sizes)
