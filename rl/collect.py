"""Collecting a step's trajectories: problems, samples, rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.base import options
from rl import evaluate, trajectory
from rl import sampler as sampler_lib
from rl import tokenizer as tokenizer_lib
from rl.tasks import task as task_lib


@dataclasses.dataclass(frozen=True)
class Source:
  """Where a run's trajectories come from.

  Attributes:
    task: Problems and verifier.
    tokenizer: Between text and ids.
    sampler: Draws completions.
    distribution: How.
    prompts: Problems a step.
    generations: Samples a problem.
    seed: Of problems and draws.
  """

  task: task_lib.Task
  tokenizer: tokenizer_lib.Tokenizer
  sampler: sampler_lib.Sampler
  distribution: sampler_lib.Distribution
  prompts: int
  generations: int
  seed: int

  def collect(self, weights: Any, step: int, policy_version: int) -> list[trajectory.Trajectory]:
    """The trajectories of one step: a function of weights, step and seed alone.

    Args:
      weights: The policy's parameters.
      step: Training step the batch is for, from 1; it says which problems are asked.
      policy_version: Updates made before.
    """
    first = (step - 1) * self.prompts
    problems = [self.task.train_problem(self.seed, first + i) for i in range(self.prompts)]
    requests = []
    for i, problem in enumerate(problems):
      prompt = tuple(self.tokenizer.prompt(problem.question))
      requests += [
        sampler_lib.Request(prompt, evaluate.request_seed("train", self.seed, first + i, j))
        for j in range(self.generations)
      ]
    completions = self.sampler.sample(weights, requests, self.distribution)
    return [
      trajectory.Trajectory(
        group_id=first + i // self.generations,
        prompt_ids=np.asarray(request.prompt_ids, np.int32),
        completion_ids=completion.ids,
        loss_mask=np.ones(len(completion.ids), np.float32),
        sampler_logprobs=completion.logprobs,
        reward=self.task.score(
          problems[i // self.generations], self.tokenizer.decode(completion.ids)
        ),
        truncated=completion.truncated,
        policy_version=policy_version,
        routed_experts=completion.routed_experts,
        step=step,
      )
      for i, (request, completion) in enumerate(zip(requests, completions, strict=True))
    ]


def demonstrations(
  task: task_lib.Task, tokenizer: tokenizer_lib.Tokenizer, seed: int, step: int, count: int
) -> list[trajectory.Trajectory]:
  """Trajectories of the task's own demonstrations, for a supervised update.

  Args:
    task: Must know a demonstration of its problems.
    tokenizer: Its first stop id ends each completion.
    seed: Seed of the problems; they are others than those of `Source.collect`.
    step: Supervised update, from 1.
    count: Number of trajectories.

  Raises:
    options.UserError: A problem has no demonstration.
  """
  made = []
  for i in range(count):
    index = (step - 1) * count + i
    problem = task.train_problem(evaluate.request_seed("warm-up", seed), index)
    if problem.demonstration is None:
      raise options.UserError(
        f"the task {task.name} has no demonstrations to warm up on; start from --checkpoint, or add "
        "--warmup_steps=0"
      )
    ids = [*tokenizer.encode(problem.demonstration), tokenizer.stop_ids[0]]
    made.append(
      trajectory.Trajectory(
        group_id=index,
        prompt_ids=np.asarray(tokenizer.prompt(problem.question), np.int32),
        completion_ids=np.asarray(ids, np.int32),
        loss_mask=np.ones(len(ids), np.float32),
        sampler_logprobs=np.zeros(len(ids), np.float32),
        reward=1.0,
        step=step,
      )
    )
  return made


def statistics(batch: Sequence[trajectory.Trajectory], policy_version: int) -> dict[str, float]:
  """Metrics of a batch that need no model.

  Args:
    batch: A step's trajectories.
    policy_version: Version of the policy that they will train.
  """
  rewards = np.asarray([t.reward for t in batch], np.float64)
  groups: dict[Any, list[float]] = {}
  for one in batch:
    groups.setdefault(one.group_id, []).append(one.reward)
  lengths = np.asarray([len(t.completion_ids) for t in batch])
  return {
    "reward_mean": float(rewards.mean()),
    "reward_std": float(rewards.std()),
    "solve_rate": float(np.mean([max(g) > 0 for g in groups.values()])),
    "zero_variance_fraction": float(np.mean([max(g) == min(g) for g in groups.values()])),
    "completion_length_mean": float(lengths.mean()),
    "completion_length_max": float(lengths.max()),
    "truncated_fraction": float(np.mean([t.truncated for t in batch])),
    "staleness_max": float(policy_version - min(t.policy_version for t in batch)),
    "tokens": float(sum(t.num_tokens for t in batch)),
    "completion_tokens": float(lengths.sum()),
  }
