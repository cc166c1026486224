"""Reports on a compiled TPU program from its scheduled HLO text, whoever compiled it.

./bazelw run //tools:aot_report -- DUMP/module_0000.jit_step.cl_1.after_optimizations.txt \
  --mesh=32x2x4 --json=report.json --plot=report.png
"""

from __future__ import annotations

import dataclasses
import os

from kernels.base import cli, options, outputs, refusals
from tools.aot import files


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
  """What the program ran on, and what to write."""

  mesh: str | None = options.option(
    None,
    help="Devices: fsdp x expert x context, such as 32x2x4; device order fsdp, context, expert.",
  )
  mesh_axes: tuple[str, ...] = options.option(
    (), help="Other axes as name:size in device order, such as data:8,model:16."
  )
  name: str = options.option("", help="Name of the program in the report; empty: the module's.")
  rows: int = options.option(25, help="Rows of the longer tables.", minimum=1)
  json: str | None = options.option(None, help="File to write the report to as JSON.", writes=True)
  plot: str | None = options.option(
    None,
    help="File to write the plots to: .png, .pdf or .svg.",
    check=outputs.chart_fault,
    writes=True,
  )


RULES = (
  refusals.Rule(
    name="one-mesh",
    keys=("mesh", "mesh_axes"),
    broken=lambda s: bool(s.mesh) and bool(s.mesh_axes),
    reason="give mesh, or mesh_axes for a program with other axes, not both",
    accepted={"mesh": "32x2x4"},
    refused={"mesh": "32x2x4", "mesh_axes": ("fsdp:32",)},
  ),
)


def judge(settings: options.Settings) -> None:
  """What the command line alone tells.

  Raises:
    options.OptionError: The mesh is none, or an option is given that a report's JSON has in it.
  """
  files.grid_of(settings.mesh, settings.mesh_axes)
  files.refuse_unread(settings, ("mesh", "mesh_axes", "name"))


def run(settings: options.Settings) -> int:
  """Reads, prints and writes."""
  from tools.aot import show

  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  grid = files.grid_of(settings.mesh, settings.mesh_axes)
  made = files.load(settings.positionals[0], grid, settings.name)
  show.show(made, rows=settings.rows)
  if settings.json:
    show.write_json(made, settings.json)
  if settings.plot:
    show.plot(made, settings.plot)
  return 0


if __name__ == "__main__":
  cli.main(
    run,
    components=[ReportOptions],
    rules=RULES,
    positionals=("FILE",),
    description=__doc__ or "",
    judge=judge,
  )
