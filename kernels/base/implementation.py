"""Choice between a Pallas kernel and its plain reference, the same way for every kernel family.

`auto` is decided when a program is lowered, not when it is traced: the same function compiled for
a TPU from a machine without one contains the kernel, and compiled for a CPU the reference.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import lax

IMPLEMENTATIONS = ("auto", "pallas", "interpret", "reference")


def validate(implementation: str) -> None:
  """Raises ValueError unless `implementation` is one of IMPLEMENTATIONS."""
  if implementation not in IMPLEMENTATIONS:
    allowed = ", ".join(IMPLEMENTATIONS)
    raise ValueError(f"implementation={implementation!r}: want one of {allowed}")


def dispatch(implementation: str, kernel: Callable, reference: Callable, *operands):
  """Runs `kernel(*operands, interpret=...)` or `reference(*operands)`.

  Call it inside the rules of a custom_vjp rather than around one: a derivative of the choice
  itself would carry the residuals of both sides.

  Args:
    implementation: `pallas` compiles the kernel, `interpret` runs its body on any device,
      `reference` runs the reference, `auto` the kernel where the program is lowered for a TPU
      and the reference elsewhere.
    kernel: Takes the operands and the keyword `interpret`.
    reference: Takes the operands; its results have the same shapes and types.
    *operands: Arrays, or trees of them.
  """
  validate(implementation)
  if implementation == "reference":
    return reference(*operands)
  if implementation != "auto":
    return kernel(*operands, interpret=implementation == "interpret")
  return lax.platform_dependent(
    *operands, tpu=lambda *args: kernel(*args, interpret=False), default=reference
  )
