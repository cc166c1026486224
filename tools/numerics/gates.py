"""Six gates between two trainings: whether a configuration trains as its reference does.  Pure.

Both runs start from the same weights and see the same rows, advantages and routing.  The noise floor
is a reference pair: the reference against itself with its rows in another order.

N1 everything is finite.
N2 loss of every step, relative.
N3 gradient norm of every step, relative.
N4 log-probs of every token: mean and 99.9th percentile of the absolute difference, against the
   reference pair's.
N5 gradient of every parameter: cosine; relative L2 is reported.
N6 no token lost, no violation of a 16-bit master.  A micro-batch whose tokens were dropped and that
   was run again has lost none; how many were is said.

N2 to N5 look at finite values only and leave the others to N1, so that one fault fails one gate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NAMES = {
  "N1": "finite",
  "N2": "loss",
  "N3": "gradient norm",
  "N4": "log-probs",
  "N5": "gradients",
  "N6": "counters",
}
LOST = "uncounted_dropped_tokens"
COUNTERS = (LOST, "residual16_violations")
REPLAYED = "replayed_micro_batches"


@dataclasses.dataclass(frozen=True)
class Step:
  """What one step gave.

  Attributes:
    loss: The step's loss.
    grad_norm: Global norm of the gradient, before clipping.
    logprobs: float32 [tokens], log-probs of the tokens with loss, in the order of the reference.
    gradients: Mean gradient of every trained parameter by path.
    counters: Values of `COUNTERS` that the program counts; others are absent.  `REPLAYED`, which
      passes whatever it is, where the program runs micro-batches again.
  """

  loss: float
  grad_norm: float
  logprobs: np.ndarray
  gradients: Mapping[str, np.ndarray]
  counters: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Where the gates stand.

  Attributes:
    loss: Relative difference of the loss.
    grad_norm: Relative difference of the gradient norm.
    logprob_mean: Mean absolute log-prob difference over the reference pair's.
    logprob_tail: Its 99.9th percentile over the reference pair's.
    logprob_floor: Log-prob difference that passes whatever the pair's is, nats.
    cosine: Least cosine of a gradient.
    lossy_cosine: The same where a lossy option is on.
  """

  loss: float = 1e-3
  grad_norm: float = 2e-3
  logprob_mean: float = 1.5
  logprob_tail: float = 3.0
  logprob_floor: float = 5e-3
  cosine: float = 0.999
  lossy_cosine: float = 0.99


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
  """One gate's answer.

  Attributes:
    name: N1 to N6.
    passed: The answer.
    value: The worst value that it saw.
    limit: What it stands at.
    detail: Where the worst value is, or what is not there.
  """

  name: str
  passed: bool
  value: float
  limit: float
  detail: str = ""


@dataclasses.dataclass(frozen=True)
class Spread:
  """Log-prob differences of two runs: mean, 99.9th percentile."""

  mean: float
  tail: float


def spread(a: Sequence[Step], b: Sequence[Step]) -> Spread:
  """Log-prob differences over all steps, where both are finite."""
  gaps = []
  for x, y in zip(a, b, strict=True):
    both = np.isfinite(x.logprobs) & np.isfinite(y.logprobs)
    gaps.append(np.abs(x.logprobs[both].astype(np.float64) - y.logprobs[both]))
  gap = np.concatenate(gaps)
  if not len(gap):
    return Spread(0.0, 0.0)
  return Spread(float(gap.mean()), float(np.percentile(gap, 99.9)))


def judge(
  reference: Sequence[Step],
  candidate: Sequence[Step],
  noise: Spread,
  *,
  lossy: bool = False,
  limits: Limits | None = None,
) -> list[Gate]:
  """Judges a candidate.

  Args:
    reference: Steps of the reference.
    candidate: The same steps of the candidate.
    noise: Log-prob differences of the reference pair.
    lossy: Whether an option is on that trades accuracy.
    limits: Where the gates stand.

  Returns:
    The six gates, N1 first.

  Raises:
    ValueError: The runs have other steps, tokens or parameters.
  """
  limits = limits or Limits()
  if len(reference) != len(candidate) or not reference:
    raise ValueError(f"{len(reference)} steps against {len(candidate)}: want as many, and one")
  for a, b in zip(reference, candidate):
    if a.logprobs.shape != b.logprobs.shape or a.gradients.keys() != b.gradients.keys():
      raise ValueError("the runs have not the same tokens and parameters")
  return [
    _finite(candidate),
    _relative("N2", "loss", reference, candidate, limits.loss),
    _relative("N3", "grad_norm", reference, candidate, limits.grad_norm),
    _logprobs(reference, candidate, noise, limits),
    _gradients(reference, candidate, limits.lossy_cosine if lossy else limits.cosine),
    _counters(candidate),
  ]


def _finite(steps: Sequence[Step]) -> Gate:
  wrong = []
  for number, step in enumerate(steps, 1):
    parts = {"loss": step.loss, "gradient norm": step.grad_norm, "log-probs": step.logprobs}
    parts |= {f"gradient of {name}": g for name, g in step.gradients.items()}
    for name, values in parts.items():
      count = int(np.sum(~np.isfinite(values)))
      if count:
        wrong.append(f"step {number}: {count} values of {name}")
  detail = "; ".join(wrong[:3]) + (f"; {len(wrong) - 3} more" if len(wrong) > 3 else "")
  return Gate(name="N1", passed=not wrong, value=len(wrong), limit=0, detail=detail)


def _relative(
  name: str, field: str, reference: Sequence[Step], candidate: Sequence[Step], limit: float
) -> Gate:
  worst, where = 0.0, ""
  for number, (a, b) in enumerate(zip(reference, candidate), 1):
    x, y = getattr(a, field), getattr(b, field)
    if np.isfinite(x) and np.isfinite(y):
      gap = abs(y - x) / max(abs(x), 1e-12)
      if gap > worst:
        worst, where = gap, f"step {number}: {x:.6g} against {y:.6g}"
  return Gate(name=name, passed=worst <= limit, value=worst, limit=limit, detail=where)


def _logprobs(
  reference: Sequence[Step], candidate: Sequence[Step], noise: Spread, limits: Limits
) -> Gate:
  found = spread(reference, candidate)
  mean = max(limits.logprob_mean * noise.mean, limits.logprob_floor)
  tail = max(limits.logprob_tail * noise.tail, limits.logprob_floor)
  passed = found.mean <= mean and found.tail <= tail
  detail = (
    f"mean {found.mean:.3g} of {mean:.3g}, 99.9th percentile {found.tail:.3g} of {tail:.3g};"
    f" reference pair {noise.mean:.3g}, {noise.tail:.3g}"
  )
  # The worse of the two, as a part of its limit.
  value = max(found.mean / mean, found.tail / tail)
  return Gate(name="N4", passed=passed, value=value, limit=1.0, detail=detail)


def compare_gradients(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
  """Cosine and relative L2 of two gradients; (1, 0) where both are zero.

  Non-finite entries count as zero in both.
  """
  both = np.isfinite(a) & np.isfinite(b)
  x = np.where(both, a, 0).astype(np.float64).ravel()
  y = np.where(both, b, 0).astype(np.float64).ravel()
  size_x, size_y = np.linalg.norm(x), np.linalg.norm(y)
  if size_x == 0 and size_y == 0:
    return 1.0, 0.0
  if size_x == 0 or size_y == 0:
    return 0.0, float("inf") if size_x == 0 else 1.0
  return float(x @ y / (size_x * size_y)), float(np.linalg.norm(x - y) / size_x)


def _gradients(reference: Sequence[Step], candidate: Sequence[Step], limit: float) -> Gate:
  worst, distance, where = 1.0, 0.0, ""
  for number, (a, b) in enumerate(zip(reference, candidate), 1):
    for name, gradient in a.gradients.items():
      cosine, relative = compare_gradients(gradient, b.gradients[name])
      distance = max(distance, relative)
      if cosine < worst:
        worst, where = cosine, f"step {number}: {name}, relative L2 {relative:.3g}"
  detail = f"{where}; largest relative L2 {distance:.3g}" if where else ""
  return Gate(name="N5", passed=worst >= limit, value=worst, limit=limit, detail=detail)


def _counters(steps: Sequence[Step]) -> Gate:
  total, notes = 0.0, []
  for name in COUNTERS:
    counted = [s.counters[name] for s in steps if name in s.counters]
    if len(counted) < len(steps):
      notes.append(f"{name} is not counted by this program")
    elif sum(counted):
      notes.append(f"{name} {sum(counted):g}")
    total += sum(counted)
  replayed = [s.counters[REPLAYED] for s in steps if REPLAYED in s.counters]
  if sum(replayed):
    notes.append(f"{sum(replayed):g} micro-batches run again")
  return Gate(name="N6", passed=total == 0, value=total, limit=0, detail="; ".join(notes))


def to_json(gates: Sequence[Gate]) -> list[dict[str, Any]]:
  """Gates as plain data."""
  return [dataclasses.asdict(g) | {"what": NAMES[g.name]} for g in gates]
