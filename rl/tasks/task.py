"""What a task is: problems by index, and a score for an answer.

A problem is a function of the task and an index alone.  The loop can therefore resume anywhere,
and two runs with one seed see one sequence of problems.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Problem:
  """One question with what is needed to judge an answer.

  Attributes:
    question: Text that is asked.
    answer: The right answer, in the form that the verifier compares with.
    demonstration: A completion that scores 1, for supervised warm-up; None where none is known.
    detail: Whatever else the task's verifier needs.
    name: What messages call it: the line of its file; empty where there is none.
  """

  question: str
  answer: str
  demonstration: str | None = None
  detail: Any = None
  name: str = ""


class Task(abc.ABC):
  """A source of problems and their verifier.

  Attributes:
    name: Name on the command line.
    exact: Whether a completion scores by being equal to the answer.
  """

  name: str
  exact = True

  def file_problems(self) -> Sequence[Problem]:
    """All problems of a task that reads them from a file, to be checked before training."""
    return ()

  @property
  def held_out_size(self) -> int | None:
    """Number of held-out problems, or None where they do not end."""
    return None

  @property
  def train_size(self) -> int | None:
    """Number of distinct training problems, or None where they do not end."""
    return None

  @abc.abstractmethod
  def train_problem(self, seed: int, index: int) -> Problem:
    """Problem `index` of the training sequence that `seed` gives."""

  @abc.abstractmethod
  def held_out_problem(self, index: int) -> Problem:
    """Held-out problem `index`; never one of the training problems, the same for every seed."""

  @abc.abstractmethod
  def score(self, problem: Problem, completion: str) -> float:
    """Reward of a completion in [0, 1]; exact unless the task says otherwise."""


def exact_match(answer: str, completion: str) -> float:
  """1 where the two are equal once outer white space is stripped, else 0.

  Nothing is given for a part: credit for a substring is won by writing every answer at once.
  """
  return float(completion.strip() == answer.strip())


def stable_uniform(*parts: object) -> int:
  """A 64-bit number that depends on the parts alone, the same on every machine and run."""
  text = "\x1f".join(str(p) for p in parts).encode()
  return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
