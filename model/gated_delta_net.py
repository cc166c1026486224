"""The Gated DeltaNet mixer of Qwen3.5: convolution, gated delta rule, gated norm."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kernels.base import options as options_lib
from kernels.conv1d import conv1d
from kernels.gated_norm import gated_norm
from kernels.gdn import gdn
from model import config as config_lib
from model import layers, placement


class DeltaState(NamedTuple):
  """What a row remembers.

  Attributes:
    state: float32 memory per value head.
    window: The last inputs of the convolution.
  """

  state: Float[Array, "B nv dk dv"]
  window: Float[Array, "B taps-1 C"]


class Conv(nnx.Module):
  """Filters of the causal depthwise convolution; the last tap is the current token's."""

  def __init__(self, config, options, *, rngs: nnx.Rngs):
    shape = (config.linear_conv_kernel_dim, config.conv_dim)
    self.kernel = nnx.Param(
      layers.normal(rngs.params(), shape, config, options), logical_axes=("conv_taps", "gdn_qkv")
    )


class PlainScale(nnx.Module):
  """Scale of the gated norm: plain, one at the start, always float32."""

  def __init__(self, size: int):
    self.scale = nnx.Param(jnp.ones((size,), jnp.float32), logical_axes=("norm",))


class GatedDeltaNet(nnx.Module):
  """One Gated DeltaNet mixer.

  Attributes:
    in_proj_qkv: Queries, keys, values, each head by head.
    in_proj_z: Gate of the norm.
    in_proj_b: Writing strength before its sigmoid, per value head.
    in_proj_a: Decay before its softplus, per value head.
    conv1d: Over queries, keys and values.
    A_log: Logarithm of the decay rate, float32.
    dt_bias: Added to the decay's input, float32.
    norm: Scale of the gated norm, float32.
    out_proj: Output projection.
  """

  def __init__(self, config: config_lib.ModelConfig, options, *, rngs: nnx.Rngs):
    self.config, self.options = config, options
    group = options.gdn_fwd_kernel_head_group_size
    if config.linear_num_key_heads % group:
      raise options_lib.UserError(
        f"--gdn_fwd_kernel_head_group_size={group} does not divide the model's"
        f" {config.linear_num_key_heads} key heads"
      )
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    common = {"config": config, "options": options, "rngs": rngs}
    self.in_proj_qkv = layers.Linear(hidden, config.conv_dim, ("embed", "gdn_qkv"), **common)
    self.in_proj_z = layers.Linear(hidden, config.value_dim, ("embed", "gdn_value"), **common)
    self.in_proj_b = layers.Linear(hidden, heads, ("embed", "gdn_heads"), **common)
    self.in_proj_a = layers.Linear(hidden, heads, ("embed", "gdn_heads"), **common)
    self.conv1d = Conv(**common)
    rate = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 0.01, 16.0)
    self.A_log = nnx.Param(jnp.log(rate), logical_axes=("gdn_heads",))
    self.dt_bias = nnx.Param(jnp.ones((heads,), jnp.float32), logical_axes=("gdn_heads",))
    self.norm = PlainScale(config.linear_value_head_dim)
    self.out_proj = layers.Linear(config.value_dim, hidden, ("gdn_value", "embed"), **common)

  def __call__(
    self,
    x: Float[Array, "B S h"],
    context: layers.Context,
    cache: DeltaState | None = None,
  ) -> tuple[Float[Array, "B S h"], DeltaState | None]:
    """Mixes within segments; with a cache, each row continues the cached segment.

    Args:
      x: Normalised input.
      context: Segments; with a cache real tokens come first in a row and are one segment.
      cache: Memory so far.

    Returns:
      The mixer's output, and the memory after each row's last real token.
    """
    config = self.config
    batch, length, _ = x.shape
    qkv, kernel = self.in_proj_qkv(x), self.conv1d.kernel[...]
    real = context.segment_ids > 0
    segments = context.segment_ids if cache is None else real.astype(jnp.int32)
    window = None if cache is None else cache.window
    single = cache is not None and length == 1
    if single:
      mixed, new_window = conv1d.causal_conv1d_silu_step(qkv[:, 0], kernel, window)
      mixed = mixed[:, None]
    else:
      mixed = conv1d.causal_conv1d_silu(
        qkv, kernel, segments, window, implementation=self.options.kernel_implementation
      )
      if cache is not None:
        new_window = conv1d.next_window(qkv, window, jnp.sum(real, axis=1))
    q, k, v = jnp.split(mixed, [config.key_dim, 2 * config.key_dim], axis=-1)
    keys = (config.linear_num_key_heads, config.linear_key_head_dim)
    values = (config.linear_num_value_heads, config.linear_value_head_dim)
    q, k = q.reshape(batch, length, *keys), k.reshape(batch, length, *keys)
    v = v.reshape(batch, length, *values)
    beta = jax.nn.sigmoid(self.in_proj_b(x))
    decay = jax.nn.softplus(self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...])
    g = -jnp.exp(self.A_log[...]) * decay

    if single:
      out, state = gdn.gated_delta_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], cache.state)
      out = out[:, None]
      keep = real[:, 0]
      state = jnp.where(keep[:, None, None, None], state, cache.state)
      new_window = jnp.where(keep[:, None, None], new_window, cache.window)
    else:
      run = functools.partial(
        gdn.gated_delta_rule,
        chunk_size=self.options.gdn_chunk_size,
        implementation=self.options.kernel_implementation,
        head_group=self.options.gdn_fwd_kernel_head_group_size,
      )
      before = () if cache is None else (cache.state,)
      # The rule folds rows into its other independent axes.
      out, state = placement.over_rows(run, (q, k, v, g, beta, segments, *before))
    z = self.in_proj_z(x).reshape(batch, length, *values)
    out = gated_norm.gated_rms_norm(
      out,
      z,
      self.norm.scale[...],
      config.rms_norm_eps,
      implementation=self.options.kernel_implementation,
    )
    out = self.out_proj(out.reshape(batch, length, config.value_dim))
    return out, None if cache is None else DeltaState(state, new_window)
