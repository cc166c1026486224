import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.fp8 import fp8

_TYPES = [fp8.E4M3, fp8.E5M2]


def _grid(dtype):
  """Every finite value of the type, in order."""
  values = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
  return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize("dtype", _TYPES)
def test_cast_rounds_to_nearest_even_and_saturates(dtype):
  grid = _grid(dtype)
  middle = (grid[1:] + grid[:-1]) / 2
  x = np.concatenate([grid, middle, np.nextafter(middle, np.float32(np.inf)), -middle])
  got = np.asarray(jax.jit(lambda x: fp8.saturating_cast(x, dtype))(x), np.float32)
  np.testing.assert_array_equal(got, x.astype(jnp.dtype(dtype)).astype(np.float32))
  beyond = jnp.asarray([fp8.largest(dtype) * 1.5, 1e30, np.inf, -1e30, -np.inf, np.nan])
  got = np.asarray(fp8.saturating_cast(beyond, dtype), np.float32)
  np.testing.assert_array_equal(got[:3], fp8.largest(dtype))
  np.testing.assert_array_equal(got[3:5], -fp8.largest(dtype))
  assert np.isnan(got[5])
  # The fault this guards against: the plain e4m3 cast gives NaN beyond the largest value.
  assert not np.isfinite(np.asarray(beyond[:2].astype(dtype), np.float32)).any()


@pytest.mark.parametrize("dtype", _TYPES)
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
def test_scales_of_empty_and_tiny_blocks_are_finite(dtype, x_dtype):
  blocks = np.array([[0.0, 0.0], [1e-45, 0.0], [1e-39, -1e-40], [1.2e-38, 1e-38], [3e38, 1.0]])
  q = jax.jit(lambda x: fp8.quantise_rows(x, dtype))(jnp.asarray(blocks, x_dtype))
  scale = np.asarray(q.scale)
  assert scale.shape == (5, 1) and (scale >= np.finfo(np.float32).tiny).all()
  assert np.isfinite(scale).all() and np.isfinite(1 / scale).all()
  back = np.asarray(fp8.dequantise(q))
  assert np.isfinite(back).all() and (back[0] == 0).all()
  # The planted fault: absmax / largest of a denormal underflows, and 0 / 0 is NaN.
  naive = (np.abs(blocks[1]).max().astype(np.float32) / np.float32(448)).astype(np.float32)
  assert naive == 0.0


@pytest.mark.parametrize(("dtype", "bound"), [(fp8.E4M3, 0.03), (fp8.E5M2, 0.06)])
def test_rows_keep_their_values(dtype, bound):
  x = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
  x *= np.exp2(np.arange(64) - 32)[:, None]
  q = fp8.quantise_rows(jnp.asarray(x), dtype)
  back = np.asarray(fp8.dequantise(q))
  error = np.linalg.norm(back - x, axis=1) / np.linalg.norm(x, axis=1)
  assert error.max() < bound
  # Rounding to the nearest: within half a step of the grid at the largest value.
  step = {fp8.E4M3: 2.0**-4, fp8.E5M2: 2.0**-3}[dtype]
  assert (np.abs(back - x) <= step * np.abs(x) + 2.0**-9 * np.asarray(q.scale)).all()


def test_broken_rows_stay_where_they_are():
  x = np.ones((4, 8), np.float32)
  x[2] = np.nan
  q = fp8.quantise_rows(jnp.asarray(x))
  back = np.asarray(fp8.dequantise(q))
  assert np.isnan(back[2]).all() and np.isfinite(back[[0, 1, 3]]).all()
  q = fp8.quantise_columns(jnp.asarray(x), jnp.asarray([True, True, False, True]))
  assert np.isfinite(np.asarray(q.scale)).all() and (np.asarray(q.values[2], np.float32) == 0).all()


def _by_hand(w):
  w = np.asarray(w, np.float32)
  scale = np.maximum(np.abs(w).max(1, keepdims=True) * np.float32(1 / 448), np.float32(2.0**-126))
  values = np.clip(w / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
  return values * scale


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fake_quant_per_expert_and_output_channel(dtype):
  rng = np.random.default_rng(1)
  w = rng.normal(size=(3, 32, 16)) * np.exp(rng.normal(size=(3, 1, 16)) * 4)
  w[1] = 0.0
  w = jnp.asarray(w, dtype)
  got = jax.jit(fp8.fake_quant)(w)
  assert got.dtype == dtype
  want = jnp.asarray(_by_hand(w)).astype(dtype)
  np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
  # One scale for the whole matrix, the planted fault, is told apart.
  coarse = fp8.dequantise(fp8.quantise(w, (1, 2)), dtype)
  assert (np.asarray(coarse, np.float32) != np.asarray(want, np.float32)).any()


def test_gradient_passes_straight_through():
  rng = np.random.default_rng(2)
  w = jnp.asarray(rng.normal(size=(2, 16, 8)), jnp.bfloat16)
  c = jnp.asarray(rng.normal(size=(2, 16, 8)), jnp.bfloat16)
  grad = jax.grad(lambda w: jnp.sum((fp8.fake_quant(w) * c).astype(jnp.float32)))(w)
  np.testing.assert_array_equal(np.asarray(grad, np.float32), np.asarray(c, np.float32))


def test_once_before_a_scan_is_bitwise_every_time_inside_it():
  rng = np.random.default_rng(3)
  w = jnp.asarray(rng.normal(size=(4, 2, 16, 16)), jnp.bfloat16)
  x = jnp.asarray(rng.normal(size=(2, 8, 16)), jnp.bfloat16)

  def run(w, hoisted):
    quant = fp8.fake_quant
    layers = quant(w) if hoisted else w

    def body(x, layer):
      return jnp.tanh(x @ (layer if hoisted else quant(layer))), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, layers)[0].astype(jnp.float32))

  inside, outside = (jax.jit(jax.value_and_grad(run), static_argnums=1)(w, h) for h in (0, 1))
  for a, b in zip(inside, outside):
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_scale_spans_the_mesh_axis():
  w = jnp.asarray(np.random.default_rng(4).normal(size=(2, 8, 4)), jnp.float32)
  mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
  quant = lambda w: fp8.fake_quant(w, -2, fp8.E4M3, "fsdp")
  one = jax.shard_map(quant, mesh=mesh, in_specs=P(None, "fsdp"), out_specs=P(None, "fsdp"))(w)
  # Two shards of the contraction axis, as a mapped axis.
  halves = jnp.stack(jnp.split(w, 2, axis=1))
  two = jnp.concatenate(list(jax.vmap(quant, axis_name="fsdp")(halves)), axis=1)
  np.testing.assert_array_equal(one, fp8.fake_quant(w))
  np.testing.assert_array_equal(two, fp8.fake_quant(w))
  assert (jnp.concatenate([fp8.fake_quant(h) for h in halves], axis=1) != two).any()


def test_other_types_are_refused():
  with pytest.raises(ValueError, match="float8_e4m3fn"):
    fp8.saturating_cast(jnp.ones(2), jnp.float16)


@pytest.mark.parametrize(
  ("name", "fault", "check"),
  [
    (
      "saturating_cast",
      lambda x, dtype: x.astype(dtype),
      lambda: test_cast_rounds_to_nearest_even_and_saturates(fp8.E4M3),
    ),
    (
      "scale_of",
      lambda absmax, dtype: absmax.astype(jnp.float32) / fp8.largest(dtype),
      lambda: test_scales_of_empty_and_tiny_blocks_are_finite(fp8.E4M3, jnp.float32),
    ),
  ],
)
def test_planted_faults_are_caught(name, fault, check, monkeypatch):
  check()
  monkeypatch.setattr(fp8, name, fault)
  with pytest.raises(AssertionError):
    check()
