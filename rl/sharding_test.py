"""The sharded step against the unsharded one, on eight devices of the CPU."""

import dataclasses
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=8"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from kernels.base.mesh import MeshShape  # noqa: E402
from kernels.base.options import UserError  # noqa: E402
from model import api  # noqa: E402
from model import config as model_config  # noqa: E402
from rl import config as rl_config  # noqa: E402
from rl import optimizer, packing, placed, sharding, train_step  # noqa: E402

ROWS, TOKENS, SEGMENTS = 8, 16, 3
MODEL_OPTIONS = model_config.ModelOptions(dtype="float32", gdn_chunk_size=8)
OPTIMIZER = rl_config.OptimizerOptions(learning_rate=1e-3)


def batch_of(config, seed):
  rng = np.random.default_rng(seed)
  lengths = np.array([6, 5, 3])  # and two places of padding
  ids = np.concatenate([np.repeat([1, 2, 3], lengths), [0] * 2]).astype(np.int32)
  positions = np.concatenate([np.arange(n) for n in (*lengths, 2)]).astype(np.int32)
  tile = lambda x: np.tile(x, (ROWS, 1))
  mask = (tile(ids) > 0) & (tile(positions) > 0)
  real = lambda scale: (rng.normal(size=(ROWS, TOKENS)) * scale * mask).astype(np.float32)
  ones = np.ones((ROWS, SEGMENTS), np.float32)
  return packing.PackedBatch(
    tokens=rng.integers(0, config.vocab_size, (ROWS, TOKENS)).astype(np.int32),
    segment_ids=tile(ids),
    positions=tile(positions),
    loss_mask=mask.astype(np.float32),
    advantages=real(1.0),
    sampler_logprobs=real(0.1) - 6.0 * mask.astype(np.float32),
    old_logprobs=None,
    reference_logprobs=None,
    routed_experts=None,
    segment_valid=ones,
    segment_truncated=0 * ones,
    segment_reward=ones,
    segment_index=np.arange(ROWS * SEGMENTS, dtype=np.int32).reshape(ROWS, SEGMENTS),
  )


def one_step(config, layout):
  """An update of one micro-batch; the state after, and metrics."""
  functions = train_step.make_functions(
    config,
    MODEL_OPTIONS,
    rl_config.LossOptions(
      truncated_importance_sampling_type="none",
      seq_logprob_error_threshold=None,
      logps_chunk_size=32,
    ),
    OPTIMIZER,
  )
  params = api.init_params(config, MODEL_OPTIONS, jax.random.key(0))
  state = optimizer.init_state(params, OPTIMIZER)
  if layout is not None:
    functions = sharding.constrained(functions, layout)
    state = jax.device_put(state, layout.like_parameters(state))
  programs = train_step.compile_programs(functions)
  hyper = optimizer.HyperParameters(jnp.float32(1e-3), jnp.float32(0.0))
  sums = programs.first_micro_batch(state.weights, batch_of(config, 0))
  gradients = jax.device_get(sums.gradients)
  state, metrics = programs.update(state, sums, hyper)
  return gradients, state, train_step.host_metrics(metrics)


@pytest.fixture(scope="module")
def sharded():
  config = model_config.preset("tiny")
  layout = sharding.plan(config, placed.make_mesh(MeshShape.parse("8x1x1")))
  return config, layout, one_step(config, layout)


def test_a_sharded_step_is_the_unsharded_one(sharded):
  config, _, (gradients, _, metrics) = sharded
  alone, _, alone_metrics = one_step(config, None)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(gradients), strict=True
  ):
    # Sums in another order, in float32.
    assert np.linalg.norm(a - b) <= 5e-5 * np.linalg.norm(a) + 1e-7, jax.tree_util.keystr(path)
  for name, value in alone_metrics.items():
    assert metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-5), name


def test_arrays_lie_where_the_plan_says(sharded):
  config, layout, (_, state, _) = sharded
  table = state.weights["embed"]["embedding"]
  assert table.sharding.spec == P(None, "fsdp")
  assert {s.data.shape for s in table.addressable_shards} == {(config.vocab_size, 8)}
  for (path, weight), (_, where) in zip(
    jax.tree_util.tree_leaves_with_path(state.weights),
    jax.tree_util.tree_leaves_with_path(layout.parameters),
    strict=True,
  ):
    assert weight.sharding.is_equivalent_to(where, weight.ndim), jax.tree_util.keystr(path)
  split = lambda tree: sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(tree))
  assert split(state.weights) > 10
  assert split(state.moments) == 2 * split(state.weights)


def test_meshes_that_cannot_be_are_refused():
  with pytest.raises(UserError, match="4 devices, there are 8"):
    placed.make_mesh(MeshShape.parse("4x1x1"))
  mesh = placed.make_mesh(MeshShape.parse("8x1x1"))
  odd = dataclasses.replace(model_config.preset("tiny"), hidden_size=60)
  with pytest.raises(UserError, match="hidden_size=60 does not divide"):
    sharding.plan(odd, mesh)
