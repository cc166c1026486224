"""The training loop.

1. Warm-up, when asked for: supervised updates on the task's demonstrations, until the policy gives
   the whole demonstration a probability of `warmup_target` on average.
2. For each step: problems -> samples -> rewards -> trajectories -> one update -> the sampler has
   the new weights.  Or the next batch of recorded trajectories -> one update.
3. At the end: checkpoint, export, the exported model evaluated again, plot.

Everything a step does is a function of the state before it and of the seed, so a run that was
killed and resumed makes the same updates as one that was not.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import jax

from kernels.base import options
from rl import (
  checkpointing,
  collect,
  evaluate,
  finite,
  learner,
  metrics_log,
  rollouts,
  run_config,
  setup,
  trajectory,
)

_WARMUP, _POLICY = "warmup", "policy"
_DEFAULT_STEPS = 100
# One update that is not finite may be an accident; as many in a row are not.
_MOST_SKIPPED = 10
# Options that may differ on resume: they do not shape the weights of a step.
_FREE = frozenset(
  "recipe output_dir resume allow_config_change max_steps checkpoint_every keep_checkpoints export "
  "save_rollouts peak_tflops".split()
) | {f.name for f in dataclasses.fields(run_config.EvaluationOptions)}


class Preemption:
  """Notes SIGTERM and the first Ctrl-C, so that the loop can stop between two steps."""

  def __init__(self):
    """Takes the signals over, where this is the main thread."""
    self.requested: str | None = None  # The signal's name.
    self._before: dict[int, Any] = {}
    try:
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._note)
    except ValueError:  # Signals belong to the main thread.
      pass

  def _note(self, number: int, frame: Any) -> None:
    if number == signal.SIGINT:
      if self.requested:  # A second Ctrl-C does not wait for the step.
        raise KeyboardInterrupt
      print("\nstopping after this step; Ctrl-C again stops at once, unsaved", flush=True)
    else:
      print("stopping after this step", flush=True)
    self.requested = signal.Signals(number).name

  def close(self) -> None:
    for number, before in self._before.items():
      signal.signal(number, before)


class Loop:
  """One run, from its first update or from a checkpoint to its end."""

  def __init__(self, parts: setup.Setup, say: Callable[[str], None] = print):
    """Opens the checkpoint store; trains nothing.

    Args:
      parts: The parts of the run.
      say: Takes a line for the user.
    """
    self.parts, self._say = parts, say
    self._settings = parts.settings
    self._store = checkpointing.Store(
      parts.output_dir / "checkpoints", keep=self._settings.keep_checkpoints, say=say
    )
    self._preemption = Preemption()
    self._learner: learner.Learner
    self._warmup_done = 0  # Supervised updates made.
    self._step = 0  # Updates of the run's own loss made.
    self._phase = _POLICY
    self._pending: collections.deque[list[trajectory.Trajectory]] = collections.deque()
    self._saved: tuple[int, int] | None = None
    self._told_staleness = False
    self._told_dropped = False
    self._told_nothing_valid = False
    self._skipped = 0  # Updates skipped in a row.
    self._updated = False  # Whether this process has made an update.
    self.total_steps = self._total_steps()

  def _total_steps(self) -> int:
    if self._settings.max_steps is not None:
      return self._settings.max_steps
    return len(self.parts.recorded) or _DEFAULT_STEPS

  @property
  def _wants_warmup(self) -> bool:
    return self._settings.warmup_steps > 0 and not self.parts.recorded

  @property
  def _task(self) -> str:
    return "recorded rollouts" if self.parts.recorded else self._settings.task

  # Checkpoints.

  def _record(self) -> dict[str, Any]:
    return {
      "phase": self._phase,
      "step": self._step,
      "warmup_done": self._warmup_done,
      "policy_version": self._step,
      "pending": [[rollouts.to_record(t) for t in batch] for batch in self._pending],
      "options": self._settings.as_dict(),
      "model": self.parts.model.to_hf(),
    }

  def _save(self) -> None:
    place = (self._warmup_done, self._step)
    if self._saved != place:  # A finished run that is started again has nothing to save.
      self._store.save(sum(place), self._learner.checkpointed, self._record())
      self._saved = place

  def _resume(self) -> bool:
    """Takes up the newest whole checkpoint; false when there is none."""
    number = self._store.newest_whole()
    where = self.parts.output_dir
    if number is None:
      if self._settings.resume == "must":
        raise options.UserError(f"--resume=must: there is no checkpoint in {where}")
      return False
    if self._settings.resume == "never":
      raise options.UserError(
        f"--resume=never: {where} holds checkpoints; choose another --output_dir"
      )
    record = self._store.record(number)
    self._refuse_other_options(record["options"])
    self._phase, self._step = record["phase"], record["step"]
    self._warmup_done = record["warmup_done"]
    self._pending.extend(
      [rollouts.from_record(r, "checkpoint") for r in batch] for batch in record["pending"]
    )
    params = self.parts.initial_params()
    self._learner = (
      self.parts.warmup_learner(params) if self._phase == _WARMUP else self.parts.learner(params)
    )
    self._learner.restore(self._store.restore(number, self._learner.checkpointed))
    self._saved = (self._warmup_done, self._step)
    done = f"step {self._step}" if self._phase == _POLICY else f"warm-up {self._warmup_done}"
    self._say(f"resumed after {done} from {where / 'checkpoints'}")
    return True

  def _refuse_other_options(self, saved: dict[str, Any]) -> None:
    now = self._settings.as_dict()
    differ = [k for k in now if k not in _FREE and k in saved and saved[k] != now[k]]
    differ += [k for k in now if k not in _FREE and k not in saved]
    if not differ:
      return
    show = lambda value: "unset" if value is None else json.dumps(value).strip('"')
    texts = "; ".join(f"--{k} was {show(saved.get(k))}, now {show(now[k])}" for k in differ)
    if self._settings.allow_config_change:
      self._say(f"resuming with other options: {texts}")
      return
    raise options.UserError(
      f"{self.parts.output_dir} was made with other options: {texts}; give those again, choose "
      "another --output_dir, or add --allow_config_change"
    )

  def _refuse_to_overwrite(self) -> None:
    """A fresh run replaces no file that it did not make."""
    given = self._settings.save_rollouts
    if given is None:
      return
    path = pathlib.Path(setup.user_path(given))
    # Metrics are there when an earlier start of this very run was killed before its checkpoint.
    own = (self.parts.output_dir / "metrics.jsonl").exists()
    if path.exists() and path.stat().st_size and not own:
      raise options.UserError(
        f"--save_rollouts={given}: exists, and this run did not write it; choose another file, or "
        "remove that one"
      )

  # Phases.

  def run(self) -> bool:
    """Trains to the end, or to a SIGTERM.

    Returns:
      Whether the run reached its end.

    Raises:
      options.UserError: Something of the user's is wrong: a batch, a file, a full disk.
    """
    try:
      if not self._resume():
        self._refuse_to_overwrite()
        params = self.parts.initial_params()
        if self._wants_warmup:
          self._phase, self._learner = _WARMUP, self.parts.warmup_learner(params)
        else:
          self._learner = self.parts.learner(params)
      finished = self._warm_up() and self._train()
      self._save()
      self._store.wait()
      if self._skipped and not self._updated:
        raise self._not_finite()
      if names := finite.broken(self.weights):
        raise options.UserError(
          f"{len(names)} parameters are not finite, such as {names[0]}; no model is exported: lower "
          "--learning_rate, or go on from an earlier checkpoint"
        )
      if not finished:
        self._say(
          f"stopped by {self._preemption.requested}; saved to {self.parts.output_dir}; the same "
          f"command with --output_dir={self.parts.output_dir} goes on from there"
        )
        return False
      return True
    finally:
      self._preemption.close()
      self._store.close()

  def _count_skipped(self, metrics: dict[str, float], say: Callable[[str], None]) -> None:
    """Says that an update was skipped, once in a row, and stops a run that makes none any more."""
    if metrics["update_applied"]:
      self._skipped, self._updated = 0, True
      return
    self._skipped += 1
    if self._skipped == 1:
      say("note: loss or gradients are not finite; the update was skipped, the weights kept")
    if self._skipped == _MOST_SKIPPED:
      raise self._not_finite()

  def _tell_dropped(self, metrics: dict[str, float], say: Callable[[str], None]) -> None:
    """Says once that a bounded buffer of the ring of experts left work out."""
    dropped = metrics.get("moe_dropped_pairs", 0.0)
    if dropped and not (self._told_dropped or self._settings.retry_when_tokens_dropped):
      self._told_dropped = True
      say(
        f"warning: {dropped:.0f} pairs of token and expert found no room in step {self._step} and were "
        "left out; add --retry_when_tokens_dropped or raise --ragged_buffer_factor "
        "(moe_dropped_pairs in metrics.jsonl counts them)"
      )

  def _tell_nothing_valid(self, metrics: dict[str, float], say: Callable[[str], None]) -> None:
    """Says once why a step whose every token is masked trains nothing."""
    if metrics.get("num_valid_tokens") != 0 or self._told_nothing_valid:
      return
    self._told_nothing_valid = True
    gated, overlong = metrics["num_error_gated_samples"], metrics["num_overlong_samples"]
    text = "note: every token of this step is masked, so that it trains nothing"
    if gated:
      text += (
        f"; {gated:.0f} samples for log-probs that are not the sampler's "
        "(--seq_logprob_error_threshold): start from the model that sampled them"
      )
    if overlong:
      text += f"; {overlong:.0f} for having been cut (--overlong_filtering)"
    say(text)

  def _not_finite(self) -> options.UserError:
    given = self._settings.checkpoint
    start = f"the weights of --checkpoint={given}, " if given else ""
    return options.UserError(
      f"the last {self._skipped} updates were skipped, since loss or gradients were not finite; look "
      f"at {start}the batch's log-probs, or a lower --learning_rate"
    )

  @property
  def weights(self) -> Any:
    """The current parameters."""
    return self._learner.weights

  def evaluate(self, weights: Any) -> evaluate.Evaluation | None:
    """Scores weights on the held-out problems; None without a task."""
    parts = self.parts
    if parts.task is None or parts.sampler is None:
      return None
    return evaluate.evaluate(
      parts.task,
      parts.tokenizer,
      parts.sampler,
      parts.for_sampling(weights),
      self._settings.of(run_config.EvaluationOptions),
      top_k=self._settings.top_k,
      seed=self._settings.seed,
    )

  def _warm_up(self) -> bool:
    """Supervised updates until the target; then hands the weights to the run's own loss."""
    if self._phase != _WARMUP:
      return True
    settings, parts = self._settings, self.parts
    log = metrics_log.JsonLines(parts.output_dir / "warmup.jsonl", self._warmup_done)
    most = settings.warmup_steps
    progress = metrics_log.Progress("warm-up", most, self._warmup_done)
    # The record says whether the target was reached before a kill: the update after it must not
    # be made twice.
    reached = any(r["demonstration_probability"] >= settings.warmup_target for r in log.records)
    while self._warmup_done < most and not reached:
      if self._preemption.requested:
        return False
      step = self._warmup_done + 1
      batch = collect.demonstrations(
        parts.task, parts.tokenizer, settings.seed, step, settings.warmup_batch
      )
      metrics = self._learner.step(batch, step, 0)
      self._warmup_done = step
      probability = metrics["demonstration_probability"]
      reached = probability >= settings.warmup_target
      log.write({"step": step, **metrics})
      progress.update(step, loss=metrics["loss"], p_demonstration=probability)
      self._count_skipped(metrics, progress.say)
      if settings.checkpoint_every and step % settings.checkpoint_every == 0 and not reached:
        self._save()
    progress.close()
    log.close()
    self._say(f"warm-up ended after {self._warmup_done} supervised updates")
    self._phase, self._learner = _POLICY, parts.learner(self._learner.weights)
    return True

  def _next_batch(self, step: int) -> list[trajectory.Trajectory]:
    parts, settings = self.parts, self._settings
    if parts.recorded:
      return parts.recorded[(step - 1) % len(parts.recorded)]
    if settings.loss == "sft":
      source = parts.source
      count = source.prompts * source.generations
      return collect.demonstrations(parts.task, parts.tokenizer, settings.seed, step, count)
    while len(self._pending) <= settings.rollout_lag:
      weights = parts.for_sampling(self.weights)
      self._pending.append(parts.source.collect(weights, step + len(self._pending), self._step))
    return self._pending.popleft()

  def _evaluates(self, step: int) -> bool:
    every, first = self._settings.eval_every, self._settings.eval_first
    if step in (0, self.total_steps):
      return True
    return every > 0 and step >= first and (step - first) % every == 0

  def _train(self) -> bool:
    """Updates by the run's own loss."""
    parts, settings = self.parts, self._settings
    log = metrics_log.MetricsLog(parts.output_dir, self._step)
    # Before its first update a run has nothing to keep, not even step 0 of an earlier one.
    scores = metrics_log.JsonLines(
      parts.output_dir / "evaluations.jsonl", self._step or -1, first_step=0
    )
    writer = None
    if settings.save_rollouts is not None:
      path = setup.user_path(settings.save_rollouts)
      writer = rollouts.Writer(path, append=_drop_later(path, self._step))
    progress = metrics_log.Progress("train", self.total_steps, self._step)
    done = False
    if not scores.records and (evaluation := self.evaluate(self.weights)):
      scores.write({"step": 0, **evaluation.metrics()})
      self._say(f"before the first update: {evaluation}")
    while self._step < self.total_steps and not done:
      if self._preemption.requested:
        return False
      metrics, done = self._one_step(scores, writer, progress)
      log.write(self._step, metrics)
      self._count_skipped(metrics, progress.say)
      self._tell_nothing_valid(metrics, progress.say)
      self._tell_dropped(metrics, progress.say)
      if settings.checkpoint_every and self._step % settings.checkpoint_every == 0:
        self._save()
    progress.close()
    for one in (log, scores, writer):
      if one is not None:
        one.close()
    return True

  def _one_step(self, scores, writer, progress) -> tuple[dict[str, float], bool]:
    """One update with all that belongs to it; its metrics, and whether the target is reached."""
    parts, settings, step, version = self.parts, self._settings, self._step + 1, self._step
    started = time.perf_counter()
    batch = self._next_batch(step)
    sampled = time.perf_counter()
    self._check_staleness(batch, version)
    if writer is not None:
      writer.write([dataclasses.replace(t, step=step) for t in batch])
    metrics = self._learner.step(batch, step, version)
    self._step = step
    trained = time.perf_counter()
    metrics = {**collect.statistics(batch, version), **metrics}
    done = False
    if self._evaluates(step) and (evaluation := self.evaluate(self.weights)):
      found = evaluation.metrics()
      metrics |= found
      scores.write({"step": step, **found})
      progress.say(f"step {step}: {evaluation}")
      target = settings.target_accuracy
      done = target is not None and evaluation.pass_at_k >= target
    ended = time.perf_counter()
    metrics |= {
      "time/rollout": sampled - started,
      "time/train": trained - sampled,
      "time/eval": ended - trained,
      "time/step": ended - started,
      **parts.meter.metrics(
        [t.num_tokens for t in batch],
        step_seconds=trained - started,
        train_seconds=trained - sampled,
      ),
      "memory/host_peak_gib": _peak_gib(),
      **_device_memory(),
    }
    progress.update(
      step, reward=metrics["reward_mean"], loss=metrics["loss"], grad=metrics["grad_norm"]
    )
    return metrics, done

  def _check_staleness(self, batch: list[trajectory.Trajectory], version: int) -> None:
    oldest = min(batch, key=lambda t: t.policy_version)
    behind = version - oldest.policy_version
    if behind <= self._settings.max_staleness or self._settings.loss == "sft":
      return
    if self.parts.recorded:
      if version and not self._told_staleness:
        self._told_staleness = True
        self._say(
          f"note: recorded trajectories are now {behind} updates older than the policy, more than "
          f"--max_staleness={self._settings.max_staleness}; training on them is off-policy"
        )
      return
    raise options.UserError(
      f"{oldest.called(0)} was sampled {behind} updates ago, more than "
      f"--max_staleness={self._settings.max_staleness}"
    )


def _peak_gib() -> float:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _device_memory() -> dict[str, float]:
  stats = jax.local_devices()[0].memory_stats() or {}  # None on CPU.
  peak = stats.get("peak_bytes_in_use")
  return {} if peak is None else {"memory/device_peak_gib": peak / 2**30}


def _drop_later(path: str, last_step: int) -> bool:
  """Cuts recorded steps after `last_step` off a file that is to be continued; false to rewrite.

  Raises:
    options.UserError: It is a Parquet file, and the steps before would be lost.
  """
  if last_step == 0 or not os.path.exists(path):
    return False
  if not path.lower().endswith(".jsonl"):
    raise options.UserError(
      f"--save_rollouts={path}: the run goes on from step {last_step}, and a Parquet file cannot be "
      "continued; name a .jsonl file, or one that is not there yet"
    )
  metrics_log.JsonLines(path, last_step).close()
  return True
