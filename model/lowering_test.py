"""The largest model traces and lowers, forward and backward, on a machine without devices."""

import time

import jax
import jax.numpy as jnp

from model import api
from model import config as config_lib


def test_largest_model_lowers_in_seconds():
  config = config_lib.preset("397B-A17B")
  options = config_lib.ModelOptions(weight_dtype="bfloat16")
  start = time.monotonic()
  params = api.abstract_params(config, options)
  row = jax.ShapeDtypeStruct((1, 65_536), jnp.int32)
  routing = jax.ShapeDtypeStruct((1, 65_536, 60, 10), jnp.int16)

  def loss(params, inputs):
    return jnp.sum(api.forward(config, options, params, inputs).hidden.astype(jnp.float32))

  inputs = api.ModelInputs(row, row, row, routing)
  lowered = jax.jit(jax.value_and_grad(loss)).trace(params, inputs).lower(
    lowering_platforms=("tpu",)
  )  # fmt: skip
  seconds = time.monotonic() - start
  print(f"shapes, trace and lowering of the 397B preset: {seconds:.1f} s")
  text = lowered.as_text()
  # One body a kind of layer, however deep the model: a program of unrolled layers is far longer.
  assert len(text) < 3_000_000, len(text)
  assert jax.tree.structure(lowered.out_info[1]) == jax.tree.structure(params)
  assert seconds < 60
