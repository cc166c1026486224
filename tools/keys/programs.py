"""Texts of the small programs that the table's rows are read from."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels.base.mesh import MeshShape
from model import api
from model import config as model_config
from model.sharded.options import ShardedOptions
from rl import config as rl_config
from rl import optimizer, packing, placed
from tools.keys import table

SHAPE = MeshShape.parse(table.SMALL["mesh"])
ROWS, TOKENS = table.SMALL["micro_batch_rows"], table.SMALL["row_tokens"]
SEGMENTS = table.SMALL["max_segments_per_row"]

# One layer of each kind, without experts, for keys of Gated DeltaNet.
_DENSE = dataclasses.replace(
  model_config.preset("tiny"), num_hidden_layers=2, full_attention_interval=2
)
# The attention layer alone, for all others.
_SHORT = dataclasses.replace(
  model_config.preset("tiny_moe"), num_hidden_layers=1, full_attention_interval=1
)
# Widths that fill a TPU's lanes, experts as wide as those of the preset in `table.EXPERTS`.
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


@functools.cache
def text(program: str, platform: str, short: bool, given: tuple[tuple[str, Any], ...]) -> str:
  """The lowered program under the trainer's options.

  Args:
    program: first_micro_batch or update.
    platform: What it is lowered for.
    short: One attention layer instead of one layer of each kind.
    given: Options and their values.

  Raises:
    RuntimeError: This process has too few devices.
  """
  if len(jax.devices()) < SHAPE.devices:
    raise RuntimeError(
      f"{len(jax.devices())} devices: want {SHAPE.devices}; on a CPU set"
      f" XLA_FLAGS=--xla_force_host_platform_device_count={SHAPE.devices}"
    )
  settings = table.settings_of(dict(given))
  config = _WIDE if platform == "tpu" else _SHORT if short else _DENSE
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
  placed_at = lambda tree, where: jax.tree.map(
    lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), tree, where
  )
  weights = placed_at(api.abstract_params(config, model_options), layout.parameters)
  batch = _batch(config if settings.router_replay else None)
  batch = placed_at(batch, layout.batch(batch))
  if program == "first_micro_batch":
    traced = jax.jit(functions.first_micro_batch).trace(weights, batch)
    return traced.lower(lowering_platforms=(platform,)).as_text()
  sums = jax.eval_shape(functions.first_micro_batch, weights, batch)
  state = jax.eval_shape(lambda p: optimizer.init_state(p, optimizer_options), weights)
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  arguments = placed_at(state, layout.state(state)), placed_at(sums, layout.sums(sums))
  hyper = optimizer.HyperParameters(scalar, scalar)
  traced = jax.jit(functions.update).trace(*arguments, hyper)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def probe(key: table.Key) -> tuple[Any, Any]:
  """What a row's probe finds with the key off and on."""
  make = lambda values: text(key.program, key.platform, key.short, tuple(sorted(values.items())))
  return key.probe(make(key.off)), key.probe(make(key.on))
