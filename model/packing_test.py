"""Packed rows against their segments alone, forward and backward; and padding."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import reference as attention_reference
from kernels.conv1d import conv1d
from kernels.gdn import gdn
from model import api
from model import config as config_lib

_OPTIONS = config_lib.ModelOptions(dtype="float32")
_LENGTH = 128
# Segments of three rows, all of unequal lengths; the second row ends in padding.
_ROWS = ([37, 51, 40], [5, 90, 20], [1, 2, 125])


@functools.cache
def _params(name):
  """Weights away from the initial symmetry: norms at zero and equal biases hide mistakes."""
  config = config_lib.preset(name)
  params = api.init_params(config, _OPTIONS, jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  moved = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)]
  return jax.tree.unflatten(tree, moved)


def _packed():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 512, (len(_ROWS), _LENGTH)).astype(np.int32)
  segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
  for row, lengths in enumerate(_ROWS):
    start = 0
    for i, n in enumerate(lengths):
      segments[row, start : start + n] = i + 1
      positions[row, start : start + n] = np.arange(n)
      start += n
  return api.ModelInputs(tokens, segments, positions)


def _alone(values):
  """[3, S, ...] of the packed rows -> [9, S, ...], one segment a row, padded with zeros."""
  values = np.asarray(values)
  out = np.zeros((9, *values.shape[1:]), values.dtype)
  at = 0
  for row, lengths in enumerate(_ROWS):
    start = 0
    for n in lengths:
      out[at, :n] = values[row, start : start + n]
      at, start = at + 1, start + n
  return out


@functools.partial(jax.jit, static_argnums=0)
def _program(name, params, inputs, weights):
  def objective(params):
    out = api.forward(config_lib.preset(name), _OPTIONS, params, inputs)
    return jnp.sum(out.hidden * weights), (out.hidden, out.routed_experts)

  return jax.grad(objective, has_aux=True)(params)


def _rel(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def _run_both(name):
  packed = _packed()
  weights = np.random.default_rng(1).normal(size=(*packed.tokens.shape, 64)).astype(np.float32)
  weights *= (packed.segment_ids > 0)[..., None]
  alone = api.ModelInputs(
    _alone(packed.tokens), (_alone(packed.segment_ids) > 0).astype(np.int32),
    _alone(packed.positions),
  )  # fmt: skip
  together = _program(name, _params(name), packed, weights)
  return packed, together, _program(name, _params(name), alone, _alone(weights))


@pytest.mark.parametrize("name", ["tiny", "tiny_moe"])
def test_packed_rows_equal_their_segments_alone(name):
  packed, (grads, (hidden, routed)), (want_grads, (want, want_routed)) = _run_both(name)
  real = _alone(packed.segment_ids) > 0
  assert _rel(_alone(hidden)[real], np.asarray(want)[real]) <= 5e-6
  if routed is not None:
    np.testing.assert_array_equal(_alone(routed)[real], np.asarray(want_routed)[real])
    np.testing.assert_array_equal(np.asarray(routed)[packed.segment_ids == 0], -1)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads)):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    tolerance = 2e-5 if name.endswith(("A_log", "dt_bias")) else 1e-5
    assert _rel(a, b) <= tolerance, name


_attention_mask = attention_reference.visible
_conv, _rule = conv1d.causal_conv1d_silu, gdn.gated_delta_rule
_ones = lambda segments: (segments > 0).astype(jnp.int32)
_LEAKS = {
  "attention": (
    attention_reference,
    "visible",
    lambda qs, ks, qp, kp: _attention_mask(_ones(qs), _ones(ks), qp, kp),
  ),
  "convolution": (conv1d, "causal_conv1d_silu", lambda x, w, s, *r: _conv(x, w, _ones(s), *r)),
  "state": (
    gdn,
    "gated_delta_rule",
    lambda q, k, v, g, b, s, *r, **kw: _rule(q, k, v, g, b, _ones(s), *r, **kw),
  ),
}


@pytest.mark.parametrize("leak", list(_LEAKS))
def test_a_part_that_drops_the_segment_ids_is_seen(leak):
  config, packed = config_lib.preset("tiny"), _packed()
  run = lambda params, inputs: api.forward(config, _OPTIONS, params, inputs).hidden
  want = _clean_hidden()
  with mock.patch.object(*_LEAKS[leak]):
    got = jax.jit(lambda params: run(params, packed))(_params("tiny"))
  first = packed.segment_ids == 1
  assert _rel(np.asarray(got)[first], want[first]) <= 5e-6
  assert _rel(np.asarray(got)[~first], want[~first]) > 1e-3


@functools.cache
def _clean_hidden():
  config, packed = config_lib.preset("tiny"), _packed()
  return np.asarray(
    jax.jit(lambda params: api.forward(config, _OPTIONS, params, packed).hidden)(_params("tiny"))
  )


def test_calls_without_segments_are_refused():
  packed, config = _packed(), config_lib.preset("tiny")
  with pytest.raises(TypeError):
    api.ModelInputs(packed.tokens)  # type: ignore[call-arg]
  run = lambda inputs: jax.eval_shape(
    lambda p: api.forward(config, _OPTIONS, p, inputs), api.abstract_params(config, _OPTIONS)
  )
  with pytest.raises(ValueError, match="segment_ids"):
    run(packed._replace(segment_ids=None))
  with pytest.raises(ValueError, match="positions"):
    run(packed._replace(positions=packed.positions[:, :5]))
  with pytest.raises(ValueError, match="dense"):
    run(packed._replace(routed_experts=np.zeros((3, _LENGTH, 4, 2), np.int16)))


def test_left_padding_leaves_the_first_token_alone():
  config = config_lib.preset("tiny")
  tokens = np.random.default_rng(2).integers(0, 512, (1, _LENGTH)).astype(np.int32)
  pads = 5
  segments = (np.arange(_LENGTH) >= pads)[None].astype(np.int32)
  positions = np.maximum(np.arange(_LENGTH) - pads, 0)[None].astype(np.int32)
  run = jax.jit(lambda p, i: api.forward(config, _OPTIONS, p, i).hidden)
  left = run(_params("tiny"), api.ModelInputs(tokens, segments, positions))
  rolled = np.roll(tokens, -pads, axis=1)
  right = run(_params("tiny"), api.row_inputs(rolled, np.array([_LENGTH - pads])))
  assert _rel(left[:, pads:], right[:, : _LENGTH - pads]) <= 5e-6
