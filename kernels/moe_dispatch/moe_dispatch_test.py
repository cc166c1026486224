"""Sorted dispatch against dense selection matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.fp8 import fp8
from kernels.moe_dispatch import moe_dispatch, reference


def _case(tokens=64, valid=48, choices=2, num_experts=5, seed=0, width=6):
  rng = np.random.default_rng(seed)
  experts = np.stack([rng.permutation(num_experts)[:choices] for _ in range(tokens)])
  experts = np.where(rng.permutation(tokens)[:, None] < valid, experts, -1).astype(np.int32)
  draw = lambda *s: rng.normal(size=s).astype(np.float32)
  return experts, draw(tokens, width), draw(tokens, choices), draw(tokens * choices, width)


def test_plan():
  experts, *_ = _case()
  plan = jax.jit(moe_dispatch.plan, static_argnums=1)(experts, 5)
  flat = experts.reshape(-1)
  np.testing.assert_array_equal(plan.group_sizes, [(flat == e).sum() for e in range(5)])
  assert plan.group_sizes.sum() == 48 * 2
  # A permutation of the pairs, and its inverse.
  np.testing.assert_array_equal(np.sort(plan.pairs), np.arange(128))
  np.testing.assert_array_equal(plan.sent, experts >= 0)
  assert not plan.overflow
  sent = np.asarray(plan.sent).reshape(-1)
  back = np.asarray(plan.pairs)[plan.rows.reshape(-1)]
  np.testing.assert_array_equal(back[sent], np.arange(128)[sent])
  # By expert, then by token.
  held = np.asarray(plan.pairs)[:96]
  np.testing.assert_array_equal(held, sorted(held, key=lambda p: (flat[p], p)))


@pytest.mark.parametrize("valid", [48, 64, 0])
def test_equal_to_the_dense_form(valid):
  experts, x, weights, y = _case(valid=valid)
  plan = moe_dispatch.plan(experts, 5)
  select = reference.selection(jnp.asarray(experts), 5)
  rng = np.random.default_rng(1)
  d_rows, d_out = rng.normal(size=y.shape), rng.normal(size=x.shape)

  rows, pull = jax.vjp(lambda x: moe_dispatch.dispatch(x, plan), x)
  want, want_pull = jax.vjp(lambda x: reference.dispatch(x, select), x)
  np.testing.assert_array_equal(rows, want)
  d_rows, d_out = d_rows.astype(np.float32), d_out.astype(np.float32)
  np.testing.assert_allclose(pull(d_rows)[0], want_pull(d_rows)[0], atol=1e-5)

  out, pull = jax.vjp(lambda y, w: moe_dispatch.combine(y, w, plan), y, weights)
  want, want_pull = jax.vjp(lambda y, w: reference.combine(y, w, select), y, weights)
  np.testing.assert_allclose(out, want, atol=1e-5)
  for got, expected in zip(pull(d_out), want_pull(d_out)):
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_rows_that_no_expert_owns_are_never_read():
  experts, x, weights, y = _case()
  plan = moe_dispatch.plan(experts, 5)
  poisoned = y.copy()
  poisoned[96:] = np.nan
  x = np.where((experts < 0).all(1)[:, None], np.nan, x)
  rows, dispatch_pull = jax.vjp(lambda x: moe_dispatch.dispatch(x, plan), x)
  assert np.isfinite(rows).all()
  np.testing.assert_array_equal(rows[96:], 0)
  assert np.isfinite(dispatch_pull(jnp.asarray(poisoned))[0]).all()
  combine = lambda y, w: moe_dispatch.combine(y, w, plan)
  out, pull = jax.vjp(combine, poisoned, weights)
  np.testing.assert_array_equal(out, combine(y, weights))
  np.testing.assert_array_equal(out[(experts < 0).all(1)], 0)
  d_rows, d_weights = pull(jnp.ones_like(out))
  np.testing.assert_array_equal(d_rows[96:], 0)
  np.testing.assert_array_equal(d_weights[experts < 0], 0)
  assert np.isfinite(d_weights).all()


def test_round_trip_is_bitwise():
  experts, x, _, _ = _case(valid=64, choices=1)
  plan = moe_dispatch.plan(experts, 5)
  there = moe_dispatch.dispatch(x, plan)
  np.testing.assert_array_equal(moe_dispatch.combine(there, np.ones((64, 1)), plan), x)


def test_keys_that_do_not_fit():
  with pytest.raises(ValueError, match="32-bit"):
    jax.eval_shape(
      lambda e: moe_dispatch.plan(e, 1 << 12), jax.ShapeDtypeStruct((1 << 19, 4), jnp.int32)
    )


_PLAN = jax.jit(
  moe_dispatch.plan, static_argnums=1, static_argnames=("buffer_rows", "spread_masked")
)


def test_buffer_that_holds_every_pair_changes_nothing():
  experts, x, weights, y = _case()
  whole, bounded = _PLAN(experts, 5), _PLAN(experts, 5, buffer_rows=96)
  assert not bounded.overflow
  for p in (whole, bounded):
    np.testing.assert_array_equal(p.group_sizes, whole.group_sizes)
  rows = moe_dispatch.dispatch(x, bounded)
  np.testing.assert_array_equal(rows, moe_dispatch.dispatch(x, whole)[:96])
  np.testing.assert_array_equal(
    moe_dispatch.combine(y[:96], weights, bounded), moe_dispatch.combine(y, weights, whole)
  )


@pytest.mark.parametrize("spread", [False, True])
def test_overflow_is_flagged_and_leaves_the_last_rows_out(spread):
  experts, x, weights, y = _case()
  whole = _PLAN(experts, 5)
  p = _PLAN(experts, 5, buffer_rows=70, spread_masked=spread)
  assert p.overflow and not _PLAN(experts, 5, buffer_rows=96).overflow
  assert _PLAN(experts, 5, buffer_rows=95).overflow
  assert int(p.group_sizes.sum()) == 70 == int(p.sent.sum())
  np.testing.assert_array_equal(p.pairs, whole.pairs[:70])
  want = jnp.where(whole.rows < 70, whole.rows, 127)
  np.testing.assert_array_equal(p.rows[p.sent], want[p.sent])
  # The dropped pairs add nothing, and no gradient reaches them.
  left = np.where(np.asarray(p.sent), weights, 0)
  out, pull = jax.vjp(lambda y, w: moe_dispatch.combine(y, w, p), y[:70], weights)
  np.testing.assert_allclose(out, moe_dispatch.combine(y, left, whole), atol=1e-6)
  assert not np.asarray(pull(jnp.ones_like(out))[1])[~np.asarray(p.sent)].any()


def test_spread_masked_indices_change_no_bit_and_are_spread():
  experts, x, weights, y = _case()
  plans = [_PLAN(experts, 5, buffer_rows=100, spread_masked=s) for s in (False, True)]
  results = []
  for p in plans:
    masked = np.asarray(p.rows)[~np.asarray(p.sent)]
    assert ((masked >= 0) & (masked < 100)).all()
    results.append(
      jax.vjp(lambda y, w: moe_dispatch.combine(y, w, p), y[:100], weights)[1](x)  # noqa: B023
    )
  count = lambda p: np.bincount(np.asarray(p.rows)[~np.asarray(p.sent)], minlength=100).max()
  assert count(plans[0]) == 32 and count(plans[1]) == 1
  for a, b in zip(*results):
    np.testing.assert_array_equal(a, b)


def test_experts_of_two_devices_add_up():
  experts, x, weights, y = _case(num_experts=6)
  select = reference.selection(jnp.asarray(experts), 6)
  whole = _PLAN(experts, 6)
  out = 0
  for first in (0, 3):
    p = _PLAN(experts, 3, first_expert=jnp.int32(first))
    start = int(whole.group_sizes[:first].sum())
    np.testing.assert_array_equal(p.group_sizes, whole.group_sizes[first : first + 3])
    part = np.roll(y, -start, axis=0)
    out += moe_dispatch.combine(part, weights, p)
  np.testing.assert_allclose(out, reference.combine(y, weights, select), atol=1e-5)


def test_weights_on_rows_equal_weights_in_the_sum():
  experts, x, weights, y = _case()
  p = _PLAN(experts, 5, buffer_rows=80)
  y = np.where((np.arange(80) < int(p.group_sizes.sum()))[:, None], y[:80], np.nan)

  def on_rows(y, weights):
    scaled = jnp.where(jnp.isnan(y), 0, y) * moe_dispatch.dispatch_weights(weights, p)[:, None]
    return moe_dispatch.sum_rows(scaled, p)

  out, pull = jax.vjp(on_rows, y, weights)
  want, want_pull = jax.vjp(lambda y, w: moe_dispatch.combine(y, w, p), y, weights)
  np.testing.assert_allclose(out, want, atol=1e-6)
  for a, b in zip(pull(x), want_pull(x)):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(fp8.E4M3, 0.04), (fp8.E5M2, 0.08)])
def test_eight_bit_rows(dtype, bound):
  experts, x, _, y = _case(width=64)
  x *= np.exp2(np.arange(64) - 32.0).astype(np.float32)[:, None]
  x = np.where((experts < 0).all(1)[:, None], np.nan, x)
  p = _PLAN(experts, 5)
  rows, pull = jax.vjp(lambda x: moe_dispatch.dispatch_quantised(x, p, dtype), x)
  exact, exact_pull = jax.vjp(lambda x: moe_dispatch.dispatch(x, p), x)
  held = slice(0, int(p.group_sizes.sum()))
  error = np.linalg.norm(rows - exact, axis=1)[held] / np.linalg.norm(exact, axis=1)[held]
  assert 0 < error.max() < bound
  assert not np.asarray(rows)[held.stop :].any()
  # The row travels with its own scale: quantising after the gather gives the same bits.
  after = fp8.dequantise(fp8.quantise_rows(exact[held], dtype))
  np.testing.assert_array_equal(rows[held], after)
  np.testing.assert_array_equal(pull(y)[0], exact_pull(y)[0])


@pytest.mark.parametrize("fault", ["scale", "inverse"])
def test_planted_faults_are_caught(fault, monkeypatch):
  experts, x, weights, y = _case(width=64)
  x *= np.exp2(np.arange(64) - 32.0).astype(np.float32)[:, None]
  p = _PLAN(experts, 5)
  if fault == "scale":
    q = fp8.quantise_rows(jnp.asarray(x))
    wrong = moe_dispatch.take_quantised(
      fp8.Quantised(q.values, jnp.roll(q.scale, 1, 0)), p, x.dtype
    )
    right = moe_dispatch.dispatch(jnp.asarray(x), p)
    assert np.linalg.norm(wrong - right) > 0.3 * np.linalg.norm(right)
  else:
    wrong = p._replace(rows=jnp.roll(p.rows, 1, axis=0))
    want = reference.combine(y, weights, reference.selection(jnp.asarray(experts), 5))
    assert not np.allclose(moe_dispatch.combine(y, weights, wrong), want, atol=1e-3)


def test_buffers_that_are_refused():
  experts = _case()[0]
  for rows in (0, 129):
    with pytest.raises(ValueError, match="buffer_rows"):
      moe_dispatch.plan(experts, 5, buffer_rows=rows)


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_operands_that_are_not_the_plans_are_refused(implementation):
  plan = moe_dispatch.plan(jnp.zeros((50, 3), jnp.int32), 4)
  x = jnp.ones((150, 128))
  with pytest.raises(ValueError, match="dispatch: x is"):
    moe_dispatch.dispatch(x[:30], plan, implementation)
  with pytest.raises(ValueError, match="sum_rows: y is"):
    moe_dispatch.sum_rows(x[:100], plan, implementation)
  with pytest.raises(ValueError, match="num_experts=0"):
    moe_dispatch.plan(jnp.zeros((50, 3), jnp.int32), 0)


def test_other_operands_that_are_not_the_plans_are_refused():
  plan = moe_dispatch.plan(jnp.zeros((5, 3), jnp.int32), 4)
  rows, weights, tokens = jnp.ones((15, 8)), jnp.ones((5, 3)), jnp.ones((5, 8))
  q = fp8.quantise_rows(tokens)
  for run, text in (
    (lambda: moe_dispatch.combine(rows[:4], weights, plan), "combine: y is"),
    (lambda: moe_dispatch.combine(rows, weights[:1], plan), "combine: weights is"),
    (lambda: moe_dispatch.combine(rows, weights[:, :1], plan), "combine: weights is"),
    (lambda: moe_dispatch.dispatch_weights(weights[:2], plan), "dispatch_weights: weights is"),
    (lambda: moe_dispatch.dispatch_quantised(tokens[:2], plan), "take_quantised: values is"),
    (
      lambda: moe_dispatch.take_quantised(q._replace(scale=q.scale[:2]), plan, jnp.float32),
      "take_quantised: scale is",
    ),
    (lambda: moe_dispatch.plan(jnp.zeros((5, 3)), 4), "experts is float32"),
    (lambda: moe_dispatch.plan(jnp.zeros((5,), jnp.int32), 4), "experts is"),
    (lambda: moe_dispatch.plan(jnp.zeros((0, 3), jnp.int32), 4), "T of at least 1"),
  ):
    with pytest.raises(ValueError, match=text):
      run()
