"""Built-in procedural tasks over digits: sorting, addition, subtraction, multiplication.

Every problem has one right answer, checked exactly.  The split is by the multiset of the answer's
digits: a multiset that occurs among held-out answers occurs among no training answers, so that
a held-out score cannot come from answers seen in training.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from rl.tasks import task

# One answer multiset in five is held out.
_HELD_OUT_OF = 5


@dataclasses.dataclass(frozen=True)
class _Family:
  """A finite set of problems: `size` of them, `make(i)` giving question and answer."""

  size: int
  make: Callable[[int], tuple[str, str]]


def _sort(digits: int) -> _Family:
  def make(index: int) -> tuple[str, str]:
    given = f"{index:0{digits}d}"
    return given + ">", "".join(sorted(given))

  return _Family(10**digits, make)


def _binary(digits: int, sign: str, width: int, reverse: bool) -> _Family:
  """Two numbers of `digits` digits, zero-padded, and their sum, difference or product.

  The answer is padded to `width` digits.  `reverse` writes the question's numbers and the answer
  least significant digit first, the order in which carries arise.
  """
  base = 10**digits
  compute = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
  }[sign]

  def make(index: int) -> tuple[str, str]:
    if sign == "-":  # a >= b: pair number a (a + 1) / 2 + b of a triangle.
      a = (math.isqrt(8 * index + 1) - 1) // 2
      b = index - a * (a + 1) // 2
    else:
      a, b = divmod(index, base)
    texts = [f"{a:0{digits}d}", f"{b:0{digits}d}", f"{compute(a, b):0{width}d}"]
    if reverse:
      texts = [t[::-1] for t in texts]
    return f"{texts[0]}{sign}{texts[1]}=", texts[2]

  return _Family(base * (base + 1) // 2 if sign == "-" else base * base, make)


FAMILIES: dict[str, Callable[[], _Family]] = {
  "sort4": lambda: _sort(4),
  "sort6": lambda: _sort(6),
  "add2": lambda: _binary(2, "+", 3, reverse=True),
  "add2_msd": lambda: _binary(2, "+", 3, reverse=False),
  "add3": lambda: _binary(3, "+", 4, reverse=True),
  "subtract2": lambda: _binary(2, "-", 2, reverse=True),
  "multiply2": lambda: _binary(2, "*", 4, reverse=True),
}

DESCRIPTIONS = {
  "sort4": "sort four digits (3102> is answered 0123)",
  "sort6": "sort six digits",
  "add2": "two-digit addition with carry, least significant digit first (37+58 is asked 73+85=, "
  "and answered 590)",
  "add2_msd": "two-digit addition with carry, most significant digit first",
  "add3": "three-digit addition with carry, least significant digit first",
  "subtract2": "two-digit subtraction, the larger first, least significant digit first",
  "multiply2": "two-digit multiplication, least significant digit first",
}


def is_held_out(answer: str) -> bool:
  """Whether answers with these digits, in any order, belong to the held-out side."""
  return _multiset_held_out("".join(sorted(answer)))


@functools.cache
def _multiset_held_out(digits: str) -> bool:
  return task.stable_uniform("held-out", digits) % _HELD_OUT_OF == 0


class ArithmeticTask(task.Task):
  """A family of digit problems, split by answer multiset."""

  def __init__(self, name: str):
    """Makes the task.

    Args:
      name: A key of FAMILIES.
    """
    self.name = name
    self._family = FAMILIES[name]()

  @functools.cached_property
  def _held_out(self) -> list[int]:
    # A fixed shuffle, so that the first 1,000 are a fair sample.
    found = [i for i in range(self._family.size) if is_held_out(self._family.make(i)[1])]
    found.sort(key=lambda i: task.stable_uniform("held-out order", self.name, i))
    return found

  @property
  def held_out_size(self) -> int:
    return len(self._held_out)

  @property
  def train_size(self) -> int:
    return self._family.size - len(self._held_out)

  def train_problem(self, seed: int, index: int) -> task.Problem:
    # Draw until the draw is no held-out problem; about one draw in five is turned down.
    for attempt in range(10_000):
      draw = task.stable_uniform("train", self.name, seed, index, attempt) % self._family.size
      question, answer = self._family.make(draw)
      if not is_held_out(answer):
        return task.Problem(question, answer, demonstration=answer)
    raise AssertionError(f"{self.name}: no training problem found")

  def held_out_problem(self, index: int) -> task.Problem:
    question, answer = self._family.make(self._held_out[index])
    return task.Problem(question, answer, demonstration=answer)

  def score(self, problem: task.Problem, completion: str) -> float:
    return task.exact_match(problem.answer, completion)
