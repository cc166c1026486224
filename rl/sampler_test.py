"""The sampler against the trainer's forward pass, and requests against their surroundings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.base import options
from model import api
from model import config as model_config
from rl import run_config, sampler

CONFIG = dataclasses.replace(model_config.preset("tiny_moe"), vocab_size=64)
MODEL = model_config.ModelOptions(dtype="float32", gdn_chunk_size=16, remat_policy="none")
STOPS = tuple(range(48, 64))


@pytest.fixture(scope="module")
def weights():
  return _random(3)


def _random(seed):
  """Weights drawn by numpy: nothing to compile."""
  rng = np.random.default_rng(seed)
  draw = lambda a: jnp.asarray(0.3 * rng.normal(size=a.shape), a.dtype)
  return jax.tree.map(draw, api.abstract_params(CONFIG, MODEL))


def _make(**changes):
  given = {
    "sampler_slots": 6,
    "prefill_rows": 3,
    "prefill_chunk": 4,
    "decode_block": 3,
    "max_prompt_tokens": 11,
    "max_completion_tokens": 9,
    **changes,
  }
  return sampler.LocalSampler(
    CONFIG, MODEL, run_config.SamplerOptions(**given), STOPS, with_routed_experts=True
  )


def _requests(count, seed=0):
  rng = np.random.default_rng(seed)
  made = []
  for i in range(count):
    length = int(rng.integers(1, 12))
    # Prompts hold stop ids too: a stop counts only where the policy draws it.
    prompt = tuple(int(t) for t in rng.integers(0, 64, length))
    made += [sampler.Request(prompt, 10 * i + j) for j in range(1 + i % 3)]
  return made


@pytest.fixture(scope="module")
def made():
  return _make()


@pytest.fixture(scope="module")
def sampled(made, weights):
  requests = _requests(20)
  return requests, made.sample(weights, requests, sampler.Distribution())


@jax.jit
def _forward(weights, tokens, lengths, temperature):
  out = api.forward(CONFIG, MODEL, weights, api.row_inputs(tokens, lengths))
  logits = api.unembed(weights, out.hidden).astype(jnp.float32) / temperature
  return jax.nn.log_softmax(logits), out.routed_experts


def _trainer(weights, requests, completions, temperature=1.0):
  """For each completion the log-probs of its places and its routing, by one forward pass."""
  tokens = np.zeros((64, 20), np.int32)
  lengths = np.zeros(64, np.int32)
  for row, (request, got) in enumerate(zip(requests, completions, strict=True)):
    whole = [*request.prompt_ids, *got.ids]
    tokens[row, : len(whole)], lengths[row] = whole, len(whole)
  logprobs, routed = jax.device_get(_forward(weights, tokens, lengths, temperature))
  return [
    (logprobs[row, len(request.prompt_ids) - 1 : n - 1], routed[row, :n])
    for row, (request, n) in enumerate(zip(requests, lengths))
  ]


def _assert_log_probs(completions, scored):
  for got, (logprobs, _) in zip(completions, scored):
    want = logprobs[np.arange(len(got.ids)), got.ids]
    np.testing.assert_allclose(got.logprobs, want, atol=1e-4, rtol=0)


def test_log_probs_and_experts_are_the_trainers(sampled, weights):
  requests, completions = sampled
  scored = _trainer(weights, requests, completions)
  _assert_log_probs(completions, scored)
  for got, (_, routed) in zip(completions, scored):
    assert got.routed_experts.dtype == np.int16
    np.testing.assert_array_equal(got.routed_experts[:-1], routed[:-1])
    assert np.all(got.routed_experts[-1] == -1)


def test_log_probs_and_draws_follow_the_temperature(made, weights):
  requests = _requests(6)
  completions = made.sample(weights, requests, sampler.Distribution(temperature=0.5))
  _assert_log_probs(completions, _trainer(weights, requests, completions, temperature=0.5))


def test_draws_of_seeds_and_places_are_independent(made, weights):
  # A head of zeros makes every draw uniform, whatever came before.
  flat = {**weights, "lm_head": jax.tree.map(jnp.zeros_like, weights["lm_head"])}
  requests = [sampler.Request((5, 6), seed) for seed in range(300)]
  completions = made.sample(flat, requests, sampler.Distribution())
  for got in completions:
    np.testing.assert_allclose(got.logprobs, -np.log(64), rtol=1e-6)
  # Of 300 draws out of 64 nearly all tokens come up: no two seeds share their draws.
  assert len({int(c.ids[0]) for c in completions}) > 55
  # Nor do two places: the second token is the first one's equal by chance alone, 1 in 64.
  pairs = [c.ids[:2] for c in completions if len(c.ids) > 1]
  assert 180 < len(pairs) < 270  # a quarter of the tokens are stops
  assert np.mean([a == b for a, b in pairs]) < 0.1
  # The seed is the request's: the same one draws the same.
  _same(completions[:5] * 2, made.sample(flat, requests[:5] * 2, sampler.Distribution()))


def test_top_k_and_top_p_reach_the_draws(made, weights):
  requests = _requests(6)
  greedy = made.sample(weights, requests, sampler.Distribution(greedy=True))
  for given in ({"top_k": 1}, {"top_p": 1e-6}):
    _same(greedy, made.sample(weights, requests, sampler.Distribution(**given)))


def test_greedy_takes_the_likeliest(made, weights):
  requests = _requests(6)
  completions = made.sample(weights, requests, sampler.Distribution(greedy=True))
  for got, (logprobs, _) in zip(completions, _trainer(weights, requests, completions)):
    np.testing.assert_array_equal(got.ids, logprobs.argmax(-1))


def test_a_completion_ends_at_a_stop_or_at_the_limit(sampled):
  _, completions = sampled
  lengths = {len(c.ids) for c in completions}
  assert len(lengths) > 3  # or the refilling below was never tried
  for got in completions:
    stops = np.isin(got.ids, STOPS)
    assert not stops[:-1].any()
    assert got.truncated == (not stops[-1]) and (stops[-1] or len(got.ids) == 9)
    assert len(got.logprobs) == len(got.ids)


def _same(one, other, tolerance=1e-5):
  assert len(one) == len(other)
  for a, b in zip(one, other):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=0)
    np.testing.assert_array_equal(a.routed_experts, b.routed_experts)


def test_neighbours_and_slots_change_nothing(sampled, made, weights):
  requests, completions = sampled
  order = np.random.default_rng(1).permutation(len(requests))
  again = made.sample(weights, [requests[i] for i in order], sampler.Distribution())
  _same([completions[i] for i in order], again)
  for i in (0, 7):
    _same([completions[i]], made.sample(weights, [requests[i]], sampler.Distribution()))


@pytest.mark.parametrize(
  "changes",
  [
    {"sampler_slots": 64, "prefill_rows": 64, "decode_block": 9},
    {"sampler_slots": 1, "decode_block": 1, "prefill_chunk": 1},
  ],
)
def test_shapes_change_nothing(sampled, weights, changes):
  requests, completions = sampled
  # Products of other shapes round otherwise, hence the bound of the trainer's log-probs.
  again = _make(**changes).sample(weights, requests, sampler.Distribution())
  _same(completions, again, tolerance=1e-4)


def test_nothing_is_compiled_twice(made, weights):
  programs = (made._empty, made._fresh_cache, made._prefill, made._insert, made._decode)
  made.sample(weights, _requests(3), sampler.Distribution(temperature=0.7))
  before = [p._cache_size() for p in programs]
  made.sample(weights, _requests(9, seed=4), sampler.Distribution(temperature=0.9))
  made.sample(weights, _requests(1, seed=5), sampler.Distribution(greedy=True))
  assert [p._cache_size() for p in programs] == before


def test_new_weights_are_used(sampled, made, weights):
  requests, completions = sampled
  other = _random(4)
  different = made.sample(other, requests, sampler.Distribution())
  assert any(not np.array_equal(a.ids, b.ids) for a, b in zip(completions, different))
  _same(completions, made.sample(weights, requests, sampler.Distribution()))


def _draws(logits, count=4000, **given):
  keys = jax.random.split(jax.random.key(0), count)
  table = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
  values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "greedy": False, **given}
  token, logprob = sampler.draw(
    table,
    keys,
    jnp.float32(values["temperature"]),
    jnp.float32(values["top_p"]),
    jnp.int32(values["top_k"]),
    jnp.bool_(values["greedy"]),
    filtered=values["top_p"] < 1 or values["top_k"] > 0,
  )
  share = np.bincount(np.asarray(token), minlength=len(logits)) / count
  return share, np.asarray(token), np.asarray(logprob)


def test_draws_have_the_probabilities_of_the_logits_over_temperature():
  logits = np.log([0.1, 0.2, 0.7])
  for temperature in (1.0, 0.5):
    want = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    share, token, logprob = _draws(logits, temperature=temperature)
    np.testing.assert_allclose(share, want, atol=0.025)
    np.testing.assert_allclose(logprob, np.log(want)[token], atol=1e-5)


@pytest.mark.parametrize(
  "given, kept",
  [
    ({"top_k": 1}, [4]),
    ({"top_k": 2}, [4, 1]),
    ({"top_p": 0.39}, [4]),
    ({"top_p": 0.41}, [4, 1]),  # 0.4 lies before the second, so it may be drawn
    ({"top_p": 0.71}, [4, 1, 2]),
    ({"top_p": 0.99, "top_k": 3}, [4, 1, 2]),
    ({"top_p": 1e-6}, [4]),
  ],
)
def test_top_p_and_top_k_keep_the_likeliest(given, kept):
  probability = np.array([0.08, 0.3, 0.15, 0.07, 0.4])
  share, token, logprob = _draws(np.log(probability), **given)
  want = np.zeros(5)
  want[kept] = probability[kept] / probability[kept].sum()
  np.testing.assert_allclose(share, want, atol=0.03)
  assert np.all(share[want == 0] == 0)
  # Log-probs are of the whole distribution: the trainer does not know what was left out.
  np.testing.assert_allclose(logprob, np.log(probability)[token], atol=1e-5)


def test_mistakes_are_named(made, weights):
  draw = sampler.Distribution()
  with pytest.raises(options.UserError, match="12 tokens, more than --max_prompt_tokens=11"):
    made.sample(weights, [sampler.Request((1,) * 12, 0)], draw)
  with pytest.raises(options.UserError, match="no tokens"):
    made.sample(weights, [sampler.Request((), 0)], draw)
  for wrong in (64, -1):
    with pytest.raises(options.UserError, match=f"{wrong} is outside the model's vocabulary of 64"):
      made.sample(weights, [sampler.Request((3, wrong), 0)], draw)
  with pytest.raises(options.UserError, match="the tokenizer's stop id 257 is outside"):
    sampler.LocalSampler(CONFIG, MODEL, run_config.SamplerOptions(), (257,))
  given = run_config.SamplerOptions(stop_ids=(5, 99999))
  with pytest.raises(options.UserError, match="^--stop_ids: 99999 is outside"):
    sampler.LocalSampler(CONFIG, MODEL, given, given.stop_ids)
