"""The flash kernels, interpreted, against the whole score matrix in float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import (
  attention,
  blockwise,
  flash,
  options,
  pallas_forward,
  reference,
  schedule,
  tile_math,
  zigzag,
)
from kernels.base import options as base_options

# The interpreted kernels are many small programs: compiling them takes longest.
jax.config.update("jax_disable_most_optimizations", True)

_TILES = {
  "sa_block_q": 128,
  "sa_block_kv": 512,
  "sa_block_kv_compute": 128,
  "sa_block_q_dkv": 256,
  "sa_block_kv_dkv": 256,
  "sa_block_kv_dkv_compute": 128,
}
_PLAIN = options.AttentionOptions(**_TILES)
_CELL = options.AttentionOptions(**_TILES, sa_use_base2_exp=True, dq_reduction_steps=3)
# Scores times this need no factor to base 2.
_EXACT = math.log(2.0) / 16
_NAMES = ("out", "lse", "dq", "dk", "dv")


def _relative(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def _packed(length, rows):
  segments, positions = (np.zeros((len(rows), length), np.int32) for _ in range(2))
  for b, lengths in enumerate(rows):
    start = 0
    for i, n in enumerate(lengths):
      segments[b, start : start + n] = i + 1
      positions[b, start : start + n] = np.arange(n)
      start += n
  return blockwise.Ids(segments, segments, positions, positions)


def _inputs(ids, heads, kv_heads, dim, dtype, seed=0):
  """q, k, v and the output's gradient, heads before tokens."""
  rng = np.random.default_rng(seed)
  batch, queries = ids.q_segment_ids.shape
  keys = ids.kv_segment_ids.shape[1]
  draw = lambda n, length: jnp.asarray(rng.normal(size=(batch, n, length, dim)), dtype)
  return draw(heads, queries), draw(kv_heads, keys), draw(kv_heads, keys), draw(heads, queries)


def _kernels(q, k, v, d_out, ids, scale, given):
  run = lambda *x: flash.attention(*x, ids, scale, "interpret", given)

  def both(q, k, v, d_out):
    (out, lse), vjp = jax.vjp(run, q, k, v)
    return out, lse, *vjp((d_out, jnp.zeros_like(lse)))

  return jax.jit(both)(q, k, v, d_out)


def _definition(q, k, v, d_out, ids, scale):
  q, k, v, d_out = (jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in (q, k, v, d_out))
  mask = reference.visible(*ids)
  out, vjp = jax.vjp(lambda *x: reference.attention(*x, mask, scale), q, k, v)
  lse = blockwise.forward(q, k, v, ids, scale=scale)[1]
  turn = lambda x: jnp.swapaxes(x, 1, 2)
  return turn(out), lse, *(turn(x) for x in vjp(d_out))


@pytest.mark.parametrize(
  "dtype, heads, kv_heads, dim, given, scale, limit",
  [
    (jnp.float32, 4, 2, 128, _PLAIN, 128**-0.5, 2e-6),
    (jnp.float32, 2, 2, 64, _CELL, 0.1, 2e-6),
    (jnp.bfloat16, 16, 1, 256, _PLAIN, 1 / 16, 3e-3),
    (jnp.bfloat16, 4, 1, 256, _CELL, _EXACT, 3e-3),
  ],
)
def test_forward_and_gradients(dtype, heads, kv_heads, dim, given, scale, limit):
  # No multiple of any block; many heads take a shorter row, for the time it takes.
  ids = _packed(300, [[140, 110, 20]]) if heads == 16 else _packed(600, [[290, 200, 30], [600]])
  inputs = _inputs(ids, heads, kv_heads, dim, dtype)
  got = _kernels(*inputs, ids, scale, given)
  for name, a, b in zip(_NAMES, got, _definition(*inputs, ids, scale)):
    assert _relative(a, b) <= limit, name
  pad = ids.q_segment_ids == 0
  assert pad.any()
  for x in got:
    x = np.asarray(x.astype(jnp.float32))
    np.testing.assert_array_equal(np.moveaxis(x, 2, 1)[pad], 0)


def _op(ids, implementation):
  def both(q, k, v, d_out):
    run = lambda *x: attention.attention(
      *x, **ids._asdict(), scale=0.1, implementation=implementation, given=_PLAIN
    )
    out, vjp = jax.vjp(run, q, k, v)
    return out, *vjp(d_out)

  return jax.jit(both)


def test_poisoned_padding_reaches_nothing():
  ids = _packed(256, [[100, 90], [17]])
  inputs = [jnp.swapaxes(x, 1, 2) for x in _inputs(ids, 2, 1, 64, jnp.float32)]
  pad = (ids.q_segment_ids == 0)[:, :, None, None]
  poisoned = [jnp.where(pad, jnp.nan, x) for x in inputs]
  run = _op(ids, "interpret")
  for a, b in zip(run(*poisoned), run(*inputs)):
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.asarray(a)[pad[:, :, 0, 0]], 0)
  for a in _op(ids, "reference")(*poisoned[:3], inputs[3]):
    assert np.isfinite(a).all()


def test_four_context_ranks_in_zigzag_order_equal_one():
  """Each rank has its queries and all keys, all in zig-zag order."""
  length, ranks = 512, 4
  ids = _packed(length, [[300, 150, 40]])
  q, k, v, d_out = _inputs(ids, 2, 1, 64, jnp.float32)
  want = _definition(q, k, v, d_out, ids, 0.1)
  order = zigzag.permutation(length, ranks)
  q, k, v, d_out = (x[:, :, order] for x in (q, k, v, d_out))
  moved = blockwise.Ids(*(x[:, order] for x in ids))

  def rank(q, d_out, segments, positions):
    mine = moved._replace(q_segment_ids=segments, q_positions=positions)
    run = lambda *x: flash.attention(*x, mine, 0.1, "interpret", _PLAIN)
    (out, lse), vjp = jax.vjp(run, q, k, v)
    return out, lse, *vjp((d_out, jnp.zeros_like(lse)))

  rank = jax.jit(rank)
  parts = []
  for r in range(ranks):
    mine = slice(r * length // ranks, (r + 1) * length // ranks)
    own = moved.q_segment_ids[:, mine], moved.q_positions[:, mine]
    parts.append(rank(q[:, :, mine], d_out[:, :, mine], *own))
  by_rank = list(zip(*parts))
  joined = [jnp.concatenate(by_rank[i], axis=2) for i in range(3)] + [sum(x) for x in by_rank[3:]]
  for name, a, b in zip(_NAMES, joined, want):
    assert _relative(a, b[:, :, order]) <= 2e-6, name


def _seen(ids):
  return np.asarray(reference.visible(*ids))


@pytest.mark.parametrize("shuffled", [False, True])
def test_kinds_of_blocks(shuffled):
  ids = _packed(512, [[100, 28, 256, 100], [512], [300, 40, 5]])
  if shuffled:
    order = np.random.default_rng(0).permutation(512)
    ids = blockwise.Ids(*(x[:, order] for x in ids))
  kinds = np.asarray(
    schedule.kinds(
      *(ids.q_segment_ids, ids.q_positions, ids.kv_segment_ids, ids.kv_positions),
      block_q=32,
      block_kv=64,
    )
  )
  seen = _seen(ids).reshape(3, 16, 32, 8, 64).transpose(0, 1, 3, 2, 4).reshape(3, 16, 8, -1)
  if shuffled:
    assert not seen[kinds == schedule.DEAD].any()
  else:
    np.testing.assert_array_equal(kinds == schedule.DEAD, ~seen.any(axis=-1))
  np.testing.assert_array_equal(kinds == schedule.FULL, seen.all(axis=-1))


def test_plan_lists_live_items_in_order():
  kinds = np.zeros((2, 3, 4, 2), np.int32)
  kinds[0, 1, 2] = [schedule.PARTIAL, schedule.FULL]
  kinds[0, 1, 3] = [schedule.DEAD, schedule.PARTIAL]
  kinds[1, 0, 0] = [schedule.FULL, schedule.FULL]
  plan = schedule.plan(jnp.asarray(kinds))
  count = int(plan.count)
  where = list(zip(*(np.asarray(x)[:count].tolist() for x in schedule.unpack(plan.blocks))))
  assert where == [(0, 0, 0), (0, 1, 2), (0, 1, 3), (0, 2, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0)]
  words = np.asarray(plan.parts)[:count]
  assert (words & 3).tolist() == [3, schedule.FIRST, schedule.LAST, 3, 3, 3, 3]
  assert (words >> schedule.PART_SHIFT).tolist() == [0, 1 + 2 * 4, 1 * 4, 0, 2 + 2 * 4, 0, 0]
  with pytest.raises(ValueError, match="take larger blocks"):
    schedule.plan(jnp.zeros((1, 4096, 1, 1), jnp.int32))


def _forward_error(times=1.0):
  ids = _packed(256, [[100, 90], [256]])
  q, k, v, d_out = _inputs(ids, 2, 1, 64, jnp.float32)
  run = lambda *x: flash.attention(*x, ids, 0.1, "interpret", _PLAIN)
  got = jax.jit(lambda *x: run(*x))(times * q, k, v)
  want = _definition(times * q, k, v, d_out, ids, 0.1)
  return max(_relative(a, b) for a, b in zip(got, want))


def test_large_scores():
  assert _forward_error(100.0) <= 2e-5


def test_queries_go_by_strips(monkeypatch):
  """And the planted fault: every strip is the first."""
  monkeypatch.setattr(pallas_forward, "_STRIP", 32)
  assert _forward_error() <= 2e-6
  first = lambda start, stop=None: slice(start, stop) if stop is None else slice(0, stop - start)
  monkeypatch.setattr(pallas_forward, "slice", first, raising=False)
  assert not _forward_error() <= 0.1


class _WithoutMaximum:
  """jax.numpy in which a running maximum never moves."""

  def __getattr__(self, name):
    return getattr(jnp, name)

  def maximum(self, old, new):
    return jnp.zeros_like(old)


def _all_full(*ids, block_q, block_kv):
  shape = (ids[0].shape[0], ids[0].shape[1] // block_q, ids[2].shape[1] // block_kv)
  return jnp.full(shape, schedule.FULL)


def _segments_alike(column):
  return lambda row: jnp.ones_like(column(row))


@pytest.mark.parametrize(
  "module, name, fault, times",
  [
    (pallas_forward, "jnp", _WithoutMaximum(), 100.0),
    (schedule, "kinds", _all_full, 1.0),
    (tile_math.Exponential, "exponent", lambda self, x: x, 1.0),
    (tile_math, "column", _segments_alike(tile_math.column), 1.0),
  ],
  ids=["no maximum", "no mask", "no scale", "one segment"],
)
def test_planted_faults_are_seen(monkeypatch, module, name, fault, times):
  monkeypatch.setattr(module, name, fault)
  assert not _forward_error(times) <= 0.1


def test_planted_fault_in_the_backward_pass(monkeypatch):
  ids = _packed(256, [[100, 90], [256]])
  inputs = _inputs(ids, 2, 1, 64, jnp.float32)
  inner = flash.pallas_backward.backward
  drop = lambda q, k, v, d_out, lse, di, *rest, **more: inner(
    q, k, v, d_out, lse, 0 * di, *rest, **more
  )
  monkeypatch.setattr(flash.pallas_backward, "backward", drop)
  got = _kernels(*inputs, ids, 0.1, _PLAIN)
  errors = [_relative(a, b) for a, b in zip(got, _definition(*inputs, ids, 0.1))]
  assert max(errors[:2] + errors[4:]) <= 2e-6 and min(errors[2:4]) > 0.1


def _backward_needs_the_forward_kernel(policy):
  """Whether anything in the replay reads what a forward kernel there gives; else it is dropped."""
  ids = _packed(256, [[256]])
  inputs = _inputs(ids, 2, 1, 64, jnp.float32)[:3]
  run = jax.checkpoint(
    lambda *x: flash.attention(*x, ids, 0.1, "interpret", _PLAIN)[0], policy=policy
  )
  program = jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(jnp.sin(run(*x)))))(*inputs).jaxpr
  (replay,) = (e.params["jaxpr"] for e in program.eqns if e.primitive.name.startswith("remat"))
  named = lambda e: e.primitive.name == "pallas_call" and pallas_forward.NAME in str(e.params)
  given = {v for e in replay.eqns if named(e) for v in e.outvars}
  read = {v for e in replay.eqns for v in e.invars if not hasattr(v, "val")}
  return bool(given & read)


def test_saved_output_and_log_sum_exp_spare_the_forward_kernel():
  policies = jax.checkpoint_policies
  assert _backward_needs_the_forward_kernel(policies.nothing_saveable)
  saved = policies.save_only_these_names(flash.SAVED_NAME)
  assert not _backward_needs_the_forward_kernel(saved)


def test_scale_is_split_where_nothing_is_multiplied():
  for scale in (1 / 16, 128**-0.5, 0.3):
    factor, rest = attention.split_scale(scale)
    assert factor * rest == pytest.approx(scale, rel=1e-15) and 1 <= factor < 2
    exact = flash.exact_factor(rest, _CELL)
    assert math.log2(exact).is_integer()
    ready = tile_math.Exponential(rest / exact, True)
    x = object()
    assert ready.exponent(x) is x
  assert flash.exact_factor(1 / 16, _CELL) == flash.exact_factor(rest, _PLAIN) == 1.0


def test_options():
  with pytest.raises(base_options.UserError, match="1 to 14 times"):
    options.AttentionOptions(sa_block_kv=1024, sa_block_kv_compute=768)
  with pytest.raises(base_options.OptionError, match="sa_block_q=100: want"):
    options.AttentionOptions(sa_block_q=100)
  assert options.misfits(options.AttentionOptions(), 16_384, 65_536) == []
  (text,) = options.misfits(options.AttentionOptions(sa_block_q=3072), 16_384, 65_536)
  assert "16384 tokens" in text and text.endswith("nearest that do: 2048 and 4096")
  assert "no multiple of 128 does" in options.misfits(options.AttentionOptions(), 200, 8192)[0]
  assert len(options.misfits(options.AttentionOptions(), 1536, 65_536)) == 2


def test_refusals():
  x = jnp.zeros((1, 4, 3, 8))
  ids = blockwise.Ids(*[jnp.ones((1, 4), jnp.int32)] * 4)
  with pytest.raises(ValueError, match="no multiple"):
    attention.attention(x, x[:, :, :2], x[:, :, :2], **ids._asdict(), scale=1.0)
  with pytest.raises(ValueError, match="above 0"):
    attention.attention(x, x, x, **ids._asdict(), scale=0.0)
