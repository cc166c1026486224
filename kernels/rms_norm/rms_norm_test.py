"""The norm's kernels, interpreted, against float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.rms_norm import pallas_tpu, rms_norm


def _check(dtype, rows, bound):
  r = np.random.default_rng(0)
  scales = np.exp2(r.integers(-20, 20, (rows, 1)))
  x = jnp.asarray(r.normal(size=(rows, 384)) * scales, dtype)
  dy = jnp.asarray(r.normal(size=(rows, 384)), dtype)
  w = jnp.asarray(1 + r.normal(size=384) / 4, jnp.float32)

  def run(x, dy, implementation):
    y, pull = jax.vjp(
      lambda x, w: rms_norm.rms_norm(x, w, 1e-6, implementation=implementation), x, w
    )
    return y, *pull(dy)

  wide = lambda a: a.astype(jnp.float32)
  got = run(x.reshape(1, rows, 384), dy.reshape(1, rows, 384), "interpret")
  assert got[0].dtype == got[1].dtype == dtype and got[2].dtype == jnp.float32
  for a, b in zip(got, run(wide(x), wide(dy), "reference"), strict=True):
    a, b = np.asarray(a, np.float64).reshape(b.shape), np.asarray(b, np.float64)
    # Row by row: rows differ by powers of two.
    a, b = np.atleast_2d(a), np.atleast_2d(b)
    error = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    assert np.isfinite(error).all() and np.sqrt(np.mean(error**2)) <= bound


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-3)])
@pytest.mark.parametrize("rows", [256, 150])
def test_forward_and_gradients(dtype, bound, rows):
  _check(dtype, rows, bound)


def _rows_behind_count(kernel):
  return lambda *refs, eps, rows_in_all: kernel(*refs, eps=eps, rows_in_all=1 << 20)


@pytest.mark.parametrize(
  ("name", "fault"),
  [
    ("_row_sums", lambda sums: lambda terms: 0.99 * sums(terms)),
    ("_wide", lambda wide: lambda ref, rows, c: wide(ref, rows, slice(0, 128))),
    ("_backward_kernel", _rows_behind_count),
  ],
)
def test_planted_faults_are_caught(name, fault, monkeypatch):
  monkeypatch.setattr(pallas_tpu, name, fault(getattr(pallas_tpu, name)))
  with pytest.raises(AssertionError):
    _check(jnp.float32, 150, 2e-6)


def test_columns_that_fill_no_register_are_plain():
  x = jnp.ones((3, 24))
  out = rms_norm.rms_norm(x, jnp.full(24, 2.0), 0.0, implementation="interpret")
  np.testing.assert_allclose(out, 2.0)


def test_refusals():
  with pytest.raises(ValueError, match="float32 factors"):
    rms_norm.rms_norm(jnp.ones((2, 8)), jnp.ones(7), 0.0)
  with pytest.raises(ValueError, match="implementation"):
    rms_norm.rms_norm(jnp.ones((2, 8)), jnp.ones(8), 0.0, implementation="fast")
  one = jnp.ones((128,))
  for shape in ((0, 128), ()):
    with pytest.raises(ValueError, match="at least one row"):
      rms_norm.rms_norm(jnp.ones(shape), one, 1e-6, implementation="interpret")
  with pytest.raises(ValueError, match="x is float16; the kernels take"):
    rms_norm.rms_norm(jnp.ones((3, 128), jnp.float16), one, 1e-6, implementation="interpret")
  half = jnp.ones((3, 100), jnp.float16)  # columns that no kernel takes
  assert rms_norm.rms_norm(half, one[:100], 1e-6, implementation="interpret").dtype == half.dtype
