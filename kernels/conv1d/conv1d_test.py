"""The convolution against a loop over tokens and taps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.conv1d import conv1d


def _loop(x, kernel, segments):
  """float64, one token and tap at a time."""
  taps = kernel.shape[0]
  total = np.zeros(x.shape)
  for b in range(x.shape[0]):
    for t in range(x.shape[1]):
      for j in range(taps):
        s = t - (taps - 1) + j
        if s >= 0 and segments[b, t] > 0 and segments[b, s] == segments[b, t]:
          total[b, t] += kernel[j] * x[b, s]
  return total / (1 + np.exp(-total))


def _rel(got, want):
  return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def _inputs(seed=0):
  rng = np.random.default_rng(seed)
  segments = np.array([[1] * 5 + [2] * 2 + [3] * 9 + [0] * 4, [0] * 3 + [1] * 11 + [2] * 6])
  # Values that float32 holds exactly, in float64 for the loop.
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32).astype(np.float64)
  return draw(2, 20, 6), draw(4, 6), segments.astype(np.int32), draw(2, 20, 6)


def test_forward_and_gradients():
  x, kernel, segments, weight = _inputs()
  objective = lambda x, w: jnp.sum(conv1d.causal_conv1d_silu(x, w, segments) * weight)
  args = (jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
  assert _rel(conv1d.causal_conv1d_silu(*args, segments), _loop(x, kernel, segments)) <= 1e-6
  for i, grad in enumerate(jax.grad(objective, argnums=(0, 1))(*args)):
    want = np.zeros(args[i].shape)
    for at in np.ndindex(want.shape):
      values = []
      for sign in (1, -1):
        moved = [x.copy(), kernel.copy()]
        moved[i][at] += sign * 1e-5
        values.append(np.sum(_loop(*moved, segments) * weight))
      want[at] = (values[0] - values[1]) / 2e-5
    assert _rel(grad, want) <= 1e-5


def test_padding_and_other_segments_are_never_read():
  x, kernel, segments, _ = _inputs()
  x, kernel = x.astype(np.float32), kernel.astype(np.float32)
  poisoned = np.where((segments == 0)[..., None], np.float32(np.nan), x)
  clean = conv1d.causal_conv1d_silu(x, kernel, segments)
  np.testing.assert_array_equal(conv1d.causal_conv1d_silu(poisoned, kernel, segments), clean)
  np.testing.assert_array_equal(clean[segments == 0], 0)
  second = np.where((segments == 2)[..., None], x, np.float32(np.nan))
  got = conv1d.causal_conv1d_silu(second, kernel, segments)
  np.testing.assert_array_equal(got[segments == 2], clean[segments == 2])


def test_bfloat16_is_rounded_once():
  x, kernel, segments, _ = _inputs()
  x = jnp.asarray(x, jnp.bfloat16)
  wide = conv1d.causal_conv1d_silu(x.astype(jnp.float32), kernel, segments)
  got = conv1d.causal_conv1d_silu(x, kernel, segments)
  np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


def test_parts_and_steps_equal_the_row():
  x, kernel = (a.astype(np.float32) for a in _inputs()[:2])
  ones = np.ones((2, 20), np.int32)
  want = np.asarray(conv1d.causal_conv1d_silu(x, kernel, ones))
  window = jnp.zeros((2, 3, 6), jnp.float32)
  # First part: unequal lengths 7 and 0; the second row's window must stay empty.
  lengths = np.array([7, 0])
  window = conv1d.next_window(jnp.asarray(x[:, :8]), window, lengths)
  np.testing.assert_array_equal(window[1], 0)
  rest = np.stack([x[0, 7:19], x[1, :12]])
  got = conv1d.causal_conv1d_silu(jnp.asarray(rest), kernel, ones[:, :12], window)
  np.testing.assert_allclose(got[0], want[0, 7:19], rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(got[1], want[1, :12], rtol=1e-6, atol=1e-6)
  window = conv1d.next_window(jnp.asarray(rest), window, np.array([12, 12]))
  out, window = conv1d.causal_conv1d_silu_step(
    jnp.stack([x[0, 19], x[1, 12]]), jnp.asarray(kernel), window
  )
  np.testing.assert_allclose(out, [want[0, 19], want[1, 12]], rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(window, [x[0, 17:20], x[1, 10:13]], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
@pytest.mark.parametrize(
  "change, text",
  [
    ({"kernel": (4, 64)}, "kernel is"),
    ({"segment_ids": (1, 30)}, "segment_ids is"),
    ({"window": (1, 2, 128)}, "window is"),
    ({"window_segment": (2,)}, "window_segment is"),
  ],
)
def test_operands_that_do_not_fit_are_refused(implementation, change, text):
  shapes = {"x": (1, 40, 128), "kernel": (4, 128), "segment_ids": (1, 40)}
  kind = lambda name: jnp.int32 if "segment" in name else jnp.float32
  operands = {name: jnp.ones(shape, kind(name)) for name, shape in {**shapes, **change}.items()}
  with pytest.raises(ValueError, match=text):
    conv1d.causal_conv1d_silu(**operands, implementation=implementation)


def test_operands_of_other_types_are_refused():
  shapes = {"x": (1, 40, 128), "kernel": (4, 128)}
  operands = {name: jnp.ones(shape, jnp.float32) for name, shape in shapes.items()}
  ids = jnp.ones((1, 40), jnp.int32)
  for name, dtype, implementation in (
    ("x", jnp.int32, "reference"),
    ("x", jnp.float16, "interpret"),
    ("segment_ids", jnp.float32, "reference"),
  ):
    given = {**operands, "segment_ids": ids}
    given[name] = given[name].astype(dtype)
    with pytest.raises(ValueError, match=f"{name} is {jnp.dtype(dtype)}"):
      conv1d.causal_conv1d_silu(**given, implementation=implementation)
