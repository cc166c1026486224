"""The plain fsdp form of a step: parameters and rows over the mesh's fsdp axis, by constraints.

Every matrix is split along its embedding dimension, norms and other small vectors are whole on each
device, packed rows are split by row.  The partitioner derives the gathers of weights and the
reductions of gradients from that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.base.options import UserError
from model import api, placement
from model.config import ModelConfig
from rl import optimizer
from rl.config import OptimizerOptions
from rl.optimizer import TrainState
from rl.packing import PackedBatch
from rl.train_step import Accumulators, StepFunctions

Tree = Any

_SPLIT = "embed"  # the logical axis that every matrix has once


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where the arrays of a step lie.

  Attributes:
    mesh: Axes fsdp, context, expert.
    parameters: A `NamedSharding` for every parameter, in the parameters' tree.
  """

  mesh: Mesh
  parameters: Tree

  @property
  def rows(self) -> NamedSharding:
    """Of arrays whose first axis is packed rows."""
    return NamedSharding(self.mesh, P("fsdp"))

  @property
  def replicated(self) -> NamedSharding:
    """Of arrays that every device holds whole."""
    return NamedSharding(self.mesh, P())

  def batch(self, batch: PackedBatch) -> PackedBatch:
    """Of a micro-batch."""
    return jax.tree.map(lambda _: self.rows, batch)

  def state(self, state: TrainState) -> TrainState:
    """Of a training state, given its arrays or their shapes."""
    return self.like_parameters(state)

  def sums(self, sums: Accumulators) -> Accumulators:
    """Of a step's sums, given its arrays or their shapes."""
    return self.like_parameters(sums)

  def like_parameters(self, tree: Tree) -> Tree:
    """Shardings for a tree that holds parameters' twins: masters, moments, gradients.

    A leaf is placed as the parameter whose path its own path ends with, and whole on every device
    where there is none, such as a count of updates.
    """
    by_path = {
      _names(path): sharding
      for path, sharding in jax.tree_util.tree_leaves_with_path(self.parameters)
    }

    def place(path, leaf):
      names = _names(path)
      for start in range(len(names)):
        found = by_path.get(names[start:])
        if found is not None and len(leaf.shape) >= len(found.spec):
          return found
      return self.replicated

    return jax.tree_util.tree_map_with_path(place, tree)


def _names(path: Sequence[Any]) -> tuple[str, ...]:
  return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def plan(config: ModelConfig, mesh: Mesh) -> Plan:
  """Places every parameter.

  Raises:
    UserError: The hidden size does not divide over fsdp.
  """
  count = mesh.shape["fsdp"]
  if config.hidden_size % count:
    raise UserError(f"hidden_size={config.hidden_size} does not divide over fsdp = {count} devices")
  place = lambda axes: NamedSharding(mesh, P(*("fsdp" if a == _SPLIT else None for a in axes)))
  names = api.logical_axes(config)
  return Plan(mesh, jax.tree.map(place, names, is_leaf=lambda x: isinstance(x, tuple)))


def init_state(params: Tree, options: OptimizerOptions, layout: Plan) -> TrainState:
  """The state before the first update, made where it lies; `params` are donated."""
  make = lambda p: optimizer.init_state(p, options)
  where = layout.like_parameters(jax.eval_shape(make, params))
  params = jax.device_put(params, layout.parameters)
  return jax.jit(make, out_shardings=where, donate_argnums=0)(params)


def constrain(tree: Tree, shardings: Tree) -> Tree:
  """Asks for a placement inside a program; None leaves are passed over."""
  return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def constrained(functions: StepFunctions, layout: Plan) -> StepFunctions:
  """The programs of a step with their arrays placed.

  Args:
    functions: Plain functions, as `train_step.make_functions` makes them.
    layout: Where arrays lie.

  Returns:
    Functions of the same values, to be jitted in place of the given ones.
  """
  rows = lambda batch: jax.tree.map(
    lambda x: jax.lax.with_sharding_constraint(x, layout.rows), batch
  )
  twins = lambda tree: constrain(tree, layout.like_parameters(tree))
  weights = lambda tree: constrain(tree, layout.parameters)
  whole = lambda tree: constrain(tree, jax.tree.map(lambda _: layout.replicated, tree))

  def sums(accumulators: Accumulators) -> Accumulators:
    return Accumulators(
      gradients=twins(accumulators.gradients),
      denominators=whole(accumulators.denominators),
      metrics=whole(accumulators.metrics),
    )

  def placed(function):
    def run(*arguments):
      with placement.rows_over(layout.rows):
        return function(*arguments)

    return run

  def update(state, accumulators, hyper):
    state, metrics = functions.update(twins(state), sums(accumulators), hyper)
    return twins(state), whole(metrics)

  return StepFunctions(
    first_micro_batch=placed(lambda w, b: sums(functions.first_micro_batch(weights(w), rows(b)))),
    accumulate=placed(lambda w, a, b: sums(functions.accumulate(weights(w), sums(a), rows(b)))),
    update=update,
    log_probs=placed(lambda w, b: rows(functions.log_probs(weights(w), rows(b)))),
  )
