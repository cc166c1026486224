"""Prefill in parts and decoding step by step against the full forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import api
from model import config as config_lib

_OPTIONS = config_lib.ModelOptions(dtype="float32")
_TAIL = config_lib.ModelConfig.from_hf(
  {k: v for k, v in config_lib.preset("tiny_moe").to_hf().items() if k != "layer_types"}
  | {"num_hidden_layers": 3, "full_attention_interval": 2}
)
_CONFIGS = {"tiny": config_lib.preset("tiny"), "tiny_moe with a tail": _TAIL}
_SLOTS, _WIDTH, _CAPACITY = 3, 16, 48


class _Model:
  """Compiled calls of one configuration, and the numbers of the full pass."""

  def __init__(self, config):
    self.config = config
    params = jax.jit(lambda key: api.init_params(config, _OPTIONS, key))(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)]
    params = jax.tree.unflatten(tree, moved)
    self.tokens = np.random.default_rng(0).integers(0, 512, (_SLOTS, 40)).astype(np.int32)
    forward = jax.jit(lambda i: api.forward(config, _OPTIONS, params, i))
    self.full = forward(api.row_inputs(self.tokens))
    self.prefill = jax.jit(lambda i, c: api.prefill(config, _OPTIONS, params, i, c))
    self.step = jax.jit(lambda c, t, a: api.decode_step(config, _OPTIONS, params, c, t, a))
    self.empty = api.init_cache(config, _OPTIONS, _SLOTS, _CAPACITY)

  def part(self, rows, starts, lengths):
    """Parts of token rows, right-padded with a token that must not matter."""
    tokens = np.full((_SLOTS, _WIDTH), 7, np.int32)
    for slot, (row, start, n) in enumerate(zip(rows, starts, lengths)):
      tokens[slot, :n] = self.tokens[row, start : start + n]
    return api.row_inputs(tokens, np.array(lengths))

  def check(self, hidden, routed, slot, row, position):
    """One token's results against the full pass."""
    want = np.asarray(self.full.hidden[row, position], np.float64)
    assert np.linalg.norm(hidden[slot] - want) <= 1e-5 * np.linalg.norm(want)
    if routed is not None:
      np.testing.assert_array_equal(routed[slot], self.full.routed_experts[row, position])


@functools.cache
def _model(name):
  return _Model(_CONFIGS[name])


def _decode(model, cache, rows, ends):
  """Decodes each slot's row to its end; rows end at different steps."""
  at = np.array(cache.lengths)
  while (active := at < ends).any():
    tokens = np.array([model.tokens[r, min(t, 39)] for r, t in zip(rows, at)], np.int32)
    hidden, cache, routed = model.step(cache, tokens, active)
    for slot in np.flatnonzero(active):
      model.check(hidden, routed, slot, rows[slot], at[slot])
    at = at + active
    np.testing.assert_array_equal(cache.lengths, at)
  return cache


@pytest.mark.parametrize("name", list(_CONFIGS))
def test_parts_and_steps_equal_the_full_pass(name):
  model = _model(name)
  rows = [0, 1, 2]
  hidden, cache, routed = model.prefill(model.part(rows, [0, 0, 0], [16, 7, 0]), model.empty)
  for slot, last in ((0, 15), (1, 6)):
    model.check(hidden, None, slot, slot, last)
    if routed is not None:
      n = last + 1
      np.testing.assert_array_equal(routed[slot, :n], model.full.routed_experts[slot, :n])
      np.testing.assert_array_equal(routed[slot, n:], -1)
  # The third row's prompt arrives late, the second's second part is short.
  hidden, cache, _ = model.prefill(model.part(rows, [16, 7, 0], [10, 1, 3]), cache)
  for slot, last in ((0, 25), (1, 7), (2, 2)):
    model.check(hidden, None, slot, slot, last)
  _decode(model, cache, rows, np.array([40, 31, 36]))


@pytest.mark.parametrize("name", list(_CONFIGS))
def test_slots_are_refilled_alone(name):
  model = _model(name)
  _, cache, _ = model.prefill(model.part([0, 1, 2], [0, 0, 0], [5, 16, 9]), model.empty)
  cache = _decode(model, cache, [0, 1, 2], np.array([8, 18, 12]))
  # Slot 1 is emptied and filled with row 2 while the others wait.
  cache = api.reset_slots(cache, jnp.array([False, True, False]))
  np.testing.assert_array_equal(cache.lengths, [8, 0, 12])
  hidden, cache, _ = model.prefill(model.part([0, 2, 2], [0, 0, 0], [0, 6, 0]), cache)
  model.check(hidden, None, 1, 2, 5)
  cache = _decode(model, cache, [0, 2, 2], np.array([10, 9, 14]))
  # Slots 0 and 1 are replaced by rows prefilled elsewhere, in a shorter cache.
  small = api.init_cache(model.config, _OPTIONS, _SLOTS, _WIDTH)
  _, small, _ = model.prefill(model.part([1, 0, 2], [0, 0, 0], [12, 4, 1]), small)
  cache = api.insert_rows(cache, jnp.array([0, 1, _SLOTS]), small)
  np.testing.assert_array_equal(cache.lengths, [12, 4, 14])
  _decode(model, cache, [1, 0, 2], np.array([15, 9, 17]))


def test_untouched_slots_keep_every_bit():
  model = _model("tiny")
  _, cache, _ = model.prefill(model.part([0, 1, 2], [0, 0, 0], [5, 16, 9]), model.empty)
  _, after, _ = model.prefill(model.part([0, 1, 2], [5, 0, 0], [3, 0, 0]), cache)
  _, after, _ = model.step(after, np.array([1, 2, 3], np.int32), np.array([True, False, False]))
  for old, new, axis in zip(cache, after, (0, 1, 1, 2, 2)):
    if old is not None:
      np.testing.assert_array_equal(np.take(new, [1, 2], axis), np.take(old, [1, 2], axis))


def test_replayed_routing_in_prefill():
  model = _model("tiny_moe with a tail")
  config = model.config
  part = model.part([0, 1, 2], [0, 0, 0], [16, 16, 16])
  replay = np.full((_SLOTS, _WIDTH, config.num_hidden_layers, 2), -1, np.int16)
  replay[:, 3] = [5, 1]
  _, _, routed = model.prefill(part._replace(routed_experts=replay), model.empty)
  np.testing.assert_array_equal(routed[:, 3], replay[:, 3])


def test_refusals():
  model = _model("tiny")
  packed = model.part([0, 1, 2], [0, 0, 0], [16, 7, 5])
  two = np.array(packed.segment_ids)
  two[0, 8:] = 2
  run = lambda inputs, cache: api.prefill(model.config, _OPTIONS, {}, inputs, cache)
  with pytest.raises(ValueError, match="one segment"):
    run(packed._replace(segment_ids=two), model.empty)
  gap = np.array(packed.segment_ids)
  gap[0, 3] = 0
  with pytest.raises(ValueError, match="one segment"):
    run(packed._replace(segment_ids=gap), model.empty)
  with pytest.raises(ValueError, match="do not fit"):
    run(packed, api.init_cache(model.config, _OPTIONS, _SLOTS, 8))
  with pytest.raises(ValueError, match="3 rows"):
    run(packed, api.init_cache(model.config, _OPTIONS, 2, _CAPACITY))
  # A compiled call cannot raise: what is refused there is NaN, never a leak.
  hidden, _, _ = model.prefill(packed._replace(segment_ids=two), model.empty)
  assert np.isnan(hidden[0]).all() and np.isfinite(hidden[1:]).all()


def test_a_full_slot_is_refused():
  model = _model("tiny")
  _, cache, _ = model.prefill(model.part([0, 1, 2], [0, 0, 0], [16, 7, 5]), model.empty)
  almost = cache._replace(lengths=jnp.array([_CAPACITY - 1, _CAPACITY, 5]))
  token, all_but_one = np.zeros(_SLOTS, np.int32), np.array([True, False, True])
  # The last place may be filled; a full slot may wait.
  hidden, cache, _ = model.step(almost, token, all_but_one)
  assert np.isfinite(np.asarray(hidden)[[0, 2]]).all()
  hidden, _, _ = model.step(cache, token, np.ones(_SLOTS, bool))
  assert np.isnan(hidden[:2]).all() and np.isfinite(hidden[2]).all()
  with pytest.raises(ValueError, match="holds its 48 tokens"):
    api.decode_step(model.config, _OPTIONS, {}, cache, token)
  three = model.part([0, 1, 2], [0, 0, 0], [3, 0, 3])
  outgrown = cache._replace(lengths=jnp.array([_CAPACITY - 2, _CAPACITY, 5]))
  hidden, _, _ = model.prefill(three, outgrown)
  assert np.isnan(hidden[0]).all() and np.isfinite(hidden[2]).all()
  with pytest.raises(ValueError, match="outgrows its slot of 48"):
    api.prefill(model.config, _OPTIONS, {}, three, outgrown)


def test_a_step_costs_one_token_whatever_the_context():
  """No prefix is computed again: only attention's reading of the slot grows with it."""
  config = _CONFIGS["tiny"]
  params = api.abstract_params(config, _OPTIONS)

  def cost(capacity):
    cache = jax.eval_shape(lambda: api.init_cache(config, _OPTIONS, _SLOTS, capacity))
    token = jax.ShapeDtypeStruct((_SLOTS,), jnp.int32)
    step = jax.jit(lambda p, c, t: api.decode_step(config, _OPTIONS, p, c, t)[:2])
    return step.lower(params, cache, token).cost_analysis()["flops"]

  per_place = (cost(4096) - cost(64)) / (4096 - 64) / _SLOTS
  # q . k and weight . v of every head are 4 heads dim; masks and softmax a little more.
  attention = config.num_groups * 4 * config.num_attention_heads * config.head_dim
  assert attention <= per_place < 1.5 * attention, per_place / attention
