"""A training step as three programs of static shapes.

1. `first_micro_batch(weights, batch)` makes the accumulators of a step from its first micro-batch.
2. `accumulate(weights, accumulators, batch)` adds another one; the accumulators are donated.
3. `update(state, accumulators, hyper)` divides once, clips, updates; the state is donated.

Beside them `log_probs(weights, batch)` scores a micro-batch without gradients: old and reference
log-probs, evaluation.

Accumulated is the gradient of the UNREDUCED sum of token losses, in float32, with the denominators
and the metrics' sums beside it.  So the result does not depend on how a step's rows were packed or
split.  Only trained parameters are differentiated; a frozen one costs no gradient.

    functions = make_functions(model_config, model_options, loss_options, optimizer_options)
    programs = compile_programs(functions)
    state = optimizer.init_state(params, optimizer_options)
    state, metrics = run_step(programs, state, batches, hyper)

The functions are plain, so that an ahead-of-time compilation or a benchmark can jit them itself,
with shardings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.base.options import UserError
from kernels.logprob_head import op as logprob_head
from model import api, placement
from model.config import ModelConfig, ModelOptions
from rl import losses, optimizer, step_metrics
from rl.config import LossOptions, OptimizerOptions
from rl.losses import LossInputs
from rl.optimizer import HyperParameters, TrainState, Tree
from rl.packing import PackedBatch
from rl.step_metrics import Denominators, Metric
from rl.trajectory import Trajectory


class Accumulators(NamedTuple):
  """Sums of a step so far.

  Attributes:
    gradients: float32 gradients of the unreduced loss, None where a parameter is frozen.
    denominators: Valid tokens and sequences so far.
    metrics: Metrics' sums and extremes so far.
  """

  gradients: Tree
  denominators: Denominators
  metrics: dict[str, Metric]


class Scores(NamedTuple):
  """Log-probs of a micro-batch's tokens; 0 at a segment's first token and on padding.

  Attributes:
    logprobs: Of each token given its segment's tokens before it, in nats, at the loss's
      temperature.
    entropies: Of the distribution that each token was drawn from.
  """

  logprobs: Float[Array, "R S"]
  entropies: Float[Array, "R S"]


@dataclasses.dataclass(frozen=True)
class StepFunctions:
  """The programs as plain functions; see the module's text.

  Attributes:
    first_micro_batch: (weights, batch) -> Accumulators.
    accumulate: (weights, accumulators, batch) -> Accumulators.
    update: (state, accumulators, hyper) -> (state, metrics).
    log_probs: (weights, batch) -> Scores.
    prepare: weights -> what the step's micro-batches use instead of some of them, None elsewhere;
      None where they use the weights as they are.
  """

  first_micro_batch: Callable[[Tree, PackedBatch], Accumulators]
  accumulate: Callable[[Tree, Accumulators, PackedBatch], Accumulators]
  update: Callable[[TrainState, Accumulators, HyperParameters], tuple[TrainState, dict[str, Array]]]
  log_probs: Callable[[Tree, PackedBatch], Scores]
  prepare: Callable[[Tree], Tree] | None = None


def score(
  config: ModelConfig,
  options: ModelOptions,
  params: Tree,
  batch: PackedBatch,
  *,
  temperature: float,
  token_chunk: int,
) -> Scores:
  """Runs the model and the log-prob head over packed rows.

  The state at a token predicts the next one, so targets are the tokens moved one place left and
  results are moved one place right.  A place whose next token is of another segment, padding or
  outside the row predicts nothing: nothing crosses a segment and nothing wraps around.

  Args:
    config: The model.
    options: How to compute it.
    params: Parameters.
    batch: Packed rows.
    temperature: Logits are divided by it.
    token_chunk: Tokens per chunk of the head.
  """
  inputs = api.ModelInputs(batch.tokens, batch.segment_ids, batch.positions, batch.routed_experts)
  hidden = api.forward(config, options, params, inputs).hidden
  rows, length = batch.tokens.shape
  targets = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))

  def head(hidden, targets, table):
    return logprob_head.logprob_head(
      hidden.reshape(targets.size, -1),
      table,
      targets.reshape(-1),
      temperature=temperature,
      token_chunk=token_chunk,
      implementation=options.kernel_implementation,
    )

  with jax.named_scope("head"):
    logprobs, entropies = placement.over_rows(
      head, (hidden, targets), (api.head_table(params),), split=(1,)
    )
  place = lambda values: at_token(values.reshape(rows, length), batch.segment_ids)
  return Scores(place(logprobs), place(entropies))


def at_token(values: Float[Array, "R S"], segment_ids: Int[Array, "R S"]) -> Float[Array, "R S"]:
  """Moves what each place says of the next token to that token.

  It is 0 on a token that no token of its own segment stands before.
  """
  shift = lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
  predicted = (segment_ids > 0) & (segment_ids == shift(segment_ids))
  return jnp.where(predicted, shift(values), 0.0)


def batch_loss(scores: Scores, batch: PackedBatch, options: LossOptions) -> losses.LossOutputs:
  """The loss of a micro-batch from its scores."""
  inputs = LossInputs(
    logprobs=scores.logprobs,
    entropies=scores.entropies,
    loss_mask=batch.loss_mask,
    advantages=batch.advantages,
    sampler_logprobs=batch.sampler_logprobs,
    old_logprobs=batch.old_logprobs,
    reference_logprobs=batch.reference_logprobs,
    segment_ids=batch.segment_ids,
    segment_valid=batch.segment_valid,
    segment_truncated=batch.segment_truncated,
  )
  return losses.compute_loss(inputs, options, length_norm=float(batch.tokens.shape[1]))


def add(accumulators: Accumulators, new: Accumulators) -> Accumulators:
  """Sums of a step with those of another micro-batch."""
  return Accumulators(
    gradients=jax.tree.map(jnp.add, accumulators.gradients, new.gradients),
    denominators=jax.tree.map(jnp.add, accumulators.denominators, new.denominators),
    metrics=step_metrics.merge(accumulators.metrics, new.metrics),
  )


def no_micro_batch(functions: StepFunctions, weights: Tree, batch: PackedBatch) -> Accumulators:
  """Sums of no micro-batch, on the host: `accumulate` then does for the first one as well.

  Args:
    functions: Plain ones.
    weights: What the programs take, or its shapes.
    batch: A micro-batch, for its shape.
  """
  shapes = jax.eval_shape(functions.first_micro_batch, weights, batch)
  empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  is_metric = lambda x: isinstance(x, Metric)
  metrics = jax.tree.map(step_metrics.neutral, shapes.metrics, is_leaf=is_metric)
  return empty._replace(metrics=jax.device_get(metrics))


def finish(
  state: TrainState,
  accumulators: Accumulators,
  hyper: HyperParameters,
  loss_options: LossOptions,
  optimizer_options: OptimizerOptions,
) -> tuple[TrainState, dict[str, Array]]:
  """The update of a step from its sums, and the step's metrics."""
  divisor = accumulators.denominators.of(losses.normalizer(loss_options))
  gradients = jax.tree.map(lambda g: g / divisor, accumulators.gradients)
  with jax.named_scope("optimizer"):
    state, info = optimizer.apply_update(state, gradients, hyper, optimizer_options)
  metrics = step_metrics.finalise(accumulators.metrics, accumulators.denominators)
  metrics["grad_norm"] = info.grad_norm
  metrics["update_applied"] = info.applied.astype(jnp.float32)
  metrics["skipped_steps"] = state.skipped.astype(jnp.float32)
  metrics["learning_rate"] = hyper.learning_rate
  return state, metrics


def make_functions(
  config: ModelConfig,
  model_options: ModelOptions,
  loss_options: LossOptions,
  optimizer_options: OptimizerOptions,
) -> StepFunctions:
  """Builds the programs for a model and a loss.

  Args:
    config: The model.
    model_options: How to compute it.
    loss_options: Loss, temperature, head chunk.
    optimizer_options: Mask and AdamW's constants.

  Raises:
    UserError: The mask of trained parameters matches none.
  """
  mask = optimizer.trainable_mask(api.abstract_params(config, model_options), optimizer_options)

  def log_probs(weights: Tree, batch: PackedBatch) -> Scores:
    return score(
      config,
      model_options,
      weights,
      batch,
      temperature=loss_options.temperature,
      token_chunk=loss_options.logps_chunk_size,
    )

  def micro_batch(weights: Tree, batch: PackedBatch) -> Accumulators:
    frozen = optimizer.select(weights, jax.tree.map(lambda on: not on, mask))

    def loss_sum(trained: Tree):
      scores = log_probs(optimizer.combine(trained, frozen), batch)
      outputs = batch_loss(scores, batch, loss_options)
      return outputs.loss_sum, outputs

    gradients, outputs = jax.grad(loss_sum, has_aux=True)(optimizer.select(weights, mask))
    return Accumulators(
      gradients=jax.tree.map(lambda g: g.astype(jnp.float32), gradients),
      denominators=outputs.denominators,
      metrics=outputs.metrics,
    )

  def accumulate(weights: Tree, accumulators: Accumulators, batch: PackedBatch) -> Accumulators:
    return add(accumulators, micro_batch(weights, batch))

  def update(
    state: TrainState, accumulators: Accumulators, hyper: HyperParameters
  ) -> tuple[TrainState, dict[str, Array]]:
    return finish(state, accumulators, hyper, loss_options, optimizer_options)

  return StepFunctions(
    first_micro_batch=micro_batch, accumulate=accumulate, update=update, log_probs=log_probs
  )


def compile_programs(functions: StepFunctions) -> StepFunctions:
  """Jits the functions, with what a step is done with donated.

  A program compiles once for each shape of its arguments, so a run compiles each of them once.
  """
  return StepFunctions(
    first_micro_batch=jax.jit(functions.first_micro_batch),
    accumulate=jax.jit(functions.accumulate, donate_argnums=1),
    update=jax.jit(functions.update, donate_argnums=0),
    log_probs=jax.jit(functions.log_probs),
    prepare=None if functions.prepare is None else jax.jit(functions.prepare),
  )


def step_weights(programs: StepFunctions, weights: Tree) -> Tree:
  """What the micro-batches of a step take as weights: made once a step."""
  if programs.prepare is None:
    return weights
  return optimizer.combine(programs.prepare(weights), weights)


def run_step(
  programs: StepFunctions,
  state: TrainState,
  batches: Iterable[PackedBatch],
  hyper: HyperParameters,
) -> tuple[TrainState, dict[str, Array]]:
  """One update from a step's micro-batches.

  Args:
    programs: Compiled programs.
    state: Donated.
    batches: At least one micro-batch, all of one shape.
    hyper: Learning rate and clip.

  Returns:
    The state after, and the step's metrics on device.

  Raises:
    ValueError: There is no micro-batch.
  """
  accumulators = None
  weights = step_weights(programs, state.weights)
  for batch in batches:
    if accumulators is None:
      accumulators = programs.first_micro_batch(weights, batch)
    else:
      accumulators = programs.accumulate(weights, accumulators, batch)
  del weights  # the state is donated
  if accumulators is None:
    raise ValueError("a step needs at least one micro-batch; pack() gives one even for no rows")
  return programs.update(state, accumulators, hyper)


def old_logprobs_source(
  options: LossOptions, trajectories: Sequence[Trajectory], policy_version: int
) -> str:
  """Where a batch's old log-probs come from.

  Args:
    options: The loss.
    trajectories: The batch.
    policy_version: Version of the trainer's weights now.

  Returns:
    "none" (forced ratio, or a loss without one), "batch" or "recompute".

  Raises:
    UserError: Recorded ones are asked for and absent; or old log-probs would be the current
      policy's for trajectories of an older one with nothing to correct for it.  The ratio would
      then be 1 whatever the policy that sampled them, a silent bias.
  """
  if options.loss == "sft":
    return "none"
  if options.force_on_policy_ratio:
    source = "none"
  else:
    lacking = [t.called(i) for i, t in enumerate(trajectories) if t.old_logprobs is None]
    if options.old_logprobs == "batch" and lacking:
      raise UserError(
        f"{lacking[0]} has no old_logprobs; record them, or use --old_logprobs=recompute"
      )
    recorded = options.old_logprobs == "batch" or (options.old_logprobs == "auto" and not lacking)
    source = "batch" if recorded else "recompute"
  if source != "batch" and not options.use_importance_sampling_correction:
    for index, one in enumerate(trajectories):
      if one.policy_version < policy_version:
        raise UserError(
          f"{one.called(index)} was sampled by policy version {one.policy_version} and is trained "
          f"at {policy_version}, but its old log-probs would be the current policy's; use "
          "--use_importance_sampling_correction=true (or a truncated type), or record old_logprobs "
          "and use --old_logprobs=batch"
        )
  return source


def with_old_logprobs(
  programs: StepFunctions, weights: Tree, batches: Sequence[PackedBatch]
) -> list[PackedBatch]:
  """Fills `old_logprobs` of a step's batches by a forward pass of the given weights."""
  return [b._replace(old_logprobs=programs.log_probs(weights, b).logprobs) for b in batches]


def with_reference_logprobs(
  programs: StepFunctions, reference_weights: Tree, batches: Sequence[PackedBatch]
) -> list[PackedBatch]:
  """Fills `reference_logprobs` of a step's batches by a forward pass of the reference policy."""
  return [
    b._replace(reference_logprobs=programs.log_probs(reference_weights, b).logprobs)
    for b in batches
  ]


def host_metrics(metrics: dict[str, Any]) -> dict[str, float]:
  """Metrics as Python floats; waits for the device."""
  return {name: float(np.asarray(value)) for name, value in jax.device_get(metrics).items()}
