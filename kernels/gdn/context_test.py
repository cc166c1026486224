"""The gated delta rule split over four ranks against the unsplit float32 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kernels.gdn import context, reference

_RANKS, _LENGTH = 4, 128
jax.config.update("jax_num_cpu_devices", _RANKS)
_NAMES = ("out", "dq", "dk", "dv", "dg", "dbeta")


def _relative(a, b):
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  return np.linalg.norm(a - b) / np.linalg.norm(b)


def _row(lengths):
  ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)])
  return np.pad(ids, (0, _LENGTH - len(ids)))


def _inputs(decay=0.02, key_heads=1):
  """One segment over all ranks; three segments across their edges, one of which is an edge."""
  r = np.random.default_rng(0)
  segments = np.stack([_row([_LENGTH]), _row([37, 27, 60])]).astype(np.int32)
  normal = lambda *tail: jnp.asarray(r.normal(size=(2, _LENGTH, *tail)), jnp.float32)
  heads = 2 * key_heads
  q, k, v = normal(key_heads, 32), normal(key_heads, 32), normal(heads, 32)
  g = -decay * jnp.abs(normal(heads))
  beta = jax.nn.sigmoid(normal(heads))
  return (q, k, v, g, beta), jnp.asarray(segments), normal(heads, 32)


def _whole(operands, segments, d_out):
  start = jnp.zeros((2, operands[2].shape[2], 32, 32), jnp.float32)
  owner = jnp.ones((2,), jnp.int32)
  run = lambda *x: reference.recurrent_gated_delta_rule(*x, segments, start, owner)[0]
  out, vjp = jax.vjp(run, *operands)
  return out, *vjp(d_out)


def _split(operands, segments, d_out, **options):
  rule = functools.partial(context.gated_delta_rule, axis_name="context", chunk_size=16, **options)

  def ranks(operands, segments, d_out):
    out, vjp = jax.vjp(lambda *x: rule(*x, segments), *operands)
    return out, *vjp(d_out)

  spec = PartitionSpec(None, "context")
  mesh = Mesh(np.array(jax.devices()[:_RANKS]), ("context",))
  run = jax.shard_map(ranks, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  return jax.jit(run)(operands, segments, d_out)


# With two key heads the forward kernel takes one a grid step, the scans and the backward kernel both.
@pytest.mark.parametrize("implementation, key_heads", [("interpret", 2), ("auto", 1)])
def test_four_ranks_equal_one(implementation, key_heads):
  inputs = _inputs(key_heads=key_heads)
  got = _split(*inputs, implementation=implementation)
  for name, a, b in zip(_NAMES, got, _whole(*inputs)):
    assert _relative(a, b) <= 2e-6, name


def test_planted_fault_ranks_that_start_from_nothing(monkeypatch):
  zeros = lambda m, h, **options: jnp.zeros_like(h)
  monkeypatch.setattr(context, "states_before", zeros)
  inputs = _inputs()
  got = _split(*inputs, implementation="auto")
  assert _relative(got[0], _whole(*inputs)[0]) > 1e-2


def test_exchange_by_states_and_by_pairs():
  r = np.random.default_rng(1)
  m = jnp.asarray(r.normal(size=(_RANKS, 3, 8, 8)) / 4, jnp.float32)
  h = jnp.asarray(r.normal(size=(_RANKS, 3, 8, 5)), jnp.float32)
  want, state = [], np.zeros((3, 8, 5))
  for i in range(_RANKS):
    want.append(state)
    state = np.asarray(m[i], np.float64) @ state + np.asarray(h[i])
  for passing in (True, False):
    got = context.states_before(m, h, state_passing=passing)
    np.testing.assert_allclose(got, np.stack(want), atol=1e-5)
  want, state = [], np.zeros((3, 8, 5))
  for i in reversed(range(_RANKS)):
    want.insert(0, state)
    state = np.swapaxes(np.asarray(m[i], np.float64), -1, -2) @ state + np.asarray(h[i])
  for passing in (True, False):
    got = context.cotangents_after(m, h, state_passing=passing)
    np.testing.assert_allclose(got, np.stack(want), atol=1e-5)


def test_composition_is_associative():
  r = np.random.default_rng(2)
  pair = lambda: tuple(jnp.asarray(r.normal(size=(8, n)) / 3, jnp.float32) for n in (8, 5))
  a, b, c = pair(), pair(), pair()
  left = context.compose(context.compose(c, b), a)
  right = context.compose(c, context.compose(b, a))
  for x, y in zip(left, right):
    np.testing.assert_allclose(x, y, atol=1e-5)


def test_segment_before_skips_ranks_of_padding():
  ids = jnp.asarray([[[0, 0]], [[4, 0]], [[0, 0]], [[6, 6]]], jnp.int32)
  got = jax.vmap(lambda x: context.segment_before(x, "context"), axis_name="context")(ids)
  assert np.asarray(got)[:, 0].tolist() == [1, 1, 4, 4]
