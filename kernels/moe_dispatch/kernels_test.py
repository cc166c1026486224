"""The kernels of dispatch and un-sort, interpreted, against plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.moe_dispatch import gather, moe_dispatch, row_copies, unsort, word_lists

_TOKENS, _WIDTH = 600, 200  # no multiples of a tile of tokens, nor of 128 lanes
_FLOAT32, _BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


@functools.cache
def _case(dtype, buffer_rows=1203):
  """Eight of 64 experts: a strip without rows, a tile of many words, few rows elsewhere."""
  rng = np.random.default_rng(3)
  experts = np.stack([rng.permutation(64)[:4] for _ in range(_TOKENS)])
  experts[256:512] = 63
  experts[40:110] = np.stack([rng.permutation(8)[:4] + 8 for _ in range(70)])
  experts[512:560, 0] = 8  # one expert's rows side by side, and experts 9 to 15 with few
  mine = np.argwhere((experts >= 8) & (experts < 16))
  if len(mine) % 2 == 0:
    experts[tuple(mine[0])] = 63  # an odd number of rows
  p = moe_dispatch.plan(jnp.asarray(experts, jnp.int32), 8, first_expert=8, buffer_rows=buffer_rows)
  live = np.arange(buffer_rows) < int(p.group_sizes.sum())
  y = np.where(live[:, None], rng.normal(size=(buffer_rows, _WIDTH)), np.nan)
  reached = np.asarray(p.sent).any(axis=1)
  x = np.where(reached[:, None], rng.normal(size=(_TOKENS, _WIDTH)), np.nan)
  return p, jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def _dispatch(p, x, y, implementation):
  rows, pull = jax.vjp(lambda x: moe_dispatch.dispatch(x, p, implementation), x)
  return rows, pull(y)[0]


def _sum(p, x, y, implementation):
  sums, pull = jax.vjp(lambda y: moe_dispatch.sum_rows(y, p, implementation), y)
  return sums, pull(x)[0]


def _check(dtype, buffer_rows=1203, ops=(_dispatch, _sum)):
  """Values and gradients; NaN in every row that is nobody's and token that goes nowhere."""
  p, x, y = _case(dtype, buffer_rows)
  limit = 2e-6 if dtype == _FLOAT32 else 2e-3
  for op in ops:
    for got, want in zip(op(p, x, y, "interpret"), op(p, x, y, "reference"), strict=True):
      got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
      assert got.shape == want.shape and np.isfinite(got).all()
      assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)
      np.testing.assert_array_equal(got[~want.any(axis=1)], 0)


def _only_sum(p, x, y, implementation):
  return (moe_dispatch.sum_rows(y, p, implementation),)


def _only_dispatch(p, x, y, implementation):
  return (moe_dispatch.dispatch(x, p, implementation),)


@pytest.mark.parametrize("dtype", [_FLOAT32, _BFLOAT16])
def test_kernels_equal_plain_jax(dtype):
  p, *_ = _case(dtype)
  lists = _lists(p, 4 // dtype.itemsize)
  visits = int(lists.visits[0])
  counts = np.asarray(lists.counts).reshape(-1, word_lists.TILES)[:visits]
  strips = np.asarray(lists.strips)[:visits]
  # More than one visit of a strip, a strip without words, a tile without words beside one with some.
  assert (np.bincount(strips[counts.any(axis=1)], minlength=3) == 0).any()
  assert (counts == word_lists.WORDS).any() and not counts[:, 1].all()
  # The last row that is somebody's shares its word with NaN.
  assert not p.overflow and int(p.group_sizes.sum()) % 2 == 1
  _check(dtype)


def test_a_full_buffer():
  p, *_ = _case(_BFLOAT16, 300)
  assert p.overflow and int(p.group_sizes.sum()) == 300
  _check(_BFLOAT16, 300, [_only_sum])


def _lists(p, per_word):
  rows = p.pairs.shape[0] - p.pairs.shape[0] % per_word
  return word_lists.make(
    p.pairs[:rows], p.group_sizes, tokens=_TOKENS, choices=4, per_word=per_word
  )


@pytest.mark.parametrize("per_word", [1, 2])
def test_lists_name_every_row_once(per_word):
  p, *_ = _case(_FLOAT32)
  lists = _lists(p, per_word)
  tokens = np.asarray(p.pairs) // 4
  found = {}
  every = np.asarray(lists.words)
  assert (every >= 0).all() and (every * per_word < tokens.shape[0]).all()
  for visit, strip in enumerate(np.asarray(lists.strips)[: int(lists.visits[0])]):
    for tile in range(word_lists.TILES):
      entry = visit * word_lists.TILES + tile
      count, words = int(lists.counts[entry]), every[entry]
      assert not np.asarray(lists.places[entry, count:]).any()
      for word, place in zip(words[:count], np.asarray(lists.places[entry])):
        for half in range(per_word):
          if at := (int(place) >> (16 * half)) & 0xFFFF:
            row = int(word) * per_word + half
            assert row not in found
            found[row] = (strip * word_lists.TILES + tile) * word_lists.TOKENS + at - 1
  live = int(p.group_sizes.sum())
  assert found == dict(enumerate(tokens[:live]))


@pytest.mark.parametrize("dtype", [_FLOAT32, _BFLOAT16])
def test_words_hold_the_tokens(dtype):
  x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 300)), dtype).at[3, 5].set(jnp.nan)
  words = gather.to_words(x)
  assert words.dtype.itemsize == 4 and words.shape == (7, 384 if dtype == _FLOAT32 else 256)
  back = gather.from_words(words, 300, dtype)
  assert back.dtype == dtype
  np.testing.assert_array_equal(np.asarray(back, np.float32), np.asarray(x, np.float32))


def test_a_word_is_copied_once_for_neighbours():
  """A run of rows of one expert costs half as many copies as rows."""
  tokens = jnp.arange(512, dtype=jnp.int32)
  lists = word_lists.make(tokens, jnp.array([512], jnp.int32), tokens=512, choices=1, per_word=2)
  assert int(lists.counts[: int(lists.visits[0]) * word_lists.TILES].sum()) == 256


def test_every_row_of_one_tile_fits_the_bound():
  """The static number of visits is enough when one strip gets every row, and when all get some."""
  for tokens in (np.arange(4000) % 128, np.arange(4000) * 7 % 4096):
    tokens = np.sort(tokens.reshape(8, 500), axis=1).reshape(-1)
    lists = word_lists.make(
      jnp.asarray(tokens, jnp.int32),
      jnp.full((8,), 500, jnp.int32),
      tokens=4096,
      choices=1,
      per_word=2,
    )
    visits = int(lists.visits[0])
    assert visits <= lists.strips.shape[0]
    named = np.asarray(lists.places)[: visits * word_lists.TILES]
    assert ((named & 0xFFFF) > 0).sum() + ((named >> 16) > 0).sum() == 4000
    assert int(lists.strips[visits - 1]) == 4096 // (word_lists.TILES * word_lists.TOKENS) - 1


def test_refusals():
  p, _, y = _case(_FLOAT32)
  with pytest.raises(ValueError, match="bfloat16 or float32"):
    moe_dispatch.sum_rows(y.astype(jnp.float16), p, "interpret")
  shapes = jax.ShapeDtypeStruct((1 << 22,), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
  make = functools.partial(word_lists.make, tokens=1 << 20, choices=4, per_word=2)
  with pytest.raises(ValueError, match="32-bit sort key"):
    jax.eval_shape(make, *shapes)


def _wrong_half(make):
  swap = lambda places: (places >> 16) | (places << 16)

  def wrong(*arguments, **keywords):
    lists = make(*arguments, **keywords)
    return lists._replace(places=swap(lists.places))

  return wrong


def _next_token(make):
  def wrong(*arguments, **keywords):
    lists = make(*arguments, **keywords)
    return lists._replace(places=jnp.where(lists.places > 0, lists.places - 1, 0))

  return wrong


def _no_second_visit(make):
  def wrong(*arguments, **keywords):
    lists = make(*arguments, **keywords)
    again = lists.strips == jnp.roll(lists.strips, 1)
    again = jnp.repeat(again.at[0].set(False), word_lists.TILES)
    return lists._replace(counts=jnp.where(again, 0, lists.counts))

  return wrong


def _nothing_to_clean(make):
  def wrong(*arguments, **keywords):
    lists = make(*arguments, **keywords)
    return lists._replace(unclean=jnp.full_like(lists.unclean, -1))

  return wrong


def _halves_changed(to_words):
  return lambda x: (to_words(x) >> 16) | (to_words(x) << 16)


def _next_piece(first_pieces):
  return lambda words, *shape: first_pieces(words ^ 1, *shape)


@pytest.mark.parametrize(
  ("module", "name", "fault", "op"),
  [
    (word_lists, "make", _wrong_half, _only_sum),
    (word_lists, "make", _next_token, _only_sum),
    (word_lists, "make", _no_second_visit, _only_sum),
    (word_lists, "make", _nothing_to_clean, _only_sum),
    (unsort, "_clean", lambda clean: lambda *_: None, _only_sum),
    (row_copies, "first_pieces", _next_piece, _only_sum),
    (row_copies, "first_pieces", _next_piece, _only_dispatch),
    (gather, "to_words", _halves_changed, _only_dispatch),
  ],
)
def test_planted_faults_are_caught(module, name, fault, op, monkeypatch):
  monkeypatch.setattr(module, name, fault(getattr(module, name)))
  jax.clear_caches()
  with pytest.raises(AssertionError):
    _check(_BFLOAT16, ops=[op])
  jax.clear_caches()
