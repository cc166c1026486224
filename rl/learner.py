"""The learner: a step's trajectories in, one update and its metrics out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from model import config as model_config
from model.sharded.options import ShardedOptions
from rl import advantages, config, optimizer, packing, placed, train_step, trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerOptions:
  """All that shapes an update.

  Attributes:
    loss: Which loss.
    advantage: Which estimator.
    batch: Rows and micro-batches.
    optimizer: AdamW.
    mesh: Devices as text, fsdp x expert x context; None for one device.
    sharded: How the model crosses the mesh.
    router_replay: Whether tokens go to the experts that the sampler used.
  """

  loss: config.LossOptions
  advantage: config.AdvantageOptions
  batch: config.BatchOptions
  optimizer: config.OptimizerOptions
  mesh: str | None = None
  sharded: ShardedOptions = ShardedOptions()
  router_replay: bool = False


@functools.lru_cache(maxsize=8)
def _programs(
  model: model_config.ModelConfig,
  model_options: model_config.ModelOptions,
  loss: config.LossOptions,
  optimizer_options: config.OptimizerOptions,
  mesh: str | None,
  sharded: ShardedOptions,
) -> train_step.StepFunctions:
  """Learners of one process that do the same share what was compiled."""
  layout = placed.layout_of(model, model_options, mesh, sharded)
  return placed.compile_programs(model, model_options, loss, optimizer_options, layout)


def _placed(state):
  """The state on the first device, every leaf bound to it.

  Some leaves of a loaded state are bound to a device and others are not; after an update all
  are, and the programs would be compiled again for that alone.
  """
  return jax.device_put(state, jax.devices()[0])


class Learner:
  """Holds the training state and the compiled programs of one loss."""

  def __init__(
    self,
    model: model_config.ModelConfig,
    model_options: model_config.ModelOptions,
    options: LearnerOptions,
    params: Any,
  ):
    """Makes the state; nothing is compiled before the first step.

    Args:
      model: The model.
      model_options: How it is computed.
      options: All that shapes an update.
      params: Initial parameters; the learner's own from here on.

    Raises:
      options.UserError: The mesh is not that of the devices, or the model does not divide over it.
    """
    self._options = options
    mesh = (options.mesh, options.sharded)
    self._programs = _programs(model, model_options, options.loss, options.optimizer, *mesh)
    self._layout = placed.layout_of(model, model_options, *mesh)
    self._reference = None
    if options.loss.reference_policy_kl_penalty > 0:
      # A copy: the state is donated step by step.
      self._reference = jax.tree.map(jnp.copy, params)
    if self._layout is None:
      self.state = _placed(optimizer.init_state(params, options.optimizer))
    else:
      self.state = placed.init_state(params, options.optimizer, self._layout)

  @property
  def weights(self) -> Any:
    """The parameters as the model reads them; valid until the next `step`."""
    return self.state.weights

  @property
  def checkpointed(self) -> dict[str, Any]:
    """Everything a resumed run needs: the state, and the reference policy where there is one."""
    found = {"state": self.state}
    if self._reference is not None:
      found["reference"] = self._reference
    return found

  def restore(self, checkpointed: dict[str, Any]) -> None:
    """Takes what `checkpointed` gave."""
    state = checkpointed["state"]
    self.state = _placed(state) if self._layout is None else state
    self._reference = checkpointed.get("reference")

  def step(
    self, batch: Sequence[trajectory.Trajectory], step: int, policy_version: int
  ) -> dict[str, float]:
    """Makes one update.

    Args:
      batch: Trajectories of the step.
      step: The step, from 1.
      policy_version: Updates made by the policy loss before.

    Returns:
      The step's metrics.

    Raises:
      options.UserError: The batch is not whole groups, a trajectory is longer than a row, or old
        log-probs are missing or would be those of another policy.
    """
    options = self._options
    source = train_step.old_logprobs_source(options.loss, batch, policy_version)
    supervised = options.loss.loss == "sft"
    values = [0.0] * len(batch)
    if not supervised:
      values = advantages.compute_advantages(
        [t.group_id for t in batch],
        [t.reward for t in batch],
        options.advantage,
        generations_per_prompt=options.batch.generations_per_prompt,
        loss_tokens=[t.num_loss_tokens for t in batch],
      )
    batches, plan = packing.pack(
      batch,
      values,
      options.batch,
      with_old_logprobs=source == "batch",
      with_routed_experts=options.router_replay,
    )
    if self._layout is not None:
      batches = [placed.place_batch(b, self._layout) for b in batches]
    if source == "recompute":
      batches = train_step.with_old_logprobs(self._programs, self.state.weights, batches)
    if self._reference is not None and not supervised:
      batches = train_step.with_reference_logprobs(self._programs, self._reference, batches)
    hyper = optimizer.hyper_parameters(options.optimizer, step, len(batch))
    self.state, metrics = train_step.run_step(self._programs, self.state, batches, hyper)
    return {
      **train_step.host_metrics(metrics),
      "packing_fill": plan.fill,
      "micro_batches": float(len(batches)),
    }
