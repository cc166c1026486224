"""Losses against hand-worked numbers and a literal float64 restatement of their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import losses, step_metrics
from rl.config import LossOptions
from rl.losses import LossInputs

PLAIN = {
  "truncated_importance_sampling_type": "none",
  "use_importance_sampling_correction": False,
  "seq_logprob_error_threshold": None,
  "overlong_filtering": False,
}


def _row(sequences, segments=4, tokens=64, pad=3):
  """One packed row of dicts with logp, g, p, ref, adv, mask; a prompt token before each."""
  fields = {k: np.zeros(tokens) for k in ("logp", "g", "p", "ref", "adv", "mask", "entropy")}
  ids = np.zeros(tokens, np.int32)
  valid, truncated = np.zeros(segments), np.zeros(segments)
  start = 0
  for k, one in enumerate(sequences):
    count = len(one["logp"])
    # A prompt token that carries values, as real ones do, and no mask.
    ids[start : start + count + 1] = k + 1
    fields["logp"][start] = -9.0
    for name in fields:
      value = one.get(name, 0.0 if name != "mask" else 1.0)
      fields[name][start + 1 : start + 1 + count] = value
    valid[k], truncated[k] = one.get("valid", 1.0), one.get("truncated", 0.0)
    start += count + 1
  assert start + pad <= tokens
  return fields, ids, valid, truncated


def _inputs(rows, **kwargs):
  made = [_row(row, **kwargs) for row in rows]
  f = {k: jnp.asarray(np.stack([m[0][k] for m in made]), jnp.float32) for k in made[0][0]}
  return LossInputs(
    logprobs=f["logp"],
    entropies=f["entropy"],
    loss_mask=f["mask"],
    advantages=f["adv"],
    sampler_logprobs=f["g"],
    old_logprobs=f["p"],
    reference_logprobs=f["ref"],
    segment_ids=jnp.asarray(np.stack([m[1] for m in made])),
    segment_valid=jnp.asarray(np.stack([m[2] for m in made]), jnp.float32),
    segment_truncated=jnp.asarray(np.stack([m[3] for m in made]), jnp.float32),
  )


def _run(inputs, options, **kwargs):
  """Loss, metrics and the gradient of the loss to the log-probs, all divided."""

  def total(logprobs):
    out = losses.compute_loss(inputs._replace(logprobs=logprobs), options, **kwargs)
    return out.loss_sum, out

  (value, out), gradient = jax.value_and_grad(total, has_aux=True)(inputs.logprobs)
  by = out.denominators.of(losses.normalizer(options))
  metrics = {k: float(v) for k, v in step_metrics.finalise(out.metrics, out.denominators).items()}
  return float(value / by), metrics, np.asarray(gradient / by)


def _one(logp, p, adv, options, **kwargs):
  sequence = {"logp": logp, "p": p, "g": p, "adv": adv} | kwargs
  return _run(_inputs([[sequence]]), options)


# ----------------------------------------------------------------------------- by hand


def test_clipped_loss_by_hand():
  off = LossOptions(force_on_policy_ratio=False, **PLAIN)
  # r = 1.5, A = 1: clipped at 1.28, no gradient.  r = 0.5, A = 1: not clipped.
  loss, metrics, gradient = _one(np.log([1.5, 0.5]) - 1, [-1.0, -1.0], 1.0, off)
  assert loss == pytest.approx(-(1.28 + 0.5) / 2, rel=1e-6)
  np.testing.assert_allclose(gradient[0, 1:3], [0, -0.5 / 2], rtol=1e-6)
  assert metrics["clip_fraction"] == 0.5
  assert metrics["probs_ratio"] == pytest.approx(1.0)
  assert metrics["probs_ratio_clamped"] == pytest.approx((1.28 + 0.8) / 2)
  assert metrics["probs_ratio_min"] == pytest.approx(0.5)
  assert metrics["probs_ratio_clamped_max"] == pytest.approx(1.28)
  # r = 5, A = -1: no clipping, loss 5; with dual clip at 3, loss 3 and no gradient.
  assert _one([math.log(5) - 1], [-1.0], -1.0, off)[0] == pytest.approx(5.0, rel=1e-6)
  dual = LossOptions(force_on_policy_ratio=False, ratio_clip_c=3.0, **PLAIN)
  loss, _, gradient = _one([math.log(5) - 1], [-1.0], -1.0, dual)
  assert loss == pytest.approx(3.0) and not gradient.any()
  # r = 0.5, A = -1: clipped at 0.8.
  assert _one([math.log(0.5) - 1], [-1.0], -1.0, off)[0] == pytest.approx(0.8, rel=1e-6)


def test_forced_ratio_is_one_and_keeps_its_gradient():
  loss, metrics, gradient = _one([-2.0, -3.0], [-1.0, -1.0], 2.0, LossOptions(**PLAIN))
  assert loss == pytest.approx(-2.0)
  np.testing.assert_allclose(gradient[0, 1:3], [-1.0, -1.0])
  assert metrics["probs_ratio"] == metrics["probs_ratio_clamped"] == 1.0


def test_other_losses_by_hand():
  logp, p = np.log([0.5, 0.2]), np.log([0.25, 0.25])
  reinforce = LossOptions(loss="reinforce", **PLAIN)
  loss, _, gradient = _one(logp, p, 2.0, reinforce)
  assert loss == pytest.approx(-2 * logp.mean(), rel=1e-6)
  np.testing.assert_allclose(gradient[0, 1:3], [-1, -1])
  cispo = LossOptions(loss="cispo", force_on_policy_ratio=False, **PLAIN)
  loss, _, gradient = _one(logp, p, 2.0, cispo)
  # Ratios 2 and 0.8: weights 1.28 and 0.8, and the gradient goes through the log-prob.
  assert loss == pytest.approx(-(1.28 * logp[0] + 0.8 * logp[1]), rel=1e-6)
  np.testing.assert_allclose(gradient[0, 1:3], [-1.28, -0.8], rtol=1e-6)
  sft = LossOptions(loss="sft")
  loss, metrics, gradient = _one(logp, p, 2.0, sft)
  assert loss == pytest.approx(-logp.mean(), rel=1e-6)
  np.testing.assert_allclose(gradient[0, 1:3], [-0.5, -0.5])
  assert metrics["nll"] == pytest.approx(loss)


def test_gspo_takes_the_geometric_mean_over_valid_tokens():
  options = LossOptions(loss="gspo", force_on_policy_ratio=False, **PLAIN)
  # The masked token's ratio of e^5 must not enter; the others': mean log-ratio (0.3 - 0.1) / 2.
  mask = np.array([1.0, 0.0, 1.0])
  loss, _, gradient = _one([-0.7, -1.0, -1.1], [-1.0, -6.0, -1.0], 1.0, options, mask=mask)
  assert loss == pytest.approx(-math.exp(0.1), rel=1e-6)
  np.testing.assert_allclose(
    gradient[0, 1:4], [-math.exp(0.1) / 2, 0, -math.exp(0.1) / 2], rtol=1e-6
  )


def test_kl_estimators_by_hand():
  x = math.log(0.5 / 0.25)
  for kind, want in (("k1", -x), ("k2", x * x / 2), ("k3", 2 - 1 - x)):
    options = LossOptions(reference_policy_kl_penalty=0.1, reference_policy_kl_type=kind, **PLAIN)
    loss, metrics, _ = _one(np.log([0.25]), np.log([0.25]), 0.0, options, ref=np.log([0.5]))
    assert metrics["kl_penalty"] == pytest.approx(want, rel=1e-5)
    assert loss == pytest.approx(0.1 * want, rel=1e-5)


def test_entropy_bonus_and_aggregations_by_hand():
  sequences = [
    {"logp": np.full(2, -1.0), "p": -1.0, "g": -1.0, "adv": 1.0, "entropy": 0.5},
    {"logp": np.full(6, -1.0), "p": -1.0, "g": -1.0, "adv": -2.0, "entropy": 0.5},
  ]
  inputs = _inputs([sequences])
  bonus = 0.02

  def loss(**changes):
    return _run(inputs, LossOptions(entropy_bonus=bonus, **PLAIN, **changes), length_norm=8.0)[0]

  assert loss() == pytest.approx((-2 + 12) / 8 - bonus * 0.5)
  assert loss(token_level_loss=False) == pytest.approx((-1 + 2) / 2 - bonus * 0.5)
  summed = loss(loss_aggregation="sequence-mean-token-sum-norm")
  assert summed == pytest.approx((-2 + 12 - bonus * 0.5 * 8) / 8 / 2)


# ----------------------------------------------------------------------------- masks


def test_overlong_tokens_leave_both_numerator_and_denominator():
  # 30 tokens of which 5 are of a truncated sequence: both count 25.
  a = {"logp": np.full(25, -1.0), "p": -1.0, "g": -1.0, "adv": 1.0}
  b = {"logp": np.full(5, -1.0), "p": -1.0, "g": -1.0, "adv": 100.0, "truncated": 1.0}
  loss, metrics, gradient = _run(_inputs([[a, b]]), LossOptions())
  assert loss == pytest.approx(-1.0)
  assert metrics["num_valid_tokens"] == 25 and metrics["num_valid_samples"] == 1
  assert metrics["num_overlong_samples"] == 1
  assert not gradient[0, 27:].any()
  kept, metrics, _ = _run(_inputs([[a, b]]), LossOptions(overlong_filtering=False))
  assert kept == pytest.approx(-(25 + 500) / 30) and metrics["num_valid_tokens"] == 30


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "reinforce", "sft"])
def test_every_token_masked_gives_finite_zeros(loss):
  options = LossOptions(
    loss=loss,
    force_on_policy_ratio=loss != "cispo",
    truncated_importance_sampling_type="tis",
    reference_policy_kl_penalty=0.1,
    entropy_bonus=0.1,
  )
  one = {"logp": np.full(5, -1.0), "p": -2.0, "g": -3.0, "adv": 1.0, "mask": 0.0, "entropy": 1.0}
  for rows in ([[one]], [[]], [[one | {"mask": 1.0, "truncated": 1.0}]]):
    value, metrics, gradient = _run(_inputs(rows), options)
    assert value == 0 and not gradient.any()
    assert all(math.isfinite(v) for v in metrics.values())


def test_error_gate_drops_the_sequence_from_the_denominator():
  good = {"logp": np.full(3, -1.0), "g": -1.0, "p": -1.0, "adv": 1.0}
  # exp(0.7) = 2.01: above the threshold of 2.  Its reward was already in the group's baseline.
  bad = {"logp": np.full(9, -1.0), "g": -1.7, "p": -1.0, "adv": 5.0}
  options = LossOptions(truncated_importance_sampling_type="none")
  value, metrics, gradient = _run(_inputs([[good, bad]]), options)
  assert value == pytest.approx(-1.0) and metrics["num_valid_tokens"] == 3
  assert metrics["num_error_gated_samples"] == 1
  assert metrics["max_seq_mult_prob_error"] == pytest.approx(math.exp(0.7), rel=1e-5)
  assert not gradient[0, 5:].any()


def test_sequences_masked_by_their_ratio_stay_in_the_denominator():
  good = {"logp": np.full(3, -1.0), "g": -1.0, "p": -1.0, "adv": 1.0}
  bad = {"logp": np.full(9, -1.0), "g": -1.01, "p": -1.0, "adv": 5.0}
  value, metrics, gradient = _run(_inputs([[good, bad]]), LossOptions())
  assert value == pytest.approx(-3 / 12)
  assert metrics["is_oob_ratio"] == 0.5 and metrics["num_valid_samples"] == 2
  assert metrics["tis_kept_fraction"] == pytest.approx(3 / 12)
  assert not gradient[0, 5:].any()


# ----------------------------------------------------------------------------- traps


def test_logged_ratio_before_and_after_truncation():
  raw = np.array([0.607, 12.18, 0.819])
  options = LossOptions(
    truncated_importance_sampling_type="tis",
    seq_logprob_error_threshold=None,
    force_on_policy_ratio=False,
  )
  p = np.full(3, -4.0)
  _, metrics, _ = _one(p, p, 1.0, options, g=p - np.log(raw))
  assert metrics["sampling_importance_ratio_raw"] == pytest.approx(4.536, abs=1e-3)
  assert metrics["sampling_importance_ratio"] == pytest.approx((0.607 + 2 + 0.819) / 3, rel=1e-5)
  assert metrics["is_oob_ratio"] == pytest.approx(1 / 3)


def test_kl_flows_through_a_zero_variance_group():
  # Advantage 0 for all: the policy term is 0, the KL term is not.
  options = LossOptions(reference_policy_kl_penalty=0.1, **PLAIN)
  value, metrics, gradient = _one([-1.0, -2.0], [-1.0, -2.0], 0.0, options, ref=[-1.5, -1.5])
  assert metrics["pg_loss"] == 0 and value > 0
  assert np.all(gradient[0, 1:3] != 0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_huge_differences_stay_finite(kind):
  options = LossOptions(
    reference_policy_kl_penalty=0.1,
    reference_policy_kl_type=kind,
    force_on_policy_ratio=False,
    seq_logprob_error_threshold=None,
    truncated_importance_sampling_type="tis",
  )
  value, metrics, gradient = _one(
    [-101.0, -1.0], [-1.0, -101.0], -1.0, options, ref=[-1.0, -101.0], g=[-201.0, -1.0]
  )
  assert math.isfinite(value) and np.isfinite(gradient).all()
  assert all(math.isfinite(v) for v in metrics.values())
  # Clamped at the input: the value is that of a difference of 20, cut at 10, and does not pull.
  assert abs(metrics["kl_penalty"]) <= 10


def test_correction_weight_that_overflows_is_zero():
  options = LossOptions(truncated_importance_sampling_type="none", seq_logprob_error_threshold=None)
  value, _, gradient = _one([-1.0, -1.0], [-1.0, -1.0], 1.0, options, g=[-201.0, -1.0])
  assert value == pytest.approx(-0.5)
  np.testing.assert_allclose(gradient[0, 1:3], [0, -0.5])


def test_needed_fields_must_be_there():
  inputs = _inputs([[{"logp": np.full(2, -1.0)}]])._replace(old_logprobs=None)
  with pytest.raises(ValueError, match="old_logprobs"):
    losses.compute_loss(inputs, LossOptions(force_on_policy_ratio=False))
  with pytest.raises(ValueError, match="reference_logprobs"):
    losses.compute_loss(
      inputs._replace(reference_logprobs=None), LossOptions(reference_policy_kl_penalty=1.0)
    )
  with pytest.raises(ValueError, match="number of tokens to divide by"):
    losses.compute_loss(inputs, LossOptions(loss_aggregation="sequence-mean-token-sum-norm"))


# ----------------------------------------------------------------------------- restatement


def _literal(sequences, options):
  """The clipped loss, its correction and its metrics, one sequence and token at a time."""
  low, high = options.truncation_band
  numerator, tokens, kept_sequences, outside_sequences, outside_tokens = 0.0, 0, 0, 0, 0
  sums = dict.fromkeys(
    (
      "token_mult_prob_error",
      "gen_kl_error",
      "policy_kl_error",
      "js_divergence_error",
      "sampling_importance_ratio",
      "sampling_importance_ratio_raw",
      "approx_entropy",
      "probs_ratio",
      "probs_ratio_clamped",
    ),
    0.0,
  )
  for one in sequences:
    on = [i for i in range(len(one["logp"])) if one["mask"][i]]
    old = one["logp"] if options.force_on_policy_ratio else one["p"]
    g = one["g"]
    error = sum(math.exp(abs(g[i] - old[i])) for i in on) / max(len(on), 1)
    if one["truncated"] or error > options.seq_logprob_error_threshold:
      continue
    kept_sequences += 1
    tokens += len(on)
    geometric = math.exp(sum(old[i] - g[i] for i in on) / max(len(on), 1))
    sequence_outside = not low <= geometric <= high
    outside_sequences += sequence_outside
    for i in on:
      now, p, a = one["logp"][i], old[i], one["adv"]
      r = math.exp(min(max(now - p, -20), 20))
      clipped = min(max(r, 1 - options.ratio_clip_min), 1 + options.ratio_clip_max)
      if options.force_on_policy_ratio:
        r = clipped = 1.0
      c = max(-a * r, -a * clipped)
      if a < 0 and options.ratio_clip_c is not None:
        c = min(c, -a * options.ratio_clip_c)
      raw = w = math.exp(p - g[i])
      outside_tokens += not low <= raw <= high
      if options.truncated_importance_sampling_type == "tis":
        w = min(max(w, low), high)
      elif options.truncated_importance_sampling_type == "icepop":
        w = w if low <= w <= high else 0.0
      elif sequence_outside:
        w = 0.0
      numerator += w * c
      m = math.log(0.5 * math.exp(p) + 0.5 * math.exp(g[i]))
      sums["token_mult_prob_error"] += math.exp(abs(g[i] - p))
      sums["gen_kl_error"] += math.exp(p - g[i]) - (p - g[i]) - 1
      sums["policy_kl_error"] += math.exp(g[i] - p) - (g[i] - p) - 1
      sums["js_divergence_error"] += 0.5 * (math.exp(p - m) - (p - m) - 1)
      sums["js_divergence_error"] += 0.5 * (math.exp(g[i] - m) - (g[i] - m) - 1)
      sums["sampling_importance_ratio"] += w
      sums["sampling_importance_ratio_raw"] += raw
      sums["approx_entropy"] += -math.exp(now - g[i]) * now
      sums["probs_ratio"] += r
      sums["probs_ratio_clamped"] += clipped
  n = max(tokens, 1)
  metrics = {k: v / n for k, v in sums.items()}
  metrics["num_valid_samples"] = kept_sequences
  if options.truncated_importance_sampling_type == "seq-mask-tis":
    metrics["is_oob_ratio"] = outside_sequences / max(kept_sequences, 1)
  else:
    metrics["is_oob_ratio"] = outside_tokens / n
  return numerator / n, metrics


def _random_sequences(seed, count=11):
  rng = np.random.default_rng(seed)
  made = []
  for k in range(count):
    tokens = int(rng.integers(1, 12))
    p = -rng.gamma(2.0, 1.5, tokens)
    # Some sequences agree with the sampler closely enough for the narrow band, some do not at all.
    noise = (0.0004, 0.3, 1.2)[k % 3]
    made.append(
      {
        "logp": p + rng.normal(0, 0.3, tokens),
        "p": p,
        "g": p + rng.normal(0, noise, tokens) * (rng.random(tokens) < 0.7),
        "adv": float(rng.normal()),
        "mask": (rng.random(tokens) < 0.8).astype(float),
        "truncated": float(k % 5 == 4),
      }
    )
    if k % 4 == 0:
      made[-1]["g"] = made[-1]["logp"] + rng.normal(0, 0.0004, tokens)
  # What float32 inputs are exactly, so that the comparison is about arithmetic alone.
  exact = lambda v: np.asarray(v, np.float32).astype(np.float64)
  return [{k: exact(v) if np.ndim(v) else float(exact(v)) for k, v in s.items()} for s in made]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"force_on_policy_ratio": False},
    {
      "force_on_policy_ratio": False,
      "ratio_clip_c": 3.0,
      "truncated_importance_sampling_type": "tis",
      "truncated_importance_sampling_ratio": 1.3,
    },
    {
      "force_on_policy_ratio": False,
      "truncated_importance_sampling_type": "icepop",
      "truncated_importance_sampling_ratio": 1.1,
      "truncated_importance_sampling_ratio_min": 0.9,
    },
    {"truncated_importance_sampling_type": "tis"},
  ],
  ids=["seq-mask-tis", "seq-mask-tis-ppo", "tis-ppo-dual", "icepop-ppo", "tis"],
)
def test_equals_the_literal_formulas(seed, changes):
  options = LossOptions(**changes)
  sequences = _random_sequences(seed)
  want, want_metrics = _literal(sequences, options)
  rows = [sequences[i : i + 4] for i in range(0, len(sequences), 4)]
  loss, metrics, _ = _run(_inputs(rows), options)
  assert loss == pytest.approx(want, rel=1e-5, abs=1e-7)
  assert want_metrics["num_valid_samples"] not in (0, len(sequences))
  for name, value in want_metrics.items():
    assert metrics[name] == pytest.approx(value, rel=5e-5, abs=1e-7), name
  for name in ("clip_fraction", "is_oob_ratio", "tis_kept_fraction"):
    assert 0 <= metrics[name] <= 1


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "reinforce", "sft"])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean"])
def test_packed_in_any_order_equals_unpacked(loss, aggregation):
  if loss == "gspo" and aggregation == "token-mean":
    pytest.skip("gspo is averaged over sequences")
  options = LossOptions(
    loss=loss,
    loss_aggregation=aggregation,
    force_on_policy_ratio=False,
    truncated_importance_sampling_type="tis",
    reference_policy_kl_penalty=0.1,
    entropy_bonus=0.01,
  )
  sequences = _random_sequences(5, count=12)
  alone = _run(_inputs([[s] for s in sequences]), options)
  order = np.random.default_rng(0).permutation(12)
  packed = _run(_inputs([[sequences[i] for i in order[k : k + 4]] for k in (0, 4, 8)]), options)
  assert packed[0] == pytest.approx(alone[0], rel=1e-5)
  assert packed[1].keys() == alone[1].keys()
  for name, value in alone[1].items():
    assert packed[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_metrics_do_not_depend_on_the_split_into_micro_batches():
  options = LossOptions(truncated_importance_sampling_type="tis", force_on_policy_ratio=False)
  sequences = _random_sequences(6, count=12)
  rows = [[s] for s in sequences]
  _, whole, _ = _run(_inputs(rows), options)
  parts = [losses.compute_loss(_inputs(rows[i : i + 2]), options) for i in range(0, 12, 2)]
  merged, denominators = parts[0].metrics, parts[0].denominators
  for part in parts[1:]:
    merged = step_metrics.merge(merged, part.metrics)
    denominators = jax.tree.map(jnp.add, denominators, part.denominators)
  split = step_metrics.finalise(merged, denominators)
  for name, value in whole.items():
    assert float(split[name]) == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_correlation_survives_merging_and_hardly_varying_values():
  rng = np.random.default_rng(0)
  x = -4.5 + 1e-3 * rng.standard_normal((6, 40))
  y = x + 1e-3 * rng.standard_normal((6, 40))
  mask = (rng.random((6, 40)) < 0.7).astype(np.float32)
  mask[3] = 0
  x32, y32 = x.astype(np.float32), y.astype(np.float32)
  parts = [
    step_metrics.correlation(*(jnp.asarray(a[i]) for a in (x32, y32, mask))) for i in range(6)
  ]
  merged = {"c": parts[0]}
  for part in parts[1:]:
    merged = step_metrics.merge(merged, {"c": part})
  nothing = step_metrics.Denominators(jnp.float32(0), jnp.float32(0))
  on = mask > 0
  want = np.corrcoef(x32[on].astype(np.float64), y32[on].astype(np.float64))[0, 1]
  assert float(step_metrics.finalise(merged, nothing)["c"]) == pytest.approx(want, rel=1e-4)
