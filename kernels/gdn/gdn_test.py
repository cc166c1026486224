"""The chunked rule against the recurrence: forward, gradients, packing, hard inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.gdn import chunked, gdn, inverse, reference

_NAMES = ("q", "k", "v", "g", "beta", "state")


def _rel(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def _inputs(batch, length, nk=2, nv=4, dk=16, dv=8, seed=0, rate=1.0, correlated=0.0):
  rng = np.random.default_rng(seed)
  draw = lambda *s: rng.normal(size=s).astype(np.float32)
  k = draw(batch, length, nk, dk) + correlated * draw(1, 1, nk, dk)
  return (
    draw(batch, length, nk, dk),
    k,
    draw(batch, length, nv, dv),
    -rate * np.exp(draw(batch, length, nv)),
    1 / (1 + np.exp(-draw(batch, length, nv))),
    0.3 * draw(batch, nv, dk, dv),
  )


def _segments(lengths, total):
  ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
  return np.pad(ids, (0, total - len(ids))).astype(np.int32)[None]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _value_and_grads(rule, args, segments, chunk):
  def objective(*args):
    q, k, v, g, beta, state = args
    start = jnp.ones((q.shape[0],), jnp.int32)
    kwargs = {} if chunk is None else {"chunk_size": chunk}
    out, final = rule(q, k, v, g, beta, segments, state, start, **kwargs)
    weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return jnp.sum(out * weight) + jnp.sum(final * jnp.sin(final + 1.0)), (out, final)

  return jax.value_and_grad(objective, argnums=tuple(range(6)), has_aux=True)(*args)


def _compare(args, segments, chunk, tolerance=2e-6, gate_tolerance=2e-5):
  segments = jnp.asarray(segments)
  (_, got), got_grads = _value_and_grads(chunked.chunked_gated_delta_rule, args, segments, chunk)
  (_, want), want_grads = _value_and_grads(
    reference.recurrent_gated_delta_rule, args, segments, None
  )
  assert _rel(got[0], want[0]) <= tolerance and _rel(got[1], want[1]) <= tolerance
  for name, a, b in zip(_NAMES, got_grads, want_grads):
    assert _rel(a, b) <= (gate_tolerance if name == "g" else 5 * tolerance), name


_ROWS = ([140], [37, 51, 40], [1, 63, 64, 2, 1], [5], [], [70, 70])


@pytest.mark.parametrize("chunk", [64, 16])
def test_chunks_equal_the_recurrence(chunk):
  segments = np.concatenate([_segments(lengths, 140) for lengths in _ROWS])
  _compare(_inputs(len(_ROWS), 140), segments, chunk)


def test_head_ratios_and_sizes():
  _compare(_inputs(1, 40, nk=2, nv=2, dk=8, dv=16), _segments([3, 30], 40), 64)


def test_correlated_keys_and_slow_decay():
  args = _inputs(1, 130, correlated=2.0, rate=0.01)
  _compare(args, _segments([130], 130), 64, tolerance=5e-6)


def test_fast_decay_neither_overflows_nor_loses_gradients():
  args = _inputs(1, 130, rate=30.0)
  assert np.abs(np.cumsum(args[3], 1)).max() > 1000
  # The gates' gradient is 1e-4 of the others here, and a difference of sums of their size.
  _compare(args, _segments([60, 70], 130), 64, gate_tolerance=2e-4)


def test_packed_row_equals_its_segments_alone():
  lengths, total = [37, 51, 40], 128
  args = _inputs(1, total)[:5]
  rule = jax.jit(gdn.gated_delta_rule)
  packed, _ = rule(*args, _segments(lengths, total))
  starts = np.cumsum(lengths) - lengths
  alone = [np.zeros((3, *a.shape[1:]), a.dtype) for a in args]
  for i, (start, n) in enumerate(zip(starts, lengths)):
    for row, a in zip(alone, args):
      row[i, :n] = a[0, start : start + n]
  segments = np.concatenate([_segments([n], total) for n in lengths])
  want, _ = rule(*alone, segments)
  for i, (start, n) in enumerate(zip(starts, lengths)):
    assert _rel(packed[0, start : start + n], want[i, :n]) <= 2e-6


def test_padding_is_never_read_and_keeps_the_state():
  args = _inputs(1, 130)
  segments = _segments([60], 130)
  poisoned = tuple(a.copy() for a in args)
  for a in poisoned[:5]:
    a[:, 60:] = np.nan
  chunk = chunked.chunked_gated_delta_rule
  (_, clean), clean_grads = _value_and_grads(chunk, args, jnp.asarray(segments), 64)
  (_, dirty), dirty_grads = _value_and_grads(chunk, poisoned, jnp.asarray(segments), 64)
  np.testing.assert_array_equal(dirty[0], clean[0])
  np.testing.assert_array_equal(dirty[1], clean[1])
  np.testing.assert_array_equal(dirty[0][:, 60:], 0)
  for a, b in zip(dirty_grads, clean_grads):
    np.testing.assert_array_equal(a, b)
  for a in dirty_grads[:5]:
    np.testing.assert_array_equal(a[:, 60:], 0)
  short = tuple(a[:, :60] for a in args[:5])
  _, alone = gdn.gated_delta_rule(*short, segments[:, :60], args[5])
  assert _rel(dirty[1], alone) <= 2e-6


def test_left_padding_leaves_the_first_token_alone():
  args = _inputs(1, 40)[:5]
  padded = tuple(np.pad(a, ((0, 0), (5, 0)) + ((0, 0),) * (a.ndim - 2)) for a in args)
  segments = np.pad(np.ones((1, 40), np.int32), ((0, 0), (5, 0)))
  got, _ = jax.jit(gdn.gated_delta_rule)(*padded, segments)
  want, _ = gdn.gated_delta_rule(*args, np.ones((1, 40), np.int32))
  assert _rel(got[:, 5:], want) <= 2e-6


def test_gradient_of_the_norm_at_zero_is_finite():
  grad = jax.grad(lambda x: jnp.sum(reference.l2_normalize(x) * jnp.arange(4.0)))(jnp.zeros(4))
  np.testing.assert_allclose(grad, 1e3 * np.arange(4.0), rtol=1e-5)
  args = list(_inputs(1, 130))
  args[1] = np.zeros_like(args[1])
  _, grads = _value_and_grads(
    chunked.chunked_gated_delta_rule, tuple(args), jnp.ones((1, 130), jnp.int32), 64
  )
  assert all(np.isfinite(g).all() for g in grads)


def test_steps_equal_the_row():
  q, k, v, g, beta, state = _inputs(2, 12)
  want, final = jax.jit(gdn.gated_delta_rule)(q, k, v, g, beta, np.ones((2, 12), np.int32), state)
  step = jax.jit(gdn.gated_delta_step)
  for t in range(12):
    out, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
    assert _rel(out, want[:, t]) <= 2e-6
  assert _rel(state, final) <= 2e-6


def test_bfloat16_inputs_cost_their_rounding_alone():
  args = _inputs(1, 100)[:5]
  rounded = [a.astype(jnp.bfloat16) if i != 3 else a for i, a in enumerate(args)]
  segments = np.ones((1, 100), np.int32)
  got, _ = gdn.gated_delta_rule(*rounded, segments)
  assert got.dtype == jnp.bfloat16
  widened = [np.asarray(a, np.float32) for a in rounded]
  want, _ = gdn.gated_delta_rule(*widened, segments)
  assert _rel(got, want) <= 2e-3


@pytest.mark.parametrize("size", [1, 8, 64, 128])
def test_inverse_of_correlated_keys(size):
  rng = np.random.default_rng(0)
  k = rng.normal(size=(4, size, 32)) + 2 * rng.normal(size=(1, 1, 32))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  a = np.tril(0.9 * np.einsum("nik,njk->nij", k, k), -1)
  want = np.linalg.inv(np.eye(size) + a)
  got = inverse.unit_lower_inverse(jnp.asarray(a, jnp.float32))
  assert _rel(got, want) <= 1e-6
  weight = rng.normal(size=a.shape)
  grad = jax.grad(lambda a: jnp.sum(inverse.unit_lower_inverse(a) * weight))(
    jnp.asarray(a, jnp.float32)
  )
  transposed = np.swapaxes(want, 1, 2)
  assert _rel(grad, -np.tril(transposed @ weight @ transposed, -1)) <= 1e-5


def test_refusals():
  q, k, v, g, beta, _ = _inputs(1, 4)
  with pytest.raises(ValueError, match="power of two"):
    gdn.gated_delta_rule(q, k, v, g, beta, np.ones((1, 4), np.int32), chunk_size=48)
  with pytest.raises(ValueError, match="no multiple"):
    gdn.gated_delta_rule(
      q[:, :, :1].repeat(3, 2), k[:, :, :1].repeat(3, 2), v, g, beta, np.ones((1, 4), np.int32)
    )


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
@pytest.mark.parametrize(
  "change, text",
  [
    ({"q": (1, 20, 2, 128)}, "q is"),
    ({"q": (1, 32, 1, 128)}, "q is"),
    ({"beta": (1, 32, 2)}, "beta is"),
    ({"segment_ids": (1, 20)}, "segment_ids is"),
    ({"initial_state": (1, 2, 128, 128)}, "initial_state is"),
  ],
)
def test_operands_that_do_not_fit_are_refused(implementation, change, text):
  key, gate = (1, 32, 2, 128), (1, 32, 4)
  shapes = {"q": key, "k": key, "v": (1, 32, 4, 128), "g": gate, "beta": gate}
  shapes = {**shapes, "segment_ids": (1, 32), **change}
  kind = lambda name: jnp.int32 if "segment" in name or "positions" in name else jnp.float32
  operands = {name: jnp.ones(shape, kind(name)) for name, shape in shapes.items()}
  with pytest.raises(ValueError, match=text):
    gdn.gated_delta_rule(**operands, implementation=implementation)


def test_operands_of_other_types_are_refused():
  shapes = {
    "q": (1, 32, 2, 128),
    "k": (1, 32, 2, 128),
    "v": (1, 32, 4, 128),
    "g": (1, 32, 4),
    "beta": (1, 32, 4),
  }
  operands = {name: jnp.ones(shape, jnp.float32) for name, shape in shapes.items()}
  ids = jnp.ones((1, 32), jnp.int32)
  for name, dtype, implementation in (
    ("v", jnp.int32, "reference"),
    ("v", jnp.float16, "interpret"),
    ("segment_ids", jnp.float32, "reference"),
  ):
    given = {**operands, "segment_ids": ids}
    given[name] = given[name].astype(dtype)
    with pytest.raises(ValueError, match=f"{name} is {jnp.dtype(dtype)}"):
      gdn.gated_delta_rule(**given, implementation=implementation)
  for group in (0, -1, 3):
    with pytest.raises(ValueError, match="want a divisor of the 2 key heads"):
      gdn.gated_delta_rule(**operands, segment_ids=ids, head_group=group)
