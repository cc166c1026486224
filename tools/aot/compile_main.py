"""Compiles the trainer's own programs for a TPU that is not there, and reports on them.

./bazelw run //tools:aot_compile -- --recipe=none --model_preset=27B --mesh=128x1x1 --topology=tpu7x:4x4x4 \
  --micro_batch_rows=128 --row_tokens=8192

Takes the trainer's flags.  The three programs of a step (first micro-batch, accumulate, update) are
compiled one after another, each in a process of its own, by default only as far as the schedule and
the memory: a fast verdict.  --full goes through code generation.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from kernels.base import cli, mesh, options
from rl import recipes, refusals, trainer_options
from tools.aot import trainer_programs

_TOPOLOGY = re.compile(r"[a-z]\w*:[1-9]\d*(x[1-9]\d*){1,2}")
_KINDS = ("tpu7x", "v6e", "v5p", "v5e", "v5", "v4", "v3", "v2")  # what libtpu calls them


def topology_fault(text: str) -> str | None:
  """What is wrong with a topology's text, or None."""
  if not _TOPOLOGY.fullmatch(text):
    return "want a kind and chips, such as tpu7x:4x4x8"
  kind, chips = text.split(":")
  if kind not in _KINDS:
    return f"no TPU is called {kind}; want one of {', '.join(_KINDS)}, such as tpu7x:4x4x8"
  # A host has 2x2x1 chips, and a slice whole hosts.
  if kind == "tpu7x" and any(int(size) % 2 for size in chips.split("x")[:2]):
    return "the first two numbers of chips are to be even, as a host has 2x2x1, such as tpu7x:4x4x8"
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AotOptions:
  """What is compiled, for which chips, how far, and where the reports go."""

  topology: str = options.option(
    "tpu7x:4x4x8",
    help="TPU topology, chips along the torus.",
    check=topology_fault,
  )
  programs: tuple[str, ...] = options.option(
    trainer_programs.PROGRAMS,
    help="Programs to compile.",
    choices=trainer_programs.PROGRAMS,
    check=lambda names: None if names else "want at least one",
  )
  groups: int | None = options.option(
    None, help="Cut the model to so many groups of layers; empty for the whole model.", minimum=1
  )
  full: bool = options.option(False, help="Go through code generation.")
  serialize: bool = options.option(False, help="With full, save the serialized executables.")
  compile_time_limit: float = options.option(600.0, help="Seconds for each program.", minimum=1.0)
  compile_memory_gib: float = options.option(
    16.0, help="GiB of memory that a compiling process may take.", minimum=0.5
  )
  reports: str | None = options.option(
    None, help="Directory for reports, plots and what the compiler wrote; empty to keep nothing."
  )
  rows: int = options.option(25, help="Rows of the longer tables.", minimum=1)


COMPONENTS = (*trainer_options.COMPONENTS, AotOptions)


def trainer_values(settings: options.Settings) -> dict[str, Any]:
  """The trainer's option values, without this tool's own."""
  own = {opt.name for opt in options.declared(AotOptions)}
  return {name: value for name, value in settings.as_dict().items() if name not in own}


def judge(settings: options.Settings) -> None:
  """What the flags alone tell.

  Raises:
    options.OptionError: There would be no executable to save, the model has fewer groups than it
      is cut to, or the slice has another number of devices than the mesh: the trainer would not
      start there.
  """
  if settings.serialize and not settings.full:
    raise options.OptionError("--serialize needs --full: there is no executable before")
  if settings.groups is not None and not settings.checkpoint:
    trainer_programs.parts(settings, settings.groups)
  kind, chips = settings.topology.split(":")
  devices = 2 * math.prod(map(int, chips.split("x")))
  if kind == "tpu7x" and settings.mesh and mesh.MeshShape.parse(settings.mesh).devices != devices:
    raise options.OptionError(
      f"--mesh={settings.mesh}: {settings.topology} has {devices} devices, two a chip; give a mesh of "
      "as many, or another topology"
    )


def run(settings: options.Settings) -> int:
  """Compiles, reports, and prices the step."""
  from tools.aot import compiler, files, narrow, show

  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  grid = files.grid_of(settings.mesh or "1x1x1", ())
  values = trainer_values(settings)
  seconds = {}
  fits = True
  with tempfile.TemporaryDirectory() as scratch:
    out = pathlib.Path(settings.reports or scratch)
    fresh = [place for place in (out, *out.parents) if not place.exists()]
    out.mkdir(parents=True, exist_ok=True)
    forget(out, settings.programs)
    for program in settings.programs:
      request = compiler.Request(
        builder="tools.aot.trainer_programs:lower",
        arguments={
          "program": program,
          "options": values,
          "topology": settings.topology,
          "groups": settings.groups,
        },
        directory=str(out / program),
        full=settings.full,
        serialize=settings.serialize,
        time_limit=settings.compile_time_limit,
        memory_limit=settings.compile_memory_gib * 2**30,
      )
      try:
        result = compiler.compile_program(request)
      except compiler.ArgumentError as error:
        forget(out, [program])  # the compiler was not reached
        remove_empty(fresh)
        kind = options.OptionError if error.kind == "OptionError" else options.UserError
        raise kind(f"{program}: {error}") from error
      except compiler.CompileError as error:
        remove_empty((out / program / "dump", out / program, *fresh))
        kept = "" if settings.reports else "\n--reports=DIR keeps what the compiler wrote"
        raise options.UserError(f"{program}: {error}{kept}") from error
      made = narrow.of_result(result, grid, program)
      fits &= result.verdict.fits
      print(
        f"{program}: {result.seconds:.1f} s"
        f" (lowered at {result.stages.get('lowered', 0.0):.1f} s),"
        f" {result.peak_rss_bytes / 2**30:.1f} GiB of memory; {result.verdict}"
      )
      show.show(made, rows=settings.rows)
      show.write_json(made, str(out / f"{program}.json"))
      show.plot(made, str(out / f"{program}.png"))
      seconds[program] = made.seconds
  print(step_line(seconds, settings.num_micro_batches or 1))
  return 0 if fits else 1


def forget(out: pathlib.Path, programs: Sequence[str]) -> None:
  """Removes what was written about these programs, so that nothing stale stands beside a failure."""
  for program in programs:
    shutil.rmtree(out / program, ignore_errors=True)
    for suffix in (".json", ".png"):
      (out / f"{program}{suffix}").unlink(missing_ok=True)


def remove_empty(folders: Sequence[pathlib.Path]) -> None:
  """Removes those of the folders, in their order, that hold nothing."""
  for folder in folders:
    if folder.is_dir() and not any(folder.iterdir()):
      folder.rmdir()


def step_line(seconds: dict[str, float], micro_batches: int) -> str:
  """The estimate of a whole step, where all its programs were compiled."""
  if set(seconds) != set(trainer_programs.PROGRAMS):
    return "a step is priced where all its programs are compiled"
  more = (micro_batches - 1) * seconds["accumulate"]
  step = seconds["first_micro_batch"] + more + seconds["update"]
  return f"estimated step of {micro_batches} micro-batches: {step:.3f} s"


def main(argv: list[str] | None = None) -> None:
  """Parses the trainer's command line, its recipe first, and compiles."""
  cli.main(
    run,
    components=COMPONENTS,
    rules=refusals.RULES,
    description=__doc__ or "",
    argv=recipes.expand(sys.argv if argv is None else argv),
    judge=judge,
  )


if __name__ == "__main__":
  main()
