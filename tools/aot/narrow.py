"""The narrow program of the regression test; //tools/aot:record makes its record again."""

from __future__ import annotations

import pathlib
from typing import Any

from tools.aot import compiler, report
from tools.roofline.machine import TPU7X, Grid

GRID = Grid({"fsdp": 32, "context": 4, "expert": 2}, TPU7X)
RECORD = pathlib.Path("tools/aot/testdata/narrow.json")


def compile_report(directory: str, **arguments: Any) -> report.Report:
  """Compiles the narrow program, or one with a planted fault, and reports on it."""
  result = compiler.compile_program(
    compiler.Request(
      builder="tools.aot.programs:sharded_product",
      arguments=arguments,
      directory=directory,
      time_limit=300.0,
    )
  )
  return of_result(result, GRID, "narrow")


def of_result(result: compiler.Result, grid: Grid | None, name: str) -> report.Report:
  """The report on a finished compile."""
  return report.make(
    result.hlo.read_text(),
    grid,
    name=name,
    memory_report=result.memory_text,
    buffer_assignment=result.buffer_assignment.read_text(),
    analysis=result.analysis,
  )
