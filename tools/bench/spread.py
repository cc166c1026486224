"""What repeated timings say: a mean with its spread, a ratio with its error.  Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

# Two-sided 95 % points of Student's t by degrees of freedom; 1.96 beyond.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A number and its 95 % error; the error is infinite with one value.

  Attributes:
    value: The mean.
    error: Half the width of its 95 % interval.
    count: Values behind it.
  """

  value: float
  error: float
  count: int

  @property
  def relative(self) -> float:
    """The error over the value."""
    return self.error / abs(self.value) if self.value else math.inf


def mean(values: Sequence[float]) -> Estimate:
  """The mean of replicates.

  Raises:
    ValueError: There is none.
  """
  if not values:
    raise ValueError("no replicates to take the mean of")
  count = len(values)
  centre = sum(values) / count
  if count == 1:
    return Estimate(centre, math.inf, 1)
  variance = sum((v - centre) ** 2 for v in values) / (count - 1)
  point = _T[count - 2] if count - 2 < len(_T) else 1.96
  return Estimate(centre, point * math.sqrt(variance / count), count)


def ratio(a: Sequence[float], b: Sequence[float]) -> Estimate:
  """B over A from paired replicates, which share what the machine was doing.

  Args:
    a: Seconds of arm A, replicate by replicate.
    b: Seconds of arm B in the same rounds.

  Returns:
    Geometric mean of the pairs' ratios, with its 95 % error.

  Raises:
    ValueError: The arms have not as many replicates, or none.
  """
  if len(a) != len(b):
    raise ValueError(f"{len(a)} replicates of A against {len(b)} of B: want pairs")
  logs = mean([math.log(y / x) for x, y in zip(a, b)])
  value = math.exp(logs.value)
  return Estimate(
    value, value * math.expm1(logs.error) if logs.error < 700 else math.inf, logs.count
  )
