"""The trainer's own three programs, lowered for a TPU topology from the trainer's own options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROGRAMS = ("first_micro_batch", "accumulate", "update")


def lower(
  *, program: str, options: Mapping[str, Any], topology: str, groups: int | None = None
) -> Any:
  """Lowers one program.

  Args:
    program: One of `PROGRAMS`.
    options: The trainer's option values by name; the mesh's devices are the topology's first ones.
    topology: TPU topology, such as tpu7x:4x4x8.
    groups: Cut the model to so many groups of layers; None for all of them.

  Returns:
    The lowered program.

  Raises:
    kernels.base.options.UserError: The options do not describe a step.
  """
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.experimental import topologies

  from kernels.base.mesh import MeshShape
  from kernels.base.options import UserError
  from model import api
  from model.sharded.options import ShardedOptions
  from rl import optimizer, packing, placed, train_step

  settings = settings_of(options)
  config, model_options, loss, batch_options, optimizer_options = parts(settings, groups)
  shape = MeshShape.parse(settings.mesh or "1x1x1")
  try:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
  except Exception as error:  # the compiler's own kinds, by the version
    reason = str(error).splitlines()[0]
    raise UserError(f"--topology={topology}: want one such as tpu7x:4x4x8 ({reason})") from error
  devices = described.devices
  if shape.devices > len(devices):
    raise UserError(f"--mesh={shape} has {shape.devices} devices, {topology} {len(devices)}")
  if shape.devices == len(devices):
    made = topologies.make_mesh(
      described,
      tuple(shape.in_device_order.values()),
      tuple(shape.in_device_order),
    )
    devices = list(np.asarray(made.devices).flat)
  mesh = settings.mesh or "1x1x1"
  layout = placed.layout_of(
    config, model_options, mesh, settings.of(ShardedOptions), devices[: shape.devices]
  )

  rows, tokens = batch_options.micro_batch_rows, batch_options.row_tokens
  shards = shape.fsdp * shape.expert
  if rows % shards:
    raise UserError(
      f"--micro_batch_rows={rows} does not divide over fsdp x expert = {shards}; give a multiple"
    )
  struct = jax.ShapeDtypeStruct
  per_token = lambda dtype: struct((rows, tokens), dtype)
  per_segment = lambda dtype: struct((rows, batch_options.max_segments_per_row), dtype)
  recorded = loss.loss != "sft" and not loss.force_on_policy_ratio
  penalty = loss.loss != "sft" and loss.reference_policy_kl_penalty > 0
  replay = getattr(settings, "router_replay", False)
  batch = packing.PackedBatch(
    tokens=per_token(jnp.int32),
    segment_ids=per_token(jnp.int32),
    positions=per_token(jnp.int32),
    loss_mask=per_token(jnp.float32),
    advantages=per_token(jnp.float32),
    sampler_logprobs=per_token(jnp.float32),
    old_logprobs=per_token(jnp.float32) if recorded else None,
    reference_logprobs=per_token(jnp.float32) if penalty else None,
    routed_experts=struct(
      (rows, tokens, config.num_hidden_layers, config.num_experts_per_tok), jnp.int16
    )
    if replay and config.is_moe
    else None,
    segment_valid=per_segment(jnp.float32),
    segment_truncated=per_segment(jnp.float32),
    segment_reward=per_segment(jnp.float32),
    segment_index=per_segment(jnp.int32),
  )
  given = lambda tree, where: jax.tree.map(
    lambda s, at: struct(s.shape, s.dtype, sharding=at), tree, where
  )
  functions = placed.make_functions(
    config, model_options, loss, optimizer_options, layout if settings.mesh else None
  )
  compiled: Any = train_step.compile_programs(functions)
  weights = given(api.abstract_params(config, model_options), layout.parameters)
  batch = given(batch, layout.batch(batch))
  if program == "first_micro_batch":
    traced = compiled.first_micro_batch.trace(weights, batch)
  else:
    sums = jax.eval_shape(functions.first_micro_batch, weights, batch)
    sums = given(sums, layout.sums(sums))
    if program == "accumulate":
      traced = compiled.accumulate.trace(weights, sums, batch)
    elif program == "update":
      state = jax.eval_shape(lambda p: optimizer.init_state(p, optimizer_options), weights)
      state = given(state, layout.state(state))
      scalar = struct((), jnp.float32, sharding=layout.replicated)
      traced = compiled.update.trace(state, sums, optimizer.HyperParameters(scalar, scalar))
    else:
      raise UserError(f"no program {program!r}: want one of {', '.join(PROGRAMS)}")
  return traced.lower(lowering_platforms=("tpu",))


def settings_of(values: Mapping[str, Any]):
  """The trainer's settings from plain values by name; lists stand for tuples."""
  from kernels.base.options import Settings
  from rl import trainer_options

  plain = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
  return Settings(trainer_options.COMPONENTS, plain)


def parts(settings, groups: int | None):
  """Model, model options, loss, batch and optimizer options of the trainer's settings.

  Raises:
    kernels.base.options.OptionError: The model has fewer groups than asked for.
  """
  import dataclasses

  from kernels.base.options import OptionError
  from model import config as model_config
  from rl import config as rl_config

  if settings.checkpoint:
    model = model_config.ModelConfig.from_file(settings.checkpoint)
  else:
    model = model_config.preset(settings.model_preset)
  if groups is not None:
    layers = groups * model.full_attention_interval
    if layers > model.num_hidden_layers:
      raise OptionError(
        f"--groups={groups}: the model has {model.num_groups}; give at most as many"
      )
    model = dataclasses.replace(model, num_hidden_layers=layers)
  return (
    model,
    settings.of(model_config.ModelOptions),
    settings.of(rl_config.LossOptions),
    settings.of(rl_config.BatchOptions),
    settings.of(rl_config.OptimizerOptions),
  )
