"""Runs on a mesh of two devices of the CPU against runs on one of them."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
)

import jax  # noqa: E402
import pytest  # noqa: E402

from kernels.base import options  # noqa: E402
from rl import metrics_log, setup  # noqa: E402
from rl.mesh_runs import bits, distance, record, settings_of, train  # noqa: E402

MESH = "--mesh=2x1x1"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  """A flag: trajectories of two steps, two micro-batches each."""
  return record(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def alone(recorded, tmp_path_factory):
  """A run on one device."""
  where = tmp_path_factory.mktemp("alone")
  _, training, _ = train(f"--output_dir={where}", recorded)
  return where, training


@pytest.fixture(scope="module")
def split(recorded, tmp_path_factory):
  """The same run on two."""
  where = tmp_path_factory.mktemp("split")
  parts, training, _ = train(f"--output_dir={where}", recorded, MESH)
  return where, parts, training


def check_same_run(alone, split):
  """Raises AssertionError unless two (directory, loop) runs are one, sums in another order."""
  one, two = (metrics_log.read(where / "metrics.jsonl") for where, _ in (alone, split))
  assert [r["step"] for r in one] == [r["step"] for r in two] == [1, 2]
  for a, b in zip(one, two, strict=True):
    assert a["micro_batches"] == b["micro_batches"] == 2
    for metric in ("loss", "pg_loss", "grad_norm", "entropy", "advantage_abs_mean"):
      assert a[metric] != 0
      assert b[metric] == pytest.approx(a[metric], rel=1e-5), (a["step"], metric)
  # Adam divides a gradient by its own size, so where one is nearly 0 the sums' order shows.
  assert distance(alone[1].weights, split[1].weights) < 1e-4


def test_a_split_run_is_the_run_on_one_device(alone, split):
  check_same_run(alone, (split[0], split[2]))


def test_so_is_a_run_whose_rows_are_split_over_context(recorded, alone, tmp_path):
  flags = ("--mesh=1x1x2", "--gdn_cp_mode=seq", "--context_parallel_attention_load_balance")
  _, training, _ = train(f"--output_dir={tmp_path}", recorded, *flags)
  check_same_run(alone, (tmp_path, training))


def test_state_lies_on_both_devices(split):
  _, parts, training = split
  mesh = parts.layout.mesh
  assert mesh.shape["fsdp"] == mesh.size == 2
  state = training._learner.state
  for tree in (state.weights, state.moments):
    halves = [x for x in jax.tree.leaves(tree) if not x.is_fully_replicated]
    assert len(halves) > 10
    assert all({s.device for s in x.addressable_shards} == set(jax.devices()) for x in halves)
    held = sum(s.data.nbytes for x in halves for s in x.addressable_shards)
    assert held == sum(x.nbytes for x in halves)


def test_a_resumed_split_run_ends_with_the_same_bits(recorded, split, tmp_path):
  train(f"--output_dir={tmp_path}", recorded, MESH, "--max_steps=1")
  _, training, said = train(f"--output_dir={tmp_path}", recorded, MESH)
  assert any("resumed after step 1" in line for line in said)
  assert bits(training.weights) == bits(split[2].weights)


def test_another_mesh_is_refused_on_resume_unless_asked(recorded, alone, tmp_path):
  train(f"--output_dir={tmp_path}", recorded, MESH, "--max_steps=1")
  with pytest.raises(options.UserError, match="--mesh was 2x1x1, now unset"):
    train(f"--output_dir={tmp_path}", recorded)
  _, training, _ = train(f"--output_dir={tmp_path}", recorded, "--allow_config_change")
  assert distance(alone[1].weights, training.weights) < 1e-4
  assert {len(x.devices()) for x in jax.tree.leaves(training.weights)} == {1}


def test_the_export_is_the_split_weights_and_is_sampled_from(split, tmp_path):
  _, parts, training = split
  exported = parts.export(training.weights)
  assert bits(setup.load_exported(parts, exported)) == bits(training.weights)
  # Read straight into shards; samples, trains and evaluates from there.
  again, sampled, _ = train(
    f"--output_dir={tmp_path}", MESH, f"--checkpoint={exported}", "--max_steps=1"
  )
  start = again.initial_params()
  assert bits(start) == bits(training.weights) != bits(sampled.weights)
  for leaf, where in zip(
    jax.tree.leaves(start), jax.tree.leaves(again.layout.parameters), strict=True
  ):
    assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
  (record,) = metrics_log.read(tmp_path / "metrics.jsonl")
  # Sampler and trainer agree in float32, though one has the weights whole and the other split.
  assert record["sampler_logprob_gap_max"] < 1e-4 and "eval/pass@1" in record
  for leaf in jax.tree.leaves(again.for_sampling(sampled.weights)):
    assert leaf.devices() == {jax.devices()[0]}


@pytest.mark.parametrize(
  "mesh, words",
  [
    ("1x1x1", "has 1 devices, there are 2; give a mesh of 2, such as 2x1x1"),
    ("4x1x1", "has 4 devices, there are 2"),
    ("2x1", "want fsdp x expert x context"),
  ],
)
def test_meshes_that_cannot_be_are_refused_in_one_line(mesh, words, tmp_path):
  with pytest.raises(options.UserError, match=words) as error:
    setup.build(settings_of(f"--output_dir={tmp_path}", f"--mesh={mesh}", "--micro_batch_rows=4"))
  assert "\n" not in str(error.value).strip()
