"""Recipes: sets of flags that stand before those of the command line.

A recipe says nothing that the command line cannot: `--recipe=sort --learning_rate=1e-4` is the
recipe's flags with another learning rate.  Without JAX.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from kernels.base import cli

# Small float32 models on a CPU: short rows, small chunks, no recomputation, everything trained
# but the router.
_SMALL = {
  "dtype": "float32",
  "remat_policy": "none",
  "gdn_chunk_size": "16",
  "max_prompt_tokens": "8",
  "max_completion_tokens": "6",
  "row_tokens": "80",
  "max_segments_per_row": "8",
  "logps_chunk_size": "1024",
}

# Rewards minus the mean of the group's others, as they are; an entropy bonus keeps the samples of
# a prompt apart, and the falling learning rate lets the score settle; sampler and trainer are the
# same float32 model, so that the correction is idle.
_POLICY = {
  "advantage_estimator": "rloo",
  # A sample that does not end is a failure, not an accident of the length limit.
  "overlong_filtering": "false",
  "truncated_importance_sampling_type": "tis",
  "adam_b2": "0.95",
  "gradient_clip": "0.5",
}

RECIPES: dict[str, dict[str, str]] = {
  "sort": {
    **_SMALL,
    **_POLICY,
    "task": "sort4",
    "prompts_per_step": "32",
    "generations_per_prompt": "8",
    "micro_batch_rows": "40",
    "learning_rate": "6e-4",
    "learning_rate_decay_steps": "280",
    "entropy_bonus": "0.02",
    "warmup_steps": "300",
    "max_steps": "240",
    "eval_every": "40",
  },
  "add": {
    **_SMALL,
    **_POLICY,
    "task": "add2",
    "prompts_per_step": "64",
    "generations_per_prompt": "8",
    "micro_batch_rows": "74",
    "learning_rate": "6e-4",
    "learning_rate_decay_steps": "300",
    "entropy_bonus": "0.02",
    "warmup_steps": "600",
    "max_steps": "250",
    "eval_every": "50",
  },
  # From a checkpoint: no warm-up, small steps; sizes for a first try on one machine.
  "finetune": {
    **_POLICY,
    "prompts_per_step": "16",
    "generations_per_prompt": "8",
    "row_tokens": "2048",
    "micro_batch_rows": "2",
    "learning_rate": "1e-5",
    "max_prompt_tokens": "256",
    "max_completion_tokens": "256",
    "sampler_slots": "64",
    "eval_problems": "200",
    "max_steps": "20",
  },
  # Recorded trajectories: the options' own defaults but for rows that a laptop can hold.
  "recorded": {"row_tokens": "2048", "micro_batch_rows": "4"},
  "none": {},
}


def given(argv: Sequence[str], name: str) -> str | None:
  """The value of flag `name` on a command line, the last one given; None when absent."""
  value = None
  for place, argument in enumerate(argv):
    flag, equals, rest = argument.partition("=")
    if flag in (f"--{name}", f"-{name}"):
      value = rest if equals else (argv[place + 1] if place + 1 < len(argv) else "")
  return value


def choose(argv: Sequence[str]) -> str:
  """The recipe that a command line asks for, by name or by what it starts from."""
  name = given(argv, "recipe")
  if name:
    return name
  if given(argv, "rollouts"):
    return "recorded"
  return "finetune" if given(argv, "checkpoint") else "sort"


def expand(argv: Sequence[str]) -> list[str]:
  """The command line with its recipe's flags before the given ones; a later flag wins.

  An unknown name, or a flag file that cannot be read, is left for the flags' own check.
  """
  try:
    argv = cli.expand_flag_files(argv)
  except flags.Error:
    return list(argv)
  first = RECIPES.get(choose(argv), {})
  return [argv[0], *(f"--{k}={v}" for k, v in first.items()), *argv[1:]]
