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
CORRELATION = "correlation"  # value is [count, mean x, mean y, S_xx, S_yy, S_xy], centred


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
    value: float32 scalar: a sum, or an extreme; moments for CORRELATION.
    normalizer: TOKENS, SEQUENCES, SUM, MIN, MAX or CORRELATION; static.
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


def correlation(x, y, mask) -> Metric:
  """Pearson's correlation coefficient of x and y where the mask is.

  Moments are about the micro-batch's own means: sums of squares of log-probs that hardly vary would
  lose the variance in float32.
  """
  count = jnp.sum(mask)
  mean = lambda v: jnp.sum(jnp.where(mask > 0, v, 0.0)) / jnp.maximum(count, 1.0)
  mean_x, mean_y = mean(x), mean(y)
  dx, dy = jnp.where(mask > 0, x - mean_x, 0.0), jnp.where(mask > 0, y - mean_y, 0.0)
  moments = (count, mean_x, mean_y, jnp.sum(dx * dx), jnp.sum(dy * dy), jnp.sum(dx * dy))
  return Metric(jnp.stack(moments), CORRELATION)


def neutral(metric: Metric) -> Metric:
  """What a micro-batch that does not count adds to a metric: an array of zeros, or of the infinity
  that no extreme is beyond."""
  fill = {MIN: jnp.inf, MAX: -jnp.inf}.get(metric.normalizer, 0.0)
  return Metric(jnp.full(metric.value.shape, fill, metric.value.dtype), metric.normalizer)


def _merge_moments(a: Float[Array, " 6"], b: Float[Array, " 6"]) -> Float[Array, " 6"]:
  """Moments of two sets together (Chan, Golub and LeVeque 1979)."""
  count = a[0] + b[0]
  share = b[0] / jnp.maximum(count, 1.0)
  dx, dy = b[1] - a[1], b[2] - a[2]
  between = a[0] * share * jnp.stack([dx * dx, dy * dy, dx * dy])
  means = a[1:3] + share * (b[1:3] - a[1:3])
  return jnp.concatenate([count[None], means, a[3:] + b[3:] + between])


_JOIN = {MIN: jnp.minimum, MAX: jnp.maximum, CORRELATION: _merge_moments}


def merge(a: dict[str, Metric], b: dict[str, Metric]) -> dict[str, Metric]:
  """Metrics of two micro-batches together.

  Raises:
    ValueError: They hold different metrics.
  """
  if a.keys() != b.keys():
    raise ValueError(f"metrics differ: {sorted(a.keys() ^ b.keys())}")
  merged = {}
  for name, one in a.items():
    join = _JOIN.get(one.normalizer, jnp.add)
    merged[name] = Metric(join(one.value, b[name].value), one.normalizer)
  return merged


def finalise(metrics: dict[str, Metric], denominators: Denominators) -> dict[str, Float[Array, ""]]:
  """The step's values.  A step without valid tokens has zeros, never infinities."""
  found = {}
  for name, one in metrics.items():
    if one.normalizer in (TOKENS, SEQUENCES):
      found[name] = one.value / denominators.of(one.normalizer)
    elif one.normalizer in (MIN, MAX):
      found[name] = jnp.where(jnp.isinf(one.value), 0.0, one.value)
    elif one.normalizer == CORRELATION:
      _, _, _, s_xx, s_yy, s_xy = one.value
      # Equal values have no correlation.
      spread = jnp.sqrt(s_xx) * jnp.sqrt(s_yy)
      found[name] = jnp.where(spread > 0, s_xy / jnp.maximum(spread, 1e-30), 0.0)
    else:
      found[name] = one.value
  return found
