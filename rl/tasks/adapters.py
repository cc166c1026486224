"""Tasks of other packages, imported only when chosen: reasoning_gym and math-verify.

Neither package is a dependency of this repository.  Both score exactly here: reasoning_gym's own
`score_answer` may pay for a substring, which a policy learns to exploit.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import sys
from typing import Any

from kernels.base import options
from rl.tasks import json_lines, task

# Held-out problems come from a seed that no training run uses.
_HELD_OUT_SEED = 0x5EED_0FF
_DATASET_SIZE = 1 << 20
_VERIFY_SECONDS = 20.0


def _import(module: str, distribution: str, chosen: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError:
    raise options.UserError(
      f"--task={chosen} needs the package {distribution}, which is not installed here; run `python3 "
      f"-m pip install --target=DIR {distribution}` with a Python {sys.version_info[0]}."
      f"{sys.version_info[1]} and start with PYTHONPATH=DIR, or choose a built-in task"
    ) from None


class ReasoningGymTask(task.Task):
  """A dataset of reasoning_gym, by name.

  Problems are deterministic in (seed, index).  Prompts that the held-out seed gives too are
  turned down in training.
  """

  def __init__(self, dataset: str, held_out_size: int = 1000):
    """Makes the datasets.

    Args:
      dataset: Name that `reasoning_gym.create_dataset` knows.
      held_out_size: Number of held-out problems.

    Raises:
      options.UserError: The package is not installed, or knows no such dataset.
    """
    self.name = f"reasoning_gym:{dataset}"
    self._gym = _import("reasoning_gym", "reasoning-gym", self.name)
    self._dataset = dataset
    self._datasets: dict[int, Any] = {}
    self._held_out_size = held_out_size
    try:
      held_out = self._get(_HELD_OUT_SEED)
    except Exception as error:
      raise options.UserError(f"--task={self.name}: reasoning_gym: {error}") from None
    self._held_out_questions = {held_out[i]["question"] for i in range(held_out_size)}

  def _get(self, seed: int) -> Any:
    if seed not in self._datasets:
      self._datasets[seed] = self._gym.create_dataset(self._dataset, size=_DATASET_SIZE, seed=seed)
    return self._datasets[seed]

  @property
  def held_out_size(self) -> int:
    return self._held_out_size

  def train_problem(self, seed: int, index: int) -> task.Problem:
    dataset = self._get(seed)
    for attempt in range(1000):
      entry = dataset[task.stable_uniform("train", index, attempt) % _DATASET_SIZE]
      if entry["question"] not in self._held_out_questions:
        return self._problem(entry)
    raise options.UserError(f"--task={self.name}: too few distinct problems to hold some out")

  def held_out_problem(self, index: int) -> task.Problem:
    return self._problem(self._get(_HELD_OUT_SEED)[index])

  def score(self, problem: task.Problem, completion: str) -> float:
    completion = completion.strip()
    if completion == problem.answer.strip():
      return 1.0
    # Some datasets accept several answers; only full marks from the dataset count.
    score = self._get(_HELD_OUT_SEED).score_answer(completion, problem.detail)
    return 1.0 if score >= 1.0 else 0.0

  @staticmethod
  def _problem(entry: dict[str, Any]) -> task.Problem:
    answer = entry["answer"]
    return task.Problem(
      entry["question"], str(answer or ""), demonstration=answer or None, detail=entry
    )


def _verify(answer: str, completion: str) -> float:
  """Runs in a worker process: math-verify's own timeout needs a main thread."""
  math_verify = importlib.import_module("math_verify")
  return float(math_verify.verify(math_verify.parse(answer), math_verify.parse(completion)))


class MathVerifyTask(json_lines.JsonLinesTask):
  """Prompts from a file, judged by mathematical equality of the answers (math-verify)."""

  name = "math_verify"

  exact = False

  def __init__(self, path: str, held_out_path: str | None = None):
    """As `JsonLinesTask`; starts the worker process on first use."""
    _import("math_verify", "math-verify", self.name)
    super().__init__(path, held_out_path)
    self._pool: concurrent.futures.ProcessPoolExecutor | None = None

  def score(self, problem: task.Problem, completion: str) -> float:
    if self._pool is None:
      context = multiprocessing.get_context("spawn")
      self._pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
    try:
      return self._pool.submit(_verify, problem.answer, completion).result(_VERIFY_SECONDS)
    except concurrent.futures.TimeoutError:
      return 0.0  # What cannot be judged in time earns nothing.
