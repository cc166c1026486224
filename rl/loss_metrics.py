"""Diagnostics of the gap between sampler and trainer, as the reference defines them.

All are means over the step's valid tokens.  Differences are clamped far outside any honest value,
so that one broken token gives a large number, not an infinity that hides the others.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from rl import step_metrics
from rl.config import LossOptions
from rl.step_metrics import Metric

# exp of it is finite in float32, and so is a sum of millions of those.
_CLAMP = 60.0


def kl_estimate(x: Float[Array, "R S"], kind: str) -> Float[Array, "R S"]:
  """Estimator of KL(policy || other) from x = log(other / policy) (Schulman 2020).

  Args:
    x: Log-ratio, finite and small enough for its exponential.
    kind: k1: -x; k2: x^2 / 2; k3: exp(x) - 1 - x, never negative.
  """
  if kind == "k1":
    return -x
  if kind == "k2":
    return 0.5 * x * x
  return jnp.expm1(x) - x


def mismatch(
  logprobs: Float[Array, "R S"],
  old: Float[Array, "R S"],
  sampler: Float[Array, "R S"],
  mask: Float[Array, "R S"],
  options: LossOptions,
) -> dict[str, Metric]:
  """How far trainer and sampler are apart on the sampled tokens.

  With l, p, g the current, old and sampler log-probs:
    token_mult_prob_error exp(|g - p|);  gen_kl_error KL(sampler || old);  policy_kl_error
    KL(old || sampler);  js_divergence_error of the two with their mixture;  approx_entropy
    -exp(l - g) l;  sampler_logprob_gap_* of |l - g|, and the correlation of l and g.

  Args:
    logprobs: l.
    old: p.
    sampler: g.
    mask: Valid tokens.
    options: Its `reference_policy_kl_type` estimates the divergences, as in the reference.
  """
  kind = options.reference_policy_kl_type
  x = jnp.clip(old - sampler, -_CLAMP, _CLAMP)
  mixture = jnp.logaddexp(old, sampler) - jnp.log(2.0)
  to_mixture = 0.5 * (
    kl_estimate(jnp.clip(old - mixture, -_CLAMP, _CLAMP), "k3")
    + kl_estimate(jnp.clip(sampler - mixture, -_CLAMP, _CLAMP), "k3")
  )
  weight = jnp.exp(jnp.clip(logprobs - sampler, -_CLAMP, _CLAMP))
  gap = jnp.abs(logprobs - sampler)
  return {
    "token_mult_prob_error": step_metrics.masked(jnp.exp(jnp.abs(x)), mask),
    "gen_kl_error": step_metrics.masked(kl_estimate(x, kind), mask),
    "policy_kl_error": step_metrics.masked(kl_estimate(-x, kind), mask),
    "js_divergence_error": step_metrics.masked(to_mixture, mask),
    "approx_entropy": step_metrics.masked(-weight * logprobs, mask),
    "sampler_logprob_gap_mean": step_metrics.masked(gap, mask),
    "sampler_logprob_gap_max": Metric(jnp.max(jnp.where(mask > 0, gap, 0.0)), step_metrics.MAX),
    "sampler_logprob_correlation": step_metrics.correlation(logprobs, sampler, mask),
  }
