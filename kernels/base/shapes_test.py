"""Shapes of operands: what fits, what does not, and the message."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.base import shapes


def test_names_stand_for_one_length():
  x, y = np.zeros((2, 5, 3)), np.zeros((2, 5))
  assert shapes.check("op", x=(x, ("B", "S", 3)), ids=(y, ("B", "S"))) == {"B": 2, "S": 5}


@pytest.mark.parametrize(
  "shape, text",
  [((2, 4), r"op: ids is \[2, 4\], want \[B=2, S=5\]"), ((2,), "want"), ((2, 5, 1), "want")],
)
def test_what_does_not_fit_is_named(shape, text):
  with pytest.raises(ValueError, match=text):
    shapes.check("op", x=(np.zeros((2, 5)), ("B", "S")), ids=(np.zeros(shape), ("B", "S")))
  with pytest.raises(ValueError, match=r"want \[3, N\]"):
    shapes.check("op", x=(np.zeros((2, 5)), (3, "N")))


def test_nothing_at_all_is_refused():
  with pytest.raises(ValueError, match=r"op: x is \[2, 0\], want S of at least 1"):
    shapes.check("op", x=(np.zeros((2, 0)), ("B", "S")))
  # A length that the op itself works out may be 0: a filter of one tap has no window.
  assert shapes.check("op", x=(np.zeros((2, 0)), ("B", 0))) == {"B": 2}


def test_types():
  of = lambda dtype: jnp.zeros((1,), dtype)
  for dtype in (jnp.bfloat16, jnp.float32):
    shapes.check_types("op", kernels=True, values={"x": of(dtype)}, ids={"i": of(jnp.int32)})
  shapes.check_types("op", kernels=False, values={"x": of(jnp.float16)})
  for kernels, dtype in ((True, jnp.float16), (True, jnp.int32), (False, jnp.int32), (False, bool)):
    with pytest.raises(ValueError, match="op: x is (float16|int32|bool)"):
      shapes.check_types("op", kernels=kernels, values={"x": of(dtype)})
  with pytest.raises(ValueError, match="op: i is float32, want an integer type"):
    shapes.check_types("op", kernels=True, values={}, ids={"i": of(jnp.float32)})
