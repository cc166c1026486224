"""What a run tells its user: what it does, how it went, where things are, what to do next."""

from __future__ import annotations

import pathlib
import time

from kernels.base import options
from rl import loop, metrics_log, run_config, setup
from rl.tasks import arithmetic


def train_and_report(settings: options.Settings, started: float) -> int:
  """Runs the loop and prints the report.

  Args:
    settings: Checked options.
    started: `time.monotonic()` at the start of the process.

  Returns:
    Exit status: 0, also when a SIGTERM stopped the run after saving.

  Raises:
    options.UserError: Something of the user's is wrong.
  """
  parts = setup.build(settings)
  training = loop.Loop(parts)
  print(_introduction(parts, training.total_steps), flush=True)
  try:
    if not training.run():
      return 0
  except options.UserError:
    _remove_if_empty(parts.output_dir)
    raise
  rows = [
    (_label(r["step"], settings), r)
    for r in metrics_log.read(parts.output_dir / "evaluations.jsonl")
  ]
  exported = None
  if settings.export:
    exported = _export(parts, training)
    reloaded = setup.load_exported(parts, exported)
    again = training.evaluate(reloaded)
    if again is not None:
      rows.append(("exported model, loaded back", again.metrics()))
      _require_same(rows)
  print(_table(rows, settings.of(run_config.EvaluationOptions)))
  print(_places(parts, exported, _plot(parts)))
  print(f"took {time.monotonic() - started:.0f} s; {_next_steps(parts, exported)}", flush=True)
  return 0


def _export(parts: setup.Setup, training: loop.Loop) -> pathlib.Path:
  try:
    return parts.export(training.weights)
  except options.UserError as error:
    kept = parts.output_dir / "checkpoints"
    raise options.UserError(
      f"{error}; the trained state is whole in {kept}: mend this and give the same command with "
      f"--output_dir={parts.output_dir} to export it without training again"
    ) from error


def _remove_if_empty(directory: pathlib.Path) -> None:
  """Removes folders in which a refused start has left no file."""
  inside = sorted(directory.rglob("*"), reverse=True)
  if all(path.is_dir() for path in inside):
    for path in (*inside, directory):
      path.rmdir()


def _introduction(parts: setup.Setup, steps: int) -> str:
  settings, model = parts.settings, parts.model
  kind = "mixture of experts" if model.is_moe else "dense"
  size = setup.count_params(model)
  what = f"Qwen3.5 ({kind}, {size:,} parameters, from "
  what += f"{settings.checkpoint})" if settings.checkpoint else "random weights)"
  if parts.recorded:
    return (
      f"{what} learns from {sum(map(len, parts.recorded))} recorded trajectories of "
      f"{settings.rollouts}: {steps} steps of {settings.loss}.\nfiles go to {parts.output_dir}"
    )
  lines = [f"{what} learns {_task_text(settings.task)}"]
  if settings.warmup_steps:
    lines.append(
      f"  1. warm-up: supervised updates until demonstrations have probability "
      f"{settings.warmup_target:g} (at most {settings.warmup_steps})"
    )
  source = parts.source
  number = 2 if settings.warmup_steps else 1
  if settings.loss == "sft":
    count = source.prompts * source.generations
    lines.append(f"  {number}. sft: {steps} steps of {count} demonstrations; nothing is sampled")
  else:
    lines.append(
      f"  {number}. {settings.loss}: {steps} steps of {source.prompts} problems x "
      f"{source.generations} samples, reward alone"
    )
  lines.append(
    f"scores are on held-out problems; training sees {parts.task.train_size or 'endless'} others"
  )
  lines.append(f"files go to {parts.output_dir}; the first updates compile for a while")
  return "\n".join(lines)


def _task_text(name: str) -> str:
  described = arithmetic.DESCRIPTIONS.get(name)
  return f"the task {name}" + (f": {described}" if described else "")


def _label(step: int, settings: options.Settings) -> str:
  if step:
    return f"step {step}"
  return "after warm-up, before step 1" if settings.warmup_steps else "before step 1"


def _require_same(rows) -> None:
  """The exported model must be the trained one: same draws, same scores."""
  trained, exported = rows[-2][1], rows[-1][1]
  keys = [k for k in exported if k.startswith("eval/")]
  if any(abs(trained[k] - exported[k]) > 1e-9 for k in keys):
    print(
      "warning: the exported model scores otherwise than the trained one; it is kept in narrower "
      "numbers, or the export is wrong"
    )


def _table(rows, evaluation: run_config.EvaluationOptions) -> str:
  if not rows:
    return "no evaluation: recorded rollouts have no task (--eval_every adds one)"
  name = f"eval/pass@{evaluation.eval_samples}"
  lines = [f"\n{'held-out score':<32}{'sampled ' + name[5:]:>16}{'greedy':>9}"]
  for label, row in rows:
    greedy = row.get("eval/greedy")
    shown = "" if greedy is None else f"{greedy:.3f}"
    lines.append(f"{label:<32}{row[name]:>16.3f}{shown:>9}")
  return "\n".join(lines) + "\n"


def _plot(parts: setup.Setup):
  records = metrics_log.read(parts.output_dir / "metrics.jsonl")
  scores = metrics_log.read(parts.output_dir / "evaluations.jsonl")
  records = [r for r in scores if r["step"] == 0] + records
  title = "recorded rollouts" if parts.recorded else parts.settings.task
  return metrics_log.plot(records, parts.output_dir / "metrics.png", title)


def _places(parts: setup.Setup, exported, picture) -> str:
  where = parts.output_dir
  rows = [
    ("plot", picture),
    ("metrics", where / "metrics.jsonl"),
    ("TensorBoard", where / "tensorboard"),
    ("checkpoints", where / "checkpoints"),
  ]
  if exported is not None:
    rows.append(("Hugging Face model", exported))
  return "\n".join(f"{name:<20}{path}" for name, path in rows)


def _next_steps(parts: setup.Setup, exported) -> str:
  if exported is None:
    return "next: --help lists every flag"
  return (
    f"next: --checkpoint={exported} goes on from this model, --task=json_lines --prompts=FILE "
    "trains on your own problems, --help lists every flag"
  )
