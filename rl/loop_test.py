"""Whole small runs: in this process where nothing must die, in another one where it must."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import types
from unittest import mock

# Read when JAX is imported, here and in the processes below: what one process compiled the others
# read.
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from kernels.base import cli, options  # noqa: E402
from rl import (  # noqa: E402
  loop,
  metrics_log,
  recipes,
  refusals,
  report,
  rollouts,
  setup,
  trainer,
  trainer_options,
)

# The smallest run that has every phase.
SMALL = (
  "--warmup_steps=2 --warmup_batch=16 --max_steps=4 --prompts_per_step=4 "
  "--generations_per_prompt=4 --micro_batch_rows=4 --sampler_slots=16 --prefill_rows=4 "
  "--eval_problems=16 --checkpoint_every=2 --warmup_target=1.0"
).split()


# Saved by transformers' own save_pretrained.
ORACLE = "tests/data/oracle/moe"


def settings_of(*flags):
  argv = recipes.expand(["trainer", *SMALL, *flags])
  return cli.parse(argv, trainer_options.COMPONENTS, rules=refusals.RULES, environ={})


def train(*flags):
  """Runs a loop; the weights at its end as one vector of bytes, and what it said."""
  said = []
  training = loop.Loop(setup.build(settings_of(*flags)), say=said.append)
  assert training.run()
  return fingerprint(training.weights), said


def fingerprint(weights):
  return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(weights))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A run that nothing disturbs."""
  where = tmp_path_factory.mktemp("whole")
  saved = where / "rollouts.jsonl"
  weights, said = train(f"--output_dir={where}", f"--save_rollouts={saved}")
  return where, weights, said


def steps(path):
  return [r["step"] for r in metrics_log.read(path)]


def test_a_run_leaves_its_metrics(whole):
  where, _, _ = whole
  assert steps(where / "metrics.jsonl") == [1, 2, 3, 4]
  assert steps(where / "warmup.jsonl") == [1, 2]
  assert steps(where / "evaluations.jsonl") == [0, 4]
  for record in metrics_log.read(where / "metrics.jsonl"):
    for name in (
      "loss pg_loss grad_norm reward_mean reward_std solve_rate entropy clip_fraction "
      "tis_kept_fraction advantage_abs_mean learning_rate completion_length_mean "
      "truncated_fraction tokens_per_second tokens_per_second_per_chip packing_fill staleness_max "
      "sampler_logprob_gap_mean sampler_logprob_gap_max sampler_logprob_correlation "
      "token_mult_prob_error time/rollout time/train time/eval memory/host_peak_gib skipped_steps"
    ).split():
      assert isinstance(record[name], float), name
    assert record["mfu"] is None  # No peak is known for a CPU.
    # float32 on both sides: sampler and trainer agree.
    assert record["sampler_logprob_gap_max"] < 1e-4
    assert record["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
  assert metrics_log.read(where / "metrics.jsonl")[-1]["eval/pass@1"] >= 0


@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_run_ends_with_the_same_bits(whole, tmp_path, stop):
  _, weights, _ = whole
  train(f"--output_dir={tmp_path}", f"--max_steps={stop}")
  again, said = train(f"--output_dir={tmp_path}")
  assert again == weights
  assert any(f"resumed after step {stop}" in line for line in said)
  assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_recorded_rollouts_of_the_run_make_the_same_updates(whole, tmp_path):
  where, weights, _ = whole
  start = tmp_path / "start"
  train(f"--output_dir={start}", "--max_steps=0")
  parts = setup.build(settings_of(f"--output_dir={start}", "--max_steps=0"))
  training = loop.Loop(parts, say=lambda text: None)
  assert training.run()
  exported = parts.export(training.weights)
  recorded = [
    "--recipe=sort",
    f"--rollouts={where / 'rollouts.jsonl'}",
    f"--checkpoint={exported}",
    f"--output_dir={tmp_path / 'again'}",
    "--warmup_steps=0",
  ]
  again, _ = train(*recorded)
  assert again == weights
  first = metrics_log.read(where / "metrics.jsonl")
  second = metrics_log.read(tmp_path / "again" / "metrics.jsonl")
  for a, b in zip(first, second, strict=True):
    for name in ("loss", "grad_norm", "reward_mean"):
      assert a[name] == b[name]


def test_a_step_that_trains_nothing_says_why(whole, tmp_path, capsys):
  where, _, _ = whole
  flags = [f"--rollouts={where / 'rollouts.jsonl'}", f"--output_dir={tmp_path}", "--max_steps=2"]
  # Random weights, not those that sampled.
  train(*flags, "--recipe=sort", "--warmup_steps=0", "--seq_logprob_error_threshold=1.0001")
  said = [line for line in capsys.readouterr().err.splitlines() if "trains nothing" in line]
  assert len(said) == 1 and "start from the model that sampled them" in said[0], said


def test_other_options_are_refused_on_resume_unless_asked(whole, tmp_path):
  train(f"--output_dir={tmp_path}", "--max_steps=1")
  with pytest.raises(options.UserError) as error:
    train(f"--output_dir={tmp_path}", "--learning_rate=1e-4", "--entropy_bonus=0.5")
  text = str(error.value)
  assert "--learning_rate was 0.0006, now 0.0001" in text and "--entropy_bonus" in text
  assert "--max_steps" not in text and "\n" not in text
  with pytest.raises(options.UserError, match="resume=never"):
    train(f"--output_dir={tmp_path}", "--resume=never")
  _, said = train(
    f"--output_dir={tmp_path}", "--learning_rate=1e-4", "--max_steps=2", "--allow_config_change"
  )
  assert any("resuming with other options: --learning_rate" in line for line in said)
  # A function of the step that the run is at, not of the steps since it was resumed.
  rate = metrics_log.read(tmp_path / "metrics.jsonl")[-1]["learning_rate"]
  assert rate == pytest.approx(1e-4 * (1 - 1 / 280), rel=1e-5)
  with pytest.raises(options.UserError, match="resume=must"):
    train(f"--output_dir={tmp_path / 'fresh'}", "--resume=must")


def test_damaged_checkpoint_falls_back_in_one_line(whole, tmp_path):
  _, weights, _ = whole
  train(f"--output_dir={tmp_path}")
  newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
  largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)
  again, said = train(f"--output_dir={tmp_path}")
  assert again == weights
  assert len([line for line in said if "passed over" in line]) == 1


def test_lagging_rollouts_carry_their_version_and_survive_a_resume(tmp_path):
  lag = ["--rollout_lag=1", "--max_staleness=1"]
  weights, _ = train(f"--output_dir={tmp_path / 'a'}", *lag)
  records = metrics_log.read(tmp_path / "a/metrics.jsonl")
  assert [r["staleness_max"] for r in records] == [0, 1, 1, 1]
  train(f"--output_dir={tmp_path / 'b'}", "--max_steps=2", *lag)
  again, _ = train(f"--output_dir={tmp_path / 'b'}", *lag)
  assert again == weights


def test_supervised_loss_trains_on_the_demonstrations(tmp_path):
  train(f"--output_dir={tmp_path}", "--loss=sft", "--warmup_steps=0", "--learning_rate=3e-3")
  records = metrics_log.read(tmp_path / "metrics.jsonl")
  assert records[-1]["loss"] < records[0]["loss"]
  assert all(r["reward_mean"] == 1.0 and r["demonstration_probability"] < 1 for r in records)


def test_one_temperature_and_one_routing_on_both_sides(tmp_path):
  saved = tmp_path / "rollouts.jsonl"
  train(
    f"--output_dir={tmp_path}",
    "--temperature=0.5",
    "--router_replay",
    "--warmup_steps=0",
    "--max_steps=2",
    f"--save_rollouts={saved}",
  )
  for record in metrics_log.read(tmp_path / "metrics.jsonl"):
    assert 0 < record["sampler_logprob_gap_max"] < 1e-4
  for one in rollouts.read(str(saved)):
    assert one.routed_experts.shape == (one.num_tokens, 4, 2)
    assert np.all(one.routed_experts[:-1] >= 0) and np.all(one.routed_experts[-1] == -1)


def test_stop_at_target_accuracy(tmp_path):
  train(f"--output_dir={tmp_path}", "--target_accuracy=0.0", "--eval_every=3")
  assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_from_a_checkpoint_made_by_transformers(tmp_path):
  flags = [
    f"--checkpoint={ORACLE}",
    f"--output_dir={tmp_path}",
    "--recipe=sort",
    "--warmup_steps=0",
    "--max_steps=2",
  ]
  parts = setup.build(settings_of(*flags))
  assert parts.model_options.dtype == "float32"
  start = fingerprint(parts.initial_params())
  weights, _ = train(*flags)
  # Random weights earn nothing, so the policy loss alone moves nothing but by its entropy bonus.
  assert weights != start
  exported = parts.export(parts.initial_params())
  assert fingerprint(setup.load_exported(parts, exported)) == start
  names = {p.name for p in pathlib.Path(ORACLE).iterdir()} & {"generation_config.json"}
  assert names <= {p.name for p in exported.iterdir()}


def test_json_lines_task(tmp_path):
  lines = [json.dumps({"prompt": f"{i:02d}", "answer": f"{i % 7}"}) for i in range(60)]
  (tmp_path / "p.jsonl").write_text("\n".join(lines))
  train(f"--output_dir={tmp_path / 'o'}", "--task=json_lines", f"--prompts={tmp_path / 'p.jsonl'}")
  assert steps(tmp_path / "o/metrics.jsonl") == [1, 2, 3, 4]


def test_recorded_step_needs_whole_groups(whole, tmp_path):
  where, _, _ = whole
  records = [json.loads(line) for line in (where / "rollouts.jsonl").read_text().splitlines()]

  def build(changed):
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join(map(json.dumps, changed)))
    setup.build(
      settings_of(f"--rollouts={path}", "--warmup_steps=0", f"--output_dir={tmp_path / 'o'}")
    )

  with pytest.raises(options.UserError, match="15 trajectories do not divide into steps"):
    build(records[:-1])
  records[0]["group_id"] = records[4]["group_id"]
  with pytest.raises(options.UserError, match=r"group \d has \d trajectories, want 4"):
    build(records)


def test_recorded_steps_are_never_lost_on_resume(tmp_path):
  path = str(tmp_path / "saved.parquet")
  assert not loop._drop_later(path, 2)
  (tmp_path / "saved.parquet").write_text("")
  assert not loop._drop_later(path, 0)
  with pytest.raises(options.UserError, match="Parquet file cannot be continued"):
    loop._drop_later(path, 2)


def test_saved_rollouts_read_back(whole):
  where, _, _ = whole
  found = rollouts.read(str(where / "rollouts.jsonl"))
  assert len(found) == 4 * 16 and [t.step for t in found[::16]] == [1, 2, 3, 4]
  assert [t.policy_version for t in found[::16]] == [0, 1, 2, 3]


def command(*flags, limit=None):
  env = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
  return subprocess.run(
    [sys.executable, "-m", "rl.trainer", *SMALL, *flags],
    capture_output=True,
    text=True,
    env=env,
    preexec_fn=limit,
  )


def test_check_imports_no_jax_and_refuses_with_all_reasons(tmp_path):
  code = (
    "import sys\nfrom rl import trainer\n"
    "try:\n  trainer.main(['trainer', '--check'])\nfinally:\n"
    "  print('jax' in sys.modules)"
  )
  env = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
  assert done.returncode == 0 and done.stdout.endswith("False\n"), done


MISTAKES = {
  "unknown task": (["--task=sort44"], 2, "the nearest is sort4"),
  "misspelt key": (["--learning_rat=1"], 2, "the nearest flag is --learning_rate"),
  "empty prompts": (["--task=json_lines", "--prompts={tmp}/empty"], 1, "holds no problem"),
  "malformed line": (["--task=json_lines", "--prompts={tmp}/bad"], 1, "line 2"),
  "no checkpoint": (["--checkpoint={tmp}/absent"], 1, "--checkpoint={tmp}/absent: "),
  "misspelt preset": (["--model_preset=tiny_mo"], 2, "the nearest is tiny_moe"),
  "nothing to train": (["--trainable_parameters_mask=.*nothing"], 1, "matches none of the"),
  "unwritable output": (["--output_dir={tmp}/empty/x"], 1, "cannot be written"),
  "bad rollouts": (["--rollouts={tmp}/bad.jsonl", "--warmup_steps=0"], 1, "bad.jsonl line 1"),
  "vocabulary": (
    ["--rollouts={tmp}/wide.jsonl", "--warmup_steps=0"],
    1,
    "outside the model's vocabulary of 512",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_give_one_line_and_a_status(tmp_path, name, capsys, monkeypatch):
  flags, status, text = MISTAKES[name]
  (tmp_path / "empty").write_text("")
  (tmp_path / "bad").write_text('{"prompt": "a", "answer": "b"}\n{"prompt"')
  (tmp_path / "bad.jsonl").write_text("{}\n")
  record = {
    "group_id": 0,
    "prompt_ids": [1],
    "completion_ids": [600],
    "loss_mask": [1],
    "sampler_logprobs": [-1.0],
    "reward": 1.0,
  }
  (tmp_path / "wide.jsonl").write_text(json.dumps(record) + "\n")
  flags = [f.format(tmp=tmp_path) for f in flags]
  flags = [f"--output_dir={tmp_path / 'o'}", *flags]
  if name == "malformed line":  # One of them as a user runs it.
    done = command(*flags)
    code, said = done.returncode, done.stderr
  else:
    monkeypatch.setattr(trainer, "_forget_late_writes", lambda: None)  # hooks of the whole process
    with pytest.raises(SystemExit) as end:
      trainer.main(["trainer", *SMALL, *flags])
    code, said = end.value.code, capsys.readouterr().err
  assert code == status, said
  lines = [line for line in said.splitlines() if line]
  assert len(lines) == 1 and lines[0].startswith("error: "), lines
  assert text.format(tmp=tmp_path) in lines[0], lines
  assert not (tmp_path / "o").exists()


def test_trajectory_longer_than_a_row_is_named_before_anything_is_trained(whole, tmp_path):
  where, _, _ = whole
  records = [json.loads(line) for line in (where / "rollouts.jsonl").read_text().splitlines()]
  records[-1]["prompt_ids"] = [1] * 99
  (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, records)))
  flags = [f"--rollouts={tmp_path / 'long.jsonl'}", f"--output_dir={tmp_path / 'o'}"]
  with pytest.raises(options.UserError, match="long.jsonl line 64 has 10.* --row_tokens=80"):
    setup.build(settings_of(*flags, "--recipe=sort", "--warmup_steps=0"))
  with pytest.raises(options.UserError, match="_prompt_tokens=8 .*_completion_tokens=6 has 14"):
    setup.build(settings_of("--row_tokens=13", f"--output_dir={tmp_path / 'o'}"))
  assert not (tmp_path / "o").exists()
  short = [f"--rollouts={where / 'rollouts.jsonl'}", f"--output_dir={tmp_path / 'o'}"]
  with pytest.raises(options.UserError, match="no trajectory carries routed_experts; leave"):
    setup.build(settings_of(*short, "--warmup_steps=0", "--router_replay"))
  assert not (tmp_path / "o").exists()


def test_a_dense_run_tells_where_everything_is(tmp_path, capsys):
  flags = ["--model_preset=tiny", "--warmup_steps=1", "--max_steps=1", f"--output_dir={tmp_path}"]
  assert report.train_and_report(settings_of(*flags), started=0.0) == 0
  told = capsys.readouterr().out
  assert "Qwen3.5 (dense, " in told and "warning" not in told
  scores = [line.split()[-2:] for line in told.splitlines() if line.startswith(("step 1", "expor"))]
  assert len(scores) == 2 and scores[0] == scores[1]  # as trained, and loaded back
  for name, place in {
    "plot": "metrics.png",
    "metrics": "metrics.jsonl",
    "TensorBoard": "tensorboard",
    "checkpoints": "checkpoints",
    "Hugging Face model": "model",
  }.items():
    assert f"{name:<20}{tmp_path / place}\n" in told and (tmp_path / place).exists()
  report._require_same([("step 1", {"eval/pass@1": 0.5}), ("exported", {"eval/pass@1": 0.25})])
  assert "warning: the exported model scores otherwise" in capsys.readouterr().out


def test_a_failed_export_says_what_is_kept(tmp_path):
  def export(params):
    raise options.UserError("model: cannot be written (No space left on device)")

  parts = types.SimpleNamespace(output_dir=tmp_path, export=export)
  kept = f"No space left on device.; the trained state is whole in {tmp_path}/checkpoints: "
  with pytest.raises(options.UserError, match=kept):
    report._export(parts, types.SimpleNamespace(weights={}))


def test_sigterm_saves_and_exits_zero(whole, tmp_path):
  _, weights, _ = whole
  env = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
  # The signal is sent by the process itself after its second step: no race with the end.
  code = f"""
import os, signal
from rl import metrics_log, trainer
write = metrics_log.MetricsLog.write
def write_and_stop(self, step, metrics):
  write(self, step, metrics)
  if step == 2:
    os.kill(os.getpid(), signal.SIGTERM)
metrics_log.MetricsLog.write = write_and_stop
trainer.main(["trainer", *{SMALL!r}, "--checkpoint_every=0", "--output_dir={tmp_path}"])
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
  assert done.returncode == 0, done.stderr
  assert "stopped by SIGTERM; saved" in done.stdout
  assert steps(tmp_path / "metrics.jsonl") == [1, 2]
  again, said = train(f"--output_dir={tmp_path}")
  assert again == weights and any("resumed after step 2" in line for line in said)
  assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_full_disk_while_saving_loses_nothing(whole, tmp_path):
  _, weights, _ = whole
  train(f"--output_dir={tmp_path}", "--max_steps=2")
  # Files of at most a megabyte stand for a disk without room for a checkpoint of several.
  limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
  done = command(f"--output_dir={tmp_path}", limit=limit)
  assert done.returncode == 1, done.stderr
  told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert len(told) == 1 and "the checkpoint of step 6 could not be written" in told[0]
  assert "(File too large); the checkpoint of step 4 is whole and kept" in told[0]
  assert "Traceback" not in done.stderr
  again, said = train(f"--output_dir={tmp_path}")
  assert again == weights and any("resumed after step 2" in line for line in said)


def test_preemption_gives_the_signal_back():
  before = signal.getsignal(signal.SIGTERM)
  preemption = loop.Preemption()
  os.kill(os.getpid(), signal.SIGTERM)
  assert preemption.requested
  preemption.close()
  assert signal.getsignal(signal.SIGTERM) == before


def test_the_first_ctrl_c_waits_for_the_step_and_the_second_does_not():
  preemption = loop.Preemption()
  try:
    os.kill(os.getpid(), signal.SIGINT)
    assert preemption.requested == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
  finally:
    preemption.close()


def test_a_recording_replaces_no_file_of_the_users(tmp_path):
  precious = tmp_path / "precious.jsonl"
  precious.write_text("mine\n")
  build = lambda path, where: setup.build(
    settings_of(f"--output_dir={tmp_path / where}", f"--save_rollouts={path}")
  )
  with pytest.raises(options.UserError, match="exists"):
    loop.Loop(build(precious, "run"), say=lambda text: None).run()
  assert precious.read_text() == "mine\n"
  for path, said in (
    (tmp_path / "x.txt", "ends in .jsonl or .parquet"),
    (tmp_path / "no" / "x.jsonl", "the directory .*no does not exist; make it"),
  ):
    with pytest.raises(options.UserError, match=said):
      build(path, "other")
  assert not (tmp_path / "other").exists()


def test_a_run_that_updates_nothing_is_an_error(tmp_path):
  parts = setup.build(settings_of(f"--output_dir={tmp_path}", "--warmup_steps=0", "--max_steps=2"))
  broken = jax.tree.map(lambda a: a * np.nan, parts.initial_params())
  said = []
  with mock.patch.object(setup.Setup, "initial_params", return_value=broken):
    with pytest.raises(options.UserError, match="last 2 updates were skipped.*not finite"):
      loop.Loop(parts, say=said.append).run()
  assert steps(tmp_path / "metrics.jsonl") == [1, 2]


def test_pairs_without_room_are_told_once():
  said = []
  settings = types.SimpleNamespace(retry_when_tokens_dropped=False)
  run = types.SimpleNamespace(_told_dropped=False, _step=3, _settings=settings)
  for dropped in (0.0, 5.0, 7.0):
    loop.Loop._tell_dropped(run, {"moe_dropped_pairs": dropped}, said.append)
  assert len(said) == 1 and said[0].startswith("warning: 5 pairs") and "in step 3" in said[0]
  settings.retry_when_tokens_dropped, run._told_dropped = True, False
  loop.Loop._tell_dropped(run, {"moe_dropped_pairs": 5.0}, said.append)
  assert len(said) == 1
