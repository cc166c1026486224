"""Decoder layers of Qwen3.5 and the stack of them.

The layers repeat in groups: `full_attention_interval - 1` Gated DeltaNet layers, then one
attention layer.  Weights of the groups are stacked and the groups are scanned; inside a group
its Gated DeltaNet layers are scanned too.  So a program holds one body of each kind however deep
the model is.  Gated DeltaNet layers after the last whole group are scanned on their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model import attention, gated_delta_net, layers, moe, placement
from model import config as config_lib


class LayerOutput(NamedTuple):
  """What one layer gives besides the hidden state.

  Attributes:
    routing: Of a sparse layer, else None.
    hidden: The layer's output, when asked for.
    cache: Its memory, when it was given one.
  """

  routing: moe.Routing | None
  hidden: Float[Array, "B S h"] | None
  cache: Any  # DeltaState or KeyValues, by the kind of layer.


class _DecoderLayer(nnx.Module):
  """x += mixer(norm(x)); x += mlp(norm(x)).  A subclass makes its mixer in `_mixer`.

  Scopes name the parts of a layer in compiled programs and profiles.
  """

  scope: str

  def __init__(self, config: config_lib.ModelConfig, options, *, rngs: nnx.Rngs):
    self.sparse = config.is_moe
    self.input_norm = layers.RmsNorm(config.hidden_size, config, options, kernel=True)
    self._make_mixer(config, options, rngs)
    self.post_norm = layers.RmsNorm(config.hidden_size, config, options, kernel=True)
    self.mlp: Any
    if config.is_moe:
      self.mlp = moe.SparseMoe(config, options, rngs=rngs)
    else:
      self.mlp = layers.GatedMlp(config.intermediate_size, "mlp", config, options, rngs=rngs)

  def __call__(self, x, context: layers.Context, replay=None, cache=None):
    with jax.named_scope(self.scope):
      mixed, cache = self._mixer(self.input_norm(x), context, cache)
      x = placement.rows(x + mixed)
    with jax.named_scope("moe" if self.sparse else "mlp"):
      normed = self.post_norm(x)
      if self.sparse:
        out, routing = self.mlp(normed, context.segment_ids, replay)
      else:
        out, routing = self.mlp(normed), None
      return placement.rows(x + out), routing, cache


class GdnLayer(_DecoderLayer):
  """A Gated DeltaNet layer."""

  scope = "gdn"

  def _make_mixer(self, config, options, rngs):
    self.gdn = gated_delta_net.GatedDeltaNet(config, options, rngs=rngs)

  def _mixer(self, x, context, cache):
    return self.gdn(x, context, cache)


class AttentionLayer(_DecoderLayer):
  """A softmax attention layer."""

  scope = "attention"

  def _make_mixer(self, config, options, rngs):
    self.attention = attention.Attention(config, options, rngs=rngs)

  def _mixer(self, x, context, cache):
    return self.attention(x, context, cache)


@functools.lru_cache(maxsize=64)
def abstract_layer(
  kind: type[_DecoderLayer], config: config_lib.ModelConfig, options: config_lib.ModelOptions
) -> tuple[nnx.GraphDef, nnx.State]:
  """Structure and abstract weights of one layer."""
  module = nnx.eval_shape(lambda: kind(config, options, rngs=nnx.Rngs(0)))
  return nnx.split(module, nnx.Param)


def init_layer(kind, config, options, key) -> dict[str, Any]:
  """Weights of one layer as a plain tree."""
  module = kind(config, options, rngs=nnx.Rngs(params=key))
  return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def apply_layer(kind, config, options, output_hidden_states, context, weights, x, replay, cache):
  """One layer on plain weights; recomputed in the backward pass if the options say so."""

  def run(weights, x, context, replay, cache):
    definition, _ = abstract_layer(kind, config, options)
    return nnx.merge(definition, weights)(x, context, replay, cache)

  if options.remat_policy == "full" and cache is None:
    # Inside a scan nothing can be merged across the recomputation, so no barrier is needed.
    run = jax.checkpoint(run, prevent_cse=not options.scan_layers)
  x, routing, cache = run(weights, x, context, replay, cache)
  return x, LayerOutput(routing, x if output_hidden_states else None, cache)


class GroupCache(NamedTuple):
  """Memories of a group's layers; leading axis n on those of its Gated DeltaNet layers."""

  gdn: gated_delta_net.DeltaState | None
  attn: attention.KeyValues | None


def run_stack(
  config: config_lib.ModelConfig,
  options: config_lib.ModelOptions,
  params: dict[str, Any],
  x: Float[Array, "B S h"],
  context: layers.Context,
  replay: Int[Array, "L B S K"] | None = None,
  group_caches: GroupCache | None = None,
  tail_caches: gated_delta_net.DeltaState | None = None,
  output_hidden_states: bool = False,
) -> tuple[Float[Array, "B S h"], list[LayerOutput]]:
  """Runs all layers.

  Args:
    config: The model.
    options: How to compute it.
    params: The whole parameter tree.
    x: Embedded tokens.
    context: Segments, positions, rotary angles.
    replay: Experts to use per layer.
    group_caches: Memories, leading axis G (and n inside).
    tail_caches: Memories of the layers after the last group, leading axis r.
    output_hidden_states: Whether each layer's output is kept.

  Returns:
    The last layer's output, and three `LayerOutput`s with leading axes: [G, n] of the groups'
    Gated DeltaNet layers, [G] of the attention layers, [r] of the tail.  One without layers is
    None.
  """
  groups, per_group = config.num_groups, config.gdn_per_group
  interval = config.full_attention_interval
  common = (config, options, output_hidden_states, context)
  unroll = not options.scan_layers

  def scan_gdn(x, weights, replay, caches):
    def body(x, per_layer):
      return apply_layer(GdnLayer, *common, per_layer[0], x, per_layer[1], per_layer[2])

    return jax.lax.scan(body, x, (weights, replay, caches), unroll=unroll)

  def group(x, per_group_values):
    weights, replay, caches = per_group_values
    caches = GroupCache(None, None) if caches is None else caches
    gdn_out = None
    if per_group:
      gdn_replay = None if replay is None else replay[:per_group]
      x, gdn_out = scan_gdn(x, weights["gdn"], gdn_replay, caches.gdn)
    attn_replay = None if replay is None else replay[per_group]
    x, attn_out = apply_layer(AttentionLayer, *common, weights["attn"], x, attn_replay, caches.attn)
    return x, (gdn_out, attn_out)

  group_replay = tail_replay = None
  if replay is not None:
    group_replay = replay[: groups * interval].reshape(groups, interval, *replay.shape[1:])
    tail_replay = replay[groups * interval :]
  stacked = (params["groups"], group_replay, group_caches)
  x, (gdn_out, attn_out) = jax.lax.scan(group, x, stacked, unroll=unroll)
  tail_out = None
  if config.num_tail_layers:
    x, tail_out = scan_gdn(x, params["tail"], tail_replay, tail_caches)
  return x, [gdn_out, attn_out, tail_out]


def in_layer_order(parts: Sequence[Array | None]) -> Array:
  """[L, ...] in the order of the layers, from the stack's three parts.

  Args:
    parts: [G, n, ...] of the groups' Gated DeltaNet layers, [G, ...] of the attention layers,
      [r, ...] of the tail; None where there are none.
  """
  gdn, attn, tail = parts
  value = attn[:, None] if gdn is None else jnp.concatenate([gdn, attn[:, None]], axis=1)
  value = value.reshape(-1, *value.shape[2:])
  return value if tail is None else jnp.concatenate([value, tail])
