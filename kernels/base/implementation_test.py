"""Tests of the choice between kernel and reference."""

import jax
import jax.numpy as jnp
import pytest

from kernels.base import implementation


def _kernel(x, *, interpret):
  return x + (2.0 if interpret else 1.0)


def _reference(x):
  return x


def _run(name):
  return float(implementation.dispatch(name, _kernel, _reference, jnp.float32(0)))


def test_each_name_reaches_its_side():
  assert [_run(name) for name in ("reference", "pallas", "interpret")] == [0.0, 1.0, 2.0]


def test_auto_is_the_reference_on_cpu_and_the_kernel_when_lowered_for_tpu():
  def op(x):
    return implementation.dispatch("auto", lambda x, interpret: jnp.sin(x), lambda x: jnp.cos(x), x)

  assert float(jax.jit(op)(jnp.float32(0))) == 1.0
  text = jax.jit(op).trace(jnp.float32(0)).lower(lowering_platforms=("tpu",)).as_text()
  assert "sine" in text and "cosine" not in text


def test_unknown_name_is_refused():
  with pytest.raises(ValueError, match="want one of auto, pallas"):
    _run("mosaic")
