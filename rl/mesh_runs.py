"""Short runs of the trainer on recorded trajectories: what its tests on meshes share."""

from __future__ import annotations

import pathlib

import jax
import numpy as np

from kernels.base import cli, options
from rl import loop, recipes, refusals, rollouts, setup, trainer_options, trajectory

SMALL = (
  "--warmup_steps=0 --max_steps=2 --prompts_per_step=4 --generations_per_prompt=4 "
  "--micro_batch_rows=2 --max_segments_per_row=4 --checkpoint_every=1 --sampler_slots=16 "
  "--prefill_rows=4 --eval_problems=8 --eval_greedy=false"
).split()


def settings_of(*flags: str) -> options.Settings:
  """Settings of the trainer's command line."""
  argv = recipes.expand(["trainer", "--recipe=sort", *SMALL, *flags])
  return cli.parse(argv, trainer_options.COMPONENTS, rules=refusals.RULES, environ={})


def train(*flags: str) -> tuple[setup.Setup, loop.Loop, list[str]]:
  """Runs a loop; its parts, itself, and what it said."""
  said: list[str] = []
  parts = setup.build(settings_of(*flags))
  training = loop.Loop(parts, say=said.append)
  assert training.run()
  return parts, training, said


def bits(weights) -> list[bytes]:
  """Every parameter as it lies in memory."""
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(weights)]


def distance(a, b) -> float:
  """Relative L2 distance over all parameters."""
  pairs = [
    (np.asarray(x, np.float64), np.asarray(y, np.float64))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  ]
  apart = sum(np.sum((x - y) ** 2) for x, y in pairs)
  return float(np.sqrt(apart / sum(np.sum(x**2) for x, _ in pairs)))


def record(directory: pathlib.Path) -> str:
  """A flag: two steps of trajectories of random tokens with random rewards."""
  rng = np.random.default_rng(0)
  path = directory / "rollouts.jsonl"
  writer = rollouts.Writer(str(path))
  for step in (1, 2):
    batch = []
    for index in range(16):
      length = int(rng.integers(3, 7))
      batch.append(
        trajectory.Trajectory(
          group_id=index // 4,
          prompt_ids=rng.integers(0, 10, 5).astype(np.int32),
          completion_ids=rng.integers(0, 10, length).astype(np.int32),
          loss_mask=np.ones(length, np.float32),
          sampler_logprobs=np.full(length, -5.5, np.float32),
          reward=float(rng.random()),
          step=step,
        )
      )
    writer.write(batch)
  writer.close()
  return f"--rollouts={path}"
