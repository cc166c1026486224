"""The largest model traces and lowers, forward and backward, on a machine without devices."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kernels.base import options as options_lib
from model import api, moe
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
  keys = {"kernel_implementation": "auto", "gdn_fwd_kernel_head_group_size": 4}
  text = _lowered_layers(2048, **keys)
  for kernel in ("gdn_forward_g4", "gdn_states_g4", "gdn_backward_g16", "gated_norm_backward"):
    assert kernel in text, kernel
  for kernel in ("causal_conv1d_silu_backward", "flash_attention_forward", "flash_attention_back"):
    assert kernel in text, kernel
  assert "rms_norm_backward" in text
  assert "tpu_custom_call" not in _lowered_layers()


def test_a_head_group_that_does_not_divide_is_refused():
  with pytest.raises(options_lib.UserError, match="16 key heads"):
    _lowered_layers(kernel_implementation="auto", gdn_fwd_kernel_head_group_size=3)


def _lowered_experts(**changes):
  """Text of the sparse layer's gradient at the shapes of 35B-A3B, lowered for a TPU."""
  config = config_lib.preset("35B-A3B")
  options = config_lib.ModelOptions(**changes)
  make = lambda: moe.SparseMoe(config, options, rngs=nnx.Rngs(0))
  definition, weights = nnx.split(nnx.eval_shape(make), nnx.Param)

  def loss(weights, x, segments):
    # A layer's forward is recomputed in its backward pass, as in the stack.
    run = jax.checkpoint(lambda w, x: nnx.merge(definition, w)(x, segments)[0])
    return jnp.sum(run(weights, x).astype(jnp.float32))

  x = jax.ShapeDtypeStruct((1, 1024, config.hidden_size), jnp.bfloat16)
  segments = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
  traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(weights, x, segments)
  return traced.lower(lowering_platforms=("tpu",)).as_text()


_JAX_KERNEL = {"kernel_implementation": "auto", "use_tokamax_gmm": True}
_V2 = {**_JAX_KERNEL, "use_gmm_v2": True}


def test_dispatch_and_unsort_are_kernels():
  """Both ways of both: forward, replayed forward and backward."""
  text = _lowered_experts(**_V2)
  named = lambda text, name: text.count(f'kernel_name = "{name}"')
  assert named(text, "moe_gather") >= 3 and named(text, "moe_unsort") >= 2
  plain = _lowered_experts()
  assert not named(plain, "moe_gather") + named(plain, "moe_unsort")


def test_the_grouped_product_is_the_one_asked_for():
  own = ("gmm_forward_none", "gmm_dlhs_none", "gmm_drhs")
  plain, bundled, v2 = (_lowered_experts(**keys) for keys in ({}, _JAX_KERNEL, _V2))
  assert "ragged_dot" in plain and "tpu_custom_call" not in plain
  assert "tpu_custom_call" in bundled and "ragged_dot" not in bundled
  assert not any(name in bundled for name in own)
  assert all(name in v2 for name in own) and "ragged_dot" not in v2


_FUSED = (
  "moe_wi_gmm_fused_swiglu",
  "moe_wo_gmm_fused_dswiglu",
  "moe_router_grad_from_wo_input",
)


@pytest.mark.parametrize("name", _FUSED)
def test_a_fusion_that_is_not_wired_is_seen(name, monkeypatch):
  """What the test below looks for is gone when the model's key does not reach the op."""
  honest = moe.form_of
  field = name.removeprefix("moe_").replace("wi_gmm_", "").replace("wo_gmm_", "")
  monkeypatch.setattr(
    moe, "form_of", lambda options: dataclasses.replace(honest(options), **{field: False})
  )
  with pytest.raises(AssertionError):
    test_keys_of_the_grouped_kernel_reach_it()


def test_keys_of_the_grouped_kernel_reach_it():
  keys = {**_V2, "prefuse_moe_weights": True}
  text = _lowered_experts(**keys)
  count = lambda text: text.count('kernel_name = "gmm_drhs"')
  assert (count(_lowered_experts(**_V2)), count(text)) == (3, 2)  # one product of gate and up
  explicit = {**keys, "use_gmm_v2_heuristic_tiling": False, "wo_tile_dlhs_mlp_dim": 512}
  plain = _lowered_experts(**explicit)
  assert plain != text
  # Fused: the kernels with epilogues in place of the plain ones, and no second product again.
  fused = _lowered_experts(
    **explicit,
    moe_wi_gmm_fused_swiglu=True,
    moe_wo_gmm_fused_dswiglu=True,
    moe_router_grad_from_wo_input=True,
  )
  assert "gmm_forward_swiglu" in fused and "gmm_dlhs_dswiglu" in fused
  assert "swiglu" not in plain
  router = _lowered_experts(**explicit, moe_router_grad_from_wo_input=True)
  forward = lambda text: text.count('kernel_name = "gmm_forward_none"')
  assert forward(router) < forward(plain)
