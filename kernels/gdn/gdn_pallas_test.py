"""The gated delta rule's Pallas kernels against the float32 token-by-token reference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.gdn import chunk_op, gdn, head_groups, layout, reference, tile_math

_NAMES = ("out", "state", "dq", "dk", "dv", "dA_log", "ddt_bias", "dbeta", "dstate")


def _relative(a, b):
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  return np.linalg.norm(a - b) / np.linalg.norm(b)


def _inputs(dtype, segments, *, key_heads=2, heads=2, dim=32, correlated=False, seed=0):
  """Operands of `_run`, and cotangents of outputs and final state."""
  r = np.random.default_rng(seed)
  segments = np.asarray(segments, np.int32)
  batch, length = segments.shape
  value_heads = key_heads * heads
  q, k = (r.normal(size=(batch, length, key_heads, dim)) for _ in range(2))
  decay = r.normal(size=value_heads)
  if correlated:
    # Keys that point the same way and a state that hardly decays: the gate gradient cancels.
    common = r.normal(size=dim)
    q, k = (common + 0.75 * x for x in (q, k))
    decay -= 5.0
  v = r.normal(size=(batch, length, value_heads, dim))
  a = r.normal(size=(batch, length, value_heads))
  beta = 1 / (1 + np.exp(-r.normal(size=a.shape)))
  state = 0.3 * r.normal(size=(batch, value_heads, dim, dim))
  d_out, d_state = r.normal(size=v.shape), 0.3 * r.normal(size=state.shape)
  cast = lambda x: jnp.asarray(x, dtype)
  wide = lambda x: jnp.asarray(x, jnp.float32)
  operands = (cast(q), cast(k), cast(v), wide(decay), wide(0.1 * decay), wide(beta), wide(state))
  return operands, wide(a), jnp.asarray(segments), (cast(d_out), wide(d_state))


def _value_and_gradients(rule, operands, a, segments, cotangents):
  def run(q, k, v, A_log, dt_bias, beta, state):
    g = -jnp.exp(A_log) * jax.nn.softplus(a + dt_bias)
    return rule(q, k, v, g, beta, segments, state, jnp.ones((q.shape[0],), jnp.int32))

  @jax.jit
  def both(operands, cotangents):
    values, vjp = jax.vjp(run, *operands)
    return *values, *vjp(cotangents)

  return both(operands, cotangents)


def _expected(operands, a, segments, cotangents):
  wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
  rule = reference.recurrent_gated_delta_rule
  return _value_and_gradients(rule, wide(operands), a, segments, wide(cotangents))


def _kernels(**options):
  return functools.partial(gdn.gated_delta_rule, implementation="interpret", **options)


def _poison(operands, a, segments, cotangents):
  real = (segments > 0)[..., None]
  nan = lambda x: jnp.where(real if x.ndim == 3 else real[..., None], x, jnp.nan)
  q, k, v, A_log, dt_bias, beta, state = operands
  operands = (nan(q), nan(k), nan(v), A_log, dt_bias, nan(beta), state)
  return operands, a, segments, (nan(cotangents[0]), cotangents[1])


def _row(lengths, total):
  ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)])
  return np.pad(ids, (0, total - len(ids)))


# Boundaries inside chunks, on a chunk's edge (48) and one token beside it; a segment of one token;
# padding between segments and at the end; a length that is no multiple of the chunk.
_SEGMENTS = [
  _row([23, 25, 1, 16], 75),
  np.concatenate([np.full(9, 1), np.zeros(4), np.full(20, 7), np.zeros(2), np.full(40, 9)]),
]


@functools.cache
def _packed_inputs(dtype):
  return _inputs(dtype, _SEGMENTS)


@functools.cache
def _packed_run(dtype, head_group, keep_states):
  rule = _kernels(chunk_size=16, head_group=head_group, keep_states=keep_states)
  return _value_and_gradients(rule, *_poison(*_packed_inputs(dtype)))


@pytest.mark.parametrize(
  "dtype, bound, gate_bound", [(jnp.float32, 2e-6, 2e-5), (jnp.bfloat16, 3e-3, 3e-3)]
)
def test_forward_and_gradients(dtype, bound, gate_bound):
  inputs = _packed_inputs(dtype)
  got = _packed_run(dtype, 1, False)
  for name, a, b in zip(_NAMES, got, _expected(*inputs)):
    assert _relative(a, b) <= (gate_bound if name in ("dA_log", "ddt_bias") else bound), name
  padding = np.asarray(inputs[2]) == 0
  for name in ("out", "dq", "dk", "dv", "dbeta"):
    assert not np.asarray(got[_NAMES.index(name)], np.float32)[padding].any(), name


def test_head_groups_and_kept_states_do_not_change_a_bit(monkeypatch):
  """One key head a step forward and two backward, and the other way round."""
  replayed = _packed_run(jnp.bfloat16, 1, False)
  monkeypatch.setattr(head_groups, "widest", lambda *_, **sizes: 1)
  for name, a, b in zip(_NAMES, replayed, _packed_run(jnp.bfloat16, 2, True)):
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), name)


def _kernels_traced(**options):
  """Names of the kernels in a gradient of four key heads."""
  operands, a, segments, cotangents = _inputs(jnp.bfloat16, [_row([32], 32)], key_heads=4)
  run = functools.partial(_value_and_gradients, _kernels(chunk_size=16, **options))
  text = str(jax.make_jaxpr(run)(operands, a, segments, cotangents))
  return set(re.findall(r"gdn_[a-z_]+_g\d+", text))


def test_the_backward_kernel_has_its_own_group(monkeypatch):
  kernels = {"gdn_forward_g1", "gdn_states_g1", "gdn_backward_g4"}
  assert _kernels_traced() == kernels
  assert _kernels_traced(head_group=2, keep_states=True) == {"gdn_forward_g2", "gdn_backward_g4"}
  # The planted fault: one group for all.
  monkeypatch.setattr(chunk_op.Options, "widest", chunk_op.Options.shape)
  assert _kernels_traced() != kernels


def test_the_widest_group_divides_and_fits():
  head = {"chunk": 64, "dk": 128, "dv": 128, "itemsize": 2}
  # 397B-A17B, 35B-A3B, and both in float32 and with chunks of 128.
  assert head_groups.widest(16, 4, **head) == 8
  assert head_groups.widest(16, 2, **head) == 16
  for change in ({"itemsize": 4}, {"chunk": 128}):
    assert head_groups.widest(16, 4, **{**head, **change}) == 4
    assert head_groups.widest(16, 2, **{**head, **change}) == 8
  # A rank's share of the heads, a number that halves do not divide, heads that fill lanes.
  assert head_groups.widest(4, 4, **head) == 4
  assert head_groups.widest(9, 4, **head) == 3
  assert head_groups.widest(4, 62, **head) == 1


def test_odd_heads_and_chunks_of_two_blocks():
  """Three value heads per key head cannot be paired; 32 tokens take a merge."""
  inputs = _inputs(jnp.float32, [_row([50, 20], 70)], key_heads=1, heads=3, seed=1)
  got = _value_and_gradients(_kernels(chunk_size=32), *inputs)
  for name, a, b in zip(_NAMES, got, _expected(*inputs)):
    assert _relative(a, b) <= (2e-5 if name in ("dA_log", "ddt_bias") else 2e-6), name


@pytest.mark.parametrize("chunk", [16, 32])
def test_heads_wider_than_the_chunks_of_a_pair(chunk):
  """Channels of a published model's heads: 128 lanes, of which two heads' C x C matrices fill a part."""
  inputs = _inputs(jnp.float32, [_row([20, 17], 40)], key_heads=1, dim=128, seed=2)
  got = _value_and_gradients(_kernels(chunk_size=chunk), *inputs)
  for name, a, b in zip(_NAMES, got, _expected(*inputs)):
    assert _relative(a, b) <= (2e-5 if name in ("dA_log", "ddt_bias") else 2e-6), name


def _correlated():
  inputs = _inputs(jnp.bfloat16, [_row([128], 128)], key_heads=1, dim=128, correlated=True)
  got = _value_and_gradients(_kernels(chunk_size=64), *inputs)
  return {n: _relative(a, b) for n, a, b in zip(_NAMES, got, _expected(*inputs))}


def test_gate_gradients_with_correlated_keys_and_slow_decay(monkeypatch):
  """And the planted fault: products of one bfloat16 pass lose what three passes keep."""
  errors = _correlated()
  assert max(errors.values()) <= 3e-3, errors
  monkeypatch.setattr(tile_math.Products, "split", lambda self, x: (x.astype(jnp.bfloat16),))
  faulty = _correlated()
  assert faulty["out"] > 3e-3, faulty
  assert faulty["dA_log"] > 10 * errors["dA_log"], (faulty, errors)


def test_planted_fault_a_state_that_crosses_a_boundary(monkeypatch):
  honest = layout.pack_gates
  blind = lambda g, beta, ids, *rest: honest(g, beta, jnp.minimum(ids, 1), *rest)
  monkeypatch.setattr(layout, "pack_gates", blind)
  operands, a, segments, cotangents = _packed_inputs(jnp.float32)
  rule = lambda *args: _kernels(chunk_size=16)(*args)[0]
  run = lambda *x: rule(*x[:3], -jnp.exp(x[3]) * jax.nn.softplus(a + x[4]), x[5], segments, x[6])
  expected = _expected(operands, a, segments, cotangents)[0]
  assert _relative(jax.jit(run)(*operands), expected) > 1e-2


@pytest.mark.parametrize("correlation", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("pack", [1, 2])
def test_inverse(correlation, pack):
  r = np.random.default_rng(0)
  common = r.normal(size=128)
  size, heads = 64, []
  for _ in range(pack):
    keys = np.sqrt(1 - correlation**2) * r.normal(size=(size, 128)) + correlation * common
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    heads.append(np.tril(0.95 * keys @ keys.T, -1))
  chunk = tile_math.Chunk(size, pack, tile_math.Products(exact=True))
  select = tile_math.block_selector(size, pack, jnp.float32)
  matrix = jnp.asarray(np.concatenate(heads, axis=1), jnp.float32)
  (got,), _ = chunk.inverses([matrix], select)
  for i, head in enumerate(heads):
    want = np.linalg.inv(np.eye(size) + head)
    assert _relative(got[:, i * size : (i + 1) * size], want) <= 1e-6


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("pack", [1, 2])
def test_pieces_of_the_inverse_are_its_split(pack, size):
  r = np.random.default_rng(1)
  heads = [np.tril(r.normal(size=(size, size)) / size, -1) for _ in range(pack)]
  chunk = tile_math.Chunk(size, pack, tile_math.Products(exact=False))
  select = tile_math.block_selector(size, pack, jnp.bfloat16)
  matrix = jnp.asarray(np.concatenate(heads, axis=1), jnp.float32)
  (got,), (pieces,) = chunk.inverses([matrix], select)
  for i, head in enumerate(heads):
    want = np.linalg.inv(np.eye(size) + head)
    assert _relative(got[:, i * size : (i + 1) * size], want) <= 1e-4
  for piece, want in zip(pieces, chunk.products.split(got), strict=True):
    np.testing.assert_array_equal(np.asarray(piece), np.asarray(want))


def test_decay_never_overflows():
  """exp(b_i) exp(-b_j) would: b reaches about -190 within a chunk here."""
  operands, a, segments, cotangents = _inputs(jnp.float32, [np.ones(32)], key_heads=1)
  operands = (*operands[:3], jnp.full((2,), 2.5), jnp.full((2,), 0.5), *operands[5:])
  g = -np.exp(2.5) * np.log1p(np.exp(np.asarray(a) + 0.5))
  assert g[0, :16].sum(axis=0).min() < -180
  got = _value_and_gradients(_kernels(chunk_size=16), operands, a, segments, cotangents)
  for name, x in zip(_NAMES, got):
    assert np.isfinite(np.asarray(x)).all(), name


def test_arguments_are_validated():
  with pytest.raises(ValueError, match="does not divide"):
    layout.Shape(chunk=64, key_heads=16, heads=4, group=3)
  with pytest.raises(ValueError, match="at most 15 key heads"):
    layout.Shape(chunk=64, key_heads=16, heads=4, group=16)
