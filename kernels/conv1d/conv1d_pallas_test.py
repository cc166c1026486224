"""The convolution's Pallas kernels against the float32 reference, and its boundaries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.conv1d import conv1d, pallas_backward, reference, tiling

_TAPS = 4


def _relative(a, b):
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  return np.linalg.norm(a - b) / np.linalg.norm(b)


def _row(lengths, total):
  """Segments of these lengths, then padding."""
  ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)])
  return np.pad(ids, (0, total - len(ids)))


def _inputs(dtype, length, channels=128, seed=0):
  r = np.random.default_rng(seed)
  # Boundaries inside tiles, one token before and after a tile's edge, and segments of one token.
  segments = np.stack([_row([31, 1, 34, 1, 1, 13], length), _row([length - 5], length)])
  x = jnp.asarray(r.normal(size=(2, length, channels)), dtype)
  kernel = jnp.asarray(r.normal(size=(_TAPS, channels)) / 2, jnp.float32)
  window = jnp.asarray(r.normal(size=(2, _TAPS - 1, channels)), dtype)
  dy = jnp.asarray(r.normal(size=x.shape), dtype)
  return x, kernel, window, dy, jnp.asarray(segments, jnp.int32), jnp.asarray([1, 1], jnp.int32)


def _value_and_gradients(run, x, kernel, window, dy):
  y, vjp = jax.vjp(run, x, kernel, window)
  return (y, *vjp(dy))


def _pair(dtype, length, poison=True, window_segment=None, tiles=(64, 32, 16)):
  x, kernel, window, dy, segments, owner = _inputs(dtype, length)
  owner = owner if window_segment is None else jnp.asarray(window_segment, jnp.int32)
  wide = lambda a: a.astype(jnp.float32)
  expected = _value_and_gradients(
    lambda *a: reference.causal_conv1d_silu(a[0], a[1], segments, a[2], owner),
    *(wide(a) for a in (x, kernel, window, dy)),
  )
  if poison:
    x = jnp.where((segments > 0)[..., None], x, jnp.nan)
    dy = jnp.where((segments > 0)[..., None], dy, jnp.nan)
  run = lambda x, kernel, window: conv1d.causal_conv1d_silu(
    x,
    kernel,
    segments,
    window,
    owner,
    implementation="interpret",
    tiles=conv1d.Tiles(tokens=tiles[0], chunk=tiles[1], masked_chunk=tiles[2]),
  )
  return (
    jax.jit(functools.partial(_value_and_gradients, run))(x, kernel, window, dy),
    expected,
    segments,
  )


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-3)])
@pytest.mark.parametrize("length", [101])
def test_forward_and_gradients(dtype, bound, length):
  got, expected, segments = _pair(dtype, length)
  for name, a, b in zip(("y", "dx", "dkernel", "dwindow"), got, expected):
    assert _relative(a, b) <= bound, name
  padding = np.asarray(segments) == 0
  assert not np.asarray(got[0], np.float32)[padding].any()
  assert not np.asarray(got[1], np.float32)[padding].any()
  assert got[2].dtype == jnp.float32


def test_window_of_another_segment_is_not_read():
  got, expected, _ = _pair(jnp.bfloat16, 96, window_segment=[7, 1])
  for a, b in zip(got, expected):
    assert _relative(a, b) <= 2e-3
  assert not np.asarray(got[3], np.float32)[0].any()


def test_tiles_without_boundaries_take_the_same_values():
  """One long segment: middle tiles run without masks, their neighbours with them."""
  x, kernel, window, dy, _, owner = _inputs(jnp.bfloat16, 160)
  segments = jnp.ones((2, 160), jnp.int32)
  bits = tiling.tap_bits(segments, owner, _TAPS)
  tiles = conv1d.Tiles(tokens=64, chunk=32, masked_chunk=16)
  assert np.asarray(tiling.full_chunks(bits, tiles, _TAPS, False)).tolist() == [[1] * 5 + [0]] * 2
  assert (
    np.asarray(tiling.full_chunks(bits, tiles, _TAPS, True)).tolist() == [[1] * 4 + [0] * 2] * 2
  )
  run = lambda implementation, tiles: _value_and_gradients(
    lambda *a: conv1d.causal_conv1d_silu(
      a[0], a[1], segments, a[2], owner, implementation=implementation, tiles=tiles
    ),
    x,
    kernel,
    window,
    dy,
  )
  small = run("interpret", tiles)
  large = run("interpret", conv1d.Tiles(tokens=96, chunk=96, masked_chunk=32))
  for a, b, c in zip(small, large, run("reference", None)):
    assert _relative(a, b) <= 1e-6
    assert _relative(a, c) <= 4e-3


def test_packed_then_sliced_equals_alone():
  """Lengths 37, 51, 40 in one row against three rows of one segment each."""
  lengths = [37, 51, 40]
  r = np.random.default_rng(3)
  x = jnp.asarray(r.normal(size=(1, 128, 128)), jnp.float32)
  kernel = jnp.asarray(r.normal(size=(_TAPS, 128)), jnp.float32)
  run = functools.partial(
    conv1d.causal_conv1d_silu,
    implementation="interpret",
    tiles=conv1d.Tiles(tokens=32, chunk=32, masked_chunk=32),
  )
  packed = run(x, kernel, jnp.asarray(_row(lengths, 128), jnp.int32)[None])
  start = 0
  for length in lengths:
    alone = run(x[:, start : start + length], kernel, jnp.ones((1, length), jnp.int32))
    np.testing.assert_array_equal(packed[:, start : start + length], alone)
    start += length


def test_rows_split_over_ranks_by_their_windows():
  """Four ranks, each given the last inputs of the rank before it, equal one row."""
  x, kernel, _, _, _, _ = _inputs(jnp.float32, 128)
  segments = jnp.asarray(np.stack([_row([37, 51, 40], 128), _row([63, 2, 60], 128)]), jnp.int32)
  run = functools.partial(
    conv1d.causal_conv1d_silu,
    implementation="interpret",
    tiles=conv1d.Tiles(tokens=16, chunk=16, masked_chunk=16),
  )
  whole = run(x, kernel, segments)
  for rank in range(4):
    part = slice(32 * rank, 32 * rank + 32)
    if rank:
      window = x[:, 32 * rank - (_TAPS - 1) : 32 * rank]
      owner = segments[:, 32 * rank - 1]
    else:
      window, owner = None, None
    # A window holds one segment: where it does not, its older rows belong to nobody here.
    if rank:
      held = segments[:, 32 * rank - (_TAPS - 1) : 32 * rank] == owner[:, None]
      window = jnp.where(held[..., None], window, 0.0)
    np.testing.assert_allclose(
      run(x[:, part], kernel, segments[:, part], window, owner), whole[:, part], atol=1e-6
    )


def test_planted_fault_is_caught(monkeypatch):
  """A kernel that ignores the segments' bits must fail the comparison."""
  honest = tiling.tap_bits
  ones = lambda *args: jnp.where(honest(*args) > 0, 0xF0F, 0)
  monkeypatch.setattr(tiling, "tap_bits", ones)
  got, expected, _ = _pair(jnp.bfloat16, 96)
  assert not _relative(got[0], expected[0]) <= 2e-3
  assert not _relative(got[1], expected[1]) <= 2e-3


@pytest.mark.parametrize("fault", ["slope", "tokens after the tile"])
def test_planted_faults_of_the_backward_pass_are_caught(fault, monkeypatch):
  if fault == "slope":
    honest = pallas_backward._twice_gradient
    monkeypatch.setattr(pallas_backward, "_twice_gradient", lambda h, d: honest(0.97 * h, d))
    wrong = (1, 2, 3)
  else:
    # The gradients of what follows a tile are read as if the row ended there.
    honest_bits = tiling.tile_bits

    def without_halo(bits, tokens, parts):
      found = honest_bits(bits, tokens, parts)
      return jnp.zeros_like(found) if tokens == tiling.HALO else found

    monkeypatch.setattr(tiling, "tile_bits", without_halo)
    wrong = (1,)
  got, expected, _ = _pair(jnp.bfloat16, 96)
  assert _relative(got[0], expected[0]) <= 2e-3
  for i in wrong:
    assert not _relative(got[i], expected[i]) <= 2e-3


def test_tiles_are_validated():
  with pytest.raises(ValueError, match="multiple of 16"):
    conv1d.Tiles(masked_chunk=24)
  with pytest.raises(ValueError, match="multiple of chunk=1024"):
    conv1d.Tiles(tokens=1536)
  fitted = conv1d.Tiles().fit(100)
  assert (fitted.tokens, fitted.chunk, fitted.masked_chunk) == (112, 112, 16)
  fitted = conv1d.Tiles().fit(2500)
  assert (fitted.tokens, fitted.chunk, fitted.masked_chunk) == (3072, 1024, 128)
