"""The largest model traces and lowers, forward and backward, on a machine without devices."""

import time

import jax
import jax.numpy as jnp
import pytest

from kernels.base import options as options_lib
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


def _lowered_layers(length=256, **changes):
  """Text of a Gated DeltaNet layer, an attention layer and their gradient, lowered for a TPU."""
  kept = {k: v for k, v in config_lib.preset("35B-A3B").to_hf().items() if k != "layer_types"}
  config = config_lib.ModelConfig.from_hf(
    kept | {"num_hidden_layers": 2, "full_attention_interval": 2}
  )
  options = config_lib.ModelOptions(**changes)
  params = api.abstract_params(config, options)
  row = jax.ShapeDtypeStruct((1, length), jnp.int32)

  def loss(params, inputs):
    return jnp.sum(api.forward(config, options, params, inputs).hidden.astype(jnp.float32))

  inputs = api.ModelInputs(row, row, row, None)
  traced = jax.jit(jax.grad(loss)).trace(params, inputs)
  return traced.lower(lowering_platforms=("tpu",)).as_text()


def test_kernels_reach_the_model():
  text = _lowered_layers(kernel_implementation="auto", gdn_fwd_kernel_head_group_size=4)
  for kernel in ("gdn_forward_g4", "gdn_states_g4", "gdn_backward_g4", "gated_norm_backward"):
    assert kernel in text, kernel
  assert "causal_conv1d_silu_backward" in text
  assert "tpu_custom_call" not in _lowered_layers()


def test_flash_attention_reaches_the_model():
  names = ("flash_attention_forward", "flash_attention_backward")
  text = _lowered_layers(2048, kernel_implementation="auto")
  assert all(name in text for name in names)
  # Few scores and a head that fills no lanes are plain JAX; so is everything under `reference`.
  for other in (_lowered_layers(1024, kernel_implementation="auto"), _lowered_layers(2048)):
    assert not any(name in other for name in names)


def test_tiles_reach_the_flash_kernels():
  tiles = {"sa_block_q": 512, "sa_block_kv": 1024, "sa_block_kv_dkv": 512, "dq_reduction_steps": 2}
  run = lambda **changes: _lowered_layers(2048, kernel_implementation="auto", **changes)
  texts = [run(), *(run(**{name: value}) for name, value in tiles.items())]
  texts.append(run(sa_use_base2_exp=True))
  assert len(set(texts)) == len(texts)  # every key changes the program


def test_a_head_group_that_does_not_divide_is_refused():
  with pytest.raises(options_lib.UserError, match="16 key heads"):
    _lowered_layers(kernel_implementation="auto", gdn_fwd_kernel_head_group_size=3)
