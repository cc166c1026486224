"""Measures arms side by side in one process, so that both meet the same machine.

1. Every arm runs two steps that are not counted: one compiles, one settles.
2. In a round every arm runs `steps` steps, the arms taking turns step by step, and the first of a
   pair is the second of the next (A B B A), so that what drifts meets both alike.
3. An arm is the mean of its rounds' means, with their spread.  Two arms are compared by the rounds'
   medians, which one interrupted step does not move: the trimmed geometric mean of the rounds'
   ratios, with its error.
4. There are at least `rounds` rounds, and more until the error is as small as asked.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rl import mesh_step
from tools.bench import spread


class Times(Protocol):
  """Seconds of one step: its micro-batches, its update, all of it."""

  @property
  def micro_batches(self) -> tuple[float, ...]: ...
  @property
  def update(self) -> float: ...
  @property
  def whole(self) -> float: ...


class Stepper(Protocol):
  """What is measured: see `arms.Arm`."""

  @property
  def name(self) -> str: ...
  @property
  def metrics(self) -> dict[str, float]: ...
  @property
  def model_flops(self) -> float: ...
  @property
  def chips(self) -> float: ...
  @property
  def peak_flops(self) -> float | None: ...
  @property
  def workload(self) -> Any: ...
  def step(self) -> Times:
    """Runs one step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """One arm.

  Attributes:
    name: The arm's name.
    chips: Chips that it uses.
    step: Seconds of a step.
    replicates: Mean seconds of a step in each round.
    medians: Median seconds of a step in each round.
    micro_batches: Mean seconds of each micro-batch.
    update: Mean seconds of the update.
    first_step: Seconds of the step that compiled.
    tokens_per_second_per_chip: Of tokens that are no padding.
    tflops_per_chip: Model TFLOP/s.
    mfu: Over the peak; None where the peak of the device is not known.
    dropped_pairs: Pairs of a token and an expert that found no room in the last step; None where
      the program does not count them.
    fill: Tokens over capacity.
    effective_length: sum(len^2) / sum(len), tokens.
  """

  name: str
  chips: float
  step: spread.Estimate
  replicates: tuple[float, ...]
  medians: tuple[float, ...]
  micro_batches: tuple[float, ...]
  update: float
  first_step: float
  tokens_per_second_per_chip: float
  tflops_per_chip: float
  mfu: float | None
  dropped_pairs: float | None
  fill: float
  effective_length: float


def measure(
  arms: Sequence[Stepper],
  *,
  rounds: int,
  most_rounds: int,
  error: float,
  steps: int,
  progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
  """Runs the arms.

  Args:
    arms: One or two.
    rounds: Least rounds.
    most_rounds: Most rounds.
    error: Relative 99 % error, of two arms' ratio or of one arm's step, at which enough is known.
    steps: Steps of an arm in a round.
    progress: Takes a line at a time.

  Returns:
    A result for each arm.
  """
  first = []
  for arm in arms:
    progress(f"compiling {arm.name} ...")
    first.append(arm.step().whole)
  for arm in arms:
    arm.step()
  progress("compiled: " + ", ".join(f"{a.name} {s:.1f} s" for a, s in zip(arms, first)))
  runs: list[list[list[Times]]] = [[] for _ in arms]
  turn = 0
  for index in range(max(rounds, most_rounds)):
    for run in runs:
      run.append([])
    for _ in range(steps):
      order = range(len(arms)) if turn % 2 == 0 else reversed(range(len(arms)))
      for place in order:
        runs[place][-1].append(arms[place].step())
      turn += 1
    found = _known(runs)
    lines = (f"{a.name} {_mean_step(r[-1]):.4f} s" for a, r in zip(arms, runs))
    progress(f"round {index + 1}: {', '.join(lines)}; error {_percent(found)}")
    if index + 1 >= rounds and found.relative <= error:
      break
  return [_result(arm, run, seconds) for arm, run, seconds in zip(arms, runs, first)]


def _known(runs: Sequence[Sequence[Sequence[Times]]]) -> spread.Estimate:
  """What is asked so far: the ratio of two arms, or the step of one."""
  if len(runs) == 2:
    return spread.ratio(_medians(runs[0]), _medians(runs[1]))
  return spread.mean([_mean_step(times) for times in runs[0]])


def _medians(rounds: Sequence[Sequence[Times]]) -> tuple[float, ...]:
  return tuple(statistics.median(t.whole for t in times) for times in rounds)


def _mean_step(times: Sequence[Times]) -> float:
  return sum(t.whole for t in times) / len(times)


def _result(arm: Stepper, rounds: Sequence[Sequence[Times]], first_step: float) -> Result:
  replicates = tuple(_mean_step(times) for times in rounds)
  step = spread.mean(replicates)
  every = [t for times in rounds for t in times]
  count = len(every[0].micro_batches)
  flops = arm.model_flops / step.value / arm.chips
  return Result(
    name=arm.name,
    chips=arm.chips,
    step=step,
    replicates=replicates,
    medians=_medians(rounds),
    micro_batches=tuple(sum(t.micro_batches[k] for t in every) / len(every) for k in range(count)),
    update=sum(t.update for t in every) / len(every),
    first_step=first_step,
    tokens_per_second_per_chip=arm.workload.tokens / step.value / arm.chips,
    tflops_per_chip=flops / 1e12,
    mfu=flops / arm.peak_flops if arm.peak_flops else None,
    dropped_pairs=arm.metrics.get(mesh_step.DROPPED),
    fill=arm.workload.fill,
    effective_length=arm.workload.effective_length,
  )


def _percent(found: spread.Estimate) -> str:
  return f"{found.relative:.1%}" if found.count > 1 else "unknown after one round"


def lines(results: Sequence[Result]) -> list[str]:
  """What a person reads."""
  out = []
  for r in results:
    mfu = f"MFU {r.mfu:.2%}" if r.mfu is not None else "MFU unknown: give --peak_tflops"
    dropped = "not counted" if r.dropped_pairs is None else f"{r.dropped_pairs:.0f}"
    out += [
      f"{r.name}: {r.step.value:.4f} s a step +- {_percent(r.step)} (rounds: {r.step.count}),"
      f" {r.tokens_per_second_per_chip:,.0f} tokens/s/chip, {r.tflops_per_chip:.3f} TFLOP/s/chip,"
      f" {mfu}",
      f"  micro-batches {', '.join(f'{s:.4f}' for s in r.micro_batches)} s, update {r.update:.4f} s,"
      f" first step {r.first_step:.1f} s; dropped pairs {dropped}; fill {r.fill:.1%}, effective"
      f" length {r.effective_length:.0f}",
    ]
  if len(results) == 2:
    found = spread.ratio(results[0].medians, results[1].medians)
    verdict = "no difference" if abs(found.value - 1) <= found.error else "a difference"
    error = f"+- {found.error:.4f}: {verdict}" if found.count > 1 else "+- unknown after one round"
    out.append(f"{results[1].name} / {results[0].name}: {found.value:.4f} {error}")
  return out


def to_json(results: Sequence[Result]) -> dict[str, Any]:
  """Results and their ratio as plain data; None for what is not known, such as an infinite error."""
  out: dict[str, Any] = {"arms": [dataclasses.asdict(r) for r in results]}
  if len(results) == 2:
    found = spread.ratio(results[0].medians, results[1].medians)
    out["ratio"] = dataclasses.asdict(found)
  return _known_numbers(out)


def _known_numbers(data: Any) -> Any:
  """The same with None for every number that is not finite: JSON has no other."""
  if isinstance(data, dict):
    return {key: _known_numbers(value) for key, value in data.items()}
  if isinstance(data, (list, tuple)):
    return [_known_numbers(value) for value in data]
  return None if isinstance(data, float) and not math.isfinite(data) else data
