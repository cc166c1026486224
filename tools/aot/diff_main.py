"""Compares two compiled TPU programs: memory, collectives, loops, estimate by component.

./bazelw run //tools:aot_diff -- A B --mesh=32x2x4

A and B are reports (JSON, as //tools:aot_report and //tools:aot_compile write them) or scheduled
HLO text.
"""

from __future__ import annotations

import dataclasses
import os

from kernels.base import cli, options
from tools.aot import files, report_main


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffOptions:
  """What the programs ran on, and how much to show."""

  mesh: str | None = options.option(
    None, help="Devices of HLO text: fsdp x expert x context, such as 32x2x4."
  )
  mesh_axes: tuple[str, ...] = options.option(
    (), help="Other axes of HLO text as name:size in device order."
  )
  everything: bool = options.option(False, help="Show what did not change too.")


def judge(settings: options.Settings) -> None:
  """What the command line alone tells.

  Raises:
    options.OptionError: The mesh is none, or neither of the two reads it.
  """
  files.grid_of(settings.mesh, settings.mesh_axes)
  files.refuse_unread(settings, ("mesh", "mesh_axes"))


def run(settings: options.Settings) -> int:
  """Reads both and prints what differs."""
  from tools.aot import diff

  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  grid = files.grid_of(settings.mesh, settings.mesh_axes)
  a, b = (files.load(path, grid) for path in settings.positionals)
  diff.show(a, b, everything=settings.everything)
  return 0


if __name__ == "__main__":
  cli.main(
    run,
    components=[DiffOptions],
    rules=report_main.RULES,
    positionals=("A", "B"),
    description=__doc__,
    judge=judge,
  )
