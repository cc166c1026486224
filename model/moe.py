"""The sparse feed-forward layer: router, experts, shared expert; and its balance loss."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.base import options as options_lib
from kernels.gmm import bundled, expert_mlp, gmm
from kernels.gmm import options as gmm_options
from kernels.moe_dispatch import moe_dispatch
from model import config as config_lib
from model import layers, placement


class Routing(NamedTuple):
  """What a sparse layer reports.

  Attributes:
    experts: Experts used, int16; -1 on padding.
    logits: Router logits in the type they were computed in.
  """

  experts: Int[Array, "B S K"]
  logits: Float[Array, "B S E"]


def form_of(options: config_lib.ModelOptions, saved: tuple[str, ...] = ()) -> expert_mlp.Form:
  """How the experts' MLP runs as one op; with `use_gmm_v2` by the kernels."""
  return expert_mlp.Form(
    fused_swiglu=options.moe_wi_gmm_fused_swiglu,
    router_grad_from_wo_input=options.moe_router_grad_from_wo_input,
    fused_dswiglu=options.moe_wo_gmm_fused_dswiglu,
    saved=saved,
    prefused=options.prefuse_moe_weights,
    implementation=options.kernel_implementation if options.use_gmm_v2 else "reference",
    wi_tiles=options.tiles("wi"),
    wo_tiles=options.tiles("wo"),
  )


def plain_rows(
  options: config_lib.ModelOptions,
  rows: Float[Array, "M h"],
  wi: Float[Array, "G h 2F"],
  wo: Float[Array, "G F h"],
  group_sizes: Int[Array, " G"],
) -> Float[Array, "M h"]:
  """The experts' MLP on rows sorted by expert, of plain products: JAX's kernel or `ragged_dot`."""
  product = gmm.grouped_matmul
  if options.use_tokamax_gmm:
    implementation = options.kernel_implementation
    product = functools.partial(bundled.grouped_matmul, implementation=implementation)
  if options.prefuse_moe_weights:
    gate, up = jnp.split(product(rows, wi, group_sizes), 2, axis=-1)
  else:
    gate, up = (product(rows, half, group_sizes) for half in jnp.split(wi, 2, axis=2))
  gate, up = checkpoint_name(gate, expert_mlp.GATE), checkpoint_name(up, expert_mlp.UP)
  return checkpoint_name(product(jax.nn.silu(gate) * up, wo, group_sizes), expert_mlp.OUT)


class SparseMoe(nnx.Module):
  """Mixture of experts with a gated shared expert.

  Attributes:
    router: Logits of the experts.
    wi: Gate, then up projection of each expert.
    wo: Down projection of each expert.
    shared_expert: Sees every token.
    shared_expert_gate: Its gate, one number a token.
  """

  def __init__(self, config: config_lib.ModelConfig, options, *, rngs: nnx.Rngs):
    self.config, self.options = config, options
    if wrong := gmm_options.misfits(options, config.moe_intermediate_size):
      raise options_lib.UserError("; ".join(wrong))
    hidden, experts = config.hidden_size, config.num_experts
    inner = config.moe_intermediate_size
    common = {"config": config, "options": options, "rngs": rngs}
    self.router = layers.Linear(hidden, experts, ("embed", "router"), **common)
    self.wi = nnx.Param(
      layers.normal(rngs.params(), (experts, hidden, 2 * inner), config, options),
      logical_axes=("expert", "embed", "mlp"),
    )
    self.wo = nnx.Param(
      layers.normal(rngs.params(), (experts, inner, hidden), config, options),
      logical_axes=("expert", "mlp", "embed"),
    )
    self.shared_expert = layers.GatedMlp(
      config.shared_expert_intermediate_size, "shared_mlp", **common
    )
    self.shared_expert_gate = layers.Linear(hidden, 1, ("embed", "one"), **common)

  def __call__(
    self,
    x: Float[Array, "B S h"],
    segment_ids: Int[Array, "B S"],
    replay: Int[Array, "B S K"] | None = None,
  ) -> tuple[Float[Array, "B S h"], Routing]:
    """Routes real tokens; padding reaches no expert.

    Args:
      x: Normalised input.
      segment_ids: 0 is padding.
      replay: Experts to use; a token with a negative entry chooses its own.  Weights always come
        from this call's logits.
    """
    config = self.config
    tokens = x.reshape(-1, config.hidden_size)
    if self.options.float32_gate_logits:
      logits = self.router(tokens.astype(jnp.float32))
    else:
      logits = self.router(tokens)
    real = segment_ids.reshape(-1) > 0
    if replay is not None:
      replay = replay.reshape(-1, config.num_experts_per_tok)
    capacity = self.options.moe_fallback_topk_capacity
    if replay is not None and capacity:
      # Padding chooses nothing: it must not take the place of a token that does.
      replay = jnp.where(real[:, None], replay, 0)
    experts, weights = route(logits, config.num_experts_per_tok, replay, capacity)
    experts = jnp.where(real[:, None], experts, -1)

    def run_experts(tokens, experts, weights, wi, wo):
      plan = moe_dispatch.plan(experts, config.num_experts)
      kernels = self.options.kernel_implementation
      rows = moe_dispatch.dispatch(tokens, plan, kernels)
      if self.options.use_gmm_v2:
        row_weights = moe_dispatch.dispatch_weights(weights, plan).astype(jnp.float32)
        form = form_of(self.options)
        rows = expert_mlp.expert_mlp(rows, wi, wo, row_weights, plan.group_sizes, form=form)
        return moe_dispatch.sum_rows(rows, plan, kernels)
      rows = plain_rows(self.options, rows, wi, wo, plan.group_sizes)
      return moe_dispatch.combine(rows, weights, plan)

    wi, wo = self.wi[...].astype(x.dtype), self.wo[...].astype(x.dtype)
    # Sorting tokens by expert mixes rows: each device sorts its own.
    routed = placement.over_rows(
      run_experts, (tokens, experts, weights.astype(x.dtype)), (wi, wo), split=(1, 2)
    )
    shared = jax.nn.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
    lead = x.shape[:2]
    routing = Routing(experts.astype(jnp.int16).reshape(*lead, -1), logits.reshape(*lead, -1))
    return (routed + shared).reshape(x.shape), routing


def route(
  logits: Float[Array, "T E"],
  top_k: int,
  replay: Int[Array, "T K"] | None,
  fallback_capacity: int = 0,
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
  """Experts and their weights: softmax over all experts, top-k, renormalised to sum to one.

  Args:
    logits: Router logits.
    top_k: Experts a token.
    replay: Experts to use; a token with a negative entry chooses its own.
    fallback_capacity: Where so many tokens or fewer choose their own, only they are put in a row
      and go through top-k; 0 for all tokens always.

  Returns:
    int32 experts, and float32 weights, from the live logits either way.
  """
  probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
  best = lambda p: jax.lax.top_k(p, top_k)[1].astype(jnp.int32)
  fixed = jax.lax.stop_gradient(probabilities)
  if replay is None:
    experts = best(fixed)
  else:
    free = jnp.any(replay < 0, axis=-1)

    def of_few(p):
      index = jnp.nonzero(free, size=fallback_capacity, fill_value=p.shape[0])[0]
      chosen = best(jnp.take(p, index, axis=0, mode="clip"))
      return jnp.zeros(replay.shape, jnp.int32).at[index].set(chosen, mode="drop")

    if fallback_capacity:
      own = jax.lax.cond(jnp.sum(free) <= fallback_capacity, of_few, best, fixed)
    else:
      own = best(fixed)
    experts = jnp.where(free[:, None], own, replay.astype(jnp.int32))
  weights = jnp.take_along_axis(probabilities, experts, axis=-1)
  return experts, weights / jnp.sum(weights, axis=-1, keepdims=True)


def load_balance_loss(
  router_logits: Float[Array, "B S L E"], segment_ids: Int[Array, "B S"], top_k: int
) -> Float[Array, ""]:
  """Switch Transformer's auxiliary loss over all layers' tokens, as transformers computes it.

  E * sum_e f_e P_e, f the top-k counts and P the mean probabilities over every layer's real
  tokens; it is `top_k` when the experts are balanced.  Padding counts in neither.

  Fedus, Zoph, Shazeer (arXiv:2101.03961), equations 4 to 6.

  Args:
    router_logits: From `forward(..., output_router_logits=True)`.
    segment_ids: 0 is padding.
    top_k: Experts a token.
  """
  probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
  experts = router_logits.shape[-1]
  _, chosen = jax.lax.top_k(jax.lax.stop_gradient(probabilities), top_k)
  counts = jnp.sum(jax.nn.one_hot(chosen, experts), axis=-2)
  real = (segment_ids > 0).astype(jnp.float32)[:, :, None, None]
  total = jnp.maximum(jnp.sum(real) * router_logits.shape[2], 1.0)
  mean = lambda x: jnp.sum(x * real, axis=(0, 1, 2)) / total
  return experts * jnp.sum(mean(counts) * mean(probabilities))
