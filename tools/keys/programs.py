"""Texts of the small programs that the table's rows are read from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels.base.mesh import MeshShape
from model import api
from model import config as model_config
from model.sharded.options import ShardedOptions
from rl import config as rl_config
from rl import optimizer, packing, placed
from tools.keys import key as key_lib

SHAPE = MeshShape.parse(key_lib.SMALL["mesh"])
ROWS, TOKENS = key_lib.SMALL["micro_batch_rows"], key_lib.SMALL["row_tokens"]
SEGMENTS = key_lib.SMALL["max_segments_per_row"]

_SHORT = dataclasses.replace(
  model_config.preset("tiny_moe"), num_hidden_layers=1, full_attention_interval=1
)
_MODELS = {
  # Without experts, for keys of Gated DeltaNet.
  "each": dataclasses.replace(
    model_config.preset("tiny"), num_hidden_layers=2, full_attention_interval=2
  ),
  "two": dataclasses.replace(_SHORT, num_hidden_layers=2),
  "one": _SHORT,
}
# Widths that fill a TPU's lanes, experts as wide as those of the preset in `key_lib.EXPERTS`.
_WIDE = dataclasses.replace(_SHORT, hidden_size=128, moe_intermediate_size=512)


def _batch(replayed: model_config.ModelConfig | None) -> packing.PackedBatch:
  shape = lambda *dims: lambda dtype: jax.ShapeDtypeStruct(dims, dtype)
  token, segment = shape(ROWS, TOKENS), shape(ROWS, SEGMENTS)
  reals = {"loss_mask", "advantages", "sampler_logprobs"}
  ids = {"tokens", "segment_ids", "positions"}
  kinds = {name: token(jnp.float32) for name in reals} | {n: token(jnp.int32) for n in ids}
  absent = dict.fromkeys(("old_logprobs", "reference_logprobs", "routed_experts"))
  if replayed is not None:
    experts = (replayed.num_hidden_layers, replayed.num_experts_per_tok)
    absent["routed_experts"] = shape(ROWS, TOKENS, *experts)(jnp.int16)
  ends = {f"segment_{name}": segment(jnp.float32) for name in ("valid", "truncated", "reward")}
  return packing.PackedBatch(**kinds, **absent, **ends, segment_index=segment(jnp.int32))


@dataclasses.dataclass(frozen=True)
class Built:
  """The step's programs under some of the trainer's options, and what they take.

  Attributes:
    config: The model.
    model_options: How it is computed.
    optimizer_options: Mask and constants.
    layout: Where arrays lie.
    functions: The programs, not compiled.
    batch: Shapes of a micro-batch.
  """

  config: model_config.ModelConfig
  model_options: model_config.ModelOptions
  optimizer_options: rl_config.OptimizerOptions
  layout: Any
  functions: Any
  batch: packing.PackedBatch


def build(given: Mapping[str, Any], *, layers: str, wide: bool = False) -> Built:
  """Programs of a small model over the small mesh.

  Args:
    given: Options and their values.
    layers: As of `key_lib.Key.layers`.
    wide: Widths that fill a TPU's lanes.

  Raises:
    RuntimeError: This process has too few devices.
  """
  if len(jax.devices()) < SHAPE.devices:
    raise RuntimeError(
      f"{len(jax.devices())} devices: want {SHAPE.devices}; on a CPU set"
      f" XLA_FLAGS=--xla_force_host_platform_device_count={SHAPE.devices}"
    )
  settings = key_lib.settings_of(given)
  config = _WIDE if wide else _MODELS[layers]
  model_options = settings.of(model_config.ModelOptions)
  optimizer_options = settings.of(rl_config.OptimizerOptions)
  layout = placed.layout_of(
    config,
    model_options,
    settings.mesh,
    settings.of(ShardedOptions),
    jax.devices()[: SHAPE.devices],
  )
  functions = placed.make_functions(
    config, model_options, settings.of(rl_config.LossOptions), optimizer_options, layout
  )
  batch = _batch(config if settings.router_replay else None)
  return Built(config, model_options, optimizer_options, layout, functions, batch)


@functools.cache
def text(program: str, platform: str, layers: str, given: tuple[tuple[str, Any], ...]) -> str:
  """The lowered program under the trainer's options.

  Args:
    program: first_micro_batch or update.
    platform: What it is lowered for.
    layers: As of `build`.
    given: Options and their values.
  """
  built = build(dict(given), layers=layers, wide=platform == "tpu")
  functions, layout = built.functions, built.layout
  placed_at = lambda tree, where: jax.tree.map(
    lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), tree, where
  )
  weights = api.abstract_params(built.config, built.model_options)
  weights = placed_at(weights, layout.parameters)
  batch = placed_at(built.batch, layout.batch(built.batch))
  if program == "first_micro_batch":
    traced = jax.jit(functions.first_micro_batch).trace(weights, batch)
    return traced.lower(lowering_platforms=(platform,)).as_text()
  sums = jax.eval_shape(functions.first_micro_batch, weights, batch)
  state = jax.eval_shape(lambda p: optimizer.init_state(p, built.optimizer_options), weights)
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  arguments = placed_at(state, layout.state(state)), placed_at(sums, layout.sums(sums))
  hyper = optimizer.HyperParameters(scalar, scalar)
  traced = jax.jit(functions.update).trace(*arguments, hyper)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def probe(key: key_lib.Key) -> tuple[Any, Any]:
  """What a row's probe finds with the key off and on."""
  make = lambda values: text(key.program, key.platform, key.layers, tuple(sorted(values.items())))
  return key.probe(make(key.off)), key.probe(make(key.on))
