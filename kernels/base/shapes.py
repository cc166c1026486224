"""Checks of the shapes and the types that a public op is given.

A kernel reads by the shapes of its first operand; one that does not fit would be read beyond its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import numpy as jnp

_KERNEL_TYPES = ("bfloat16", "float32")


def check(op: str, **operands: tuple[Any, tuple[str | int, ...]]) -> dict[str, int]:
  """Raises unless every array has its shape; a name stands for the same length everywhere.

  Args:
    op: Name of the op, for the message.
    operands: By name, an array and its shape: numbers, or names of lengths.  The first operand that
      has a name says what it is.

  Returns:
    The lengths by name.

  Raises:
    ValueError: An array has another number of axes or another length, or a length with a name is 0.
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
    if empty := [w for w, n in zip(wanted, shape, strict=True) if isinstance(w, str) and not n]:
      raise ValueError(f"{op}: {name} is {list(shape)}, want {' and '.join(empty)} of at least 1")
    lengths.update((w, n) for w, n in zip(wanted, shape, strict=True) if isinstance(w, str))
  return lengths


def check_types(
  op: str, *, kernels: bool, values: Mapping[str, Any], ids: Mapping[str, Any] | None = None
) -> None:
  """Raises unless values are floating point numbers and ids integers.

  Args:
    op: Name of the op, for the message.
    kernels: A Pallas kernel may take them: values are then bfloat16 or float32.
    values: By name, arrays that gradients pass through.
    ids: By name, arrays of segment ids, positions or targets.

  Raises:
    ValueError: An array has another type.
  """
  for name, array in values.items():
    dtype = jnp.dtype(array.dtype)
    if kernels and dtype.name not in _KERNEL_TYPES:
      raise ValueError(f"{op}: {name} is {dtype}; the kernels take {' or '.join(_KERNEL_TYPES)}")
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(f"{op}: {name} is {dtype}, want a floating point type")
  for name, array in (ids or {}).items():
    if not jnp.issubdtype(array.dtype, jnp.integer):
      raise ValueError(f"{op}: {name} is {jnp.dtype(array.dtype)}, want an integer type")
