"""A run on fsdp x expert x context, 2x2x2 devices of the CPU: stopped, resumed, exported, moved."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=8"
  " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import jax  # noqa: E402
import pytest  # noqa: E402

from kernels.base import options  # noqa: E402
from rl import mesh_runs, setup  # noqa: E402

ROWS = "--micro_batch_rows=4"
# Weights, gradients and what the optimizer keeps of them are each split in their own way here.
MESH = (
  "--mesh=2x2x2",
  "--custom_mesh_and_rule=cp-as-ep-dense-no-cp",
  "--use_ring_of_experts",
  "--use_ragged_sort",
  "--context_parallel_attention_load_balance",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  return (mesh_runs.record(tmp_path_factory.mktemp("recorded")), ROWS)


@pytest.fixture(scope="module")
def whole(recorded, tmp_path_factory):
  """A run of two steps; its parts and itself."""
  where = tmp_path_factory.mktemp("whole")
  return mesh_runs.train(f"--output_dir={where}", *recorded, *MESH)[:2]


@pytest.fixture
def stopped(recorded, tmp_path):
  """A flag: where a run stopped after the first step."""
  where = f"--output_dir={tmp_path}"
  mesh_runs.train(where, *recorded, *MESH, "--max_steps=1")
  return where


def test_state_is_split_over_every_axis(whole):
  state = whole[1]._learner.state
  for tree in (state.weights, state.moments):
    for axis in ("fsdp", "expert", "context"):
      assert any(axis in str(leaf.sharding.spec) for leaf in jax.tree.leaves(tree)), axis


def test_a_resumed_run_ends_with_the_same_bits(recorded, whole, stopped):
  _, training, said = mesh_runs.train(stopped, *recorded, *MESH)
  assert any("resumed after step 1" in line for line in said)
  assert mesh_runs.bits(training.weights) == mesh_runs.bits(whole[1].weights)
  # The second step has moved every bit that it should: the state came back, not only the weights.
  kept, wanted = training._learner.state, whole[1]._learner.state
  assert mesh_runs.bits(kept.moments) == mesh_runs.bits(wanted.moments)


def test_another_mesh_is_refused_unless_asked(recorded, whole, stopped):
  with pytest.raises(options.UserError, match="--mesh was 2x2x2, now unset") as error:
    mesh_runs.train(stopped, *recorded)
  assert "\n" not in str(error.value).strip()
  _, training, said = mesh_runs.train(stopped, *recorded, "--allow_config_change")
  assert any("resumed after step 1" in line for line in said)
  # Adam divides a gradient by its own size, so where one is nearly 0 the sums' order shows.
  assert mesh_runs.distance(whole[1].weights, training.weights) < 1e-4
  assert {len(x.devices()) for x in jax.tree.leaves(training.weights)} == {1}


def test_the_export_is_read_back_whole_and_into_shards(recorded, whole, tmp_path):
  parts, training = whole
  wanted = mesh_runs.bits(training.weights)
  exported = parts.export(training.weights)
  assert mesh_runs.bits(setup.load_exported(parts, exported)) == wanted
  flags = (f"--output_dir={tmp_path}", *recorded, *MESH, f"--checkpoint={exported}")
  start = setup.build(mesh_runs.settings_of(*flags)).initial_params()
  assert mesh_runs.bits(start) == wanted
  pairs = zip(jax.tree.leaves(start), jax.tree.leaves(parts.layout.parameters), strict=True)
  assert all(leaf.sharding.is_equivalent_to(where, leaf.ndim) for leaf, where in pairs)
