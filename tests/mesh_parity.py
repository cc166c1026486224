"""One step on a mesh beside the same step on one device: what the mesh tests share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels.base.mesh import DEVICE_ORDER, MeshShape
from model.config import ModelConfig, ModelOptions
from model.sharded.options import ShardedOptions
from rl import mesh_step, optimizer, packing, retry, train_step
from rl.config import LossOptions, OptimizerOptions

OPTIMIZER = OptimizerOptions(learning_rate=1e-3, trainable_parameters_mask="^(?!.*router).*")
LOSS = LossOptions(
  truncated_importance_sampling_type="none",
  seq_logprob_error_threshold=None,
  logps_chunk_size=32,
)
HYPER = optimizer.HyperParameters(jnp.float32(1e-3), jnp.float32(0.0))


@dataclasses.dataclass(frozen=True)
class Step:
  """What a step gave.

  Attributes:
    gradients: Summed over micro-batches and ranks, by path.
    weights: After the update, by path.
    metrics: The step's.
    tokens: Tokens that the loss is divided by.
    dropped: (token, choice) pairs that found no room in micro-batches that counted.
    discarded: Micro-batches that were run again.
  """

  gradients: dict[str, np.ndarray]
  weights: dict[str, np.ndarray]
  metrics: dict[str, float]
  tokens: float
  dropped: float = 0.0
  discarded: float = 0.0


def segments(rng, rows: int, tokens: int, limit: int):
  """Rows of up to `limit` segments of unequal lengths, some tokens of padding behind them."""
  ids, positions = np.zeros((2, rows, tokens), np.int32)
  for row in range(rows):
    at = 0
    for segment in range(1, limit + 1):
      length = int(rng.integers(3, max(4, tokens // 2)))
      if row == 0 and segment == 1:
        length = tokens // 2  # ends where a shard does
      if at + length > tokens - rng.integers(0, 5):
        break
      ids[row, at : at + length] = segment
      positions[row, at : at + length] = np.arange(length)
      at += length
  return ids, positions


def batch(
  config: ModelConfig,
  rows: int,
  tokens: int,
  seed: int,
  *,
  limit: int = 4,
  replay: str | None = None,
) -> packing.PackedBatch:
  """A micro-batch.

  Args:
    config: Gives vocabulary and experts.
    rows: Packed rows.
    tokens: Of a row.
    seed: Of everything.
    limit: Segments of a row at most.
    replay: None to route live, `some` for recorded experts on most tokens, `skewed` for the first
      experts on every token.
  """
  rng = np.random.default_rng(seed)
  ids, positions = segments(rng, rows, tokens, limit)
  mask = ((positions > 0) & (rng.random(ids.shape) < 0.8)).astype(np.float32)
  real = lambda scale: (rng.normal(size=ids.shape) * scale * mask).astype(np.float32)
  ones = np.ones((rows, limit), np.float32)
  routed = None
  if replay:
    shape = (*ids.shape, config.num_hidden_layers, config.num_experts_per_tok)
    choice = np.argsort(rng.random((*shape[:-1], config.num_experts)), axis=-1)
    routed = choice[..., : shape[-1]].astype(np.int16)
    if replay == "skewed":
      routed[:] = np.arange(shape[-1])
    else:
      routed[rng.random(ids.shape) < 0.2] = -1
    routed[ids == 0] = -1
  return packing.PackedBatch(
    tokens=rng.integers(0, config.vocab_size, ids.shape).astype(np.int32),
    segment_ids=ids,
    positions=positions,
    loss_mask=mask,
    # Of one sign: a loss that cancels to nothing has no relative error to speak of.
    advantages=np.abs(real(1.0)),
    sampler_logprobs=real(0.1) - 6.0 * mask,
    old_logprobs=None,
    reference_logprobs=None,
    routed_experts=routed,
    segment_valid=ones,
    segment_truncated=0 * ones,
    segment_reward=ones,
    segment_index=np.arange(rows * limit, dtype=np.int32).reshape(rows, limit),
  )


def mesh_of(shape: MeshShape) -> Mesh:
  """A mesh over this process's first devices."""
  devices = np.asarray(jax.devices()[: shape.devices])
  return Mesh(devices.reshape(tuple(shape.in_device_order.values())), DEVICE_ORDER)


def _by_path(tree: Any) -> dict[str, np.ndarray]:
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
  return {optimizer.path_name(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


@functools.cache
def _alone(config, model_options: ModelOptions):
  """Plain and compiled functions of one device: runs of one process share what was compiled."""
  functions = train_step.make_functions(config, model_options, LOSS, OPTIMIZER)
  return functions, train_step.compile_programs(functions)


def alone(config, model_options: ModelOptions, params, batches) -> Step:
  """The step on one device."""
  functions, programs = _alone(config, model_options)
  sums = train_step.no_micro_batch(functions, params, batches[0])
  for one in batches:
    sums = programs.accumulate(params, sums, one)
  gradients, tokens = _by_path(sums.gradients), float(sums.denominators.tokens)
  state = optimizer.init_state(jax.tree.map(jnp.copy, params), OPTIMIZER)
  state, metrics = programs.update(state, sums, HYPER)
  return Step(gradients, _by_path(state.weights), train_step.host_metrics(metrics), tokens)


@functools.cache
def _over(
  config,
  model_options: ModelOptions,
  options: ShardedOptions,
  shape: MeshShape,
  fusion_emitters: bool | None,
):
  """The same on a mesh, and the plan; with the retry, of the small buffer."""
  plan = mesh_step.make_plan(config, options, mesh_of(shape))
  functions = mesh_step.make_functions(
    config,
    model_options,
    options,
    LOSS,
    OPTIMIZER,
    plan,
    discard_overflowing=options.retry_when_tokens_dropped,
  )
  programs = train_step.compile_programs(functions)
  if fusion_emitters is not None:
    chosen = {"xla_cpu_use_fusion_emitters": fusion_emitters}
    jit = functools.partial(jax.jit, compiler_options=chosen)
    programs = dataclasses.replace(
      programs,
      accumulate=jit(functions.accumulate, donate_argnums=1),
      prepare=None if functions.prepare is None else jit(functions.prepare),
    )
  return functions, programs, plan


def on_mesh(
  config,
  model_options: ModelOptions,
  options: ShardedOptions,
  shape: MeshShape,
  params,
  batches,
  *,
  update: bool = True,
  fusion_emitters: bool | None = None,
) -> Step:
  """The step on a mesh.

  Args:
    config: The model.
    model_options: How to compute it.
    options: How it crosses the mesh.
    shape: The mesh.
    params: Weights.
    batches: Micro-batches.
    update: Without it the step's weights and metrics are empty.
    fusion_emitters: Which of XLA's emitters compile the micro-batches' program; the process's
      flags say by default.
  """
  functions, programs, plan = _over(config, model_options, options, shape, fusion_emitters)
  if options.retry_when_tokens_dropped:
    roomy = dataclasses.replace(options, ragged_buffer_factor=-1.0, retry_when_tokens_dropped=False)
    roomy = _over(config, model_options, roomy, shape, fusion_emitters)[1]
    programs = retry.Retrying(programs, roomy).programs
  # From the host: to cut an array that lies on a device takes a program for each.
  params = jax.device_get(params)
  if update:
    state = mesh_step.init_state(params, OPTIMIZER, plan)
    placed = state.weights
  else:
    placed = jax.device_put(params, plan.parameters)
  weights = train_step.step_weights(programs, placed)
  sums = train_step.no_micro_batch(functions, weights, batches[0])
  sums = jax.device_put(sums, plan.sums(sums))
  for one in batches:
    sums = programs.accumulate(weights, sums, jax.device_put(one, plan.batch(one)))
  leaves = optimizer.select(plan.layout.leaves, optimizer.trainable_mask(params, OPTIMIZER))
  whole = lambda g, leaf: g.sum(0) if leaf.unreduced else g
  host = jax.device_get(sums)
  dropped, discarded = (
    float(host.metrics[name].value) if name in host.metrics else 0.0
    for name in (mesh_step.DROPPED, mesh_step.DISCARDED)
  )
  found = Step(
    _by_path(jax.tree.map(whole, host.gradients, leaves)),
    {},
    {},
    float(host.denominators.tokens),
    dropped,
    discarded,
  )
  if not update:
    return found
  state, metrics = programs.update(state, sums, HYPER)
  metrics = train_step.host_metrics(metrics)
  return dataclasses.replace(found, weights=_by_path(state.weights), metrics=metrics)


def distances(wanted: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> dict[str, float]:
  """Relative L2 distance of every array."""
  assert wanted.keys() == found.keys()
  return {
    name: float(np.linalg.norm(found[name] - a) / max(np.linalg.norm(a), 1e-30))
    for name, a in wanted.items()
  }


def check(wanted: Step, found: Step, *, gradient: float = 1e-5, decay: float = 5e-5) -> None:
  """Raises AssertionError unless two float32 steps are one step summed in another order.

  They divide by the same count of tokens, loss and gradient norm agree to 1e-6, every gradient to `gradient`, those of the decay, which are
  heavily cancelling sums, to `decay`.
  """
  assert found.tokens == wanted.tokens
  for name in ("loss", "grad_norm"):
    np.testing.assert_allclose(found.metrics[name], wanted.metrics[name], rtol=1e-6, err_msg=name)
  for name, distance in distances(wanted.gradients, found.gradients).items():
    limit = decay if name.endswith(("A_log", "dt_bias")) else gradient
    assert distance <= limit, f"gradient of {name}: relative L2 {distance:.1e} > {limit:.0e}"
  for name, value in wanted.metrics.items():
    np.testing.assert_allclose(found.metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
