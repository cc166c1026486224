"""The model as plain functions on plain trees: what everything outside this package calls.

Parameters are nested dictionaries of arrays, stacked by layer group (see `qwen3_5`):

    {"embed": {"embedding": [V, h]},
     "groups": {"gdn": leaves [G, n, ...], "attn": leaves [G, ...]},
     "tail": leaves [r, ...],
     "final_norm": {"scale": [h]},
     "lm_head": {"kernel": [V, h]}}

"gdn" is absent when every layer is attention, "tail" when the layers are a whole number of
groups, "lm_head" when the embedding is tied to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from model import cache as cache_lib
from model import config as config_lib
from model import layers, placement, qwen3_5

Params = dict[str, Any]
Cache = cache_lib.Cache
init_cache = cache_lib.init_cache
reset_slots = cache_lib.reset_slots
insert_rows = cache_lib.insert_rows


class ModelInputs(NamedTuple):
  """Rows of tokens, each row one or more segments.

  Attributes:
    tokens: int32 ids.
    segment_ids: int32; 0 is padding, 1..K the segments, each in one piece, growing along the row
      (the packers number them so; no user gives them).
    positions: int32, from 0 in each segment.
    routed_experts: int16 experts to replay per layer, -1 where unset; None to route live.
  """

  tokens: Int[Array, "B S"]
  segment_ids: Int[Array, "B S"]
  positions: Int[Array, "B S"]
  routed_experts: Int[Array, "B S L K"] | None = None


class ForwardOutput(NamedTuple):
  """What `forward` gives.

  Attributes:
    hidden: After the final norm.
    routed_experts: int16 experts used, -1 on padding; None for a dense model.
    router_logits: When asked for.
    hidden_states: Embedding, then each layer's output, the last one after the final norm, as
      transformers lists them; when asked for.
  """

  hidden: Float[Array, "B S h"]
  routed_experts: Int[Array, "B S L K"] | None
  router_logits: Float[Array, "B S L E"] | None
  hidden_states: Float[Array, "L+1 B S h"] | None


def row_inputs(tokens: Int[Array, "B S"], lengths: Int[Array, " B"] | None = None) -> ModelInputs:
  """Rows of one segment each, of the given lengths, padded on the right."""
  index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  if lengths is None:
    return ModelInputs(tokens, jnp.ones_like(index), index)
  return ModelInputs(tokens, (index < lengths[:, None]).astype(jnp.int32), index)


def init_params(
  config: config_lib.ModelConfig, options: config_lib.ModelOptions, key: jax.Array
) -> Params:
  """Random weights from transformers' initial distribution.

  Matrices are normal with deviation `initializer_range`, norms are at identity, decay rates are
  uniform in [0.01, 16], dt_bias is 1.

  Args:
    config: The model.
    options: Gives the type weights are kept in.
    key: Random key.
  """
  embed_key, gdn_key, attn_key, tail_key, head_key = jax.random.split(key, 5)

  def stacked(kind, key, *lead):
    make = lambda k: qwen3_5.init_layer(kind, config, options, k)
    for _ in lead:
      make = jax.vmap(make)
    return make(jax.random.split(key, lead))

  groups, per_group, tail = config.num_groups, config.gdn_per_group, config.num_tail_layers
  table = (config.vocab_size, config.hidden_size)
  params: Params = {"embed": {"embedding": layers.normal(embed_key, table, config, options)}}
  params["groups"] = {"attn": stacked(qwen3_5.AttentionLayer, attn_key, groups)}
  if per_group:
    params["groups"]["gdn"] = stacked(qwen3_5.GdnLayer, gdn_key, groups, per_group)
  if tail:
    params["tail"] = stacked(qwen3_5.GdnLayer, tail_key, tail)
  dtype = layers.weight_dtype(options)
  params["final_norm"] = {"scale": jnp.zeros((config.hidden_size,), dtype)}
  if not config.tie_word_embeddings:
    params["lm_head"] = {"kernel": layers.normal(head_key, table, config, options)}
  return params


def abstract_params(config: config_lib.ModelConfig, options: config_lib.ModelOptions) -> Params:
  """Shapes and types of the parameters, without making them."""
  return jax.eval_shape(lambda: init_params(config, options, jax.random.key(0)))


def logical_axes(config: config_lib.ModelConfig) -> Params:
  """Names of each parameter's axes, in a tree of the same structure.

  "group" and "layer" are the axes of the stack.
  """
  options = config_lib.ModelOptions()

  def named(kind, *lead):
    _, state = qwen3_5.abstract_layer(kind, config, options)
    is_variable = lambda x: isinstance(x, nnx.Variable)
    names = jax.tree.map(lambda v: (*lead, *v.logical_axes), state, is_leaf=is_variable)
    return nnx.to_pure_dict(names)

  axes: Params = {
    "embed": {"embedding": ("vocab", "embed")},
    "groups": {"attn": named(qwen3_5.AttentionLayer, "group")},
    "final_norm": {"scale": ("norm",)},
  }
  if config.gdn_per_group:
    axes["groups"]["gdn"] = named(qwen3_5.GdnLayer, "group", "layer")
  if config.num_tail_layers:
    axes["tail"] = named(qwen3_5.GdnLayer, "layer")
  if not config.tie_word_embeddings:
    axes["lm_head"] = {"kernel": ("vocab", "embed")}
  return axes


def count_params(config: config_lib.ModelConfig) -> int:
  """Number of parameters, from shapes alone."""
  tree = abstract_params(config, config_lib.ModelOptions())
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def head_table(params: Params) -> Float[Array, "V h"]:
  """The output embedding: the head's, or the input embedding where they are tied."""
  return params["lm_head"]["kernel"] if "lm_head" in params else params["embed"]["embedding"]


def unembed(params: Params, hidden: Float[Array, "... h"]) -> Float[Array, "... V"]:
  """Logits in the type of `hidden`; take log-softmax in float32."""
  table = head_table(params).astype(hidden.dtype)
  return jnp.einsum("...h,vh->...v", hidden, table, precision=layers.precision(hidden.dtype))


def _embed(config, options, params, tokens):
  table = params["embed"]["embedding"].astype(jnp.dtype(options.activation_dtype))
  return placement.rows(table[tokens])


def _context(config, options, segment_ids, positions) -> layers.Context:
  cos, sin = layers.rotary_angles(positions, config, jnp.dtype(options.activation_dtype))
  return layers.Context(segment_ids, positions, cos, sin)


def _final_norm(config, params, x):
  return layers.rms_norm(x, params["final_norm"]["scale"], config.rms_norm_eps)


def _in_layer_order(outputs, pick):
  """[L, ...] in the order of the layers, from the stack's three outputs."""
  return qwen3_5.in_layer_order([None if out is None else pick(out) for out in outputs])


def _replay(config, routed_experts):
  if routed_experts is None:
    return None
  if not config.is_moe:
    raise ValueError("routed_experts were given to a dense model")
  want = (config.num_hidden_layers, config.num_experts_per_tok)
  if routed_experts.shape[2:] != want:
    raise ValueError(f"routed_experts {routed_experts.shape}: want [B, S, {want[0]}, {want[1]}]")
  return jnp.moveaxis(routed_experts, 2, 0)


def _routed(config, outputs):
  if not config.is_moe:
    return None
  return jnp.moveaxis(_in_layer_order(outputs, lambda out: out.routing.experts), 0, 2)


def forward(
  config: config_lib.ModelConfig,
  options: config_lib.ModelOptions,
  params: Params,
  inputs: ModelInputs,
  *,
  output_hidden_states: bool = False,
  output_router_logits: bool = False,
) -> ForwardOutput:
  """Runs packed rows through the model.

  Segments never see each other: not by attention, nor by Gated DeltaNet state, nor by
  convolution taps.  Padding reaches no expert.

  Args:
    config: The model.
    options: How to compute it.
    params: Parameters.
    inputs: Tokens with their segments, positions and routing to replay.
    output_hidden_states: Also give every layer's output.
    output_router_logits: Also give the router's logits (sparse models).

  Raises:
    ValueError: The inputs' shapes do not agree, or routing is given to a dense model.
  """
  tokens, segment_ids, positions = inputs.tokens, inputs.segment_ids, inputs.positions
  if segment_ids is None or positions is None:
    raise ValueError("segment_ids and positions are needed: packed rows leak without them")
  if not tokens.shape == segment_ids.shape == positions.shape or tokens.ndim != 2:
    raise ValueError(
      f"want tokens, segment_ids, positions of one shape [B, S], got {tokens.shape}, "
      f"{segment_ids.shape}, {positions.shape}"
    )
  x = embedded = _embed(config, options, params, tokens)
  x, outputs = qwen3_5.run_stack(
    config,
    options,
    params,
    x,
    _context(config, options, segment_ids, positions),
    _replay(config, inputs.routed_experts),
    output_hidden_states=output_hidden_states,
  )
  hidden = _final_norm(config, params, x)
  logits = hidden_states = None
  if output_router_logits and config.is_moe:
    logits = jnp.moveaxis(_in_layer_order(outputs, lambda out: out.routing.logits), 0, 2)
  if output_hidden_states:
    middle = _in_layer_order(outputs, lambda out: out.hidden)[:-1]
    hidden_states = jnp.concatenate([embedded[None], middle, hidden[None]])
  return ForwardOutput(hidden, _routed(config, outputs), logits, hidden_states)


def prefill(
  config: config_lib.ModelConfig,
  options: config_lib.ModelOptions,
  params: Params,
  inputs: ModelInputs,
  cache: Cache,
) -> tuple[Float[Array, "B h"], Cache, Int[Array, "B S L K"] | None]:
  """Appends prompts, or the next part of them, to the cache.

  Args:
    config: The model.
    options: How to compute it.
    params: Parameters.
    inputs: One segment a row, continuing what the slot holds: real tokens first, padding after.
      A row of padding alone leaves its slot as it is.  `positions` are not read: they follow
      from the cache's lengths.
    cache: Slots, one a row.

  Returns:
    The hidden state after the final norm at each row's last real token (of no meaning for a row
    without one), the cache, and the experts used (-1 on padding; None for a dense model).

  Raises:
    ValueError: Another number of rows than slots, or a row that is no single segment or outgrows
      its slot.  A compiled call cannot look at values: there such a row's hidden state is NaN.
  """
  batch, length = inputs.tokens.shape
  if length > cache.max_length:
    raise ValueError(f"{length} tokens do not fit slots of {cache.max_length}")
  if batch != cache.lengths.shape[0]:
    raise ValueError(f"{batch} rows for a cache of {cache.lengths.shape[0]} slots")
  real = (inputs.segment_ids > 0).astype(jnp.int32)
  wrong = _refused(
    _not_one_segment(inputs.segment_ids),
    "prefill continues one segment a row: real tokens first, then padding",
  ) | _refused(
    cache.lengths + jnp.sum(real, axis=1) > cache.max_length,
    f"a row outgrows its slot of {cache.max_length} tokens",
  )
  hidden, cache, outputs = _extend(
    config, options, params, inputs.tokens, real, cache, inputs.routed_experts
  )
  last = jnp.maximum(jnp.sum(real, axis=1) - 1, 0)
  hidden = hidden[jnp.arange(batch), last]
  # A traced call cannot raise; what is refused is made impossible to overlook.
  hidden = jnp.where(wrong[:, None], jnp.nan, hidden)
  return hidden, cache, _routed(config, outputs)


def _refused(wrong: Bool[Array, " B"], message: str) -> Bool[Array, " B"]:
  """Raises where values are there to be looked at; else hands on which rows to make NaN."""
  if not isinstance(wrong, jax.core.Tracer) and wrong.any():
    raise ValueError(message)
  return wrong


def _not_one_segment(segment_ids: Int[Array, "B S"]) -> Bool[Array, " B"]:
  """Rows that hold two segments, or real tokens after padding."""
  first = segment_ids[:, :1]
  return jnp.any((segment_ids != first) & (segment_ids != 0), axis=1) | jnp.any(
    (segment_ids[:, 1:] != 0) & (segment_ids[:, :-1] == 0), axis=1
  )


def decode_step(
  config: config_lib.ModelConfig,
  options: config_lib.ModelOptions,
  params: Params,
  cache: Cache,
  tokens: Int[Array, " B"],
  active: Bool[Array, " B"] | None = None,
) -> tuple[Float[Array, "B h"], Cache, Int[Array, "B L K"] | None]:
  """Appends one token to each active slot.

  Args:
    config: The model.
    options: How to compute it.
    params: Parameters.
    cache: Slots.
    tokens: One id a slot.
    active: Slots that advance; all when absent.  The others are left as they are.

  Returns:
    Hidden state after the final norm (of no meaning for an inactive slot), the cache, and the
    experts used.

  Raises:
    ValueError: An active slot is full.  A compiled call cannot look at values: there its hidden
      state is NaN.
  """
  active = jnp.ones(tokens.shape, bool) if active is None else active
  full = _refused(
    active & (cache.lengths >= cache.max_length),
    f"an active slot holds its {cache.max_length} tokens already",
  )
  real = active.astype(jnp.int32)[:, None]
  hidden, cache, outputs = _extend(config, options, params, tokens[:, None], real, cache, None)
  routed = _routed(config, outputs)
  # Its key and value had no place: what was computed without them must not pass for a result.
  hidden = jnp.where(full[:, None], jnp.nan, hidden[:, 0])
  return hidden, cache, None if routed is None else routed[:, 0]


def _extend(config, options, params, tokens, real, cache, routed_experts):
  """Runs tokens that continue the cache; `real` is 1 on real tokens, 0 on padding."""
  positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
  groups, tail = cache_lib.split(cache)
  x, outputs = qwen3_5.run_stack(
    config,
    options,
    params,
    _embed(config, options, params, tokens),
    _context(config, options, real, positions),
    _replay(config, routed_experts),
    groups,
    tail,
  )
  gdn, attn, tail_out = (None if out is None else out.cache for out in outputs)
  cache = cache_lib.join(cache.lengths + jnp.sum(real, axis=1), gdn, attn, tail_out)
  return _final_norm(config, params, x), cache, outputs
