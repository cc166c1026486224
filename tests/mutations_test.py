"""Plants every known mistake of a Qwen3.5 implementation and asks that the parity check sees it.

Each mutation changes the configuration, the weights, or one function of the model, and leaves a
model that trains and looks healthy.  Each is at least a thousand times over the tolerance.
"""

import dataclasses
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.conv1d import conv1d
from kernels.gated_norm import gated_norm
from kernels.gdn import gdn, reference
from model import api, attention, layers, moe
from model import config as config_lib
from tests.oracle import reading

_OPTIONS = config_lib.ModelOptions(dtype="float32")
_TOLERANCE = 1e-5
# Causal: the first tokens of a row do not know how long it is.
_TOKENS = 70


def _logits(config, params, ids):
  return api.unembed(params, api.forward(config, _OPTIONS, params, api.row_inputs(ids)).hidden)


_unpatched = jax.jit(_logits, static_argnums=0)


def _error(case, change_config=None, change_params=None, patch=None):
  """Relative L2 error of the logits under a mutation."""
  config, params, numbers = reading.load(case)
  if change_config:
    config = dataclasses.replace(config, **change_config)
  params = change_params(config, params) if change_params else params
  ids = jnp.asarray(numbers["ids"][:, :_TOKENS], jnp.int32)
  if patch:
    with mock.patch.object(*patch):
      # A function of its own: nothing traced without the mutation may be used again.
      logits = jax.jit(lambda params, ids: _logits(config, params, ids))(params, ids)
  else:
    logits = _unpatched(config, params, ids)
  logits = np.asarray(logits, np.float64)
  want = numbers["logits"][:, :_TOKENS]
  return np.linalg.norm(logits - want) / np.linalg.norm(want)


def _weights(*path, kind="gdn"):
  """A change of one weight of every layer of a kind."""

  def apply(function):
    def change(config, params):
      params = jax.tree.map(np.asarray, params)  # New containers, so the originals stay.
      node = params["groups"][kind]
      for name in path[:-1]:
        node = node[name]
      node[path[-1]] = function(config, node[path[-1]])
      return params

    return change

  return apply


def _swap_gate_and_up(config, wi):
  gate, up = np.split(wi, 2, axis=-1)
  return np.concatenate([up, gate], axis=-1)


def _both_layers_swapped(config, params):
  params = _weights("mlp", "wi")(_swap_gate_and_up)(config, params)
  return _weights("mlp", "wi", kind="attn")(_swap_gate_and_up)(config, params)


def _decay_inputs_swapped(config, params):
  params = jax.tree.map(np.asarray, params)
  mixer = params["groups"]["gdn"]["gdn"]
  mixer["in_proj_a"], mixer["in_proj_b"] = mixer["in_proj_b"], mixer["in_proj_a"]
  return params


def _flat_query_and_gate(config, kernel):
  """All queries then all gates, read as (query, gate) of each head."""
  lead = kernel.shape[:-1]
  flat = kernel.reshape(*lead, 2, config.num_attention_heads, config.head_dim)
  return np.swapaxes(flat, -3, -2).reshape(kernel.shape)


def _without_sigmoid():
  """The `jax` a module sees, with a sigmoid that is one."""
  nn = types.SimpleNamespace(**(vars(jax.nn) | {"sigmoid": jnp.ones_like}))
  return types.SimpleNamespace(**(vars(jax) | {"nn": nn}))


def _gated_norm(one_plus=False, gate_first=False, gate=jax.nn.silu):
  def mutated(x, z, scale, eps, **kwargs):
    del kwargs
    x = x * gate(z) if gate_first else x
    x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    x = x * ((1 + scale) if one_plus else scale)
    return x if gate_first else x * gate(z)

  return (gated_norm, "gated_rms_norm", mutated)


def _rule(before=lambda *a: a, after=lambda o, *a: o):
  original = gdn.gated_delta_rule

  def mutated(q, k, v, g, beta, segments, state=None, **kwargs):
    args = before(q, k, v, g, beta)
    out, state = original(*args, segments, state, **kwargs)
    return after(out, q, k, v), state

  return (gdn, "gated_delta_rule", mutated)


def _tile(x, q, inverse=False):
  """Value heads re-ordered so that head j meets key head j modulo their number."""
  keys, heads = q.shape[2], x.shape[2]
  order = np.arange(heads).reshape(heads // keys, keys).T.reshape(-1)
  return x[:, :, np.argsort(order) if inverse else order]


def _decay_after_write(q, k, v, g, beta, segments, state=None, **kwargs):
  del segments, state, kwargs
  heads = v.shape[2] // k.shape[2]
  q = jnp.repeat(reference.l2_normalize(q) * q.shape[-1] ** -0.5, heads, axis=2)
  k = jnp.repeat(reference.l2_normalize(k), heads, axis=2)

  def step(state, token):
    q, k, v, g, beta = token
    u = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
    state = jnp.exp(g)[..., None, None] * (state + k[..., None] * u[..., None, :])
    return state, jnp.einsum("bhkv,bhk->bhv", state, q)

  start = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]))
  moved = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
  state, out = jax.lax.scan(step, start, tuple(moved))
  return jnp.moveaxis(out, 0, 1), state


def _conv_without_silu(x, kernel, segments, window=None, **kwargs):
  del kwargs
  taps = kernel.shape[0]
  padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
  return sum(padded[:, j : j + x.shape[1]] * kernel[j] for j in range(taps))


def _no_renormalisation(logits, top_k, *rest):
  del rest
  probabilities = jax.nn.softmax(logits, axis=-1)
  weights, experts = jax.lax.top_k(probabilities, top_k)
  return experts, weights


def _interleaved_rotation(x, cos, sin):
  half = cos.shape[-1]
  cos, sin = cos[:, :, None], sin[:, :, None]
  even, odd = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
  pairs = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
  return jnp.concatenate([pairs.reshape(*x.shape[:-1], 2 * half), x[..., 2 * half :]], axis=-1)


def _plain_norm(x, scale, eps, factor=1.0, implementation=None):
  return factor * scale * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def _l2(eps_inside, eps_outside=0.0, mean=False):
  def mutated(x, eps=None):
    square = jnp.mean(x * x, -1, keepdims=True) if mean else jnp.sum(x * x, -1, keepdims=True)
    return x / (jnp.sqrt(square + eps_inside) + eps_outside)

  return (reference, "l2_normalize", mutated)


_MUTATIONS = {
  "norm scale w instead of 1 + w": {"patch": (layers, "rms_norm", _plain_norm)},
  "gated norm scale 1 + w": {"patch": _gated_norm(one_plus=True)},
  "gate before the norm": {"patch": _gated_norm(gate_first=True)},
  "sigmoid gate in the gated norm": {"patch": _gated_norm(gate=jax.nn.sigmoid)},
  "queries and gates flat, not per head": {
    "change_params": _weights("attention", "q_proj", "kernel", kind="attn")(_flat_query_and_gate)
  },
  "key heads tiled, not repeated": {
    "patch": _rule(
      lambda q, k, *rest: (q, k, *(_tile(x, q) for x in rest)),
      lambda out, q, k, v: _tile(out, q, inverse=True),
    )
  },
  "queries not scaled": {"patch": _rule(after=lambda out, q, k, v: out * q.shape[-1] ** 0.5)},
  "convolution taps reversed": {
    "change_params": _weights("gdn", "conv1d", "kernel")(lambda c, w: w[..., ::-1, :])
  },
  "no SiLU after the convolution": {"patch": (conv1d, "causal_conv1d_silu", _conv_without_silu)},
  "a and b swapped": {"change_params": _decay_inputs_swapped},
  "expert weights not renormalised": {"patch": (moe, "route", _no_renormalisation)},
  "shared expert without its gate": {"patch": (moe, "jax", _without_sigmoid())},
  "up before gate": {"change_params": _both_layers_swapped},
  "attention without its output gate": {"patch": (attention, "jax", _without_sigmoid())},
  "interleaved rotation": {"patch": (layers, "rotate", _interleaved_rotation)},
  "all dimensions rotated": {"change_config": {"partial_rotary_factor": 1.0, "mrope_section": ()}},
  "rope theta 1e4": {"change_config": {"rope_theta": 1e4}},
  "decay after the write": {"patch": (gdn, "gated_delta_rule", _decay_after_write)},
}
_ON_SMALL_KEYS = {
  "L2 norm without epsilon": _l2(1e-30),
  "L2 norm with the epsilon outside the root": _l2(1e-30, eps_outside=1e-6),
  "L2 norm with the epsilon on the mean": _l2(1e-6, mean=True),
  "L2 norm epsilon 1e-5": _l2(1e-5),
}


@pytest.mark.parametrize("case", ["moe", "near_zero_key"])
def test_without_a_mutation_the_check_passes(case):
  assert _error(case) <= _TOLERANCE


@pytest.mark.parametrize("name", list(_MUTATIONS))
def test_mutation_is_caught(name):
  error = _error("moe", **_MUTATIONS[name])
  assert error > 2e-2, error


@pytest.mark.parametrize("name", list(_ON_SMALL_KEYS))
def test_epsilon_of_the_l2_norm_is_caught(name):
  error = _error("near_zero_key", patch=_ON_SMALL_KEYS[name])
  assert error > 1e-3, error
