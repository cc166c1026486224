"""AdamW on float32 masters, with frozen parameters and skipped steps.

Weights are what the model reads.  A float32 weight is its own master.  A bfloat16 weight has a
float32 master beside it, from which it is rounded after every update; so small updates add up in
the master although they vanish in the weight.  A frozen parameter has neither master nor moments.

Trees: `None` stands where a parameter has no part, so a tree of masters or gradients has the
structure of the parameters, and JAX passes over what is not there.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from kernels.base.options import UserError
from rl.config import OptimizerOptions

Tree = Any

_REFERENCE_BATCH = 256
_LEARNING_RATE = 1e-6
_GRADIENT_CLIP = 0.125


class TrainState(NamedTuple):
  """All that an update changes.

  Attributes:
    weights: Parameters in the types they are kept in.
    masters: float32 masters of the trained parameters that are not float32, None elsewhere.
    moments: optax state of the trained parameters: float32 moments and the count of updates.
    step: Updates asked for, skipped ones included; int32.
    skipped: Updates skipped since the gradient's norm was not finite; int32.
  """

  weights: Tree
  masters: Tree
  moments: Any
  step: Int[Array, ""]
  skipped: Int[Array, ""]


class HyperParameters(NamedTuple):
  """Numbers of an update that may change from step to step without compiling again.

  Attributes:
    learning_rate: float32.
    gradient_clip: Largest global norm; 0 for no limit.
  """

  learning_rate: Float[Array, ""]
  gradient_clip: Float[Array, ""]


class UpdateInfo(NamedTuple):
  """What an update reports.

  Attributes:
    grad_norm: Global norm before clipping, over trained parameters.
    applied: Whether the update was made.
  """

  grad_norm: Float[Array, ""]
  applied: Bool[Array, ""]


def hyper_parameters(
  options: OptimizerOptions, step: int, trajectories_per_step: int
) -> HyperParameters:
  """Learning rate and clip of a step: functions of the step and the batch size alone.

  Args:
    options: Given values stand as they are; empty ones follow the benchmark, 1e-6 * sqrt(B / 256)
      and 0.125 * sqrt(256 / B) for B trajectories a step.
    step: The step, from 1, counted over the whole run, restarts included.
    trajectories_per_step: B.
  """
  scale = math.sqrt(trajectories_per_step / _REFERENCE_BATCH)
  rate, clip = options.learning_rate, options.gradient_clip
  rate = _LEARNING_RATE * scale if rate is None else rate
  if options.learning_rate_decay_steps is not None:
    rate *= max(0.0, 1.0 - (step - 1) / options.learning_rate_decay_steps)
  return HyperParameters(
    learning_rate=jnp.float32(rate),
    gradient_clip=jnp.float32(_GRADIENT_CLIP / scale if clip is None else clip),
  )


def path_name(path: tuple[Any, ...]) -> str:
  """A parameter's path as text, such as "groups/gdn/mlp/router/kernel"."""
  return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def trainable_mask(params: Tree, options: OptimizerOptions) -> Tree:
  """True on the parameters that are trained.

  Args:
    params: Parameters or their shapes.
    options: The regular expression, matched at the start of a parameter's path.

  Raises:
    UserError: It matches no parameter.
  """
  pattern = re.compile(options.trainable_parameters_mask)
  mask = jax.tree_util.tree_map_with_path(
    lambda path, _: pattern.match(path_name(path)) is not None, params
  )
  if not any(jax.tree.leaves(mask)):
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    raise UserError(
      f"--trainable_parameters_mask={options.trainable_parameters_mask} matches none of the "
      f"{len(names)} parameters, such as {names[0]}"
    )
  return mask


def select(tree: Tree, mask: Tree) -> Tree:
  """The leaves where the mask is true, None elsewhere."""
  return jax.tree.map(lambda leaf, on: leaf if on else None, tree, mask)


def combine(first: Tree, second: Tree) -> Tree:
  """Leaves of `first`, those of `second` where `first` has None."""
  is_none = lambda leaf: leaf is None
  return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=is_none)


def round_to(value: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
  """Rounds float32 to a narrower type in a way that no compiler may leave out.

  A plain cast there and back may be dropped under jit, which would train weights of a precision
  that the model never sees.
  """
  dtype = jnp.dtype(dtype)
  if dtype == jnp.float32:
    return value
  kind = jnp.finfo(dtype)
  return jax.lax.reduce_precision(value, kind.nexp, kind.nmant).astype(dtype)


def transformation(options: OptimizerOptions) -> optax.GradientTransformation:
  """AdamW without its last factor, -learning rate, which is an argument of the update."""
  return optax.chain(
    optax.scale_by_adam(
      b1=options.adam_b1, b2=options.adam_b2, eps=options.adam_eps, mu_dtype=jnp.float32
    ),
    optax.add_decayed_weights(options.weight_decay),
  )


def init_state(
  params: Tree, options: OptimizerOptions, *, weight_dtypes: Tree = None
) -> TrainState:
  """The state before the first update.

  Args:
    params: Initial parameters, float32 or narrower.  Float32 ones may be the state's own arrays
      afterwards: do not keep them if the state is donated.
    options: Mask and optimizer.
    weight_dtypes: Type each weight is kept in; None for the types of `params`.

  Returns:
    The state; masters start from `params` unrounded.
  """
  mask = trainable_mask(params, options)
  if weight_dtypes is None:
    weight_dtypes = jax.tree.map(lambda p: p.dtype, params)

  def narrow(param, dtype):
    if jnp.dtype(dtype).itemsize >= param.dtype.itemsize:
      return param.astype(dtype)
    return round_to(param.astype(jnp.float32), dtype)

  weights = jax.tree.map(narrow, params, weight_dtypes)
  masters = jax.tree.map(
    lambda p, w, on: p.astype(jnp.float32) if on and w.dtype != jnp.float32 else None,
    params,
    weights,
    mask,
  )
  trained = jax.tree.map(
    lambda w, on: jnp.zeros(w.shape, jnp.float32) if on else None, weights, mask
  )
  return TrainState(
    weights=weights,
    masters=masters,
    moments=transformation(options).init(trained),
    step=jnp.int32(0),
    skipped=jnp.int32(0),
  )


def apply_update(
  state: TrainState, gradients: Tree, hyper: HyperParameters, options: OptimizerOptions
) -> tuple[TrainState, UpdateInfo]:
  """One update, or none when the gradient's global norm is not finite.

  A skipped update leaves weights, masters, moments and Adam's count as they are, bit for bit; only
  `step` and `skipped` count it.

  Args:
    state: Before.
    gradients: float32 mean gradients of the trained parameters, None elsewhere.
    hyper: Learning rate and clip.
    options: AdamW's constants.
  """
  norm = optax.tree.norm(gradients)
  applied = jnp.isfinite(norm)
  limit = hyper.gradient_clip
  factor = jnp.where((limit > 0) & (norm > limit), limit / norm, 1.0)
  clipped = jax.tree.map(lambda g: g * factor, gradients)

  is_none = lambda leaf: leaf is None
  trained = jax.tree.map(
    lambda w, m, g: None if g is None else (w if m is None else m),
    state.weights,
    state.masters,
    gradients,
    is_leaf=is_none,
  )
  directions, moments = transformation(options).update(clipped, state.moments, trained)
  moved = jax.tree.map(lambda p, d: p - hyper.learning_rate * d, trained, directions)

  keep = lambda new, old: jnp.where(applied, new, old)
  moved = jax.tree.map(keep, moved, trained)
  moments = jax.tree.map(keep, moments, state.moments)
  weights = jax.tree.map(
    lambda w, p: w if p is None else round_to(p, w.dtype), state.weights, moved, is_leaf=is_none
  )
  masters = jax.tree.map(
    lambda m, p: None if m is None else p, state.masters, moved, is_leaf=is_none
  )
  new = TrainState(
    weights=weights,
    masters=masters,
    moments=moments,
    step=state.step + 1,
    skipped=state.skipped + jnp.where(applied, 0, 1),
  )
  return new, UpdateInfo(grad_norm=norm, applied=applied)
