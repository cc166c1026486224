"""Policy losses on packed rows, as pure functions of log-probs.

Convention, for every array of this file: entry i is about token i given the tokens of its segment
before it.  Nothing is shifted here.

With current log-prob l, sampler log-prob g, old log-prob p, advantage A and loss mask m:

  ratio r = exp(clip(l - p, +-20));  p = l, detached, when the ratio is forced
  grpo:      c = max(-A r, -A clip(r, 1 - low, 1 + high))     (Schulman 2017; DAPO's two ends)
  gspo:      the same with r = exp(mean over the sequence of l - p)       (Zheng et al. 2025)
  cispo:     c = -A detach(clip(r, 1 - low, 1 + high)) l                  (MiniMax 2025)
  reinforce: c = -A l
  sft:       c = -l, and nothing below applies
  dual clip: where A < 0, c = min(c, -A ratio_clip_c)                     (Ye et al. 2019)
  correction w = detach(exp(p - g)), 0 where not finite; truncated (see `truncate`)
  token loss = w c + kl_penalty KL(policy || reference) - entropy_bonus H

A sequence leaves the loss and its denominator when it is not valid, when it is truncated
(overlong_filtering), or when the mean over its tokens of exp(|g - p|) is above
seq_logprob_error_threshold.  Sequences that seq-mask-tis masks stay in the denominator.

What is returned is the unreduced sum and the denominators; the division is made once, for the whole
step.  Names and meanings of metrics are the reference's (NeMo-RL's clipped policy-gradient loss).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rl import loss_metrics, step_metrics
from rl.config import LossOptions
from rl.segments import segment_mean, segment_sum, spread
from rl.step_metrics import SEQUENCES, TOKENS, Denominators, Metric

_MAX_LOG_RATIO = 20.0
_KL_INPUT_CLAMP = 20.0
_KL_OUTPUT_CLAMP = 10.0


class LossInputs(NamedTuple):
  """What a loss sees of a micro-batch.

  Attributes:
    logprobs: Current policy; carries the gradient.
    entropies: Entropy of the distribution that each token was drawn from; carries a gradient.
    loss_mask: 1 on tokens that the policy produced.
    advantages: Per token.
    sampler_logprobs: The sampler's.
    old_logprobs: The trainer's policy that the batch was sampled from; None when forced.
    reference_logprobs: The reference policy's; None without a KL penalty.
    segment_ids: 1..K, 0 where padding.
    segment_valid: 1 where a segment exists and is valid.
    segment_truncated: 1 where it ended at the length limit.
  """

  logprobs: Float[Array, "R S"]
  entropies: Float[Array, "R S"]
  loss_mask: Float[Array, "R S"]
  advantages: Float[Array, "R S"]
  sampler_logprobs: Float[Array, "R S"]
  old_logprobs: Float[Array, "R S"] | None
  reference_logprobs: Float[Array, "R S"] | None
  segment_ids: Int[Array, "R S"]
  segment_valid: Float[Array, "R K"]
  segment_truncated: Float[Array, "R K"]


class LossOutputs(NamedTuple):
  """What a loss gives for a micro-batch.

  Attributes:
    loss_sum: Unreduced: to be divided by the step's `normalizer` denominator.
    denominators: This micro-batch's share of the step's denominators.
    metrics: Sums and extremes to be merged over micro-batches.
  """

  loss_sum: Float[Array, ""]
  denominators: Denominators
  metrics: dict[str, Metric]


class Correction(NamedTuple):
  """Weights of the off-policy correction.

  Attributes:
    raw: exp(p - g), 0 where not finite.
    weights: After truncation.
    out_of_band: 1 where a token (or its sequence) lies outside the band.
  """

  raw: Float[Array, "R S"]
  weights: Float[Array, "R S"]
  out_of_band: Float[Array, "R S"]


def normalizer(options: LossOptions) -> str:
  """Which denominator the loss is divided by."""
  return TOKENS if options.aggregation == "token-mean" else SEQUENCES


def compute_loss(
  inputs: LossInputs, options: LossOptions, *, length_norm: float | None = None
) -> LossOutputs:
  """The chosen loss of a micro-batch.

  Args:
    inputs: See `LossInputs`.
    options: Which loss, and its numbers.
    length_norm: Tokens that sequence-mean-token-sum-norm divides by, where the options leave it
      open.

  Returns:
    Unreduced sum, denominators and metrics.

  Raises:
    ValueError: Old or reference log-probs are needed and absent.
  """
  if options.loss == "sft":
    return _sft_loss(inputs, options, length_norm)
  logprobs = inputs.logprobs
  if options.force_on_policy_ratio:
    old = jax.lax.stop_gradient(logprobs)
  elif inputs.old_logprobs is None:
    raise ValueError("the ratio is not forced, so the batch must carry old_logprobs")
  else:
    old = jax.lax.stop_gradient(inputs.old_logprobs)

  kept, gate_metrics = _kept_sequences(inputs, old, options)
  mask = inputs.loss_mask * spread(kept, inputs.segment_ids)
  token_loss, ratio, clipped_ratio, was_clipped = _policy_terms(inputs, old, options)
  correction = truncate(inputs, old, options)
  weights = correction.weights if options.use_importance_sampling_correction else 1.0
  policy_loss = weights * token_loss
  total = policy_loss
  kl = jnp.zeros_like(logprobs)
  if options.reference_policy_kl_penalty > 0:
    if inputs.reference_logprobs is None:
      raise ValueError("a KL penalty needs reference_logprobs in the batch")
    kl = policy_kl(logprobs, inputs.reference_logprobs, options.reference_policy_kl_type)
    total = total + options.reference_policy_kl_penalty * kl
  if options.entropy_bonus > 0:
    total = total - options.entropy_bonus * inputs.entropies

  token_weights = _token_weights(inputs, mask, options, length_norm)
  by = normalizer(options)
  metrics = {
    "loss": step_metrics.masked(total, token_weights, by),
    "pg_loss": step_metrics.masked(policy_loss, token_weights, by),
    "kl_penalty": step_metrics.masked(kl, token_weights, by),
    "probs_ratio": step_metrics.masked(ratio, mask),
    "probs_ratio_clamped": step_metrics.masked(clipped_ratio, mask),
    **step_metrics.extremes("probs_ratio", ratio, mask),
    **step_metrics.extremes("probs_ratio_clamped", clipped_ratio, mask),
    "clip_fraction": step_metrics.masked(was_clipped, mask),
    "advantage_abs_mean": step_metrics.masked(jnp.abs(inputs.advantages), mask),
    "entropy": step_metrics.masked(inputs.entropies, mask),
    **loss_metrics.mismatch(logprobs, old, inputs.sampler_logprobs, mask, options),
    **_correction_metrics(correction, inputs, kept, mask, options),
    **gate_metrics,
    "num_valid_samples": Metric(jnp.sum(kept), step_metrics.SUM),
    "num_valid_tokens": Metric(jnp.sum(mask), step_metrics.SUM),
    # The reference's positive-example term, which is not among the losses here: its value when off.
    "positive_nll_loss": Metric(jnp.float32(0.0), step_metrics.SUM),
  }
  return LossOutputs(
    loss_sum=jnp.sum(jnp.where(mask > 0, total * token_weights, 0.0)),
    denominators=Denominators(tokens=jnp.sum(mask), sequences=jnp.sum(kept)),
    metrics=_detached(metrics),
  )


def _sft_loss(inputs: LossInputs, options: LossOptions, length_norm: float | None) -> LossOutputs:
  kept = inputs.segment_valid
  if options.overlong_filtering:
    kept = kept * (1.0 - inputs.segment_truncated)
  mask = inputs.loss_mask * spread(kept, inputs.segment_ids)
  token_weights = _token_weights(inputs, mask, options, length_norm)
  # Where one completion is right, the mean probability of the whole of it is the expected pass@1.
  whole = segment_sum(inputs.logprobs * mask, inputs.segment_ids, kept.shape[1])
  metrics = {
    "loss": step_metrics.masked(-inputs.logprobs, token_weights, normalizer(options)),
    "demonstration_probability": Metric(jnp.sum(jnp.exp(whole) * kept), SEQUENCES),
    "nll": step_metrics.masked(-inputs.logprobs, mask),
    "entropy": step_metrics.masked(inputs.entropies, mask),
    "num_valid_samples": Metric(jnp.sum(kept), step_metrics.SUM),
    "num_valid_tokens": Metric(jnp.sum(mask), step_metrics.SUM),
  }
  return LossOutputs(
    loss_sum=jnp.sum(jnp.where(mask > 0, -inputs.logprobs * token_weights, 0.0)),
    denominators=Denominators(tokens=jnp.sum(mask), sequences=jnp.sum(kept)),
    metrics=_detached(metrics),
  )


def _detached(metrics: dict[str, Metric]) -> dict[str, Metric]:
  return jax.tree.map(jax.lax.stop_gradient, metrics)


def _kept_sequences(
  inputs: LossInputs, old: Float[Array, "R S"], options: LossOptions
) -> tuple[Float[Array, "R K"], dict[str, Metric]]:
  """Which sequences stay in the loss, 0 or 1, and how many left for what."""
  kept = inputs.segment_valid
  overlong = jnp.zeros_like(kept)
  if options.overlong_filtering:
    overlong = kept * inputs.segment_truncated
    kept = kept - overlong
  gap = jnp.exp(jnp.abs(inputs.sampler_logprobs - old))
  error = segment_mean(gap, inputs.loss_mask, inputs.segment_ids, kept.shape[1])
  error = jnp.where(kept > 0, error, 0.0)
  gated = jnp.zeros_like(kept)
  if options.seq_logprob_error_threshold is not None:
    gated = kept * (error > options.seq_logprob_error_threshold)
    kept = kept - gated
  return kept, {
    "num_overlong_samples": Metric(jnp.sum(overlong), step_metrics.SUM),
    "num_error_gated_samples": Metric(jnp.sum(gated), step_metrics.SUM),
    # A gap of several hundred nats overflows; a metric stays finite.
    "max_seq_mult_prob_error": Metric(
      jnp.minimum(jnp.max(error), jnp.finfo(jnp.float32).max), step_metrics.MAX
    ),
  }


def _policy_terms(
  inputs: LossInputs, old: Float[Array, "R S"], options: LossOptions
) -> tuple[Float[Array, "R S"], ...]:
  """Token loss before correction, ratio, clipped ratio, and where the clipped branch was taken."""
  logprobs, advantages = inputs.logprobs, inputs.advantages
  none = jnp.zeros_like(logprobs)
  if options.loss == "reinforce":
    ones = jnp.ones_like(logprobs)
    return -advantages * logprobs, ones, ones, none
  log_ratio = logprobs - old
  if options.loss == "gspo":
    mean = segment_mean(
      log_ratio, inputs.loss_mask, inputs.segment_ids, inputs.segment_valid.shape[1]
    )
    log_ratio = spread(mean, inputs.segment_ids)
  ratio = jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
  clipped = jnp.clip(ratio, 1.0 - options.ratio_clip_min, 1.0 + options.ratio_clip_max)
  if options.force_on_policy_ratio:
    # A ratio of 1 lies inside any band; its gradient must not be split at a tie.
    clipped = ratio
  if options.loss == "cispo":
    loss = -advantages * jax.lax.stop_gradient(clipped) * logprobs
    return loss, ratio, clipped, (ratio != clipped).astype(jnp.float32)
  plain, bounded = -advantages * ratio, -advantages * clipped
  # `where`, not `maximum`: at a tie the gradient is the plain branch's, undivided.
  was_clipped = bounded > plain
  loss = jnp.where(was_clipped, bounded, plain)
  if options.ratio_clip_c is not None:
    ceiling = -advantages * options.ratio_clip_c
    dual = (advantages < 0) & (ceiling < loss)
    loss = jnp.where(dual, ceiling, loss)
    was_clipped = was_clipped | dual
  return loss, ratio, clipped, was_clipped.astype(jnp.float32)


def truncate(inputs: LossInputs, old: Float[Array, "R S"], options: LossOptions) -> Correction:
  """Weights of the off-policy correction, truncated by the chosen type.

  tis clamps a weight into the band; icepop sets one outside it to 0; seq-mask-tis sets those of a
  sequence to 0 whose geometric mean over its masked tokens lies outside and keeps the others raw.
  gspo's weight is the sequence's: exp of the sum of its tokens' differences.

  Args:
    inputs: The micro-batch.
    old: Old log-probs p, detached.
    options: Type and band.
  """
  low, high = options.truncation_band
  kind = options.truncated_importance_sampling_type
  segments = inputs.segment_valid.shape[1]
  difference = old - inputs.sampler_logprobs
  difference = jnp.where(inputs.loss_mask > 0, difference, 0.0)
  exponent = difference
  if options.loss == "gspo":
    exponent = spread(segment_sum(difference, inputs.segment_ids, segments), inputs.segment_ids)
  raw = jnp.exp(exponent)
  raw = jnp.where(jnp.isfinite(raw), raw, 0.0)
  if kind == "none":
    return Correction(raw, raw, jnp.zeros_like(raw))
  if kind == "seq-mask-tis":
    finite = jnp.where(jnp.isfinite(difference), difference, 0.0)
    mean = segment_mean(finite, inputs.loss_mask, inputs.segment_ids, segments)
    geometric = jnp.exp(mean)
    outside = ((geometric < low) | (geometric > high)).astype(jnp.float32)
    outside = spread(outside, inputs.segment_ids)
    return Correction(raw, raw * (1.0 - outside), outside)
  outside = ((raw < low) | (raw > high)).astype(jnp.float32)
  weights = jnp.clip(raw, low, high) if kind == "tis" else raw * (1.0 - outside)
  return Correction(raw, weights, outside)


def _correction_metrics(
  correction: Correction,
  inputs: LossInputs,
  kept: Float[Array, "R K"],
  mask: Float[Array, "R S"],
  options: LossOptions,
) -> dict[str, Metric]:
  def of_sequences(values):
    # Equal on all tokens of a sequence: one of them speaks for it, any of its tokens will do.
    token = jnp.where(inputs.segment_ids > 0, 1.0, 0.0)
    per_segment = segment_mean(values, token, inputs.segment_ids, kept.shape[1])
    return Metric(jnp.sum(per_segment * kept), SEQUENCES)

  weight = of_sequences if options.loss == "gspo" else lambda v: step_metrics.masked(v, mask)
  metrics = {
    "sampling_importance_ratio": weight(correction.weights),
    "sampling_importance_ratio_raw": weight(correction.raw),
  }
  kind = options.truncated_importance_sampling_type
  if kind != "none":
    outside = correction.out_of_band
    metrics["is_oob_ratio"] = (
      of_sequences(outside) if kind == "seq-mask-tis" else step_metrics.masked(outside, mask)
    )
    metrics["tis_kept_fraction"] = step_metrics.masked(1.0 - outside, mask)
  return metrics


def policy_kl(
  logprobs: Float[Array, "R S"], reference: Float[Array, "R S"], kind: str
) -> Float[Array, "R S"]:
  """KL divergence of the policy from the reference, estimated per token.

  The log-ratio is clamped before its exponential, so that a token the reference thinks impossible
  gives a finite value and gradient.  Tokens are drawn from the policy, so the estimate carries a
  factor exp(l - detach(l)) of value 1, whose gradient is the score function's share (Tang and
  Munos 2025); a clamped token has neither gradient.

  Args:
    logprobs: Current policy's.
    reference: Reference policy's.
    kind: k1, k2 or k3 (Schulman 2020).
  """
  difference = reference - logprobs
  clamped = jnp.clip(difference, -_KL_INPUT_CLAMP, _KL_INPUT_CLAMP)
  score = jnp.where(difference == clamped, logprobs - jax.lax.stop_gradient(logprobs), 0.0)
  estimate = loss_metrics.kl_estimate(clamped, kind) * jnp.exp(score)
  return jnp.clip(estimate, -_KL_OUTPUT_CLAMP, _KL_OUTPUT_CLAMP)


def _token_weights(
  inputs: LossInputs,
  mask: Float[Array, "R S"],
  options: LossOptions,
  length_norm: float | None,
) -> Float[Array, "R S"]:
  """Weight of each token in the unreduced sum; 0 where the mask is."""
  if options.aggregation == "token-mean":
    return mask
  if options.aggregation == "sequence-mean-token-mean":
    count = segment_sum(mask, inputs.segment_ids, inputs.segment_valid.shape[1])
    return mask / jnp.maximum(spread(count, inputs.segment_ids), 1.0)
  norm = options.loss_length_norm or length_norm
  if norm is None:
    raise ValueError("sequence-mean-token-sum-norm needs a number of tokens to divide by")
  return mask / norm
