"""The programs of a step over fsdp x expert x context, with every collective written out.

One shard_map holds a micro-batch's forward and backward pass.  Packed rows are split over
(fsdp, expert), the tokens of a row over context; every rank sees the ids of its whole rows, computes
its own tokens, and gathers the log-probs of its rows, two float32 a token, so that a loss that looks
at whole sequences is the plain one of `losses`, computed alike on every context rank.

What is accumulated is a shard's gradient, summed over the axes that split the weight and over no
others; the update sums the rest, once a step, divides and steps the optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.logprob_head import op as logprob_head
from model import api
from model.config import ModelConfig, ModelOptions
from model.sharded import collectives, stack
from model.sharded import layout as layout_lib
from model.sharded.cell import CONTEXT, Cell
from model.sharded.layout import ROWS, Layout, Leaf
from model.sharded.options import ShardedOptions
from rl import optimizer, sharding, step_metrics, train_step
from rl.config import LossOptions, OptimizerOptions
from rl.optimizer import TrainState
from rl.packing import PackedBatch
from rl.step_metrics import Denominators, Metric
from rl.train_step import Accumulators, Scores, StepFunctions

Tree = Any

ALL = (*ROWS, CONTEXT)
_EVERYWHERE: Any = P()  # a prefix: of every leaf below
DROPPED, DISCARDED = "moe_dropped_pairs", "moe_discarded_micro_batches"


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where the arrays of a step lie.

  Attributes:
    layout: Where parameters lie and what their gradients are reduced over.
    options: How the model crosses the mesh.
  """

  layout: Layout
  options: ShardedOptions

  @property
  def mesh(self) -> Mesh:
    """Axes fsdp, context, expert."""
    return self.layout.mesh

  def _placed(self, pick) -> Tree:
    return jax.tree.map(lambda leaf: NamedSharding(self.mesh, pick(leaf)), self.layout.leaves)

  @property
  def parameters(self) -> Tree:
    """A `NamedSharding` for every parameter."""
    return self._placed(lambda leaf: leaf.spec)

  @property
  def replicated(self) -> NamedSharding:
    """Of arrays that every device holds whole."""
    return NamedSharding(self.mesh, P())

  def batch(self, batch: PackedBatch) -> PackedBatch:
    """Shardings of a micro-batch."""
    return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), batch_specs(batch))

  def state(self, state: TrainState) -> TrainState:
    """Shardings of a training state, given its arrays or their shapes."""
    kept = sharding.Plan(self.mesh, self._placed(lambda leaf: leaf.state))
    others = kept.like_parameters(state._replace(weights=None))
    return others._replace(weights=self.parameters)

  def sums(self, sums: Accumulators) -> Accumulators:
    """Shardings of a step's sums, given its arrays or their shapes."""
    gradients = jax.tree.map(
      lambda leaf, g: None if g is None else NamedSharding(self.mesh, leaf.sums),
      self.layout.leaves,
      sums.gradients,
    )
    others = jax.tree.map(lambda _: self.replicated, sums._replace(gradients=None))
    return others._replace(gradients=gradients)


def batch_specs(batch: PackedBatch) -> PackedBatch:
  """Rows are split over (fsdp, expert); recorded routing, the bulk, over context too."""
  specs = jax.tree.map(lambda _: P(ROWS), batch)
  if batch.routed_experts is not None:
    specs = specs._replace(routed_experts=P(ROWS, CONTEXT))
  return specs


def make_plan(config: ModelConfig, options: ShardedOptions, mesh: Mesh) -> Plan:
  """Places a step's arrays.

  Raises:
    UserError: A size of the model does not divide over the mesh.
  """
  return Plan(layout_lib.plan(config, options, mesh), options)


def init_state(params: Tree, options: OptimizerOptions, plan: Plan, **kwargs) -> TrainState:
  """`optimizer.init_state` with every array made where the plan says."""
  params = jax.device_put(params, plan.parameters)
  make = lambda p: optimizer.init_state(p, options, **kwargs)
  return jax.jit(make, out_shardings=plan.state(jax.eval_shape(make, params)))(params)


def _merge_ranks(name: str, value, axes):
  """A metric's value over the ranks of `axes`."""
  if name == step_metrics.MIN:
    return lax.pmin(value, axes)
  if name == step_metrics.MAX:
    return lax.pmax(value, axes)
  if name == step_metrics.CORRELATION:
    every = lax.all_gather(value, axes)
    merge = lambda a, b: step_metrics.merge({"": Metric(a, name)}, {"": Metric(b, name)})[""].value
    return lax.scan(lambda held, one: (merge(held, one), None), every[0], every[1:])[0]
  return lax.psum(value, axes)


def _discard(sums: Accumulators, drop: jax.Array) -> Accumulators:
  """The sums, or those of no micro-batch where `drop`."""
  nothing = lambda x: jnp.where(drop, jnp.zeros_like(x), x)
  metrics = {
    name: Metric(jnp.where(drop, step_metrics.neutral(m).value, m.value), m.normalizer)
    for name, m in sums.metrics.items()
  }
  return Accumulators(
    jax.tree.map(nothing, sums.gradients), jax.tree.map(nothing, sums.denominators), metrics
  )


def make_functions(
  config: ModelConfig,
  model_options: ModelOptions,
  options: ShardedOptions,
  loss_options: LossOptions,
  optimizer_options: OptimizerOptions,
  plan: Plan,
  *,
  discard_overflowing: bool = False,
) -> StepFunctions:
  """Builds the programs; the same values as `train_step.make_functions` gives.

  Args:
    config: The model.
    model_options: How to compute it.
    options: How it crosses the mesh.
    loss_options: Loss, temperature, head chunk.
    optimizer_options: Mask and AdamW's constants.
    plan: Where arrays lie.
    discard_overflowing: A micro-batch of which a pair was dropped adds nothing but one to the
      metric `moe_discarded_micro_batches`: the caller runs it again in a larger buffer.

  Raises:
    UserError: The mask of trained parameters matches none.
  """
  layout, mesh = plan.layout, plan.mesh
  hoisted = options.fp8_moe_fake_quant_hoist
  # Weights that are on the grid already stay as they are.
  in_step = dataclasses.replace(options, fp8_moe_fake_quant=False) if hoisted else options
  cell = Cell(config, model_options, in_step, layout)
  exact = Cell(
    config, model_options, dataclasses.replace(options, ragged_buffer_factor=-1.0), layout
  )
  mask = optimizer.trainable_mask(api.abstract_params(config, model_options), optimizer_options)
  frozen = lambda tree: optimizer.select(tree, jax.tree.map(lambda on: not on, mask))
  weight_specs = jax.tree.map(lambda leaf: leaf.spec, layout.leaves)
  sum_specs: Any = Accumulators(
    optimizer.select(jax.tree.map(lambda leaf: leaf.sums, layout.leaves), mask),
    Denominators(P(), P()),
    _EVERYWHERE,
  )
  trained_leaves = optimizer.select(layout.leaves, mask)

  def score(cell: Cell, params: Tree, batch: PackedBatch) -> tuple[Scores, jax.Array]:
    """Scores of whole rows, alike on every context rank, and the pairs dropped here."""
    out = stack.forward(
      cell, params, batch.tokens, batch.segment_ids, batch.positions, batch.routed_experts
    )
    rows, length, width = out.hidden.shape
    targets = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
    with jax.named_scope("head"):
      found = logprob_head.logprob_head(
        out.hidden.reshape(rows * length, width),
        stack.head_table(cell, params),
        collectives.own_part(targets, CONTEXT, 1).reshape(-1),
        temperature=loss_options.temperature,
        token_chunk=loss_options.logps_chunk_size,
        implementation=cell.implementation,
      )
    whole = (collectives.gather_shared(x.reshape(rows, length), CONTEXT, 1) for x in found)
    return Scores(*(train_step.at_token(x, batch.segment_ids) for x in whole)), out.dropped

  @functools.partial(jax.jit, inline=True)  # traced once for the two programs that hold it
  def local_sums(weights: Tree, batch: PackedBatch) -> Accumulators:
    still = frozen(weights)

    def loss_sum(trained: Tree):
      scores, dropped = score(cell, optimizer.combine(trained, still), batch)
      outputs = train_step.batch_loss(scores, batch, loss_options)
      return outputs.loss_sum, (outputs, dropped)

    trained = optimizer.select(weights, mask)
    gradients, (outputs, dropped) = jax.grad(loss_sum, has_aux=True)(trained)
    metrics = {
      name: Metric(_merge_ranks(m.normalizer, m.value, ROWS), m.normalizer)
      for name, m in outputs.metrics.items()
    }
    if config.is_moe:
      dropped = lax.psum(dropped, ALL).astype(jnp.float32)
      metrics[DROPPED] = Metric(dropped, step_metrics.SUM)
    sums = Accumulators(
      gradients=jax.tree.map(
        lambda g, leaf: g.astype(jnp.float32)[None] if leaf.unreduced else g.astype(jnp.float32),
        gradients,
        trained_leaves,
      ),
      denominators=jax.tree.map(lambda x: lax.psum(x, ROWS), outputs.denominators),
      metrics=metrics,
    )
    if discard_overflowing and config.is_moe:
      sums = _discard(sums, dropped > 0)
      sums.metrics[DISCARDED] = Metric((dropped > 0).astype(jnp.float32), step_metrics.SUM)
    elif config.is_moe:
      sums.metrics[DISCARDED] = Metric(jnp.float32(0.0), step_metrics.SUM)
    return sums

  def mapped(function, in_specs, out_specs):
    return jax.shard_map(
      function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  def first_micro_batch(weights: Tree, batch: PackedBatch) -> Accumulators:
    return mapped(local_sums, (weight_specs, batch_specs(batch)), sum_specs)(weights, batch)

  def accumulate(weights: Tree, sums: Accumulators, batch: PackedBatch) -> Accumulators:
    run = lambda weights, sums, batch: train_step.add(sums, local_sums(weights, batch))
    specs = (weight_specs, sum_specs, batch_specs(batch))
    return mapped(run, specs, sum_specs)(weights, sums, batch)

  def log_probs(weights: Tree, batch: PackedBatch) -> Scores:
    run = lambda weights, batch: score(exact, weights, batch)[0]
    return mapped(run, (weight_specs, batch_specs(batch)), P(ROWS))(weights, batch)

  def prepare(weights: Tree) -> Tree:
    experts = optimizer.select(weights, stack.is_expert(weights))
    specs = optimizer.select(weight_specs, stack.is_expert(weights))
    return mapped(stack.fake_quant_experts, (specs,), specs)(experts)

  def reduced(gradients: Tree) -> Tree:
    run = lambda tree: jax.tree.map(
      lambda g, leaf: _reduce(g, leaf, options.dense_grad_reduce), tree, trained_leaves
    )
    specs = sum_specs.gradients
    out = jax.tree.map(lambda leaf: leaf.state, trained_leaves)
    return mapped(run, (specs,), out)(gradients)

  def update(state: TrainState, sums: Accumulators, hyper: optimizer.HyperParameters):
    sums = sums._replace(gradients=reduced(sums.gradients))
    placed = lambda tree: sharding.constrain(tree, plan.state(tree))
    state, metrics = train_step.finish(placed(state), sums, hyper, loss_options, optimizer_options)
    return placed(state), metrics

  return StepFunctions(
    first_micro_batch=first_micro_batch,
    accumulate=accumulate,
    update=update,
    log_probs=log_probs,
    prepare=prepare if hoisted else None,
  )


def _reduce(gradient: jax.Array, leaf: Leaf, how: str) -> jax.Array:
  """A rank's share of the whole gradient from its partial sum."""
  if not leaf.unreduced:
    return gradient
  gradient = gradient[0]
  left = leaf.unreduced
  for dim, (held, wanted) in enumerate(zip(leaf.spec, leaf.state, strict=True)):
    more = tuple(a for a in (wanted or ()) if a not in (held or ()) and a in left)
    if not more:
      continue
    if how == "reduce_scatter":
      gradient = lax.psum_scatter(gradient, more, scatter_dimension=dim, tiled=True)
    else:
      gradient = collectives.own_part(lax.psum(gradient, more), more, dim)
    left = tuple(a for a in left if a not in more)
  return lax.psum(gradient, left) if left else gradient
