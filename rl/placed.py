"""A step where its arrays lie: on one device, over fsdp by constraints, or over the whole mesh.

What a trainer, a benchmark and an ahead-of-time compilation run is decided here, in one place, from
--mesh and the options of the sharded model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kernels.base.mesh import DEVICE_ORDER, MeshShape
from kernels.base.options import UserError
from model.config import ModelConfig, ModelOptions
from model.sharded.options import ShardedOptions
from rl import mesh_step, optimizer, retry, sharding, train_step
from rl.config import LossOptions, OptimizerOptions
from rl.optimizer import TrainState
from rl.packing import PackedBatch
from rl.train_step import Accumulators, StepFunctions

Tree = Any
Layout = sharding.Plan | mesh_step.Plan | None


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
  """Makes the mesh.

  Args:
    shape: Devices along each axis.
    devices: Devices in order, fsdp outermost and expert innermost; those of this process by default.

  Raises:
    UserError: There are not as many devices.
  """
  devices = jax.devices() if devices is None else devices
  if len(devices) != shape.devices:
    raise UserError(
      f"--mesh={shape} has {shape.devices} devices, there are {len(devices)}; give a mesh of"
      f" {len(devices)}, such as {len(devices)}x1x1, or leave it out to use one"
    )
  sizes = tuple(shape.in_device_order.values())
  return Mesh(np.asarray(devices).reshape(sizes), DEVICE_ORDER)


def layout_of(
  config: ModelConfig,
  model_options: ModelOptions,
  mesh: str | None,
  options: ShardedOptions,
  devices: Sequence[Any] | None = None,
) -> Layout:
  """Where the arrays of a step lie; None for one device.

  A mesh of fsdp alone with plain JAX and the sharded model's options at their defaults is left to
  the partitioner; everything else runs the explicit collectives of `mesh_step`.  So do Pallas
  kernels, which no partitioner splits.

  Args:
    config: The model.
    model_options: How it is computed.
    mesh: fsdp x expert x context, or None.
    options: How the model crosses it.
    devices: As of `make_mesh`.

  Raises:
    UserError: The mesh is not that of the devices, or the model does not divide over it.
  """
  if mesh is None:
    return None
  shape = MeshShape.parse(mesh)
  made = make_mesh(shape, devices)
  plain = model_options.kernel_implementation == "reference" and options == ShardedOptions()
  if shape.fsdp == shape.devices and plain:
    return sharding.plan(config, made)
  return mesh_step.make_plan(config, options, made)


def make_functions(
  config: ModelConfig,
  model_options: ModelOptions,
  loss_options: LossOptions,
  optimizer_options: OptimizerOptions,
  layout: Layout,
) -> StepFunctions:
  """The programs of a step as functions to be jitted, of a buffer that may drop tokens."""
  if isinstance(layout, mesh_step.Plan):
    return mesh_step.make_functions(
      config,
      model_options,
      layout.options,
      loss_options,
      optimizer_options,
      layout,
      discard_overflowing=layout.options.retry_when_tokens_dropped,
    )
  functions = train_step.make_functions(config, model_options, loss_options, optimizer_options)
  return functions if layout is None else sharding.constrained(functions, layout)


def compile_programs(
  config: ModelConfig,
  model_options: ModelOptions,
  loss_options: LossOptions,
  optimizer_options: OptimizerOptions,
  layout: Layout,
) -> StepFunctions:
  """The compiled programs of a step, placed where the layout says: what every trainer runs."""

  def compiled(layout):
    return train_step.compile_programs(
      make_functions(config, model_options, loss_options, optimizer_options, layout)
    )

  programs = compiled(layout)
  if not isinstance(layout, mesh_step.Plan) or not layout.options.retry_when_tokens_dropped:
    return programs
  if layout.options.ragged_buffer_factor < 0:
    return programs
  dropless = dataclasses.replace(
    layout.options, ragged_buffer_factor=-1.0, retry_when_tokens_dropped=False
  )
  roomy = compiled(dataclasses.replace(layout, options=dropless))
  return retry.Retrying(programs, roomy).programs


def init_state(params: Tree, options: OptimizerOptions, layout: Layout) -> TrainState:
  """The state before the first update, made where it lies; `params` may be donated."""
  if layout is None:
    return optimizer.init_state(params, options)
  if isinstance(layout, mesh_step.Plan):
    return mesh_step.init_state(params, options, layout)
  return sharding.init_state(params, options, layout)


def place_batch(batch: PackedBatch, layout: Layout) -> PackedBatch:
  """A micro-batch where it lies."""
  if layout is None:
    return jax.device_put(batch)
  return jax.device_put(batch, layout.batch(batch))


def whole_gradients(sums: Accumulators, layout: Layout) -> Tree:
  """The sums' gradients with the partial sums of ranks added up; None where a parameter is frozen."""
  if not isinstance(layout, mesh_step.Plan):
    return sums.gradients
  whole = lambda g, leaf: None if g is None else (g.sum(0) if leaf.unreduced else g)
  is_none = lambda x: x is None
  return jax.tree.map(whole, sums.gradients, layout.layout.leaves, is_leaf=is_none)
