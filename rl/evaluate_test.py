"""Pass@k, and the trajectories of a step, with a sampler whose answers are known."""

import numpy as np
import pytest

from kernels.base import options
from rl import collect, evaluate, run_config, sampler, tokenizer
from rl.tasks import registry, task

TOKENS = tokenizer.ByteTokenizer()


class FakeSampler:
  """Answers right where `right(request, number, distribution)` says so."""

  def __init__(self, right):
    self.right, self.calls = right, []

  def sample(self, weights, requests, distribution):
    self.calls.append((tuple(requests), distribution))
    made = []
    for number, request in enumerate(requests):
      question = TOKENS.decode(request.prompt_ids)
      text = "".join(sorted(question[:4])) if self.right(request, number, distribution) else "x"
      ids = np.asarray([*TOKENS.encode(text), TOKENS.end_id], np.int32)
      made.append(sampler.Completion(ids, np.zeros(len(ids), np.float32), text == "x", None))
    return made


def _evaluate(right, **given):
  fake = FakeSampler(right)
  found = evaluate.evaluate(
    registry.make("sort4"), TOKENS, fake, None, run_config.EvaluationOptions(**given), seed=3
  )
  return found, fake


def test_a_problem_passes_when_any_of_its_k_samples_does():
  # Of every problem's four samples the last one is right, for the first half of the problems.
  right = lambda request, number, how: not how.greedy and number % 4 == 3 and number < 200
  found, fake = _evaluate(right, eval_problems=100, eval_samples=4)
  assert (found.pass_at_k, found.reward_mean, found.greedy) == (0.5, 0.125, 0.0)
  assert (found.truncated, found.problems) == (0.875, 100)
  assert found.metrics()["eval/pass@4"] == 0.5
  requests = fake.calls[0][0]
  assert len({r.seed for r in requests}) == 400  # no two samples share their draws
  prompts = [r.prompt_ids for r in requests]
  assert prompts[0] == prompts[3] != prompts[4]


def test_greedy_is_apart_and_draws_are_the_same_each_time():
  found, fake = _evaluate(lambda request, number, how: how.greedy, eval_problems=10)
  assert (found.pass_at_k, found.greedy) == (0.0, 1.0)
  assert [how.greedy for _, how in fake.calls] == [False, True]
  again, other = _evaluate(lambda request, number, how: how.greedy, eval_problems=10)
  assert fake.calls[0] == other.calls[0] and found == again
  alone, fake = _evaluate(lambda *_: True, eval_problems=10, eval_greedy=False)
  assert alone.greedy is None and len(fake.calls) == 1 and "eval/greedy" not in alone.metrics()


def test_distribution_of_the_options():
  _, fake = _evaluate(lambda *_: True, eval_problems=5, eval_temperature=0.1, eval_top_p=0.95)
  assert fake.calls[0][1] == sampler.Distribution(temperature=0.1, top_p=0.95)


def _source(right=lambda *_: True, **given):
  values = {"prompts": 3, "generations": 4, "seed": 1, **given}
  made = FakeSampler(right)
  return collect.Source(
    task=registry.make("sort4"),
    tokenizer=TOKENS,
    sampler=made,
    distribution=sampler.Distribution(),
    **values,
  ), made


def test_a_step_is_whole_groups_with_exact_rewards():
  source, _ = _source(right=lambda request, number, how: number % 4 == 0)
  batch = source.collect(None, step=2, policy_version=1)
  assert [t.group_id for t in batch] == [3] * 4 + [4] * 4 + [5] * 4
  assert [t.reward for t in batch] == [1.0, 0.0, 0.0, 0.0] * 3
  assert [t.truncated for t in batch] == [False, True, True, True] * 3
  assert {t.policy_version for t in batch} == {1} and {t.step for t in batch} == {2}
  numbers = collect.statistics(batch, policy_version=3)
  assert numbers["reward_mean"] == 0.25 and numbers["solve_rate"] == 1.0
  assert numbers["zero_variance_fraction"] == 0.0 and numbers["staleness_max"] == 2.0
  assert numbers["truncated_fraction"] == 0.75


def test_steps_and_seeds_give_other_problems_and_draws():
  source, fake = _source()
  for step in (1, 2, 1):
    source.collect(None, step=step, policy_version=0)
  first, second, again = (calls for calls, _ in fake.calls)
  assert first == again
  assert not {r.seed for r in first} & {r.seed for r in second}
  other, fake = _source(seed=2)
  other.collect(None, step=1, policy_version=0)
  assert fake.calls[0][0] != first


def test_demonstrations_end_with_the_stop_token_and_are_others_than_the_samples():
  made = registry.make("sort4")
  batch = collect.demonstrations(made, TOKENS, seed=1, step=1, count=5)
  for one in batch:
    assert one.completion_ids[-1] == TOKENS.end_id and one.reward == 1.0
    text = TOKENS.decode(one.completion_ids)
    assert text == "".join(sorted(TOKENS.decode(one.prompt_ids)[:4]))
  source, _ = _source()
  asked = [t.prompt_ids.tolist() for t in source.collect(None, 1, 0)[::4]]
  assert [t.prompt_ids.tolist() for t in batch[:3]] != asked


def test_a_task_without_demonstrations_says_so():
  class Bare(task.Task):
    name = "bare"

    def train_problem(self, seed, index):
      return task.Problem("q", "a")

    def held_out_problem(self, index):
      return task.Problem("q", "a")

    def score(self, problem, completion):
      return 0.0

  with pytest.raises(options.UserError, match="bare has no demonstrations"):
    collect.demonstrations(Bare(), TOKENS, seed=0, step=1, count=1)
