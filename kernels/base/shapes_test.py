"""Shapes of operands: what fits, what does not, and the message."""

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
