"""Layers on the ranks of a 2x2x2 mesh against the same layers on one device: the reported cases.

Packed rows with segments over the shards' edge, padding, recorded routing, empty experts and rows of
a buffer that nobody owns.  tests/CASES.md names the reports.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=8"
  " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import dataclasses  # noqa: E402
import functools  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from kernels.base.mesh import DEVICE_ORDER  # noqa: E402
from model import config as config_lib  # noqa: E402
from model import layers, moe, qwen3_5  # noqa: E402
from model.sharded import cell as cell_lib  # noqa: E402
from model.sharded import experts as experts_lib  # noqa: E402
from model.sharded import layout, mixers  # noqa: E402
from model.sharded.options import ShardedOptions  # noqa: E402

CONFIG = dataclasses.replace(config_lib.preset("tiny_moe"), initializer_range=0.3)
OPTIONS = config_lib.ModelOptions(dtype="float32", gdn_chunk_size=16)
MESH = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), DEVICE_ORDER)  # fsdp, context, expert
ROWS, TOKENS = 4, 128
RANK_EXPERTS = CONFIG.num_experts // 4
SPLIT = P(layout.ROWS, "context")  # rows over (fsdp, expert), their tokens over context


def cell_of(**values: Any) -> cell_lib.Cell:
  options = ShardedOptions(**values)
  return cell_lib.Cell(CONFIG, OPTIONS, options, layout.plan(CONFIG, options, MESH))


@functools.cache
def layer(kind):
  """(definition, weights as a plain tree) of a layer."""
  return qwen3_5.abstract_layer(kind, CONFIG, OPTIONS)[0], qwen3_5.init_layer(
    kind, CONFIG, OPTIONS, jax.random.key(0)
  )


def objective(out, real):
  """Something whose gradient is of every size, of real tokens alone."""
  return jnp.sum(jnp.cos(3 * jnp.where(real[..., None], out, 0.0)))


def distance(a, b):
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def inputs(seed=1):
  return jax.random.normal(jax.random.key(seed), (ROWS, TOKENS, CONFIG.hidden_size))


# Mixers.  The shards' edge is at 64: rows with a segment over it, with none, and with one that ends
# there; prime-rl#3003's is the first.
LENGTHS = ((37, 51, 40), (128,), (64, 64), (37, 27, 1, 63))


def packed(lengths):
  ids, positions = np.zeros((2, ROWS, TOKENS), np.int32)
  for row, row_lengths in enumerate(lengths):
    at = 0
    for number, length in enumerate(row_lengths, 1):
      ids[row, at : at + length], positions[row, at : at + length] = number, np.arange(length)
      at += length
  return ids, positions


@functools.cache
def mixer_alone(kind):
  """Output and gradient of the input on one device."""
  definition, weights = layer(kind)

  def run(x, ids, positions):
    context = layers.Context(ids, positions, *layers.rotary_angles(positions, CONFIG, jnp.float32))
    return nnx.merge(definition, weights)._mixer(x, context, None)[0]

  ids, positions = packed(LENGTHS)
  x = inputs()
  grad = jax.grad(lambda x: objective(run(x, ids, positions), ids > 0))
  return jax.jit(run)(x, ids, positions), jax.jit(grad)(x)


def mixer_on_mesh(kind, *, gradient=True, **values):
  """(ids, positions) -> the same on the mesh; the output alone without `gradient`."""
  cell = cell_of(**values)
  definition, weights = layer(kind)

  def local(weights, x, ids, positions):
    module = nnx.merge(definition, weights)
    rows = cell_lib.make_rows(cell, ids, positions)
    apply = mixers.gated_delta_net if kind is qwen3_5.GdnLayer else mixers.attention
    part = module.gdn if kind is qwen3_5.GdnLayer else module.attention
    run = lambda x: apply(cell, part, x, rows)
    if not gradient:
      return run(x)
    return run(x), jax.grad(lambda x: objective(run(x), rows.segment_ids > 0))(x)

  whole = P(layout.ROWS)
  out = (SPLIT, SPLIT) if gradient else SPLIT
  mapped = jax.shard_map(
    local, mesh=MESH, in_specs=(P(), SPLIT, whole, whole), out_specs=out, check_vma=False
  )
  program = jax.jit(mapped)
  return lambda ids, positions: program(weights, inputs(), ids, positions)


MIXERS = {
  "head": (qwen3_5.GdnLayer, {}),
  "seq": (qwen3_5.GdnLayer, {"gdn_cp_mode": "seq"}),
  "attention": (qwen3_5.AttentionLayer, {}),
  "balanced": (
    qwen3_5.AttentionLayer,
    {
      "context_parallel_attention_load_balance": True,
      "context_parallel_attention_load_balance_order": "dual_chunk_swap_local_self",
    },
  ),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_follow_the_rows_segments_over_the_shards_edge(name):
  kind, values = MIXERS[name]
  run = mixer_on_mesh(kind, **values)
  wanted = mixer_alone(kind)
  for got, want in zip(run(*packed(LENGTHS)), wanted, strict=True):
    for row in range(ROWS):
      assert distance(got[row], want[row]) < 5e-6
  # One boundary more or less at the edge is seen, in the row that it is in.
  for row, lengths in ((0, (37, 27, 24, 40)), (1, (64, 64)), (2, (128,)), (3, (37, 28, 63))):
    changed = [*LENGTHS[:row], lengths, *LENGTHS[row + 1 :]]
    for got, want in zip(run(*packed(changed)), wanted, strict=True):
      found = [distance(got[r], want[r]) for r in range(ROWS)]
      assert found[row] > 1e-3 and max(f for r, f in enumerate(found) if r != row) < 5e-6


def test_a_wrong_window_of_the_convolution_is_seen(monkeypatch):
  right = mixers._halo

  def leaking(cell, qkv, rows):  # as if the tokens before were of the rank's first segment
    window, _ = right(cell, qkv, rows._replace(whole_segment_ids=0 * rows.whole_segment_ids + 1))
    return window, rows.segment_ids[:, 0]

  def missing(cell, qkv, rows):
    return None, None

  wanted = mixer_alone(qwen3_5.GdnLayer)[0]
  for fault, wrong_rows in ((leaking, {2, 3}), (missing, {0, 1})):
    monkeypatch.setattr(mixers, "_halo", fault)
    got = mixer_on_mesh(qwen3_5.GdnLayer, gradient=False)(*packed(LENGTHS))
    seen = {row for row in range(ROWS) if distance(got[row], wanted[row]) > 1e-3}
    assert seen == wrong_rows


# Experts: two on each rank of a ring of four.
RING: dict[str, Any] = {"custom_mesh_and_rule": "cp-as-ep", "use_ring_of_experts": True}
EXPERT_TOKENS = 16  # of a row: 64 in all


def expert_weights():
  """(definition, weights, how they are split): the experts over their ranks, the others whole."""
  definition, weights = nnx.split(moe.SparseMoe(CONFIG, OPTIONS, rngs=nnx.Rngs(0)), nnx.Param)
  weights = nnx.to_pure_dict(weights)
  specs = jax.tree.map(lambda _: P(), weights)
  return (
    definition,
    weights,
    specs | {"wi": P(("context", "expert")), "wo": P(("context", "expert"))},
  )


def experts_on_mesh(**values):
  """(x, segment ids, replay) -> output, experts, pairs dropped, gradients of weights and input."""
  cell = cell_of(**RING, **values)
  definition, weights, specs = expert_weights()

  def local(weights, x, ids, replay):
    def run(weights, x):
      module = nnx.merge(definition, weights)
      out, routed = experts_lib.sparse_mlp(cell, module, x, ids, replay)
      return objective(out, ids > 0), (out, routed)

    (_, (out, routed)), grads = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(weights, x)
    over = lambda spec: ("fsdp",) if spec else DEVICE_ORDER  # axes that do not split a weight
    d_weights = jax.tree.map(lambda g, spec: jax.lax.psum(g, over(spec)), grads[0], specs)
    return out, routed.experts, jax.lax.psum(routed.dropped, DEVICE_ORDER), (d_weights, grads[1])

  program = jax.jit(
    jax.shard_map(
      local,
      mesh=MESH,
      in_specs=(specs, SPLIT, SPLIT, SPLIT),
      out_specs=(SPLIT, SPLIT, P(), (specs, SPLIT)),
      check_vma=False,
    )
  )
  return lambda *given: program(weights, *given)


@functools.cache
def ring():
  """The ring whose ranks have room for every pair: most cases differ in their inputs alone."""
  return experts_on_mesh()


@functools.cache
def _experts_alone():
  definition, weights, _ = expert_weights()

  def run(weights, x, ids, replay):
    out, routed = nnx.merge(definition, weights)(x, ids, replay)
    return objective(out, ids > 0), (out, routed.experts)

  program = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))
  return lambda *given: program(weights, *given)


def experts_alone(*given):
  (_, (out, experts)), grads = _experts_alone()(*given)
  return out, experts, grads


def check_experts(found, wanted, real):
  out, experts, _, grads = found
  np.testing.assert_array_equal(experts, wanted[1])
  assert distance(np.asarray(out)[real], np.asarray(wanted[0])[real]) < 5e-6
  leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(wanted[2]), strict=True)
  assert all(distance(got, want) < 1e-5 for got, want in leaves)


def expert_inputs():
  """x, 48 of 64 tokens that are real, routing left to the router."""
  x = inputs()[:, :EXPERT_TOKENS]
  real = np.random.default_rng(3).permutation(64).reshape(ROWS, -1) < 48
  return x, real, np.full((ROWS, EXPERT_TOKENS, 2), -1, np.int16)


def test_padding_reaches_no_expert():
  x, real, unset = expert_inputs()
  poisoned = jnp.where(real[..., None], x, 1e3)
  found = ring()(poisoned, real.astype(np.int32), unset)
  check_experts(found, experts_alone(poisoned, real.astype(np.int32), unset), real)
  experts = np.asarray(found[1])
  assert (experts[~real] == -1).all() and (experts[real] >= 0).sum() == 96
  # Nor a row of a buffer: with as many rows as the real pairs fill, not one is dropped.
  balanced = unset.copy()
  balanced[real] = np.arange(96).reshape(48, 2) % CONFIG.num_experts
  pairs = [[(balanced[rows][real[rows]] // RANK_EXPERTS == rank).sum() for rank in range(4)]
           for rows in ([0, 1], [2, 3])]  # fmt: skip
  tight = experts_on_mesh(ragged_buffer_factor=float(np.max(pairs)) / 16)
  assert tight(poisoned, real.astype(np.int32), balanced)[2] == 0
  assert tight(poisoned, np.ones_like(real, np.int32), balanced)[2] > 0


def test_experts_without_rows_have_a_gradient_of_exactly_zero():
  x, real, unset = expert_inputs()
  ids = real.astype(np.int32)
  every_other = unset.copy()
  every_other[:] = 2 * (np.arange(64).reshape(ROWS, -1, 1) + [0, 1]) % CONFIG.num_experts
  found = ring()(x, ids, every_other)
  for name in ("wi", "wo"):
    gradient = np.asarray(found[3][0][name])
    assert (gradient[1::2] == 0).all() and np.isfinite(gradient).all()
    assert all(np.abs(gradient[e]).max() > 0 for e in range(0, CONFIG.num_experts, 2))
  check_experts(found, experts_alone(x, ids, every_other), real)


def test_recorded_routing_is_used_where_it_is_set_with_live_weights(monkeypatch):
  x, real, unset = expert_inputs()
  ids = real.astype(np.int32)
  rng = np.random.default_rng(5)
  replay = np.argsort(rng.random((ROWS, EXPERT_TOKENS, CONFIG.num_experts)))[..., :2].astype(
    np.int16
  )
  free = rng.random(real.shape) < 0.3
  replay[free] = [-1, 3]  # one entry that is not set unsets the token
  found = ring()(x, ids, replay)
  check_experts(found, experts_alone(x, ids, replay), real)
  own = np.asarray(ring()(x, ids, unset)[1])
  experts = np.asarray(found[1])
  np.testing.assert_array_equal(experts[real & ~free], replay[real & ~free])
  np.testing.assert_array_equal(experts[real & free], own[real & free])
  # Weights of the recording in place of the live ones are seen.
  route = moe.route
  even = lambda *a: (route(*a)[0], jnp.full_like(route(*a)[1], 0.5))
  monkeypatch.setattr(experts_lib.moe, "route", even)
  wrong = experts_on_mesh()(x, ids, replay)
  assert distance(np.asarray(wrong[0])[real], np.asarray(found[0])[real]) > 1e-3


def test_rows_that_no_expert_owns_are_never_read(monkeypatch):
  x, real, unset = expert_inputs()
  ids = real.astype(np.int32)
  wanted = ring()(x, ids, unset)
  dispatch, mlp = experts_lib.moe_dispatch.dispatch, experts_lib.expert_mlp.expert_mlp
  sum_rows = experts_lib.moe_dispatch.sum_rows

  def poison(rows, sizes):
    return jnp.where((jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None], rows, jnp.nan)

  def poisoned_mlp(rows, wi, wo, weights, sizes, **kwargs):
    return poison(mlp(rows, wi, wo, weights, sizes, **kwargs), sizes)

  poisoned = lambda x, p, *how: poison(dispatch(x, p, *how), p.group_sizes)
  monkeypatch.setattr(experts_lib.moe_dispatch, "dispatch", poisoned)
  monkeypatch.setattr(experts_lib.expert_mlp, "expert_mlp", poisoned_mlp)
  found = experts_on_mesh()(x, ids, unset)
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_array_equal(got, want)
  # A sum that reads them is seen.
  reading = lambda y, p, *how: sum_rows(y, p._replace(sent=jnp.ones_like(p.sent)), *how)
  monkeypatch.setattr(experts_lib.moe_dispatch, "sum_rows", reading)
  wrong = experts_on_mesh(ragged_unsort_spread_masked_indices=True)(x, ids, unset)
  assert np.isnan(np.asarray(wrong[0])[real]).any()
