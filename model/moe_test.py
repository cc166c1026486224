"""Routing: replay, padding, weights, and the balance loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import api, layers, moe
from model import config as config_lib

_OPTIONS = config_lib.ModelOptions(dtype="float32")
_CONFIG = dataclasses.replace(config_lib.preset("tiny_moe"), initializer_range=0.3)


@functools.cache
def _layer():
  return moe.SparseMoe(_CONFIG, _OPTIONS, rngs=nnx.Rngs(0))


def _x(tokens=64, seed=1):
  return jax.random.normal(jax.random.key(seed), (1, tokens, _CONFIG.hidden_size))


def _dense(layer, x, experts, weights):
  """Every expert on every token, masked: no sorting at all."""
  gate, up = jnp.split(jnp.einsum("th,ehf->etf", x, layer.wi[...], precision="highest"), 2, -1)
  y = jnp.einsum("etf,efh->eth", jax.nn.silu(gate) * up, layer.wo[...], precision="highest")
  chosen = jnp.sum(jax.nn.one_hot(experts, _CONFIG.num_experts) * weights[..., None], axis=1)
  shared = jax.nn.sigmoid(layer.shared_expert_gate(x)) * layer.shared_expert(x)
  return jnp.einsum("te,eth->th", chosen, y, precision="highest") + shared


def test_against_every_expert_on_every_token():
  layer, x = _layer(), _x()
  segments = (jnp.arange(64) < 48).astype(jnp.int32)[None]
  definition, weights = nnx.split(layer, nnx.Param)

  def dense(weights, x):
    layer = nnx.merge(definition, weights)
    experts, share = moe.route(layer.router(x[0]), 2, None)
    return _dense(layer, x[0], experts, jnp.where(segments[0][:, None] > 0, share, 0.0))[None]

  def sparse(weights, x):
    return nnx.merge(definition, weights)(x, segments)[0]

  value = {}
  for run in (dense, sparse):
    objective = lambda w, x, run=run: jnp.sum(jnp.cos(3 * run(w, x)))
    value[run] = (
      jax.jit(run)(weights, x),
      *jax.tree.leaves(jax.jit(jax.grad(objective, argnums=(0, 1)))(weights, x)),
    )
  for got, want in zip(value[sparse], value[dense]):
    assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want)


def test_padding_reaches_no_expert():
  layer, x = _layer(), _x()
  real = jax.random.permutation(jax.random.key(3), jnp.arange(64) < 48)[None]
  poisoned = jnp.where(real[..., None], x, jnp.nan)
  out, routing = layer(poisoned, real.astype(jnp.int32))
  want, _ = layer(x, jnp.ones((1, 64), jnp.int32))
  np.testing.assert_array_equal(np.asarray(routing.experts)[~np.asarray(real)], -1)
  kept = np.asarray(routing.experts)[np.asarray(real)]
  assert (kept >= 0).all() and kept.size == 96
  np.testing.assert_allclose(np.asarray(out)[real], np.asarray(want)[real], atol=1e-5)


def test_replay_uses_given_experts_and_live_weights():
  layer, x = _layer(), _x()
  ones = jnp.ones((1, 64), jnp.int32)
  free, routing = layer(x, ones)
  # Its own choice replayed changes nothing; so does leaving every token unset.
  same, _ = layer(x, ones, routing.experts)
  np.testing.assert_array_equal(same, free)
  unset, again = layer(x, ones, jnp.full((1, 64, 2), -1, jnp.int16))
  np.testing.assert_array_equal(unset, free)
  np.testing.assert_array_equal(again.experts, routing.experts)
  # Others are used as they are, weighted from the live logits; one unset entry unsets the token.
  replay = np.array(jax.random.permutation(jax.random.key(5), 8)[:2])[None, None].repeat(64, 1)
  replay[0, 10] = [3, -1]
  replay[0, 11] = [-1, -1]
  out, used = layer(x, ones, jnp.asarray(replay, jnp.int16))
  want = replay.copy()
  want[0, 10:12] = routing.experts[0, 10:12]
  np.testing.assert_array_equal(used.experts, want)
  probabilities = jax.nn.softmax(layer.router(x[0]), -1)
  share = np.take_along_axis(np.asarray(probabilities), want[0], 1)
  share /= share.sum(-1, keepdims=True)
  np.testing.assert_allclose(out[0], _dense(layer, x[0], want[0], share), atol=1e-5)


def test_replay_is_by_layer():
  params = jax.jit(lambda key: api.init_params(_CONFIG, _OPTIONS, key))(jax.random.key(0))
  inputs = api.row_inputs(np.arange(20, dtype=np.int32)[None])
  rng = np.random.default_rng(0)
  replay = np.stack(
    [[rng.permutation(8)[:2] for _ in range(4)] for _ in range(20)]
  )[None].astype(np.int16)  # fmt: skip
  replay[0, :, 2] = -1
  run = jax.jit(lambda i: api.forward(_CONFIG, _OPTIONS, params, i).routed_experts)
  used = np.asarray(run(inputs._replace(routed_experts=replay)))
  for layer in (0, 1, 3):
    np.testing.assert_array_equal(used[:, :, layer], replay[:, :, layer])
  assert (used[:, :, 2] >= 0).all()


def test_router_logits_in_float32():
  x = _x().astype(jnp.bfloat16)
  ones = jnp.ones((1, 64), jnp.int32)
  run = lambda **kw: (
    moe.SparseMoe(_CONFIG, config_lib.ModelOptions(dtype="bfloat16", **kw), rngs=nnx.Rngs(0))(
      x, ones
    )[1].logits
  )
  assert run().dtype == jnp.bfloat16
  wide = run(float32_gate_logits=True)
  assert wide.dtype == jnp.float32
  exact = layers.Linear.__call__(_layer().router, x.astype(jnp.float32))
  np.testing.assert_array_equal(wide, exact)


def test_balance_loss():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 8, 3, 5))
  segments = np.array([[1] * 6 + [0] * 2, [1] * 3 + [2] * 5])
  f, p, n = np.zeros(5), np.zeros(5), 0
  for b, t, layer in np.ndindex(2, 8, 3):
    if segments[b, t]:
      e = np.exp(logits[b, t, layer])
      p += e / e.sum()
      f[np.argsort(-e)[:2]] += 1
      n += 1
  want = 5 * np.sum(f / n * p / n)
  np.testing.assert_allclose(moe.load_balance_loss(logits, segments, 2), want, rtol=1e-6)
  # Balanced experts give top_k; padding alone gives a finite zero.
  even = np.zeros((1, 5, 1, 5))
  for t in range(5):
    even[0, t, 0, [t, (t + 1) % 5]] = 1e-3
  np.testing.assert_allclose(moe.load_balance_loss(even, np.ones((1, 5)), 2), 2, rtol=1e-5)
  assert moe.load_balance_loss(logits, np.zeros((2, 8)), 2) == 0


def test_routing_for_another_model_is_refused():
  inputs = api.row_inputs(np.zeros((1, 4), np.int32))
  wrong = inputs._replace(routed_experts=np.zeros((1, 4, 3, 2), np.int16))
  with pytest.raises(ValueError, match="routed_experts"):
    jax.eval_shape(
      lambda p: api.forward(_CONFIG, _OPTIONS, p, wrong), api.abstract_params(_CONFIG, _OPTIONS)
    )


@pytest.mark.parametrize("free", [0, 3, 5, 6, 40])
def test_few_tokens_that_choose_their_own_go_through_top_k_alone(free):
  rng = np.random.default_rng(free)
  logits = jnp.asarray(rng.normal(size=(40, 8)), jnp.float32)
  replay = rng.integers(0, 8, (40, 2)).astype(np.int16)
  replay[rng.permutation(40)[:free]] = -1
  route = lambda capacity: jax.jit(lambda x, r: moe.route(x, 2, r, capacity))(logits, replay)
  for got, want in zip(route(5), route(0), strict=True):
    np.testing.assert_array_equal(got, want)


def test_top_k_sees_few_rows_unless_there_are_more():
  logits, replay = jnp.zeros((40, 8)), jnp.zeros((40, 2), jnp.int16)
  traced = jax.make_jaxpr(lambda x, r: moe.route(x, 2, r, 5))(logits, replay)
  small = [b for e in traced.eqns if e.primitive.name == "cond" for b in e.params["branches"]]
  rows = [e.invars[0].aval.shape[0] for b in small for e in b.eqns if e.primitive.name == "top_k"]
  assert sorted(rows) == [5, 40]
