"""Both forms of attention against one query at a time in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import attention, blockwise, reference

_SCALE = 0.3


def _rel(got, want):
  want = np.asarray(want, np.float64)
  return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def _inputs(batch=2, length=45, nq=4, nkv=2, dim=8, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *s: rng.normal(size=s).astype(np.float32)
  return draw(batch, length, nq, dim), draw(batch, length, nkv, dim), draw(batch, length, nkv, dim)


def _packed(length=45):
  rows = [[17, 20, 3], [length]]
  segments = np.zeros((2, length), np.int32)
  positions = np.zeros((2, length), np.int32)
  for b, lengths in enumerate(rows):
    start = 0
    for i, n in enumerate(lengths):
      segments[b, start : start + n] = i + 1
      positions[b, start : start + n] = np.arange(n)
      start += n
  return blockwise.Ids(segments, segments, positions, positions)


def _one_by_one(q, k, v, ids):
  out = np.zeros(q.shape)
  repeat = q.shape[2] // k.shape[2]
  for b, t, h in np.ndindex(q.shape[:3]):
    if ids.q_segment_ids[b, t] == 0:
      continue
    sees = (ids.kv_segment_ids[b] == ids.q_segment_ids[b, t]) & (
      ids.kv_positions[b] <= ids.q_positions[b, t]
    )
    scores = _SCALE * k[b, sees, h // repeat].astype(np.float64) @ q[b, t, h]
    weights = np.exp(scores - scores.max())
    out[b, t, h] = weights / weights.sum() @ v[b, sees, h // repeat]
  return out


def _forms(ids):
  dense = lambda q, k, v: reference.attention(q, k, v, reference.visible(*ids), _SCALE)
  forms = {"dense": dense}
  for bq, bkv in ((16, 8), (8, 64)):
    forms[f"blocks of {bq}, {bkv}"] = lambda q, k, v, bq=bq, bkv=bkv: blockwise.attention(
      q, k, v, ids, _SCALE, bq, bkv
    )
  return forms


def test_forward_and_gradients():
  args, ids = _inputs(), _packed()
  want = _one_by_one(*args, ids)
  weight = np.random.default_rng(1).normal(size=want.shape).astype(np.float32)
  grads = {}
  for name, form in _forms(ids).items():
    assert _rel(jax.jit(form)(*args), want) <= 1e-6, name
    objective = lambda *a, form=form: jnp.sum(form(*a) * weight)
    grads[name] = jax.jit(jax.grad(objective, argnums=(0, 1, 2)))(*args)
  # The dense gradients, checked against differences, stand for the definition of the others.
  rng = np.random.default_rng(2)
  for i, grad in enumerate(grads["dense"]):
    direction = rng.normal(size=args[i].shape)
    values = []
    for sign in (1, -1):
      moved = [a.astype(np.float64) for a in args]
      moved[i] = moved[i] + sign * 1e-5 * direction
      values.append(np.sum(_one_by_one(*moved, ids) * weight))
    np.testing.assert_allclose(
      np.sum(np.asarray(grad, np.float64) * direction), (values[0] - values[1]) / 2e-5, rtol=1e-4
    )
  for name, form_grads in grads.items():
    for a, b in zip(form_grads, grads["dense"]):
      assert _rel(a, b) <= 2e-6, name


def test_order_of_tokens_does_not_matter():
  args, ids = _inputs(), _packed()
  order = np.random.default_rng(3).permutation(45)
  want = _one_by_one(*args, ids)
  moved = blockwise.Ids(*(x[:, order] for x in ids))
  got = blockwise.attention(*(a[:, order] for a in args), moved, _SCALE, 16, 16)
  assert _rel(got, want[:, order]) <= 1e-6


@pytest.mark.parametrize("form", ["dense", "blocks of 16, 8"])
def test_padding_gives_zeros_and_finite_gradients(form):
  args, ids = _inputs(), _packed()
  run = _forms(ids)[form]
  pad = ids.q_segment_ids == 0
  assert pad.any()
  out = run(*args)
  np.testing.assert_array_equal(out[pad], 0)
  grads = jax.grad(lambda *a: jnp.sum(run(*a) ** 2), argnums=(0, 1, 2))(*args)
  for grad in grads:
    assert np.isfinite(grad).all()
    np.testing.assert_array_equal(grad[pad], 0)


def test_large_scores_stay_finite():
  q, k, v = _inputs()
  ids = _packed()
  for form in _forms(ids).values():
    assert _rel(form(200 * q, k, v), _one_by_one(200 * q, k, v, ids)) <= 1e-4


def test_keys_of_another_length():
  q, k, v = _inputs(length=9)
  long_k, long_v = _inputs(length=30, seed=4)[1:]
  index = np.arange(30)[None].repeat(2, 0)
  filled = np.array([[12], [25]])
  ids = blockwise.Ids(
    np.ones((2, 9), np.int32),
    (index < filled).astype(np.int32),
    filled - 9 + np.arange(9)[None],
    index,
  )
  want = _one_by_one(q, long_k, long_v, ids)
  assert _rel(blockwise.attention(q, long_k, long_v, ids, _SCALE, 4, 8), want) <= 1e-6
  got = attention.attention(q, long_k, long_v, **ids._asdict(), scale=_SCALE)
  assert _rel(got, want) <= 1e-6


def test_bfloat16():
  args, ids = [jnp.asarray(a, jnp.bfloat16) for a in _inputs()], _packed()
  want = _one_by_one(*(np.asarray(a, np.float32) for a in args), ids)
  for form in _forms(ids).values():
    assert _rel(form(*args), want) <= 4e-3


def test_long_rows_need_no_square_of_memory():
  shape = jax.ShapeDtypeStruct
  length, heads, dim = 65_536, 2, 16
  q = shape((1, length, heads, dim), jnp.float32)
  k = shape((1, length, 1, dim), jnp.float32)
  ids = shape((1, length), jnp.int32)

  def loss(q, k, v, segments, positions):
    out = attention.attention(
      q,
      k,
      v,
      q_segment_ids=segments,
      kv_segment_ids=segments,
      q_positions=positions,
      kv_positions=positions,
      scale=1.0,
    )
    return jnp.sum(out)

  compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k, ids, ids).compile()
  whole = 4 * length * length
  assert compiled.memory_analysis().temp_size_in_bytes < whole / 100


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
@pytest.mark.parametrize(
  "change, text",
  [
    ({"v": (1, 150, 2, 64)}, "v is"),
    ({"v": (1, 150, 1, 128)}, "v is"),
    ({"q_positions": (1, 100)}, "q_positions is"),
    ({"kv_segment_ids": (2, 150)}, "kv_segment_ids is"),
  ],
)
def test_operands_that_do_not_fit_are_refused(implementation, change, text):
  key, ids = (1, 150, 2, 128), (1, 150)
  names = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
  shapes = {"q": (1, 150, 4, 128), "k": key, "v": key, **dict.fromkeys(names, ids), **change}
  kind = lambda name: jnp.int32 if "segment" in name or "positions" in name else jnp.float32
  operands = {name: jnp.ones(shape, kind(name)) for name, shape in shapes.items()}
  with pytest.raises(ValueError, match=text):
    attention.attention(**operands, scale=1.0, implementation=implementation)


def test_operands_of_other_types_are_refused():
  names = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
  operands = {name: jnp.ones((1, 150, 2, 128), jnp.float32) for name in "qkv"}
  operands |= {name: jnp.ones((1, 150), jnp.int32) for name in names}
  for name, dtype, implementation in (
    ("k", jnp.int32, "reference"),
    ("k", jnp.float16, "interpret"),
    ("q_positions", jnp.float32, "reference"),
  ):
    given = {**operands, name: operands[name].astype(dtype)}
    with pytest.raises(ValueError, match=f"{name} is {jnp.dtype(dtype)}"):
      attention.attention(**given, scale=1.0, implementation=implementation)
