"""Problems from a JSON Lines file of {"prompt": ..., "answer": ...}, or judged by a command.

The held-out problems come from a second file where one is given; else every fifth line, by a
hash of the prompt, is held out, so that equal prompts fall on one side.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shlex
import shutil
import subprocess

from kernels.base import options
from rl import jsonl
from rl.tasks import task

_HELD_OUT_OF = 5
_VERIFIER_SECONDS = 30.0


def read_problems(path: str | pathlib.Path, flag: str = "prompts") -> list[task.Problem]:
  """Reads a file of problems.

  Each line is an object with `prompt` and `answer` (texts; numbers are taken as their text) and,
  if wanted, `demonstration`, a completion to warm up on.  Blank lines are passed over.

  Args:
    path: The file.
    flag: Name of the flag that gave it, without dashes.

  Raises:
    options.UserError: No such file, no problem in it, or a malformed line (with its number).
  """
  problems = []
  for where, entry in jsonl.read(path, flag):
    if not isinstance(entry, dict):
      given = json.dumps(entry)
      raise options.UserError(f"{where}: want an object with prompt and answer, got {given:.40}")
    texts = {}
    for key in ("prompt", "answer"):
      value = entry.get(key)
      finite = not isinstance(value, float) or math.isfinite(value)
      if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not finite:
        have = ", ".join(entry) or "none"
        found = f"found {json.dumps(value):.40}" if key in entry else f"keys given: {have}"
        raise options.UserError(f"{where}: want a text or a number under {key!r}; {found}")
      if value == "":
        raise options.UserError(f"{where}: the text under {key!r} is empty")
      texts[key] = str(value)
    problems.append(
      task.Problem(
        texts["prompt"],
        texts["answer"],
        demonstration=str(entry.get("demonstration", texts["answer"])),
        detail=entry,
        name=where,
      )
    )
  if not problems:
    raise options.UserError(f"{path}: holds no problem; want lines of {{prompt, answer}}")
  return problems


class JsonLinesTask(task.Task):
  """Prompts with answers from a file; exact match."""

  name = "json_lines"

  def __init__(self, path: str, held_out_path: str | None = None):
    """Reads the files.

    Args:
      path: Problems to train on (and to hold some of out).
      held_out_path: Held-out problems; every line of `path` trains when given.

    Raises:
      options.UserError: As `read_problems`; or a held-out prompt that is also trained on.
    """
    problems = read_problems(path)
    if held_out_path is not None:
      self._train, self._held_out = problems, read_problems(held_out_path, "held_out_prompts")
      shared = {p.question for p in self._train} & {p.question for p in self._held_out}
      if shared:
        raise options.UserError(
          f"{held_out_path}: {len(shared)} of its prompts are in {path} too, such as "
          f"{min(shared)!r:.60}; a held-out prompt must not be trained on"
        )
    else:
      side = [task.stable_uniform("held-out", p.question) % _HELD_OUT_OF == 0 for p in problems]
      self._held_out = [p for p, held in zip(problems, side) if held]
      self._train = [p for p, held in zip(problems, side) if not held]
      if not self._train or not self._held_out:
        raise options.UserError(
          f"{path}: its {len({p.question for p in problems})} different prompts are too few to "
          f"hold some out (one in {_HELD_OUT_OF}, by a hash of the prompt); give a second file with "
          "--held_out_prompts"
        )

  def file_problems(self) -> list[task.Problem]:
    return [*self._train, *self._held_out]

  @property
  def held_out_size(self) -> int:
    return len(self._held_out)

  @property
  def train_size(self) -> int:
    return len(self._train)

  def train_problem(self, seed: int, index: int) -> task.Problem:
    # Every epoch is a fresh permutation: all problems are seen equally often.
    epoch, place = divmod(index, len(self._train))
    order = _permutation(len(self._train), seed, epoch)
    return self._train[order[place]]

  def held_out_problem(self, index: int) -> task.Problem:
    return self._held_out[index]

  def score(self, problem: task.Problem, completion: str) -> float:
    return task.exact_match(problem.answer, completion)


_permutations: dict[tuple[int, int, int], list[int]] = {}


def _permutation(size: int, seed: int, epoch: int) -> list[int]:
  key = (size, seed, epoch)
  if key not in _permutations:
    _permutations.clear()  # One epoch at a time is read.
    _permutations[key] = sorted(
      range(size), key=lambda i: task.stable_uniform("order", seed, epoch, i)
    )
  return _permutations[key]


class CommandTask(JsonLinesTask):
  """Prompts from a file, judged by a command of the user's.

  The command reads one JSON object {prompt, answer, completion, ...the line's other keys} from
  standard input and prints a reward in [0, 1].  It runs where the trainer's command was typed.
  """

  name = "command"
  exact = False

  def __init__(self, path: str, command: str, held_out_path: str | None = None):
    """As `JsonLinesTask`, with the command line of the verifier."""
    super().__init__(path, held_out_path)
    self._command = shlex.split(command)
    directory = os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd())
    program = self._command[0] if self._command else ""
    # A name with a slash is seen from where the command was typed, as when it runs.
    found = os.path.join(directory, program) if "/" in program else program
    if shutil.which(found) is None:
      raise options.UserError(
        f"--verifier_command={command}: there is no program {program!r}; give one that can be run"
      )

  def score(self, problem: task.Problem, completion: str) -> float:
    entry = {**problem.detail, "prompt": problem.question, "answer": problem.answer}
    entry["completion"] = completion
    try:
      done = subprocess.run(
        self._command,
        cwd=os.environ.get("BUILD_WORKING_DIRECTORY"),
        input=json.dumps(entry),
        capture_output=True,
        text=True,
        timeout=_VERIFIER_SECONDS,
        check=True,
      )
    except subprocess.TimeoutExpired:
      raise self._wrong(f"printed nothing in {_VERIFIER_SECONDS:g} s") from None
    except subprocess.CalledProcessError as error:
      last = error.stderr.strip().splitlines()[-1:] or ["no message"]
      raise self._wrong(f"ended with status {error.returncode} ({last[0]:.200})") from None
    except OSError as error:
      raise self._wrong(f"cannot be run ({error.strerror})") from None
    try:
      reward = float(done.stdout.strip())
    except ValueError:
      raise self._wrong(f"printed {done.stdout.strip()!r:.80}") from None
    if not 0.0 <= reward <= 1.0:
      raise self._wrong(f"printed {reward}")
    return reward

  def _wrong(self, found: str) -> options.UserError:
    return options.UserError(
      f"--verifier_command={shlex.join(self._command)}: {found}; want one number from 0 to 1 on "
      "standard output, and status 0"
    )
