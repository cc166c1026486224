"""The mesh's shape as text: fsdp x expert x context, such as 32x2x4.  Imports no JAX.

Devices are numbered with fsdp outermost and expert innermost, so that an expert pair is one chip
of two devices and context one dimension of the torus.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Self

AXES = ("fsdp", "expert", "context")  # as the text writes them
DEVICE_ORDER = ("fsdp", "context", "expert")  # outermost first


@dataclasses.dataclass(frozen=True)
class MeshShape:
  """Devices along fsdp, expert and context."""

  fsdp: int
  expert: int
  context: int

  @classmethod
  def parse(cls, text: str) -> Self:
    """Reads "fsdp x expert x context", such as 32x2x4.

    Raises:
      ValueError: The text is not three positive integers joined by x.
    """
    parts = text.split("x")
    # One way to write a number, so that equal meshes are equal texts.
    if len(parts) != 3 or not all(re.fullmatch("[1-9][0-9]{0,8}", p) for p in parts):
      raise ValueError(
        f"mesh {text!r}: want fsdp x expert x context, such as 32x2x4: each 1 to 999999999"
      )
    return cls(*map(int, parts))

  def __str__(self) -> str:
    return f"{self.fsdp}x{self.expert}x{self.context}"

  @property
  def devices(self) -> int:
    """Number of devices."""
    return self.fsdp * self.expert * self.context

  @property
  def in_device_order(self) -> dict[str, int]:
    """Sizes by axis name, outermost first."""
    return {axis: getattr(self, axis) for axis in DEVICE_ORDER}


def fault(text: str) -> str | None:
  """What is wrong with a mesh's text, or None: the check of an option."""
  try:
    MeshShape.parse(text)
  except ValueError as error:
    return str(error)
  return None
