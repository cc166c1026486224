"""Runs a configuration for a few steps and keeps what the gates look at."""

from __future__ import annotations

import dataclasses
import pathlib
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.base import options
from model import api
from model import config as model_config
from model.sharded.options import ShardedOptions
from rl import config as rl_config
from rl import optimizer, packing, placed, train_step
from tools.bench import synthetic
from tools.numerics import gates


@dataclasses.dataclass(frozen=True)
class Problem:
  """What both runs share.

  Attributes:
    config: The model.
    params: Its initial weights, float32.
    steps: Micro-batches of each step, with old log-probs.
  """

  config: model_config.ModelConfig
  params: Any
  steps: tuple[tuple[packing.PackedBatch, ...], ...]


def model_of(settings: options.Settings) -> model_config.ModelConfig:
  """The model that the settings name."""
  if settings.checkpoint:
    return model_config.ModelConfig.from_file(settings.checkpoint)
  return model_config.preset(settings.model_preset)


def make_problem(
  settings: options.Settings,
  *,
  steps: int,
  lengths: synthetic.Lengths,
  routing: synthetic.Routing,
  config: model_config.ModelConfig | None = None,
) -> Problem:
  """Draws rows and random advantages, and records old log-probs once from the reference.

  Args:
    settings: Of the reference.
    steps: Steps of the comparison.
    lengths: Lengths of segments.
    routing: Routed experts to replay, so that both runs route alike.
    config: A model in place of the one that the settings name, with random weights.

  Raises:
    options.UserError: A file is missing, or routing is asked of a dense model.
  """
  config = config or model_of(settings)
  batch = settings.of(rl_config.BatchOptions)
  model_options = settings.of(model_config.ModelOptions)
  if settings.checkpoint:
    from model.checkpoint import loading

    _, params = loading.load_params(settings.checkpoint, config, dtype="float32")
  else:
    plain = model_config.ModelOptions(dtype="float32", weight_dtype="float32")
    params = jax.jit(lambda k: api.init_params(config, plain, k))(jax.random.key(settings.seed))
  made = [
    synthetic.make(
      seed=settings.seed + number,
      micro_batches=batch.num_micro_batches or 1,
      rows=batch.micro_batch_rows,
      row_tokens=batch.row_tokens,
      max_segments=batch.max_segments_per_row,
      vocab_size=config.vocab_size,
      lengths=lengths,
      routing=routing,
      layers=config.num_hidden_layers,
      experts=config.num_experts,
      top_k=config.num_experts_per_tok,
    ).batches
    for number in range(steps)
  ]
  programs = _programs(config, settings)
  weights = _state(config, params, settings, model_options).weights
  recorded = tuple(
    tuple(_with_old(b, programs.log_probs(weights, b).logprobs) for b in batches)
    for batches in made
  )
  return Problem(config, params, recorded)


def _with_old(batch: packing.PackedBatch, logprobs: Any) -> packing.PackedBatch:
  old = np.asarray(logprobs, np.float32) * batch.loss_mask
  return batch._replace(old_logprobs=old, sampler_logprobs=old)


def _loss_options(settings: options.Settings) -> rl_config.LossOptions:
  """The settings' loss with every gate of its own off, and dependent on the policy."""
  return dataclasses.replace(
    settings.of(rl_config.LossOptions),
    force_on_policy_ratio=False,
    overlong_filtering=False,
    seq_logprob_error_threshold=None,
    truncated_importance_sampling_type="none",
  )


def _programs(
  config: model_config.ModelConfig, settings: options.Settings
) -> train_step.StepFunctions:
  return placed.compile_programs(
    config,
    settings.of(model_config.ModelOptions),
    _loss_options(settings),
    settings.of(rl_config.OptimizerOptions),
    _layout(config, settings),
  )


def _layout(config: model_config.ModelConfig, settings: options.Settings) -> placed.Layout:
  model_options = settings.of(model_config.ModelOptions)
  return placed.layout_of(config, model_options, settings.mesh, settings.of(ShardedOptions))


def _state(
  config: model_config.ModelConfig,
  params: Any,
  settings: options.Settings,
  model_options: model_config.ModelOptions,
):
  abstract = api.abstract_params(config, model_options)
  state = optimizer.init_state(
    jax.tree.map(jnp.copy, params),
    settings.of(rl_config.OptimizerOptions),
    weight_dtypes=jax.tree.map(lambda s: s.dtype, abstract),
  )
  layout = _layout(config, settings)
  return state if layout is None else jax.device_put(state, layout.state(state))


def run(
  problem: Problem, settings: options.Settings, *, row_order: Sequence[int] | None = None
) -> list[gates.Step]:
  """Trains the problem's steps with one configuration.

  Args:
    problem: Weights and rows.
    settings: The configuration.
    row_order: Order in which the rows of each micro-batch are given; results are put back.

  Returns:
    A `gates.Step` for each step.
  """
  layout = _layout(problem.config, settings)
  programs = _programs(problem.config, settings)
  model_options = settings.of(model_config.ModelOptions)
  state = _state(problem.config, problem.params, settings, model_options)
  rows = len(problem.steps[0][0].tokens)
  order = np.arange(rows) if row_order is None else np.asarray(row_order)
  back = np.argsort(order)
  hyper = optimizer.hyper_parameters(
    settings.of(rl_config.OptimizerOptions), 1, rows * len(problem.steps[0])
  )
  out = []
  for batches in problem.steps:
    moved = [jax.tree.map(lambda x: x[order], b) for b in batches]
    weights = train_step.step_weights(programs, state.weights)
    logprobs, sums = [], None
    for before, batch in zip(batches, moved):
      values = np.asarray(programs.log_probs(state.weights, batch).logprobs)[back]
      logprobs.append(values[before.loss_mask > 0])
      if sums is None:
        sums = programs.first_micro_batch(weights, batch)
      else:
        sums = programs.accumulate(weights, sums, batch)
    assert sums is not None
    divisor = max(float(sums.denominators.tokens), 1.0)
    gradients = {
      optimizer.path_name(path): np.asarray(g) / divisor
      for path, g in jax.tree_util.tree_leaves_with_path(placed.whole_gradients(sums, layout))
    }
    state, metrics = programs.update(state, sums, hyper)
    found = train_step.host_metrics(metrics)
    out.append(
      gates.Step(
        loss=found["loss"],
        grad_norm=found["grad_norm"],
        logprobs=np.concatenate(logprobs),
        gradients=gradients,
        counters={name: found[name] for name in gates.COUNTERS if name in found},
      )
    )
  return out


def save(path: str, problem_key: str, steps: Sequence[gates.Step]) -> None:
  """Writes a run as a recorded reference (.npz).

  Args:
    path: File to write.
    problem_key: What the problem was made from; a comparison must be of the same.
    steps: The run.
  """
  arrays: dict[str, Any] = {"problem": np.array(problem_key), "steps": np.array(len(steps))}
  for number, step in enumerate(steps):
    arrays[f"{number}|scalars"] = np.array([step.loss, step.grad_norm])
    arrays[f"{number}|logprobs"] = step.logprobs
    for name, value in step.counters.items():
      arrays[f"{number}|counter|{name}"] = np.array(value)
    for name, gradient in step.gradients.items():
      arrays[f"{number}|gradient|{name}"] = gradient
  with open(path, "wb") as file:
    np.savez_compressed(file, **arrays)


def load(path: str, problem_key: str) -> list[gates.Step]:
  """Reads a recorded reference.

  Raises:
    options.UserError: It is missing, or of another problem.
  """
  if not pathlib.Path(path).is_file():
    raise options.UserError(f"{path}: no such recorded reference; --record writes one")
  try:
    with np.load(path) as file:
      found = {name: file[name] for name in file}
    recorded, count = str(found["problem"]), int(found["steps"])
  except (KeyError, TypeError, ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error):
    raise options.UserError(f"{path}: is no recorded reference; --record writes one") from None
  if recorded != problem_key:
    raise options.UserError(
      f"{path} was recorded on other rows or another model ({recorded}), this is {problem_key}"
    )
  out = []
  for number in range(count):
    pick = lambda kind, n=number: {
      name.split("|", 2)[2]: found[name] for name in found if name.startswith(f"{n}|{kind}|")
    }
    loss, norm = found[f"{number}|scalars"]
    counters = {name: float(v) for name, v in pick("counter").items()}
    step = gates.Step(
      float(loss), float(norm), found[f"{number}|logprobs"], pick("gradient"), counters
    )
    out.append(step)
  return out
