"""Metrics of a training step: each carries how it is normalised, from where it is made.

A metric's value is a sum (or an extreme) over the tokens or sequences of a micro-batch.  Values of
micro-batches are merged, and one division by the step's denominators is made at the update, so that
no metric depends on how the rows were split.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TOKENS = "tokens"  # divided by the step's valid tokens
SEQUENCES = "sequences"  # divided by the step's valid sequences
SUM = "sum"
MIN = "min"
MAX = "max"

_PEARSON = "_pearson/"


class Denominators(NamedTuple):
  """What the sums of a step are divided by.

  Attributes:
    tokens: Valid tokens: loss mask 1, in a sequence that stays in the loss.
    sequences: Sequences that stay in the loss.
  """

  tokens: Float[Array, ""]
  sequences: Float[Array, ""]

  def of(self, normalizer: str) -> Float[Array, ""]:
    """The denominator of a normaliser, at least 1."""
    return jnp.maximum({TOKENS: self.tokens, SEQUENCES: self.sequences}[normalizer], 1.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
  """A value that can be merged with those of other micro-batches.

  Attributes:
    value: float32 scalar: a sum, or an extreme.
    normalizer: TOKENS, SEQUENCES, SUM, MIN or MAX; static.
  """

  value: Float[Array, ""]
  normalizer: str = dataclasses.field(metadata={"static": True})


def masked(values: Float[Array, "R S"], mask: Float[Array, "R S"], normalizer=TOKENS) -> Metric:
  """The sum of values where the mask is; values elsewhere may be anything."""
  return Metric(jnp.sum(jnp.where(mask > 0, values * mask, 0.0)), normalizer)


def extremes(name: str, values, mask) -> dict[str, Metric]:
  """`name_min` and `name_max` of values where the mask is."""
  return {
    f"{name}_min": Metric(jnp.min(jnp.where(mask > 0, values, jnp.inf)), MIN),
    f"{name}_max": Metric(jnp.max(jnp.where(mask > 0, values, -jnp.inf)), MAX),
  }


def pearson(name: str, x, y, mask) -> dict[str, Metric]:
  """Moments from which `finalise` makes the correlation coefficient `name` of x and y."""
  moments = {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y, "n": jnp.ones_like(x)}
  return {f"{_PEARSON}{name}/{key}": masked(value, mask, SUM) for key, value in moments.items()}


def merge(a: dict[str, Metric], b: dict[str, Metric]) -> dict[str, Metric]:
  """Metrics of two micro-batches together.

  Raises:
    ValueError: They hold different metrics.
  """
  if a.keys() != b.keys():
    raise ValueError(f"metrics differ: {sorted(a.keys() ^ b.keys())}")
  merged = {}
  for name, one in a.items():
    join = {MIN: jnp.minimum, MAX: jnp.maximum}.get(one.normalizer, jnp.add)
    merged[name] = Metric(join(one.value, b[name].value), one.normalizer)
  return merged


def finalise(metrics: dict[str, Metric], denominators: Denominators) -> dict[str, Float[Array, ""]]:
  """The step's values.  A step without valid tokens has zeros, never infinities."""
  found = {}
  moments: dict[str, dict[str, Array]] = {}
  for name, one in metrics.items():
    if name.startswith(_PEARSON):
      _, stem, key = name.split("/")
      moments.setdefault(stem, {})[key] = one.value
    elif one.normalizer in (TOKENS, SEQUENCES):
      found[name] = one.value / denominators.of(one.normalizer)
    elif one.normalizer in (MIN, MAX):
      found[name] = jnp.where(jnp.isinf(one.value), 0.0, one.value)
    else:
      found[name] = one.value
  for stem, m in moments.items():
    count = jnp.maximum(m["n"], 1.0)
    x, y = m["x"] / count, m["y"] / count
    covariance = m["xy"] / count - x * y
    variances = (m["xx"] / count - x * x) * (m["yy"] / count - y * y)
    # Equal values have no correlation; rounding may leave their variance a little below 0.
    found[stem] = jnp.where(
      variances > 0, covariance / jnp.sqrt(jnp.maximum(variances, 1e-30)), 0.0
    )
  return found
