"""All the kernels that are profiled: one tuple of `KernelCase` for each family.

A family is two files: FAMILY_cases.py lists its cases and imports no JAX; FAMILY_kernels.py holds
the builders that they name, which run in the compiling process.
"""

from __future__ import annotations

from tools.kernel_report import (
  attention_cases,
  delta_cases,
  dispatch_cases,
  gmm_cases,
  head_cases,
  public_cases,
  xla_cases,
)
from tools.kernel_report.case import KernelCase

CASES: tuple[KernelCase, ...] = (
  *attention_cases.CASES,
  *delta_cases.CASES,
  *dispatch_cases.CASES,
  *gmm_cases.CASES,
  *head_cases.CASES,
  *xla_cases.CASES,
  *public_cases.CASES,
)
