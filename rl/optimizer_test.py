"""The optimizer against optax, and what must not move when an update is skipped or frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kernels.base.options import UserError
from rl import optimizer
from rl.config import OptimizerOptions
from rl.optimizer import HyperParameters

ALL = OptimizerOptions(trainable_parameters_mask=".*")


def _params(seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  return {
    "attn": {"router": {"kernel": normal(4, 3)}, "wi": normal(3, 5)},
    "A_log": normal(7).astype(jnp.float32),
  }


def _hyper(rate=1e-2, clip=0.0):
  return HyperParameters(jnp.float32(rate), jnp.float32(clip))


def _equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_optax_adamw(clip, decay):
  options = OptimizerOptions(trainable_parameters_mask=".*", weight_decay=decay)
  params = _params()
  state = optimizer.init_state(params, options)
  steps = [optax.clip_by_global_norm(clip)] if clip else []
  chain = optax.chain(*steps, optax.adamw(1e-2, b1=0.9, b2=0.999, eps=1e-8, weight_decay=decay))
  want, moments = params, chain.init(params)
  for seed in range(1, 5):
    gradients = _params(seed)
    state, info = optimizer.apply_update(state, gradients, _hyper(clip=clip), options)
    assert float(info.grad_norm) == pytest.approx(float(optax.tree.norm(gradients)))
    updates, moments = chain.update(gradients, moments, want)
    want = optax.apply_updates(want, updates)
  for got, right in zip(jax.tree.leaves(state.weights), jax.tree.leaves(want)):
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-7)
  assert int(state.step) == 4 and int(state.skipped) == 0


def test_small_updates_reach_bfloat16_weights_through_their_masters():
  params = jax.tree.map(lambda p: jnp.ones_like(p), _params(dtype=jnp.bfloat16))
  state = optimizer.init_state(params, ALL)
  assert state.masters["A_log"] is None, "a float32 parameter keeps no second copy"
  assert state.masters["attn"]["wi"].dtype == jnp.float32
  assert {leaf.dtype.name for leaf in jax.tree.leaves(state.moments)} == {"float32", "int32"}
  gradients = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), params)
  update = jax.jit(lambda s: optimizer.apply_update(s, gradients, _hyper(1e-5), ALL)[0])
  for _ in range(50):
    state = update(state)
  # One step of 1e-5 is far below half a bfloat16 unit at 1, so without masters nothing would move.
  np.testing.assert_allclose(state.masters["attn"]["wi"], 1 - 50e-5, rtol=1e-5)
  assert np.all(np.asarray(state.weights["attn"]["wi"]) == 1.0)
  for _ in range(300):
    state = update(state)
  assert np.all(np.asarray(state.weights["attn"]["wi"], np.float32) < 1.0)
  np.testing.assert_array_equal(
    np.asarray(state.weights["attn"]["wi"]),
    np.asarray(state.masters["attn"]["wi"].astype(jnp.bfloat16)),
  )


def test_float32_params_may_be_kept_as_bfloat16_with_exact_masters():
  params = _params()
  dtypes = jax.tree.map(lambda p: jnp.bfloat16, params) | {"A_log": jnp.float32}
  state = optimizer.init_state(params, ALL, weight_dtypes=dtypes)
  np.testing.assert_array_equal(state.masters["attn"]["wi"], params["attn"]["wi"])
  assert state.weights["attn"]["wi"].dtype == jnp.bfloat16
  assert state.masters["A_log"] is None


def test_rounding_is_an_instruction_of_its_own():
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
  bits = np.concatenate([bits, (bits & 0xFFFF0000) | 0x8000])  # And ties.
  values = bits.view(np.float32)
  values = values[np.isfinite(values) & (np.abs(values) > 1e-37)]
  rounded = jax.jit(lambda v: optimizer.round_to(v, jnp.bfloat16))(values)
  np.testing.assert_array_equal(np.asarray(rounded), values.astype(jnp.bfloat16))
  text = str(jax.make_jaxpr(lambda v: optimizer.round_to(v, jnp.bfloat16))(values))
  assert "reduce_precision" in text


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_that_is_not_finite_changes_nothing_but_the_counts(bad, dtype):
  good = jax.tree.map(lambda p: p.astype(jnp.float32), _params(1))
  update = jax.jit(lambda s, g: optimizer.apply_update(s, g, _hyper(clip=0.1), ALL))
  state, _ = update(optimizer.init_state(_params(dtype=dtype), ALL), good)
  broken = good | {"A_log": good["A_log"].at[3].set(bad)}
  after, info = update(state, broken)
  assert not bool(info.applied) and not np.isfinite(float(info.grad_norm))
  for field in ("weights", "masters", "moments"):
    _equal(getattr(after, field), getattr(state, field))
  assert (int(after.step), int(after.skipped)) == (2, 1)
  # And the next update is the one that would have come anyway.
  clean, _ = update(state, good)
  resumed, info = update(after, good)
  assert bool(info.applied)
  _equal(resumed.weights, clean.weights)
  _equal(resumed.moments, clean.moments)


def test_frozen_parameters_have_no_state_and_stay():
  options = OptimizerOptions()
  params = _params(dtype=jnp.bfloat16)
  mask = optimizer.trainable_mask(params, options)
  assert mask == {"attn": {"router": {"kernel": False}, "wi": True}, "A_log": True}
  state = optimizer.init_state(params, options)
  assert state.masters["attn"]["router"]["kernel"] is None
  assert state.moments[0].mu["attn"]["router"]["kernel"] is None
  gradients = optimizer.select(jax.tree.map(lambda p: p.astype(jnp.float32), params), mask)
  after, info = optimizer.apply_update(state, gradients, _hyper(), options)
  _equal(after.weights["attn"]["router"], state.weights["attn"]["router"])
  want = np.sqrt(sum(np.sum(np.square(np.asarray(g))) for g in jax.tree.leaves(gradients)))
  assert float(info.grad_norm) == pytest.approx(want, rel=1e-6)
  with pytest.raises(UserError, match="matches none of the 3 parameters, such as A_log"):
    optimizer.trainable_mask(params, OptimizerOptions(trainable_parameters_mask="decoder"))


def test_rate_and_clip_follow_the_batch_unless_given():
  hyper = optimizer.hyper_parameters(OptimizerOptions(), 0, 1024)
  assert float(hyper.learning_rate) == pytest.approx(2e-6)
  assert float(hyper.gradient_clip) == pytest.approx(0.0625)
  given = OptimizerOptions(learning_rate=0.0, gradient_clip=1.0)
  hyper = optimizer.hyper_parameters(given, 0, 1024)
  assert (float(hyper.learning_rate), float(hyper.gradient_clip)) == (0.0, 1.0)
  # A function of the step alone: a restored run asks with the restored step.
  assert optimizer.hyper_parameters(OptimizerOptions(), 7, 64) == optimizer.hyper_parameters(
    OptimizerOptions(), 7, 64
  )


def test_learning_rate_falls_linearly_and_stays_at_zero():
  given = OptimizerOptions(learning_rate=0.5, learning_rate_decay_steps=4)
  rates = [float(optimizer.hyper_parameters(given, s, 8).learning_rate) for s in (1, 2, 4, 5, 9)]
  assert rates == [0.5, 0.375, 0.125, 0.0, 0.0]


def test_zero_rate_leaves_weights_bit_identical():
  params = _params(dtype=jnp.bfloat16)
  state = optimizer.init_state(params, ALL)
  gradients = jax.tree.map(lambda p: p.astype(jnp.float32), params)
  after, _ = optimizer.apply_update(state, gradients, _hyper(0.0), ALL)
  _equal(after.weights, params)
