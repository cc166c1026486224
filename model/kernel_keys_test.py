"""Keys that choose or shape kernels, against the same layer in plain JAX; kernels interpreted."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels.attention import attention as attention_op
from kernels.attention import flash
from kernels.base import options as base_options
from kernels.gmm import gmm
from kernels.gmm import options as gmm_options
from model import attention, layers, moe
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


def test_tiles_reach_the_flash_kernels():
  seen = []

  def record(q, k, v, ids, scale, implementation, given):
    seen.append((implementation, given))
    return q, None

  given = _options(kernel_implementation="interpret", **_TILES)
  with mock.patch.object(flash, "attention", record), mock.patch.object(jax, "jit", lambda f: f):
    _attention(given)
  assert seen and all(call == ("interpret", given) for call in seen)
  assert attention_op.flash is flash


def test_every_tile_key_is_a_size_of_its_product():
  explicit = {"use_gmm_v2_heuristic_tiling": False}
  plain = gmm_options.GmmOptions(**explicit)
  assert gmm_options.GmmOptions().tiles("wi") is None
  seen = set()
  for name in gmm_options.TILE_KEYS:
    changed = gmm_options.GmmOptions(**explicit, **{name: 384})
    which = name[:2]
    other = {"wi": "wo", "wo": "wi"}[which]
    assert changed.tiles(other) == plain.tiles(other)
    seen.add((which, changed.tiles(which)))
  assert len(seen) == len(gmm_options.TILE_KEYS) == 18
  assert not {(which, plain.tiles(which)) for which in ("wi", "wo")} & seen


_MOE = dataclasses.replace(
  _CONFIG,
  hidden_size=256,
  moe_intermediate_size=128,
  shared_expert_intermediate_size=64,
  initializer_range=0.1,
)
_JAX_KERNEL = {"kernel_implementation": "interpret", "use_tokamax_gmm": True}
_V2 = {**_JAX_KERNEL, "use_gmm_v2": True}
# Tiles that cut rows and columns, never a sum.
_EXPLICIT = {
  "use_gmm_v2_heuristic_tiling": False,
  "wi_tile_fwd_batch_seq": 64,
  "wi_tile_fwd_embed_dim": 256,
  "wi_tile_fwd_mlp_dim": 128,
  "wi_tile_dlhs_batch_seq": 128,
  "wi_tile_dlhs_embed_dim": 128,
  "wi_tile_dlhs_mlp_dim": 256,
  "wi_tile_drhs_batch_seq": 512,
  "wi_tile_drhs_embed_dim": 128,
  "wi_tile_drhs_mlp_dim": 128,
  "wo_tile_fwd_batch_seq": 64,
  "wo_tile_fwd_embed_dim": 128,
  "wo_tile_drhs_batch_seq": 512,
  "wo_tile_drhs_embed_dim": 128,
}


@functools.cache
def _experts_of(changes):
  """The sparse layer on 96 tokens, a quarter of which are padding; 8 experts."""
  options = _options(**dict(changes))
  x = jax.random.normal(jax.random.key(1), (1, 96, _MOE.hidden_size))
  segments = (jnp.arange(96) < 72).astype(jnp.int32)[None]
  make = lambda: moe.SparseMoe(_MOE, options, rngs=nnx.Rngs(0))
  return _run(make, x, segments)


def _experts(**changes):
  return _experts_of(tuple(sorted(changes.items())))


def _close(got, want, limit):
  for a, b in zip(got, want, strict=True):
    assert np.isfinite(a).all() and _relative(a, b) <= limit


@pytest.mark.parametrize("keys", [_JAX_KERNEL, _V2, {**_V2, **_EXPLICIT}])
def test_grouped_products(keys):
  _close(_experts(**keys), _experts(), 2e-6)


def test_explicit_tiles_change_nothing_but_how_a_cpu_rounds():
  """The interpreter's products round by their shape; a TPU's do not."""
  _close(_experts(**_V2, **_EXPLICIT), _experts(**_V2), 2e-7)


def test_prefused_weights():
  """Apart from the input's gradient, one sum in place of two, the kernels' every bit is the same."""
  want, got = _experts(**_V2), _experts(**_V2, prefuse_moe_weights=True)
  different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if (a != b).any()]
  assert set(different) <= {len(want) - 1}
  _close(got, want, 1e-6)
  # XLA's product on a CPU rounds by its shape.
  _close(_experts(prefuse_moe_weights=True), _experts(), 2e-6)


_FUSIBLE = {**_V2, **_EXPLICIT, "prefuse_moe_weights": True}
_SWIGLU = {"moe_wi_gmm_fused_swiglu": True, "wi_tile_fwd_mlp_dim": 256}
_ROUTER = {"moe_router_grad_from_wo_input": True}
_DSWIGLU = {"moe_wo_gmm_fused_dswiglu": True, "wo_tile_dlhs_mlp_dim": 128}


@pytest.mark.parametrize("keys", [_SWIGLU, _ROUTER, {**_SWIGLU, **_ROUTER, **_DSWIGLU}])
def test_fusions(keys):
  _close(_experts(**{**_FUSIBLE, **keys}), _experts(), 2e-6)


def test_tiles_that_do_not_fit_the_experts_are_refused():
  for keys in ({**_SWIGLU, "wi_tile_fwd_mlp_dim": 1536}, {**_DSWIGLU, "wo_tile_dlhs_mlp_dim": 256}):
    with pytest.raises(base_options.UserError, match="experts' 128"):
      _experts(**{**_FUSIBLE, **keys})


def test_a_planted_fault_is_caught():
  """Matrices of the wrong expert, as a layout of tiles gone wrong would take them."""
  plain = gmm.grouped_matmul
  swapped = lambda lhs, rhs, sizes, **how: plain(lhs, rhs[::-1], sizes)
  with mock.patch.object(gmm, "grouped_matmul", swapped):
    with pytest.raises(AssertionError):
      _close(_experts_of.__wrapped__(()), _experts(), 2e-6)
