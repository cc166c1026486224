"""Advantages against numbers worked by hand and a literal float64 restatement."""

import math

import numpy as np
import pytest

from kernels.base.options import UserError
from rl.advantages import compute_advantages
from rl.config import AdvantageOptions


def _of(rewards, estimator="grpo-loo", groups=None, **kwargs):
  options = {k: kwargs.pop(k) for k in list(kwargs) if k in AdvantageOptions.__dataclass_fields__}
  return compute_advantages(
    groups if groups is not None else [0] * len(rewards),
    rewards,
    AdvantageOptions(advantage_estimator=estimator, **options),
    **kwargs,
  )


def test_leave_one_out_by_hand():
  # Member 0: others 0, 0, 1: mean 1/3, unbiased variance 1/3.
  got = _of([1, 0, 0, 1])
  high = (1 - 1 / 3) / (math.sqrt(1 / 3) + 1e-6)
  low = (0 - 2 / 3) / (math.sqrt(1 / 3) + 1e-6)
  np.testing.assert_allclose(got, [high, low, low, high], rtol=1e-12)


def test_mean_and_spread_by_hand():
  # Mean 1/2; unbiased variance 1/3.
  got = _of([1, 0, 0, 1], "grpo")
  one = 0.5 / (math.sqrt(1 / 3) + 1e-6)
  np.testing.assert_allclose(got, [one, -one, -one, one], rtol=1e-12)


def test_undivided_estimators_by_hand():
  np.testing.assert_allclose(_of([1, 0, 0, 1], "rloo"), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
  np.testing.assert_allclose(_of([1, 0, 0, 1], "dr-grpo"), [0.5, -0.5, -0.5, 0.5])


def test_others_of_one_reward_are_not_divided():
  # The first member's others have no spread: its difference stays as it is.
  got = _of([1, 0.35, 0.35, 0.35])
  assert got[0] == pytest.approx(0.65, abs=1e-7)
  assert got[1] == pytest.approx(-0.5773489, abs=2e-7)


@pytest.mark.parametrize("estimator", ["grpo", "grpo-loo", "rloo", "dr-grpo"])
@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(estimator, count):
  # A float32 mean of seven times 0.35 leaves a residue, which a spread of 1e-4 would blow up.
  assert not np.any(_of([0.35] * count, estimator))
  assert not np.any(_of([0.1 + 0.2, 0.3] + [0.3] * count, estimator))


def test_pairs_have_no_spread():
  np.testing.assert_array_equal(_of([1, 0]), [1, -1])
  assert not np.any(_of([5.0]))


def test_reinforce_plus_plus_by_hand():
  # Group means removed: 1, -1, 0, 0.  Token weights 1, 1, 2, 0: mean 0, variance 1/2.
  got = _of([3, 1, 2, 2], "reinforce++", groups=[0, 0, 1, 1], loss_tokens=[1, 1, 2, 0])
  np.testing.assert_allclose(got, [math.sqrt(2), -math.sqrt(2), 0, 0], atol=1e-12)
  got = _of([3, 1], "reinforce++", loss_tokens=[0, 0])
  np.testing.assert_array_equal(got, [0, 0])


def test_switches_have_the_references_meaning():
  rewards = [1.0, 0.2, 0.7, 0.0]
  np.testing.assert_array_equal(
    _of(rewards, "grpo", use_leave_one_out_baseline=True), _of(rewards, "grpo-loo")
  )
  np.testing.assert_array_equal(_of(rewards, normalize_rewards=False), _of(rewards, "rloo"))
  np.testing.assert_array_equal(
    _of(rewards, normalize_rewards=False, use_leave_one_out_baseline=False),
    _of(rewards, "dr-grpo"),
  )


def test_invalid_members_do_not_vote():
  got = _of([1, 0, 0, 1, 9], valid=[True, True, True, True, False])
  np.testing.assert_array_equal(got, [*_of([1, 0, 0, 1]), 0.0])
  # One valid member, or none, has nothing to be compared with.
  assert not np.any(_of([1, 0, 0], valid=[True, False, False]))
  assert not np.any(_of([1, 0, 0], valid=[False] * 3))


def test_groups_need_not_be_adjacent_and_do_not_mix():
  a, b = [1, 0, 0, 1], [0.3, 0.9, 0.9, 0.5]
  mixed = [x for pair in zip(a, b) for x in pair]
  got = _of(mixed, groups=["a", "b"] * 4)
  np.testing.assert_array_equal(got[0::2], _of(a))
  np.testing.assert_array_equal(got[1::2], _of(b))


def test_incomplete_batches_are_refused():
  with pytest.raises(UserError, match="not prompts x 2 generations: group 1 has 1"):
    _of([1, 0, 1], groups=[0, 0, 1])
  with pytest.raises(UserError, match="not prompts x 16 generations"):
    _of([1, 0], generations_per_prompt=16)
  with pytest.raises(UserError, match="reward 1 of the batch is not finite"):
    _of([1, float("inf")])


def _literal(rewards, i, epsilon=1e-6):
  """The reference's leave-one-out formula, written out for one member."""
  n = len(rewards)
  others = [r for j, r in enumerate(rewards) if j != i]
  b = sum(others) / (n - 1)
  s2 = (sum(r * r for r in others) / (n - 1) - b * b) * (n - 1) / (n - 2) if n > 2 else 0.0
  s = math.sqrt(max(s2, 0.0))
  return (rewards[i] - b) / (s + epsilon) if s > 1e-7 else rewards[i] - b


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_leave_one_out_equals_the_literal_formula(count):
  rng = np.random.default_rng(count)
  for _ in range(20):
    rewards = rng.choice([0.0, 0.35, 0.5, 1.0], count).tolist()
    exact = [float(np.float32(r)) for r in rewards]
    want = [_literal(exact, i) for i in range(count)]
    np.testing.assert_allclose(_of(rewards), want, rtol=1e-6, atol=1e-9)
