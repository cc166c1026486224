"""One check of the shapes that a public op is given.

A kernel reads by the shapes of its first operand; one that does not fit would be read beyond its end.
"""

from __future__ import annotations

from typing import Any


def check(op: str, **operands: tuple[Any, tuple[str | int, ...]]) -> dict[str, int]:
  """Raises unless every array has its shape; a name stands for the same length everywhere.

  Args:
    op: Name of the op, for the message.
    operands: By name, an array and its shape: numbers, or names of lengths.  The first operand that
      has a name says what it is.

  Returns:
    The lengths by name.

  Raises:
    ValueError: An array has another number of axes or another length.
  """
  lengths: dict[str, int] = {}
  for name, (array, wanted) in operands.items():
    shape = tuple(array.shape)
    known = [lengths.get(w, w) if isinstance(w, str) else w for w in wanted]
    if len(shape) != len(known) or any(
      isinstance(k, int) and k != n for k, n in zip(known, shape, strict=True)
    ):
      text = ", ".join(
        f"{w}={k}" if isinstance(w, str) and isinstance(k, int) else str(w)
        for w, k in zip(wanted, known, strict=True)
      )
      raise ValueError(f"{op}: {name} is {list(shape)}, want [{text}]")
    lengths.update((w, n) for w, n in zip(wanted, shape, strict=True) if isinstance(w, str))
  return lengths
