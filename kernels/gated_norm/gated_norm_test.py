"""The gated norm against its closed-form derivative in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.gated_norm import gated_norm

_EPS = 1e-6


def _inputs():
  rng = np.random.default_rng(0)
  draw = lambda *s: rng.normal(size=s)
  x = draw(3, 5, 2, 16)
  x[0, 0] = 0.0  # A head of zeros: only the epsilon keeps it finite.
  return x, draw(3, 5, 2, 16), 1 + 0.3 * draw(16), draw(3, 5, 2, 16)


def _rel(got, want):
  return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def test_forward_and_gradients():
  x, z, scale, dy = _inputs()
  s = 1 / (1 + np.exp(-z))
  silu, d_silu = z * s, s * (1 + z * (1 - s))
  r = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + _EPS)
  n = x * r
  args = tuple(jnp.asarray(a, jnp.float32) for a in (x, z, scale))
  assert _rel(gated_norm.gated_rms_norm(*args), scale * n * silu) <= 1e-6
  a = dy * scale * silu
  want = (
    r * (a - n * np.mean(a * n, -1, keepdims=True)),
    dy * scale * n * d_silu,
    np.sum(dy * n * silu, axis=(0, 1, 2)),
  )
  got = jax.grad(lambda *a: jnp.sum(gated_norm.gated_rms_norm(*a) * dy), argnums=(0, 1, 2))(*args)
  for g, w in zip(got, want):
    assert _rel(g, w) <= 2e-6


def test_order_of_roundings():
  x, z, scale, _ = (jnp.asarray(a, jnp.bfloat16) for a in _inputs())
  wide = np.asarray(x, np.float32)
  n = wide / np.sqrt(np.mean(wide * wide, -1, keepdims=True) + np.float32(_EPS))
  n = np.asarray(jnp.asarray(n, jnp.bfloat16), np.float32)
  gate = np.asarray(jax.nn.silu(z.astype(jnp.float32)))
  want = jnp.asarray(np.asarray(scale, np.float32) * n * gate, jnp.bfloat16)
  got = gated_norm.gated_rms_norm(x, z, scale.astype(jnp.float32))
  assert got.dtype == jnp.bfloat16
  assert _rel(got, np.asarray(want, np.float64)) <= 2e-4


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_operands_that_do_not_fit_are_refused(implementation):
  run = functools.partial(gated_norm.gated_rms_norm, implementation=implementation)
  x, scale = jnp.ones((2, 2, 128)), jnp.ones((128,))
  with pytest.raises(ValueError, match="scale is"):
    run(x, x, scale[:64])
  with pytest.raises(ValueError, match="z is"):
    run(x, x[:, :1], scale)
  for layout, shape in (
    ("head_minor", (0, 3, 128)),
    ("head_minor", (128,)),
    ("token_minor", (2, 128, 4)),
    ("token_minor", (1, 1, 2, 128, 4)),
  ):
    with pytest.raises(ValueError, match="not empty"):
      run(jnp.ones(shape), jnp.ones(shape), scale, layout=layout)


def test_kernels_take_one_type():
  x, scale = jnp.ones((2, 2, 128)), jnp.ones((128,))
  with pytest.raises(ValueError, match="one type"):
    gated_norm.gated_rms_norm(x.astype(jnp.bfloat16), x, scale, implementation="interpret")
