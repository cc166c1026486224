"""Options and refusals of the RL trainer."""

import pytest

from kernels.base import options, refusals
from rl import config
from rl import refusals as rl_refusals

COMPONENTS = (
  config.LossOptions,
  config.AdvantageOptions,
  config.BatchOptions,
  config.OptimizerOptions,
)


def test_defaults_are_the_benchmark_and_break_no_rule():
  settings = options.Settings(COMPONENTS)
  assert refusals.broken_rules(settings, rl_refusals.RULES) == []
  loss = settings.of(config.LossOptions)
  assert loss.truncation_band == (0.999, 1.002)
  assert (loss.ratio_clip_min, loss.ratio_clip_max, loss.seq_logprob_error_threshold) == (
    0.2,
    0.28,
    2.0,
  )
  assert loss.force_on_policy_ratio and loss.overlong_filtering
  advantages = settings.of(config.AdvantageOptions)
  assert advantages.leave_one_out and advantages.divide_by_spread


# Rules about options of a run are tested with the trainer's whole list, in trainer_options_test.
CORE_RULES = (
  rl_refusals.LOSS_RULES
  + rl_refusals.ADVANTAGE_RULES
  + rl_refusals.BATCH_RULES
  + rl_refusals.OPTIMIZER_RULES
)


@pytest.mark.parametrize("rule", CORE_RULES, ids=lambda r: r.name)
def test_rule_examples(rule):
  accepted = options.Settings(COMPONENTS, rule.accepted)
  assert rule not in refusals.broken_rules(accepted, rl_refusals.RULES)
  refused = options.Settings(COMPONENTS, rule.refused)
  assert rule in refusals.broken_rules(refused, rl_refusals.RULES)


@pytest.mark.parametrize(
  "kind, band",
  [("none", (0.0, float("inf"))), ("tis", (0.0, 2.0)), ("icepop", (0.5, 5.0))],
)
def test_bands_of_the_types(kind, band):
  assert config.LossOptions(truncated_importance_sampling_type=kind).truncation_band == band
  one = config.LossOptions(
    truncated_importance_sampling_type=kind, truncated_importance_sampling_ratio=3.0
  )
  assert one.truncation_band == (band[0], 3.0)


@pytest.mark.parametrize(
  "changes, aggregation",
  [
    ({}, "token-mean"),
    ({"token_level_loss": False}, "sequence-mean-token-mean"),
    ({"loss": "gspo"}, "sequence-mean-token-mean"),
    ({"loss_aggregation": "sequence-mean-token-sum-norm"}, "sequence-mean-token-sum-norm"),
  ],
)
def test_aggregation(changes, aggregation):
  assert config.LossOptions(**changes).aggregation == aggregation


def test_bad_values_are_named():
  with pytest.raises(options.OptionError, match="ratio_clip_c"):
    config.require_valid(config.LossOptions(ratio_clip_c=0.5))
  with pytest.raises(options.OptionError, match="regular expression"):
    config.require_valid(config.OptimizerOptions(trainable_parameters_mask="("))


def test_key_with_a_slip_gets_a_suggestion():
  with pytest.raises(options.OptionError, match="nearest flag is --ratio_clip_max"):
    options.Settings(COMPONENTS, {"ratio_clip_maxx": 0.3})
