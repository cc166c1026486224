"""What a profiled kernel is: the record that every family's cases are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
  """One kernel at one shape.

  Attributes:
    name: Unique name; the part before the colon is the library, "ours" for this repository.
    builder: "module:function" that returns the lowered program.
    arguments: The builder's arguments for the schedule: every grid step is simulated, so they
      usually take a part of the work with the same blocks.
    kernel: What the compiler's name of the kernel begins with; unused with `program`.
    flops: FLOPs of the products that the case needs.
    bytes: Least bytes across HBM: every operand and result once.
    part: Which part of one layer's work on a device this is.
    dtype: Operands of its products: bf16 or fp8.
    whole: The builder's arguments for a device's whole work, which is compiled too, without
      simulation: VMEM, spills, bundles and compile time are then those.
    program: What is priced is a whole program of XLA's own operations, by the rules of
      `tools.aot.timeline`, instead of one kernel's schedule.
  """

  name: str
  builder: str
  arguments: Mapping[str, Any]
  kernel: str
  flops: float
  bytes: float
  part: str
  dtype: str = "bf16"
  whole: Mapping[str, Any] | None = None
  program: bool = False
