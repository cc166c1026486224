"""A key's values against those of the same step without it, held to the promise of its class.

Both programs run on the mesh of mocked devices, from the same weights and micro-batch, in float32,
where a key that rounds (class R) differs in the order of sums alone.  Compared are the loss, the
gradient of every parameter (ranks' partial sums added up) and, for keys of the update, the weights
after it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.base import refusals
from model import api
from rl import optimizer, packing, placed
from rl import refusals as rl_refusals
from tools.keys import key as key_lib
from tools.keys import programs

Values = dict[str, np.ndarray]

# In float32, and with a loss that drops none of the random samples.
_PLAIN: dict[str, Any] = {
  "dtype": "float32",
  "truncated_importance_sampling_type": "none",
  "seq_logprob_error_threshold": None,
}


@dataclasses.dataclass(frozen=True)
class Parity:
  """How far a step is from the step without the key.

  Attributes:
    distance: Largest relative L2 distance of a gradient, a weight or the loss; of A_log and dt_bias
      a fifth, since five times as much is allowed to them.
    where: Whose.
    equal: Whether every bit is the same.
  """

  distance: float
  where: str
  equal: bool

  def keeps(self, promise: str) -> bool:
    """Whether the class's promise is kept."""
    limit = key_lib.LIMITS[promise]
    return self.equal if limit == 0 else self.distance <= limit


def _batch(shapes: packing.PackedBatch, num_experts: int, unset: bool) -> packing.PackedBatch:
  """A micro-batch: two segments a row, one across a shard's edge, padding behind them."""
  rng = np.random.default_rng(0)
  rows, length = shapes.tokens.shape
  at = np.arange(length)
  cuts = rng.integers(length // 4, length // 2, (rows, 1))
  ends = rng.integers(length - 8, length, (rows, 1))
  ids = np.where(at < cuts, 1, np.where(at < ends, 2, 0)).astype(np.int32)
  positions = np.where(ids == 2, at - cuts, at * (ids == 1)).astype(np.int32)
  mask = ((positions > 0) & (rng.random(ids.shape) < 0.8)).astype(np.float32)
  real = lambda scale: (rng.normal(size=ids.shape) * scale * mask).astype(np.float32)
  routed = shapes.routed_experts
  if routed is not None:
    # Draws of their own, so that the rest of the micro-batch is the same without them.
    draw = np.random.default_rng(1).random
    chosen = np.argsort(draw((*routed.shape[:-1], num_experts)), axis=-1)
    routed = chosen[..., : routed.shape[-1]].astype(np.int16)
    # Few tokens of a device choose for themselves, so that they fit where there is room for some.
    routed[(draw(ids.shape) < 0.1) | (ids == 0) | unset] = -1
  ends_ = np.ones(shapes.segment_valid.shape, np.float32)
  return packing.PackedBatch(
    tokens=rng.integers(0, 512, ids.shape).astype(np.int32),
    segment_ids=ids,
    positions=positions,
    loss_mask=mask,
    # Of one sign: a loss that cancels to nothing has no relative error to speak of.
    advantages=np.abs(real(1.0)),
    sampler_logprobs=real(0.1) - 6.0 * mask,
    old_logprobs=None,
    reference_logprobs=None,
    routed_experts=routed,
    segment_valid=ends_,
    segment_truncated=0 * ends_,
    segment_reward=ends_,
    segment_index=np.arange(ends_.size, dtype=np.int32).reshape(ends_.shape),
  )


def _by_path(prefix: str, tree: Any) -> Values:
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
  return {prefix + optimizer.path_name(path): np.asarray(leaf) for path, leaf in leaves}


@functools.cache
def _params(config, options):
  make = jax.jit(functools.partial(api.init_params, config, options))
  return jax.device_get(make(jax.random.key(0)))


@functools.cache
def _run(
  update: bool, layers: str, unset: bool, fused: bool, given: tuple[tuple[str, Any], ...]
) -> Values:
  built = programs.build(dict(given), layers=layers)
  functions, layout = built.functions, built.layout
  params = _params(built.config, built.model_options)
  batch = _batch(built.batch, built.config.num_experts, unset)
  batch = jax.device_put(batch, layout.batch(batch))
  weights = jax.device_put(params, layout.parameters)
  if functions.prepare is not None:
    prepared = jax.jit(functions.prepare)(weights)
    weights = optimizer.combine(prepared, weights)
  options = None if fused else {"xla_disable_hlo_passes": "fusion"}
  compiled = jax.jit(functions.first_micro_batch, compiler_options=options)
  sums = compiled(weights, batch)
  found = _by_path("gradient of ", placed.whole_gradients(jax.device_get(sums), layout))
  found["loss"] = np.asarray(sums.metrics["loss"].value)
  if update:
    state = placed.init_state(params, built.optimizer_options, layout)
    hyper = optimizer.HyperParameters(jnp.float32(1e-3), jnp.float32(0.0))
    state, _ = jax.jit(functions.update)(state, sums, hyper)
    found |= _by_path("new ", state.weights)
  return found


def _values(key: key_lib.Key, given: Mapping[str, Any], unset: bool) -> Values:
  plain = {**given, **_PLAIN}
  # Fused loops add in an order that depends on what they are fused with.  The load balance's permutes
  # and interpreted kernels come out wrong on a CPU without fusion (NaN with and without the key).
  breaks = ("context_parallel_attention_load_balance", "kernel_implementation")
  fused = key_lib.LIMITS[key.promise] > 0 or any(name in key.base for name in breaks)
  return _run(key.program == "update", key.layers, unset, fused, tuple(sorted(plain.items())))


def compare(wanted: Values, found: Values) -> Parity:
  """Distances of two steps.

  Raises:
    ValueError: They have other values, or one of the first step is zero, which shows nothing.
  """
  if wanted.keys() != found.keys():
    raise ValueError(f"values of one step alone: {sorted(wanted.keys() ^ found.keys())}")
  if zero := [name for name, a in wanted.items() if not np.any(a)]:
    raise ValueError(f"zero, so nothing can be compared: {', '.join(zero)}")
  worst, where, equal = 0.0, "", True
  for name, a in wanted.items():
    b = found[name]
    equal &= bool(np.array_equal(a, b))
    wide = np.asarray(a, np.float64)
    distance = float(np.linalg.norm(b - wide) / max(np.linalg.norm(wide), 1e-30))
    distance /= 5 if name.endswith(("A_log", "dt_bias")) else 1
    if distance > worst or not np.isfinite(distance):
      worst, where = (distance if np.isfinite(distance) else np.inf), name
  return Parity(worst, where, equal)


def parity(key: key_lib.Key) -> Parity:
  """The row's step with the key against that without it."""
  return _parity_of(key, key.on)


def _parity_of(key: key_lib.Key, on: Mapping[str, Any]) -> Parity:
  # Replayed routing changes nothing where none was recorded: that is its promise.
  unset = "router_replay" not in key.base
  return compare(_values(key, key.off, unset), _values(key, on, unset))


@dataclasses.dataclass
class Union:
  """Rows whose keys are on at once: what all together keep, each keeps.

  Attributes:
    keys: Rows of one base, one program and one limit.
    on: The trainer's options with all of them.
  """

  keys: list[key_lib.Key]
  on: dict[str, Any]

  @property
  def title(self) -> str:
    """Their names."""
    return ",".join(key.title for key in self.keys)

  def parity(self) -> Parity:
    """The step with all of them against that with none."""
    return _parity_of(self.keys[0], self.on)

  def takes(self, key: key_lib.Key) -> bool:
    """Whether a row fits in: nothing is set twice, and nothing refused."""
    first = self.keys[0]
    same = lambda k: (k.off, k.program, k.layers, key_lib.LIMITS[k.promise])
    if same(first) != same(key) or key.name in {one.name for one in self.keys}:
      return False
    settings = key_lib.settings_of({**self.on, key.name: key.value})
    return not refusals.broken_rules(settings, rl_refusals.RULES)


def unions(keys: Sequence[key_lib.Key]) -> list[Union]:
  """The rows whose values are compared here, in as few steps as their classes allow."""
  found: list[Union] = []
  for key in keys:
    if key.held_by != key_lib.PARITY:
      continue
    for union in found:
      if union.takes(key):
        union.keys.append(key)
        union.on[key.name] = key.value
        break
    else:
      found.append(Union([key], dict(key.on)))
  return found
