"""Keys that choose or shape kernels, against the same layer in plain JAX; kernels interpreted."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import attention, layers
from model import config as config_lib

# The interpreted kernels are many small programs: compiling them takes longest.
jax.config.update("jax_disable_most_optimizations", True)

_CONFIG = dataclasses.replace(config_lib.preset("tiny_moe"), initializer_range=0.3)
_TILES = {
  "sa_block_q": 128,
  "sa_block_kv": 256,
  "sa_block_kv_compute": 128,
  "sa_block_q_dkv": 128,
  "sa_block_kv_dkv": 256,
  "sa_block_kv_dkv_compute": 128,
}


def _options(**changes):
  return config_lib.ModelOptions(dtype="float32", **changes)


def _relative(got, want):
  return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def _run(make, *inputs):
  """A layer's output and its gradients to weights and input, of a loss that bends."""
  definition, weights = nnx.split(make(), nnx.Param)

  def loss(weights, x):
    out = nnx.merge(definition, weights)(x, *inputs[1:])[0]
    return jnp.sum(jnp.sin(out)), out

  gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(weights, inputs[0])
  return [np.asarray(leaf) for leaf in (out, *jax.tree.leaves(gradients))]


def _attention(options):
  """The layer on two packed rows, one of which ends in padding."""
  lengths, total = ((150, 100, 50), (90, 170)), 300
  rng = np.random.default_rng(0)
  segments, positions = (np.zeros((2, total), np.int32) for _ in range(2))
  for row, parts in enumerate(lengths):
    start = 0
    for i, n in enumerate(parts):
      segments[row, start : start + n] = i + 1
      positions[row, start : start + n] = np.arange(n)
      start += n
  x = jnp.asarray(rng.normal(size=(2, total, _CONFIG.hidden_size)), jnp.float32)
  angles = layers.rotary_angles(jnp.asarray(positions), _CONFIG, jnp.float32)
  context = layers.Context(jnp.asarray(segments), jnp.asarray(positions), *angles)
  make = lambda: attention.Attention(_CONFIG, options, rngs=nnx.Rngs(0))
  return _run(make, x, context)


@pytest.mark.parametrize(
  "keys", [_TILES, {**_TILES, "sa_use_base2_exp": True, "dq_reduction_steps": 2}]
)
def test_attention_kernels(keys):
  want = _attention(_options())
  got = _attention(_options(kernel_implementation="interpret", **keys))
  for a, b in zip(got, want, strict=True):
    assert np.isfinite(a).all() and _relative(a, b) <= 2e-6

  # The queries' factor taken twice, or their scores', moves every value.
  wrong = lambda dim, options: (2.0, dim**-0.5)
  with mock.patch.object(attention, "query_factors", wrong):
    assert _relative(_attention(_options())[0], want[0]) > 1e-2
