"""Sorted dispatch against dense selection matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
  np.testing.assert_array_equal(np.asarray(plan.pairs)[plan.rows.reshape(-1)], np.arange(128))
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
