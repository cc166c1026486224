"""Evaluation: pass@k over held-out problems, sampled and greedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rl import run_config
from rl import sampler as sampler_lib
from rl import tokenizer as tokenizer_lib
from rl.tasks import task as task_lib


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Scores over the held-out problems.

  Attributes:
    pass_at_k: Share of problems of which any sample has a reward above 0.
    reward_mean: Mean reward over all samples.
    greedy: Share of problems whose greedy completion has a reward above 0; None when not asked for.
    truncated: Share of samples that were cut at the length limit.
    problems: Number of problems.
    samples: Samples a problem, k.
  """

  pass_at_k: float
  reward_mean: float
  greedy: float | None
  truncated: float
  problems: int
  samples: int

  def metrics(self) -> dict[str, float]:
    """By name, for the log."""
    found = {
      f"eval/pass@{self.samples}": self.pass_at_k,
      "eval/reward_mean": self.reward_mean,
      "eval/truncated_fraction": self.truncated,
    }
    if self.greedy is not None:
      found["eval/greedy"] = self.greedy
    return found

  def __str__(self) -> str:
    text = f"sampled pass@{self.samples} {self.pass_at_k:.3f}"
    if self.greedy is not None:
      text += f", greedy {self.greedy:.3f}"
    return f"{text} on {self.problems} held-out problems"


def evaluate(
  task: task_lib.Task,
  tokenizer: tokenizer_lib.Tokenizer,
  sampler: sampler_lib.Sampler,
  weights: Any,
  options: run_config.EvaluationOptions,
  *,
  top_k: int = 0,
  seed: int = 0,
) -> Evaluation:
  """Samples every held-out problem and scores the samples.

  A seed gives the same draws at every evaluation of a run, so that scores differ by the weights
  alone.

  Args:
    task: Problems and verifier.
    tokenizer: Between text and ids.
    sampler: Draws completions.
    weights: The model's parameters.
    options: How many problems and samples, and the distribution.
    top_k: As in training; 0 for all tokens.
    seed: Seed of the draws.
  """
  size = task.held_out_size
  count = options.eval_problems if size is None else min(size, options.eval_problems)
  problems = [task.held_out_problem(i) for i in range(count)]
  prompts = [tuple(tokenizer.prompt(p.question)) for p in problems]

  def scores(samples: int, distribution: sampler_lib.Distribution):
    requests = [
      sampler_lib.Request(prompt, request_seed("eval", seed, i, j))
      for i, prompt in enumerate(prompts)
      for j in range(samples)
    ]
    completions = sampler.sample(weights, requests, distribution)
    rewards = [
      task.score(problems[i // samples], tokenizer.decode(c.ids)) for i, c in enumerate(completions)
    ]
    cut = float(np.mean([c.truncated for c in completions]))
    return np.asarray(rewards).reshape(count, samples), cut

  rewards, truncated = scores(
    options.eval_samples,
    sampler_lib.Distribution(options.eval_temperature, options.eval_top_p, top_k),
  )
  greedy = None
  if options.eval_greedy:
    greedy = float(np.mean(scores(1, sampler_lib.Distribution(greedy=True))[0] > 0))
  return Evaluation(
    pass_at_k=float(np.mean(np.any(rewards > 0, axis=1))),
    reward_mean=float(np.mean(rewards)),
    greedy=greedy,
    truncated=truncated,
    problems=count,
    samples=options.eval_samples,
  )


def request_seed(*parts: object) -> int:
  """A request's 32-bit seed, from what the request is about."""
  return task_lib.stable_uniform(*parts) & 0xFFFFFFFF
