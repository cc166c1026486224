"""Runs a configuration for a few steps and keeps what the gates look at."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.base import options
from model import api
from model import config as model_config
from model.sharded.options import ShardedOptions
from rl import config as rl_config
from rl import mesh_step, optimizer, packing, placed, train_step
from tools.bench import synthetic
from tools.numerics import gates
from tools.numerics.problem import differences


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
  params: Any = None,
) -> Problem:
  """Draws rows and random advantages, and records old log-probs once from the reference.

  Args:
    settings: Of the reference.
    steps: Steps of the comparison.
    lengths: Lengths of segments.
    routing: Routed experts to replay, so that both runs route alike.
    config: A model in place of the one that the settings name, with random weights.
    params: Its weights in place of random ones, float32.

  Raises:
    options.UserError: A file is missing, or routing is asked of a dense model.
  """
  config = config or model_of(settings)
  batch = settings.of(rl_config.BatchOptions)
  if params is not None:
    pass
  elif settings.checkpoint:
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
  arm = _arm(config, settings)
  weights = _state(arm, config, params, settings).weights
  score = lambda batch: arm.programs.log_probs(weights, placed.place_batch(batch, arm.layout))
  # A program is compiled for what a batch holds: none for batches that lack old log-probs.
  made = [[_with_old(b, np.zeros_like(b.loss_mask)) for b in batches] for batches in made]
  recorded = tuple(tuple(_with_old(b, score(b).logprobs) for b in batches) for batches in made)
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


class _Arm(NamedTuple):
  """A configuration's programs.

  Attributes:
    functions: Plain.
    programs: Compiled.
    layout: Where their arrays lie.
  """

  functions: train_step.StepFunctions
  programs: train_step.StepFunctions
  layout: placed.Layout


@functools.lru_cache(maxsize=2)
def _made(config, model_options, loss, optimizer_options, mesh, sharded) -> _Arm:
  """Runs of one configuration share what was compiled."""
  layout = placed.layout_of(config, model_options, mesh, sharded)
  given = (config, model_options, loss, optimizer_options, layout)
  return _Arm(placed.make_functions(*given), placed.compile_programs(*given), layout)


def _arm(config: model_config.ModelConfig, settings: options.Settings) -> _Arm:
  return _made(
    config,
    settings.of(model_config.ModelOptions),
    _loss_options(settings),
    settings.of(rl_config.OptimizerOptions),
    settings.mesh,
    settings.of(ShardedOptions),
  )


def _state(arm: _Arm, config: model_config.ModelConfig, params: Any, settings: options.Settings):
  abstract = api.abstract_params(config, settings.of(model_config.ModelOptions))
  state = optimizer.init_state(
    jax.tree.map(jnp.copy, params),
    settings.of(rl_config.OptimizerOptions),
    weight_dtypes=jax.tree.map(lambda s: s.dtype, abstract),
  )
  if arm.layout is None:
    return state
  # From the host: to cut an array that lies on a device takes a program for each.
  return jax.device_put(jax.device_get(state), arm.layout.state(state))


def _counters(
  found: dict[str, float], counted: float, batches: Sequence[packing.PackedBatch]
) -> dict[str, float]:
  """The step's counters of `gates`, and `REPLAYED` where micro-batches can be run again.

  A token is lost where a pair of it and an expert found no row in the micro-batch that counted, or
  where it is missing from the denominator that the loss is divided by.
  """
  tokens = sum(float(b.loss_mask.sum()) for b in batches)
  lost = abs(tokens - counted) + found.get(mesh_step.DROPPED, 0.0)
  out = {name: found[name] for name in gates.COUNTERS if name in found}
  if mesh_step.DISCARDED in found:
    out[gates.REPLAYED] = found[mesh_step.DISCARDED]
  return out | {gates.LOST: lost}


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
  arm = _arm(problem.config, settings)
  programs, layout = arm.programs, arm.layout
  state = _state(arm, problem.config, problem.params, settings)
  rows = len(problem.steps[0][0].tokens)
  order = np.arange(rows) if row_order is None else np.asarray(row_order)
  back = np.argsort(order)
  hyper = optimizer.hyper_parameters(
    settings.of(rl_config.OptimizerOptions), 1, rows * len(problem.steps[0])
  )
  out: list[gates.Step] = []
  empty = None
  for batches in problem.steps:
    moved = [placed.place_batch(jax.tree.map(lambda x: x[order], b), layout) for b in batches]
    weights = train_step.step_weights(programs, state.weights)
    if empty is None:
      empty = train_step.no_micro_batch(arm.functions, weights, moved[0])
    sums = jax.device_put(empty, None if layout is None else layout.sums(empty))
    logprobs = []
    for before, batch in zip(batches, moved):
      values = np.asarray(programs.log_probs(state.weights, batch).logprobs)[back]
      logprobs.append(values[before.loss_mask > 0])
      sums = programs.accumulate(weights, sums, batch)
    counted = float(sums.denominators.tokens)
    whole = placed.whole_gradients(jax.device_get(sums), layout)
    gradients = {
      optimizer.path_name(path): np.asarray(g) / max(counted, 1.0)
      for path, g in jax.tree_util.tree_leaves_with_path(whole)
    }
    state, metrics = programs.update(state, sums, hyper)
    found = train_step.host_metrics(metrics)
    out.append(
      gates.Step(
        loss=found["loss"],
        grad_norm=found["grad_norm"],
        logprobs=np.concatenate(logprobs),
        gradients=gradients,
        counters=_counters(found, counted, batches),
      )
    )
  return out


def save(path: str, shared: Mapping[str, str], steps: Sequence[gates.Step]) -> None:
  """Writes a run as a recorded reference (.npz).

  Args:
    path: File to write.
    shared: What the problem was made from; a comparison must be of the same.
    steps: The run.
  """
  arrays: dict[str, Any] = {
    "problem": np.array(json.dumps(dict(shared))),
    "steps": np.array(len(steps)),
  }
  for number, step in enumerate(steps):
    arrays[f"{number}|scalars"] = np.array([step.loss, step.grad_norm])
    arrays[f"{number}|logprobs"] = step.logprobs
    for name, value in step.counters.items():
      arrays[f"{number}|counter|{name}"] = np.array(value)
    for name, gradient in step.gradients.items():
      arrays[f"{number}|gradient|{name}"] = gradient
  with open(path, "wb") as file:
    np.savez_compressed(file, **arrays)


def load(path: str, shared: Mapping[str, str]) -> list[gates.Step]:
  """Reads a recorded reference.

  Raises:
    options.UserError: It is missing, or of another problem.
  """
  if not pathlib.Path(path).is_file():
    raise options.UserError(f"{path}: no such recorded reference; --record writes one")
  try:
    with np.load(path) as file:
      found = {name: file[name] for name in file}
    recorded, count = json.loads(str(found["problem"])), int(found["steps"])
    changed = differences(recorded, shared)
  except (
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    EOFError,
    OSError,
    zipfile.BadZipFile,
    zlib.error,
  ):
    raise options.UserError(f"{path}: is no recorded reference; --record writes one") from None
  if changed:
    raise options.UserError(f"{path} was recorded on other rows or another model: {changed}")
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
