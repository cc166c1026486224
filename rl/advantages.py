"""Advantages of the trajectories of a step, float64 on the host.

All estimators are relative to the other trajectories of the same prompt.  With rewards r of the n
valid members of a group:

| estimator | baseline of member i | divided by |
| --- | --- | --- |
| grpo (Shao et al. 2024) | mean of r | spread of r + 1e-6 |
| grpo-loo (NeMo-RL) | mean of the other members' r | spread of the others' r + 1e-6 |
| rloo (Ahmadian et al. 2024) | mean of the other members' r | nothing |
| dr-grpo (Liu et al. 2025) | mean of r | nothing |
| reinforce++ (Hu 2025) | mean of r | then mean and spread over all tokens of the batch |

A spread is the square root of the unbiased variance of the rewards it is about, as in the
reference, and a spread of exactly 0 divides nothing: a member whose others all have one reward
keeps its plain difference.  Leaving one out of n = 2 leaves one reward, which has no spread.

Rewards are centred on a member's reward before anything is summed, so that equal rewards give a
spread of exactly 0: the residue of a float32 mean, divided by itself, would be an advantage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.base.options import UserError
from rl.config import AdvantageOptions

_EPSILON = 1e-6
_REINFORCE_VARIANCE_FLOOR = 1e-8


def compute_advantages(
  group_ids: Sequence[int | str],
  rewards: Sequence[float],
  options: AdvantageOptions,
  *,
  generations_per_prompt: int | None = None,
  valid: Sequence[bool] | None = None,
  loss_tokens: Sequence[float] | None = None,
) -> np.ndarray:
  """Advantages of a batch.

  Args:
    group_ids: The prompt of each of N trajectories; a group's members need not be adjacent.
    rewards: N rewards.
    options: Estimator and its switches.
    generations_per_prompt: Size that every group must have; None for that of the first.
    valid: Which trajectories count; the others vote in no baseline and get advantage 0.  Truncated
      trajectories are valid here: their loss is masked elsewhere, their reward counts.
    loss_tokens: Loss tokens of each trajectory, the weights of reinforce++'s normalisation.

  Returns:
    float64 [N].

  Raises:
    UserError: The batch is not whole groups of one size, or a reward is not finite.
  """
  # Rewards are float32 in the reference.  Rounding to it first also makes one of two rewards that
  # differ by float64 noise alone, which would otherwise have a spread of 1e-17 to divide by.
  values = np.asarray(rewards, np.float32).astype(np.float64)
  mask = np.ones(len(values), bool) if valid is None else np.asarray(valid, bool)
  if not len(values) == len(group_ids) == len(mask):
    raise ValueError("group_ids, rewards and valid must have one length")
  if not np.all(np.isfinite(values)):
    raise UserError(f"reward {int(np.argmin(np.isfinite(values)))} of the batch is not finite")
  members = _groups(group_ids, generations_per_prompt)
  result = np.zeros(len(values))
  for indices in members:
    chosen = indices[mask[indices]]
    if len(chosen) < 2:
      continue
    result[chosen] = _group_advantages(values[chosen], options)
  if options.advantage_estimator == "reinforce++":
    if loss_tokens is None:
      raise ValueError("reinforce++ normalises over tokens: give loss_tokens")
    result = _normalise_over_tokens(result, np.asarray(loss_tokens, np.float64) * mask)
  return result


def _groups(group_ids: Sequence[int | str], expected: int | None) -> list[np.ndarray]:
  found: dict[int | str, list[int]] = {}
  for index, group in enumerate(group_ids):
    found.setdefault(group, []).append(index)
  want = expected if expected is not None else len(next(iter(found.values()), []))
  for group, indices in found.items():
    if len(indices) != want:
      raise UserError(
        f"a batch of {len(group_ids)} trajectories is not prompts x {want} generations: group "
        f"{group} has {len(indices)}; a group must be complete"
      )
  return [np.asarray(indices) for indices in found.values()]


def _group_advantages(rewards: np.ndarray, options: AdvantageOptions) -> np.ndarray:
  """Advantages of the n >= 2 valid members of one group."""
  count = len(rewards)
  advantages = np.empty(count)
  for i in range(count):
    peers = np.delete(rewards, i) if options.leave_one_out else rewards
    centred = peers - peers[0]
    mean = centred.mean()
    advantages[i] = (rewards[i] - peers[0]) - mean
    if not options.divide_by_spread or len(peers) < 2:
      continue
    spread = np.sqrt(np.sum((centred - mean) ** 2) / (len(peers) - 1))
    if spread > 0:
      advantages[i] /= spread + _EPSILON
  return advantages


def _normalise_over_tokens(advantages: np.ndarray, weights: np.ndarray) -> np.ndarray:
  total = weights.sum()
  if total == 0:
    return np.zeros_like(advantages)
  mean = np.sum(advantages * weights) / total
  variance = np.sum((advantages - mean) ** 2 * weights) / total
  return (advantages - mean) / np.sqrt(max(variance, _REINFORCE_VARIANCE_FLOOR))
