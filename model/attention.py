"""Softmax attention of Qwen3.5: grouped queries, per-head norms, partial rotary, output gate."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels.attention import attention as attention_op
from model import config as config_lib
from model import layers, placement


class KeyValues(NamedTuple):
  """Keys (rotated) and values of each row's tokens so far.

  Attributes:
    keys: Filled up to the row's length.
    values: Likewise.
    lengths: Tokens of each row before this call.
  """

  keys: Float[Array, "B M nkv d"]
  values: Float[Array, "B M nkv d"]
  lengths: Int[Array, " B"]


def query_factors(dim: int, options: config_lib.ModelOptions) -> tuple[float, float]:
  """Factor of the queries, to be applied in float32 by their norm, and of the scores.

  Their product is dim^-0.5.  With exponentials to base 2 the scores' factor is one that the kernels
  need not multiply by.
  """
  scale = dim**-0.5
  return attention_op.split_scale(scale) if options.sa_use_base2_exp else (1.0, scale)


class Attention(nnx.Module):
  """One attention mixer.

  Attributes:
    q_proj: For each head its query, then its gate.
    k_proj: Keys.
    v_proj: Values.
    o_proj: Output projection.
    q_norm: Per-head norm of queries, before the rotation.
    k_norm: Per-head norm of keys, before the rotation.
  """

  def __init__(self, config: config_lib.ModelConfig, options, *, rngs: nnx.Rngs):
    self.config, self.options = config, options
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    common = {"config": config, "options": options, "rngs": rngs}
    self.q_proj = layers.Linear(hidden, 2 * queries, ("embed", "q_heads"), **common)
    self.k_proj = layers.Linear(hidden, keys, ("embed", "kv_heads"), **common)
    self.v_proj = layers.Linear(hidden, keys, ("embed", "kv_heads"), **common)
    self.o_proj = layers.Linear(queries, hidden, ("q_heads", "embed"), **common)
    self.q_norm = layers.RmsNorm(dim, config, options)
    self.k_norm = layers.RmsNorm(dim, config, options)

  def __call__(
    self,
    x: Float[Array, "B S h"],
    context: layers.Context,
    cache: KeyValues | None = None,
  ) -> tuple[Float[Array, "B S h"], KeyValues | None]:
    """Attends within segments, or to a cache and the row's own tokens.

    Args:
      x: Normalised input.
      context: Segments and positions.  With a cache a row is one segment that continues the
        cached one, and `positions` count from its start.
      cache: Keys and values so far.

    Returns:
      The mixer's output, and the cache with this call's tokens in it (its lengths unchanged).
    """
    config, options = self.config, self.options
    batch, length, _ = x.shape
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query_and_gate = self.q_proj(x).reshape(batch, length, heads, 2 * dim)
    q, gate = query_and_gate[..., :dim], query_and_gate[..., dim:]
    k = self.k_proj(x).reshape(batch, length, groups, dim)
    v = self.v_proj(x).reshape(batch, length, groups, dim)
    factor, scale = query_factors(dim, options)
    q = layers.rotate(self.q_norm(q, factor), context.cos, context.sin)
    k = layers.rotate(self.k_norm(k), context.cos, context.sin)

    real = context.segment_ids > 0
    if cache is None:
      kv_segments, kv_positions = context.segment_ids, context.positions
      q_segments = context.segment_ids
    else:
      capacity = cache.keys.shape[1]
      # A padding token's slot lies outside, where the write is dropped.
      slot = jnp.where(real, context.positions, capacity)
      rows = jnp.arange(batch)[:, None]
      write = lambda old, new: old.at[rows, slot].set(new.astype(old.dtype), mode="drop")
      cache = cache._replace(keys=write(cache.keys, k), values=write(cache.values, v))
      k, v = cache.keys.astype(x.dtype), cache.values.astype(x.dtype)
      filled = cache.lengths + jnp.sum(real, axis=1)
      index = jnp.broadcast_to(jnp.arange(capacity), (batch, capacity))
      kv_segments = (index < filled[:, None]).astype(jnp.int32)
      kv_positions, q_segments = index, real.astype(jnp.int32)

    def run(q, k, v, q_segments, kv_segments, q_positions, kv_positions):
      return attention_op.attention(
        q,
        k,
        v,
        q_segment_ids=q_segments,
        kv_segment_ids=kv_segments,
        q_positions=q_positions,
        kv_positions=kv_positions,
        scale=scale,
        implementation=options.kernel_implementation,
        given=options,
      )

    operands = (q, k, v, q_segments, kv_segments, context.positions, kv_positions)
    # The partitioner splits plain JAX by itself, and cannot split a kernel.
    plain = options.kernel_implementation == "reference"
    out = run(*operands) if plain else placement.over_rows(run, operands)
    out = (out * jax.nn.sigmoid(gate)).reshape(batch, length, heads * dim)
    return self.o_proj(out), cache
