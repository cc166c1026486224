"""The gated norm's Pallas kernels against the float32 reference, in both layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.gated_norm import gated_norm, pallas_tpu


def _relative(a, b):
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  return np.linalg.norm(a - b) / np.linalg.norm(b)


def _inputs(dtype, length):
  r = np.random.default_rng(0)
  shape = (2, length, 6, 128)
  x = r.normal(size=shape) * np.exp(r.normal(size=(2, length, 6, 1)))
  x[0, 3] = 0.0  # A token that the delta rule left empty.
  z, dy = r.normal(size=shape) * 2, r.normal(size=shape)
  scale = jnp.asarray(1 + 0.3 * r.normal(size=128), jnp.float32)
  return [jnp.asarray(a, dtype) for a in (x, z, dy)], scale


def _value_and_gradients(run, x, z, scale, dy):
  y, vjp = jax.vjp(run, x, z, scale)
  return (y, *vjp(dy))


def _pair(dtype, layout, length):
  (x, z, dy), scale = _inputs(dtype, length)
  wide = [a.astype(jnp.float32) for a in (x, z, dy)]
  run = functools.partial(gated_norm.gated_rms_norm, implementation="reference")
  expected = _value_and_gradients(run, wide[0], wide[1], scale, wide[2])
  turn = (lambda a: a) if layout == "head_minor" else (lambda a: jnp.moveaxis(a, 1, -1))
  tiles = gated_norm.Tiles(tokens=64, chunk=32, heads=4)
  run = functools.partial(
    gated_norm.gated_rms_norm, layout=layout, implementation="interpret", tiles=tiles
  )
  y, dx, dz, dscale = _value_and_gradients(run, turn(x), turn(z), scale, turn(dy))
  back = (lambda a: a) if layout == "head_minor" else (lambda a: jnp.moveaxis(a, -1, 1))
  return (back(y), back(dx), back(dz), dscale), expected


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-3)])
@pytest.mark.parametrize("layout", gated_norm.LAYOUTS)
@pytest.mark.parametrize("length", [128, 150])
def test_forward_and_gradients(dtype, bound, layout, length):
  got, expected = _pair(dtype, layout, length)
  for name, a, b in zip(("y", "dx", "dz", "dscale"), got, expected):
    assert _relative(a, b) <= bound, name
  assert not np.asarray(got[0], np.float32)[0, 3].any()


@pytest.mark.parametrize("layout", gated_norm.LAYOUTS)
def test_planted_fault_is_caught(layout, monkeypatch):
  """A gate that is a little off must fail the comparison."""
  honest = pallas_tpu._gate
  monkeypatch.setattr(pallas_tpu, "_gate", lambda z: honest(0.98 * z))
  got, expected = _pair(jnp.bfloat16, layout, 128)
  assert not _relative(got[0], expected[0]) <= 2e-3
  assert not _relative(got[2], expected[2]) <= 2e-3


def test_reference_takes_token_minor_arrays():
  (x, z, _), scale = _inputs(jnp.float32, 8)
  run = functools.partial(gated_norm.gated_rms_norm, scale=scale, implementation="reference")
  turned = run(jnp.moveaxis(x, 1, -1), jnp.moveaxis(z, 1, -1), layout="token_minor")
  np.testing.assert_array_equal(jnp.moveaxis(turned, -1, 1), run(x, z))


def test_arguments_are_validated():
  (x, z, _), scale = _inputs(jnp.float32, 8)
  with pytest.raises(ValueError, match="head_minor, token_minor"):
    gated_norm.gated_rms_norm(x, z, scale, layout="channel_minor")
  with pytest.raises(ValueError, match="multiple of 16"):
    gated_norm.Tiles(chunk=8)
  assert gated_norm.Tiles().fit_rows(1000) == (1008, 1008)
  assert gated_norm.Tiles(chunk=512).fit_rows(1000) == (1024, 512)
  assert [gated_norm.Tiles(heads=8).fit_heads(n) for n in (64, 6, 12)] == [8, 2, 4]
