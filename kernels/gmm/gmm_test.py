"""Grouped products against a loop over groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.gmm import bundled, gmm, reference, tiled
from kernels.gmm import tiles as tiles_lib

_ROWS = 150
# Rows beyond the sum belong to nobody.
_SIZES = {
  "some empty": [8, 0, 8, 0],
  "unequal": [3, 70, 1, 9],
  "all empty": [0, 0, 0, 0],
  "one group": [0, 0, 100, 0],
  "large": [0, 5, 130, 0],
  "no tail": [65, 64, 1, 20],
}


def _rel(got, want):
  return np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30)


def _case(name, k=6, n=10):
  sizes = np.array(_SIZES[name], np.int32)
  rows = _ROWS
  rng = np.random.default_rng(len(name))
  draw = lambda *s: rng.normal(size=s).astype(np.float32)
  lhs, rhs, grad = draw(rows, k), draw(len(sizes), k, n), draw(rows, n)
  ends = np.cumsum(sizes)
  out, d_lhs = np.zeros((rows, n)), np.zeros((rows, k))
  d_rhs = np.zeros(rhs.shape)
  for i, (start, end) in enumerate(zip(ends - sizes, ends)):
    out[start:end] = lhs[start:end].astype(np.float64) @ rhs[i]
    d_lhs[start:end] = grad[start:end].astype(np.float64) @ rhs[i].T
    d_rhs[i] = lhs[start:end].T.astype(np.float64) @ grad[start:end]
  # What no group owns must not matter.
  lhs[ends[-1] :] = np.nan
  grad[ends[-1] :] = np.nan
  return lhs, rhs, sizes, grad, out, d_lhs, d_rhs


@jax.jit
def _value_and_pull(lhs, rhs, sizes, grad):
  out, pull = jax.vjp(lambda a, b: gmm.grouped_matmul(a, b, sizes), lhs, rhs)
  return out, *pull(grad)


@jax.jit
def _bundled(lhs, rhs, sizes, grad):
  op = lambda a, b: bundled.grouped_matmul(a, b, sizes, implementation="interpret")
  out, pull = jax.vjp(op, lhs, rhs)
  return out, *pull(grad)


@pytest.mark.parametrize("name", list(_SIZES))
def test_kernel_that_comes_with_jax(name):
  """No multiple of its tile, rows of nobody that hold NaN, empty groups."""
  lhs, rhs, sizes, grad, *want = _case(name, 128, 256)
  got = _bundled(lhs, rhs, sizes, grad)
  for a, b in zip(got, want, strict=True):
    assert np.isfinite(a).all() and _rel(a, b) <= 2e-6
  for rows in got[:2]:
    np.testing.assert_array_equal(rows[sizes.sum() :], 0)
  np.testing.assert_array_equal(got[2][sizes == 0], 0)


_FORMS = {m.__name__: (jax.jit(m.gmm), jax.jit(m.tgmm)) for m in (reference, tiled)}


@pytest.mark.parametrize("name", list(_SIZES))
def test_public_op(name):
  lhs, rhs, sizes, grad, out, d_lhs, d_rhs = _case(name)
  got, got_lhs, got_rhs = _value_and_pull(lhs, rhs, sizes, grad)
  assert _rel(got, out) <= 1e-6 and _rel(got_lhs, d_lhs) <= 1e-6 and _rel(got_rhs, d_rhs) <= 1e-6
  owned = sizes.sum()
  np.testing.assert_array_equal(got[owned:], 0)
  np.testing.assert_array_equal(got_lhs[owned:], 0)
  np.testing.assert_array_equal(got_rhs[sizes == 0], 0)


@pytest.mark.parametrize("form", list(_FORMS))
@pytest.mark.parametrize("name", list(_SIZES))
def test_each_form(form, name):
  lhs, rhs, sizes, grad, out, _, d_rhs = _case(name)
  product, transposed = _FORMS[form]
  got, got_rhs = product(lhs, rhs, sizes), transposed(lhs, grad, sizes)
  assert _rel(got, out) <= 1e-6 and _rel(got_rhs, d_rhs) <= 1e-6
  np.testing.assert_array_equal(got[sizes.sum() :], 0)
  np.testing.assert_array_equal(got_rhs[sizes == 0], 0)


def test_bfloat16_sums_are_float32():
  lhs, rhs, sizes, grad, *_ = _case("unequal", k=300)
  lhs, rhs, grad = (jnp.asarray(a, jnp.bfloat16) for a in (lhs, rhs, grad))
  wide = [np.nan_to_num(np.asarray(a, np.float32)) for a in (lhs, rhs, grad)]
  wants = _value_and_pull(wide[0], wide[1], sizes, wide[2])
  for got, want in zip(_value_and_pull(lhs, rhs, sizes, grad), wants):
    assert got.dtype == jnp.bfloat16
    assert _rel(got, np.asarray(want, np.float64)) <= 2e-3


def test_other_platforms_get_the_ragged_product():
  args = (
    jax.ShapeDtypeStruct((64, 8), jnp.float32),
    jax.ShapeDtypeStruct((4, 8, 16), jnp.float32),
    jax.ShapeDtypeStruct((4,), jnp.int32),
  )
  traced = jax.jit(gmm.grouped_matmul).trace(*args)
  assert "ragged_dot" in traced.lower(lowering_platforms=("tpu",)).as_text()
  assert "ragged_dot" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_refusals():
  with pytest.raises(ValueError, match=r"\[M, K\]"):
    gmm.grouped_matmul(jnp.ones((4, 3)), jnp.ones((2, 5, 6)), jnp.array([2, 2]))
  sizes = jnp.array([4], jnp.int32)
  rows, matrix = jnp.ones((8, 4)), jnp.ones((1, 4, 4))
  for lhs, rhs, groups, text in (
    (rows[:0], matrix, sizes, "want rows, columns and groups"),
    (rows, matrix[:, :, :0], sizes, "want rows, columns and groups"),
    (rows, matrix[:0], sizes[:0], "want rows, columns and groups"),
    (rows, matrix, jnp.array([4.7]), "group_sizes must be integers"),
    (rows.astype(jnp.int32), matrix, sizes, "lhs must be floating"),
    (rows.astype(jnp.bfloat16), matrix, sizes, "want one type"),
  ):
    with pytest.raises(ValueError, match=text):
      gmm.grouped_matmul(lhs, rhs, groups)
  half = rows.astype(jnp.float16), matrix.astype(jnp.float16)
  with pytest.raises(ValueError, match="the kernels take"):
    gmm.grouped_matmul(*half, sizes, implementation="interpret")
  with pytest.raises(ValueError, match="2 groups"):
    gmm.grouped_matmul(jnp.ones((4, 3)), jnp.ones((2, 3, 6)), jnp.array([2, 2, 0]))


@pytest.mark.parametrize(
  "bad",
  [{"rows": 12}, {"k": 100}, {"n": 0}, {"part": 24}, {"columns": 64}, {"rows": True}, {"k": 1.0}],
)
def test_tiles_are_validated(bad):
  with pytest.raises(ValueError, match="tile"):
    tiles_lib.Tiles(**bad)


def test_table_and_explicit_dims():
  for k, n in [(4096, 2048), (1024, 4096), (2048, 1024), (512, 2048), (5120, 3456), (96, 40)]:
    good = tiles_lib.good(k, n)
    # Visits of the smaller matrices of 35B-A3B take twice the rows.
    rows = 1024 if (k, n) in [(2048, 1024), (512, 2048)] else 512
    for pass_ in dataclasses.fields(good):
      assert getattr(good, pass_.name).rows == rows
  dims = {"fwd": (256, 4096, 2048), "dlhs": (256, 4096, 1024), "drhs": (256, 2048, 1024)}
  wi, wo = (tiles_lib.PassTiles.from_dims(which, **dims) for which in ("wi", "wo"))
  assert (wi.forward.k, wi.forward.n, wi.dlhs.k, wi.dlhs.n) == (4096, 2048, 1024, 4096)
  assert (wo.forward.k, wo.forward.n, wo.dlhs.k, wo.dlhs.n) == (2048, 4096, 4096, 1024)
  with pytest.raises(ValueError, match="wi or wo"):
    tiles_lib.PassTiles.from_dims("w2", **dims)
