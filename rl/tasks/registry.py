"""Task names of the command line -> tasks."""

from __future__ import annotations

from kernels.base import options
from rl.tasks import arithmetic, json_lines, task

_FILE_TASKS = ("json_lines", "command", "math_verify")


def names() -> list[str]:
  """Every name that `make` takes, the open-ended one last."""
  return [*arithmetic.FAMILIES, *_FILE_TASKS, "reasoning_gym:DATASET"]


def check_name(name: str) -> str | None:
  """What is wrong with a task's name, or None."""
  if name in arithmetic.FAMILIES or name in _FILE_TASKS:
    return None
  if name.startswith("reasoning_gym:") and name != "reasoning_gym:":
    return None
  close = options.nearest(name, names())
  return f"no such task, the nearest is {close}; there are {', '.join(names())}"


def make(
  name: str,
  *,
  prompts: str | None = None,
  held_out_prompts: str | None = None,
  verifier_command: str | None = None,
) -> task.Task:
  """Makes a task.

  Args:
    name: A name that `check_name` accepts.
    prompts: File of {prompt, answer}, for the tasks that read one.
    held_out_prompts: File of held-out problems.
    verifier_command: Command line that judges, for the task `command`.

  Raises:
    options.UserError: An unknown name, a missing or malformed file, a package not installed.
  """
  if wrong := check_name(name):
    raise options.UserError(f"--task={name}: {wrong}")
  if name in arithmetic.FAMILIES:
    return arithmetic.ArithmeticTask(name)
  if name.startswith("reasoning_gym:"):
    from rl.tasks import adapters

    return adapters.ReasoningGymTask(name.removeprefix("reasoning_gym:"))
  if prompts is None:
    raise options.UserError(f"--task={name} reads its problems from a file; give --prompts")
  if name == "json_lines":
    return json_lines.JsonLinesTask(prompts, held_out_prompts)
  if name == "command":
    if verifier_command is None:
      raise options.UserError("--task=command needs --verifier_command")
    return json_lines.CommandTask(prompts, verifier_command, held_out_prompts)
  from rl.tasks import adapters

  return adapters.MathVerifyTask(prompts, held_out_prompts)
