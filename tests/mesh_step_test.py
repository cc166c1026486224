"""The step over fsdp x expert x context against the step of one device, on eight mocked devices."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=8"
  " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import dataclasses  # noqa: E402
import functools  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from kernels.base.mesh import MeshShape  # noqa: E402
from kernels.base.options import UserError  # noqa: E402
from kernels.fp8 import fp8  # noqa: E402
from model import api  # noqa: E402
from model import config as model_config  # noqa: E402
from model.sharded.options import ShardedOptions  # noqa: E402
from rl import mesh_step, retry  # noqa: E402
from tests import mesh_parity  # noqa: E402

CONFIG = model_config.preset("tiny_moe")
MODEL_OPTIONS = model_config.ModelOptions(dtype="float32", gdn_chunk_size=16)
SHAPE = MeshShape.parse("2x2x2")
ROWS, TOKENS = 4, 64

# One attention layer: what the experts do needs no more.
SHORT = dataclasses.replace(CONFIG, num_hidden_layers=1, full_attention_interval=1)

CASES: dict[str, dict[str, Any]] = {
  "default": {},
  "cp_as_ep": {
    "custom_mesh_and_rule": "cp-as-ep",
    "use_ring_of_experts": True,
    "num_moe_token_chunks": 2,
    "context_parallel_attention_load_balance": True,
    "context_parallel_attention_load_balance_hoist_ids": True,
    "context_parallel_attention_load_balance_order": "dual_chunk_swap_local_self",
    "gdn_cp_mode": "seq",
    "key_proj": "device",
    "gdn": "device",
    "moe_x_sorted": "device",
  },
  "dense_no_cp": {
    "custom_mesh_and_rule": "cp-as-ep-dense-no-cp",
    "use_ring_of_experts": True,
    "num_moe_token_chunks": 2,
    "moe_chunk_pipeline": True,
    "context_parallel_attention_load_balance": True,
    "ragged_buffer_factor": 3.5,
    "ragged_unsort_spread_masked_indices": True,
    "dense_grad_reduce": "all_reduce",
  },
}


@functools.cache
def params(config):
  return api.init_params(config, MODEL_OPTIONS, jax.random.key(0))


@functools.cache
def batches(config, replay):
  made = [mesh_parity.batch(config, ROWS, TOKENS, seed, replay=replay) for seed in (0, 1)]
  # A segment that crosses a shard's edge, and one that ends there, are what can go wrong.
  ids = made[0].segment_ids
  assert (ids[:, 31] == ids[:, 32]).any() and (ids[:, 31] != ids[:, 32]).any()
  # So are shards of very unequal counts of tokens in the loss: 5 and 1 in two of the second's.
  mask = made[1].loss_mask
  for row, count in ((0, 5), (1, 1)):
    mask[row, np.flatnonzero(mask[row])[count:]] = 0
  return made


@functools.cache
def alone(config, replay):
  return mesh_parity.alone(config, MODEL_OPTIONS, params(config), batches(config, replay))


def on_mesh(config, replay, options, custom=False, **how):
  policy = "custom" if custom else "full"
  model_options = dataclasses.replace(MODEL_OPTIONS, remat_policy=policy)
  return mesh_parity.on_mesh(
    config, model_options, options, SHAPE, params(config), batches(config, replay), **how
  )


@pytest.mark.parametrize("name", CASES)
def test_a_step_on_a_mesh_is_the_step_of_one_device(name):
  options = ShardedOptions(**CASES[name])
  config = CONFIG if CASES[name] else SHORT
  found = on_mesh(config, "some", options, custom=bool(options.kept("device")))
  mesh_parity.check(alone(config, "some"), found)
  assert found.dropped == 0
  assert found.tokens == sum(b.loss_mask.sum() for b in batches(config, "some"))


def test_rounding_weights_once_a_step_is_rounding_them_in_every_layer():
  ring: dict[str, Any] = {"use_ring_of_experts": True, "fp8_moe_fake_quant": True}
  hoist = ShardedOptions(**ring, fp8_moe_fake_quant_hoist=True)
  # The older emitters, which compile in half the time, contract the two programs differently.
  plain = on_mesh(SHORT, "some", ShardedOptions(**ring), fusion_emitters=True)
  hoisted = on_mesh(SHORT, "some", hoist, fusion_emitters=True, update=False)
  for name, gradient in plain.gradients.items():
    np.testing.assert_array_equal(hoisted.gradients[name], gradient, err_msg=name)
  # One device whose weights were rounded beforehand.
  values = jax.tree_util.tree_map_with_path(_rounded, params(SHORT))
  wanted = mesh_parity.alone(SHORT, MODEL_OPTIONS, values, batches(SHORT, "some"))
  mesh_parity.check(wanted, plain)


def _rounded(path, weight):
  if path[-1].key not in ("wi", "wo"):
    return weight
  return fp8.dequantise(fp8.quantise(weight, -2), weight.dtype)


RING: dict[str, Any] = {"custom_mesh_and_rule": "cp-as-ep", "use_ring_of_experts": True}
TIGHT = ShardedOptions(**RING, ragged_buffer_factor=1.0, retry_when_tokens_dropped=True)


def test_no_token_is_lost_when_a_buffer_overflows():
  roomy = on_mesh(SHORT, "skewed", ShardedOptions(**RING))
  found = on_mesh(SHORT, "skewed", TIGHT)
  assert found.discarded == 2 and found.dropped == 0
  for name, gradient in roomy.gradients.items():
    np.testing.assert_array_equal(found.gradients[name], gradient, err_msg=name)
  for name, weight in roomy.weights.items():
    np.testing.assert_array_equal(found.weights[name], weight, err_msg=name)
  mesh_parity.check(alone(SHORT, "skewed"), found)


def test_a_retry_that_runs_nothing_or_everything_again_is_seen(monkeypatch):
  wanted = alone(SHORT, "skewed").tokens
  monkeypatch.setattr(retry.Retrying, "_again", lambda self, weights, sums, batch: sums)
  assert on_mesh(SHORT, "skewed", TIGHT, update=False).tokens == 0

  def always(self, weights, sums, batch):
    again = self._compiled(weights, sums, batch)
    return self._compiled(weights, again, batch)

  monkeypatch.setattr(retry.Retrying, "_again", always)
  assert on_mesh(SHORT, "skewed", TIGHT, update=False).tokens == 2 * wanted


def test_dropped_tokens_are_counted_where_nothing_runs_again():
  tight = ShardedOptions(**RING, ragged_buffer_factor=1.0)
  found = on_mesh(SHORT, "skewed", tight, update=False)
  real = sum(int((b.segment_ids > 0).sum()) for b in batches(SHORT, "skewed"))
  # Both experts of every token are on one of a ring's four ranks, whose buffer has a balanced rank's
  # rows, in each of two micro-batches.
  rings, rows = SHAPE.fsdp, ROWS * TOKENS * 2 // SHAPE.devices
  assert found.dropped == 2 * real - 2 * rings * rows


def test_sizes_that_do_not_divide_are_refused():
  mesh = mesh_parity.mesh_of(MeshShape.parse("1x1x8"))
  with pytest.raises(UserError, match="linear_num_key_heads=2 does not divide over context = 8"):
    mesh_step.make_plan(CONFIG, ShardedOptions(), mesh)
