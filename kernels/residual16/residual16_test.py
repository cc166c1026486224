import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels.residual16 import residual16

_EDGES = [
  *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000),  # zeros, infinities
  *(0x7F7FFFFF, 0xFF7FFFFF, 0x00800000, 0x80800000),  # largest finite, smallest normal
  *(0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00008000, 0x00018000, 0x0000FFFF),
  *(0x7F7F8000, 0x7F7F7FFF, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x007F8000),
]


@pytest.fixture(scope="module")
def patterns():
  rng = np.random.default_rng(0)
  sample = rng.integers(0, 1 << 32, size=1 << 20, dtype=np.uint32)
  ties = (rng.integers(0, 1 << 16, size=4096, dtype=np.uint32) << 16) | 0x8000
  tops = np.arange(1 << 16, dtype=np.uint32) << 16
  grid = [tops | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
  return np.concatenate([sample, np.array(_EDGES, np.uint32), ties, *grid])


def _floats(bits):
  return jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32)


def _bits(x):
  return np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint32))


def _weight(cast, x):
  if cast == "nearest":
    return None
  if cast == "truncate":
    return residual16.truncate(x)
  return x.astype(jnp.bfloat16)


@pytest.mark.parametrize("cast", ["nearest", "truncate", "xla"])
def test_rebuilds_bit_for_bit_and_counts_the_rest(patterns, cast):
  @jax.jit
  def round_trip(bits):
    x = _floats(bits)
    parts = residual16.split(x, _weight(cast, x))
    return parts, residual16.join(*parts[:3])

  parts, back = round_trip(patterns)
  nan = np.isnan(patterns.view(np.float32))
  wrong = _bits(back) != patterns
  assert not wrong[~nan].any()
  assert int(parts.violations) == wrong.sum() > 0
  assert np.isnan(np.asarray(parts.weight, np.float32))[nan].all()
  assert np.asarray(parts.up)[~nan].any() == (cast != "truncate")


def test_nearest_is_the_usual_cast(patterns):
  x = patterns.view(np.float32)
  with np.errstate(invalid="ignore"):
    want = x.astype(ml_dtypes.bfloat16).view(np.uint16)
  ours = jax.lax.bitcast_convert_type(
    jax.jit(residual16.round_to_nearest_even)(_floats(patterns)), jnp.uint16
  )
  np.testing.assert_array_equal(np.asarray(ours)[~np.isnan(x)], want[~np.isnan(x)])


def test_join_that_ignores_the_up_bit_is_caught(patterns):
  nan = np.isnan(patterns.view(np.float32))
  parts = residual16.split(_floats(patterns))
  ignored = residual16.join(parts.weight, parts.low, jnp.zeros_like(parts.up))
  assert ((_bits(ignored) != patterns) & ~nan).sum() > 400_000
  # Guessing the bit from the low half is wrong on ties, and only there.
  guessed = residual16.join(parts.weight, parts.low, parts.low > 0x8000)
  wrong = (_bits(guessed) != patterns) & ~nan
  assert wrong.any() and (patterns[wrong] & 0xFFFF == 0x8000).all()


def test_a_weight_that_is_not_the_cast_is_counted():
  x = jnp.asarray([1.0, 2.0, 3.0, -4.0], jnp.float32)
  weight = x.astype(jnp.bfloat16).at[1].set(2.5).at[3].set(-3.0)
  parts = residual16.split(x, weight)
  wrong = _bits(residual16.join(*parts[:3])) != _bits(x)
  assert int(parts.violations) == wrong.sum() == 2


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17])
def test_packing(length, axis):
  shape = [3, 4, 5]
  shape[axis] = length
  bits = np.random.default_rng(length).integers(0, 2, size=shape).astype(bool)

  @jax.jit
  def both(bits):
    packed = residual16.pack(bits, axis)
    return packed, residual16.unpack(packed, length, axis)

  packed, back = both(jnp.asarray(bits))
  np.testing.assert_array_equal(packed, np.packbits(bits, axis=axis, bitorder="little"))
  assert packed.shape[axis] == residual16.packed_length(length)
  np.testing.assert_array_equal(back, bits)


def test_stack_of_fifteen_takes_two_bytes():
  assert residual16.pack(jnp.ones((15, 2), bool), 0).shape == (2, 2)


def test_refusals():
  x = jnp.ones((2,), jnp.float32)
  with pytest.raises(TypeError, match="float32"):
    residual16.split(x.astype(jnp.bfloat16))
  with pytest.raises(TypeError, match="bfloat16"):
    residual16.split(x, x)
  with pytest.raises(ValueError, match="shape"):
    residual16.split(x, jnp.ones((3,), jnp.bfloat16))
  with pytest.raises(ValueError, match="do not hold"):
    residual16.unpack(jnp.zeros((2,), jnp.uint8), 17, 0)
  parts = residual16.split(jnp.ones((8,), jnp.float32))
  packed = residual16.pack(parts.up, 0)
  # One byte would spread over the eight elements and be subtracted from each.
  for wrong, text in (
    ({"up": packed}, "up in bool"),
    ({"weight": parts.weight.astype(jnp.float16)}, "weight in bfloat16"),
    ({"low": parts.low.astype(jnp.int32)}, "low in uint16"),
  ):
    with pytest.raises(TypeError, match=text):
      residual16.join(**{"weight": parts.weight, "low": parts.low, "up": parts.up, **wrong})
  with pytest.raises(ValueError, match="one shape"):
    residual16.join(parts.weight, parts.low, parts.up[:1])
  with pytest.raises(TypeError, match="bool"):
    residual16.pack(jnp.full((9,), 2), 0)
  with pytest.raises(TypeError, match="uint8"):
    residual16.unpack(packed.astype(jnp.int32), 8, 0)
