"""The model against transformers: logits, log-probs, hidden states, routing, gradients.

The numbers were recorded from transformers in float32 (`tests/oracle/make_oracle.py`).  Two exact
float32 implementations differ by 2e-6 in the logits and 1e-5 in the worst gradient; every mistake
that `mutations_test.py` plants is at least a thousand times larger.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import api
from model import config as config_lib
from tests.oracle import reading

_OPTIONS = config_lib.ModelOptions(dtype="float32")


def _rel(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def _pick(logits, ids):
  logprobs = jax.nn.log_softmax(logits, axis=-1)[:, :-1]
  return jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0]


@functools.partial(jax.jit, static_argnums=0)
def _program(config, params, ids, weights):
  def loss(params):
    out = api.forward(
      config,
      _OPTIONS,
      params,
      api.row_inputs(ids),
      output_hidden_states=True,
      output_router_logits=True,
    )
    logits = api.unembed(params, out.hidden)
    logprobs = _pick(logits, ids)
    return -jnp.mean(logprobs * weights), (logits, logprobs, out)

  return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def _run(case):
  config, params, numbers = reading.load(case)
  ids = jnp.asarray(numbers["ids"], jnp.int32)
  (value, extra), grads = _program(config, params, ids, numbers["adv"])
  return config, numbers, value, extra, grads


@pytest.mark.parametrize("case", reading.CASES)
def test_logits_and_logprobs(case):
  _, numbers, value, (logits, logprobs, _), _ = _run(case)
  assert _rel(logits, numbers["logits"]) <= 1e-5
  assert np.abs(np.asarray(logprobs) - numbers["logprobs"]).max() <= 5e-5
  np.testing.assert_allclose(value, numbers["loss"], rtol=1e-5)


@pytest.mark.parametrize("case", reading.CASES)
def test_hidden_states_and_router(case):
  config, numbers, _, (_, _, out), _ = _run(case)
  assert out.hidden_states.shape[0] == config.num_hidden_layers + 1
  for i, hidden in enumerate(out.hidden_states):
    assert _rel(hidden, numbers[f"hidden_{i}"]) <= 1e-5, i
  if not config.is_moe:
    assert out.router_logits is None and out.routed_experts is None
    return
  for i in range(config.num_hidden_layers):
    want = numbers[f"router_{i}"].reshape(*numbers["ids"].shape, -1)
    assert _rel(out.router_logits[:, :, i], want) <= 1e-5, i
    top = np.argsort(-want, axis=-1)[..., : config.num_experts_per_tok]
    used = np.sort(np.asarray(out.routed_experts[:, :, i]), axis=-1)
    np.testing.assert_array_equal(used, np.sort(top, axis=-1))


@pytest.mark.parametrize("case", reading.CASES)
def test_every_gradient(case):
  config, numbers, _, _, grads = _run(case)
  want = reading.gradients(config, numbers)
  assert jax.tree.structure(grads) == jax.tree.structure(want)
  for (path, got), expected in zip(
    jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want)
  ):
    # Layer by layer: a small layer must not hide behind a large one of its stack.
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    lead = 2 if "groups/gdn" in name else 1 if name.startswith(("groups", "tail")) else 0
    for layer in np.ndindex(got.shape[:lead]):
      assert _rel(got[layer], expected[layer]) <= 1e-4, (name, layer)


def test_cases_are_what_they_claim():
  ratios = reading.load("ratios_397b")[0]
  assert ratios.linear_num_value_heads == 4 * ratios.linear_num_key_heads
  assert ratios.num_attention_heads == 16 * ratios.num_key_value_heads
  assert (ratios.num_experts, ratios.num_experts_per_tok) == (32, 10)
  assert ratios.num_tail_layers == 1
  config, params, numbers = reading.load("near_zero_key")
  assert config.tie_word_embeddings and "lm_head" not in params
  # Keys of head 0 before the norm: the squares sum to about the epsilon, 1e-6.
  x = params["embed"]["embedding"][numbers["ids"]]
  x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)
  layer = jax.tree.map(lambda a: a[0, 0], params["groups"]["gdn"])
  x = x * (1 + layer["input_norm"]["scale"])
  first = config.key_dim
  head = layer["gdn"]["in_proj_qkv"]["kernel"][:, first : first + config.linear_key_head_dim]
  squares = np.sum((x @ head) ** 2, axis=-1)
  assert 1e-7 < np.median(squares) < 1e-5
