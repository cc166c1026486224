"""Profiles cases one process each, and shows their rows."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import threading
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kernels.base import options, outputs
from tools.aot import compiler, hlo, timeline
from tools.kernel_report import schedule
from tools.kernel_report.case import KernelCase
from tools.roofline.machine import TPU7X

# Simulations of long schedules that pass it would not end soon either.
_MEMORY_LIMIT = 8 * 2**30
# What ends the report.
ENDS = (compiler.LibtpuMissingError, compiler.CompileStoppedError)
# What a case may do wrong: the compiler, the builder, or a text that its reader does not know.
_UNPRICED = (compiler.CompileError, schedule.NoProfileError, ValueError, OSError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One profiled case.

  Attributes:
    name: The case's name.
    part: Which part of a layer's work it is.
    gflop: GFLOP of the case.
    mib: Least MiB across HBM.
    cycles: Static cycles.
    floor_us: max(FLOPs / peak, bytes / HBM rate), microseconds.
    static_us: Cycles over the clock, microseconds.
    ratio: max(static_us, bytes / HBM rate) over the floor.
    peak: Part of the products' peak that the schedule reaches.
    vmem_mib: Scoped VMEM.
    spills: Registers spilled.
    bundles: VLIW bundles of code.
    compile_s: Seconds of the compile.
    cpu_s: CPU seconds of the compiling process, its start and lowering too: what one free core would
      take, however busy the machine was.
    note: What to know of the figures, or an empty string.
    error: Why there is no profile at all, or an empty string.
    of_whole: Whether the size and the seconds are of a device's whole work.
  """

  name: str
  part: str
  gflop: float
  mib: float
  cycles: int = 0
  floor_us: float = 0.0
  static_us: float = 0.0
  ratio: float = 0.0
  peak: float = 0.0
  vmem_mib: float = 0.0
  spills: int = 0
  bundles: int = 0
  compile_s: float = 0.0
  cpu_s: float = 0.0
  note: str = ""
  error: str = ""
  of_whole: bool = False


def floor_seconds(case: KernelCase) -> float:
  """Least seconds of a case on one device."""
  rates = timeline.Rates.of(TPU7X)
  return max(case.flops / rates.flops[case.dtype], case.bytes / rates.hbm)


# No schedule is quicker than the products need at peak: then it was not simulated whole.
_SHORT = "cycles below the floor: branches on data were not simulated in full"
_UNSIMULATED = "the schedule was not simulated"


def make_row(case: KernelCase, found: schedule.Profile, compile_seconds: float) -> Row:
  """The row of a case from its profile; without cycles where the profile has none."""
  rates = timeline.Rates.of(TPU7X)
  static = found.cycles / timeline.CLOCK_HZ
  floor = floor_seconds(case)
  peak = case.flops / rates.flops[case.dtype] / static if static else 0.0
  whole = peak <= 1.0 and static > 0
  return Row(
    name=case.name,
    part=case.part,
    gflop=case.flops / 1e9,
    mib=case.bytes / 2**20,
    cycles=found.cycles,
    floor_us=floor * 1e6,
    static_us=static * 1e6,
    ratio=max(static, case.bytes / rates.hbm) / floor if whole else 0.0,
    peak=peak if whole else 0.0,
    vmem_mib=found.vmem_bytes / 2**20,
    spills=found.spills,
    bundles=found.bundles,
    compile_s=compile_seconds,
    note="" if whole else _SHORT if static else _UNSIMULATED,
  )


def program_row(case: KernelCase, text: str, compile_seconds: float) -> Row:
  """The row of a program of XLA's own operations, from its text after code generation."""
  played = timeline.estimate(hlo.parse(text))
  cycles = round(played.seconds * timeline.CLOCK_HZ)
  found = schedule.Profile(kernel="", cycles=cycles, bundles=0, spills=0, vmem_bytes=0)
  row = make_row(case, found, compile_seconds)
  said = [row.note, *(f"not priced: {text} ({n} times)" for text, n in played.unknown.items())]
  return dataclasses.replace(row, note="; ".join(text for text in said if text)[:300])


def part_key(case: KernelCase) -> str:
  """What cases have in common that share a simulation."""
  return json.dumps([case.builder, dict(case.arguments), case.kernel], sort_keys=True)


def profile_case(
  case: KernelCase,
  directory: str,
  time_limit: float,
  *,
  whole: bool = True,
  seen: dict[str, Row] | None = None,
  stop: threading.Event | None = None,
) -> Row:
  """Compiles a case in a process of its own and reads its profile.

  The simulation of a schedule can end the compiler, or not end; then the case is compiled again without it,
  for what else there is to know.  What the compiler wrote is removed: tens of MB a kernel.

  Args:
    case: What to compile.
    directory: Scratch folder; created, emptied, removed.
    time_limit: Seconds for each compile.
    whole: Compile the whole work too, where the case names it.
    seen: Rows of parts simulated so far, to which this one is added: models share parts.
    stop: Ends the compile when another thread sets it.

  Returns:
    The row.  Whatever the compiler or the builder did wrong is said in it: one case does not end
    the others' run.

  Raises:
    compiler.LibtpuMissingError: The compiler is not installed.
    compiler.CompileStoppedError: `stop` was set.
  """
  seen = {} if seen is None else seen
  key = part_key(case)
  if key not in seen:
    seen[key] = _profile_part(case, directory, time_limit, stop)
  row = dataclasses.replace(seen[key], name=case.name, part=case.part)
  if row.error or not whole or case.whole is None:
    return row
  work = dataclasses.replace(case, arguments=case.whole)
  try:
    full = _compile(work, directory, time_limit, simulate=False, stop=stop)
  except ENDS:
    raise
  except _UNPRICED as error:
    # The part's cycles stay; its size and compile time would pass for the whole's.
    unknown = Row(name=row.name, part=row.part, gflop=0.0, mib=0.0)
    said = f"a device's whole work was not compiled: {_first_line(error)}"
    note = "; ".join(text for text in (row.note, said) if text)
    return dataclasses.replace(_with_size(row, unknown), note=note)
  return dataclasses.replace(_with_size(row, full), of_whole=True)


def _with_size(row: Row, full: Row) -> Row:
  """The row with another compile's size and seconds."""
  taken = ("vmem_mib", "spills", "bundles", "compile_s", "cpu_s")
  return dataclasses.replace(row, **{name: getattr(full, name) for name in taken})


def _said(error: Exception) -> list[str]:
  """Lines of an error, without what names the scratch folder, which is removed."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  if isinstance(error, compiler.CompileTimeoutError):
    lines = [line.partition(";")[0] + "; --time_limit gives more" for line in lines]
  return [line for line in lines if not line.startswith("all of it:")]


def _first_line(error: Exception) -> str:
  """What an error says, in a table's cell."""
  lines = _said(error)
  return " ".join(lines[:2])[:160] or type(error).__name__


def _profile_part(
  case: KernelCase, directory: str, time_limit: float, stop: threading.Event | None
) -> Row:
  if case.program:
    try:
      return _compile(case, directory, time_limit, simulate=False, stop=stop)
    except ENDS:
      raise
    except _UNPRICED as error:
      return _failed(case, error)
  try:
    return _compile(case, directory, time_limit, simulate=True, stop=stop)
  except ENDS:
    raise
  except (
    compiler.CompileTimeoutError,
    compiler.CompileMemoryError,
    compiler.CompilerAbortedError,
  ) as error:
    # A simulation can take minutes and GiB, or abort, for what compiles in seconds.
    why = _first_line(error)
  except _UNPRICED as error:
    return _failed(case, error)
  try:
    row = _compile(case, directory, time_limit, simulate=False, stop=stop)
    return dataclasses.replace(row, note=f"no cycles from the simulation of the schedule: {why}")
  except _UNPRICED as error:
    return _failed(case, error)


def _failed(case: KernelCase, error: Exception) -> Row:
  return Row(
    name=case.name,
    part=case.part,
    gflop=case.flops / 1e9,
    mib=case.bytes / 2**20,
    floor_us=floor_seconds(case) * 1e6,
    error="\n".join(_said(error)) or type(error).__name__,
  )


def _compile(
  case: KernelCase,
  directory: str,
  time_limit: float,
  *,
  simulate: bool,
  stop: threading.Event | None = None,
) -> Row:
  out = pathlib.Path(directory)
  profiles, schedules = out.with_suffix(".profiles"), out.with_suffix(".schedules")
  flags = []
  if not case.program:
    flags = [f"--xla_jf_dump_to={schedules}", "--xla_jf_dump_llo_text=true"]
  if simulate:
    flags.append(f"--xla_jf_dump_static_llo_profile_to={profiles}")
  try:
    result = compiler.compile_program(
      compiler.Request(
        builder=case.builder,
        arguments=case.arguments,
        directory=directory,
        full=True,
        time_limit=time_limit,
        memory_limit=_MEMORY_LIMIT,
        init_args=" ".join(flags),
      ),
      stop,
    )
    if "compiled" not in result.stages:
      raise compiler.ProgramError(f"the compiler refused the program: {result.verdict.detail}")
    seconds = result.stages["compiled"] - result.stages["lowered"]
    text = result.hlo.read_text()
    cpu = result.cpu_seconds
    if case.program:
      return dataclasses.replace(program_row(case, text, seconds), cpu_s=cpu)
    found = schedule.read(
      text,
      case.kernel,
      schedule.read_cycles(profiles) if simulate else None,
      schedules,
    )
    return dataclasses.replace(make_row(case, found, seconds), cpu_s=cpu)
  finally:
    for folder in (out, profiles, schedules):
      shutil.rmtree(folder, ignore_errors=True)


HEADINGS = (
  *("kernel", "GFLOP", "MiB", "static cycles", "floor us", "static us", "ratio", "of peak"),
  *("VMEM MiB", "spills", "bundles", "compile s", "CPU s"),
)


def cells(row: Row) -> list[str]:
  """A row's cells, in the order of `HEADINGS`."""
  sizes = [row.name, f"{row.gflop:.1f}", f"{row.mib:.1f}"]
  if row.error:
    reason = row.error.splitlines()[0][:90]
    return [*sizes, f"none: {reason}", f"{row.floor_us:.0f}", *[""] * 8]
  known = lambda text: text if row.ratio else "-"
  return [
    *sizes,
    f"{row.cycles:,}" if row.cycles else "-",
    f"{row.floor_us:.0f}",
    *(known(f"{row.static_us:.0f}"), known(f"{row.ratio:.2f}"), known(f"{row.peak:.0%}")),
    *((f"{row.vmem_mib:.1f}", str(row.spills), f"{row.bundles:,}") if row.bundles else "---"),
    *(f"{seconds:.0f}" if seconds else "-" for seconds in (row.compile_s, row.cpu_s)),
  ]


def line(row: Row) -> str:
  """One line of progress."""
  known = [f"{row.cycles:,} cycles"] if row.cycles else []
  said = row.error or row.note or f"{row.ratio:.2f} x the floor"
  return f"{row.name}: " + "; ".join([*known, said])


def show(rows: Sequence[Row], console: Console | None = None) -> None:
  """Prints the table."""
  console = console or Console()
  if not console.is_terminal:
    console.width = 200
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
  for heading in HEADINGS:
    table.add_column(heading, justify="left" if heading == "kernel" else "right")
  for row in rows:
    table.add_row(*cells(row))
  console.print(table)
  for row in rows:
    if row.error or row.note:
      console.print(f"{row.name}: {row.error or row.note}", highlight=False, markup=False)


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
  """Rows as plain data."""
  return [dataclasses.asdict(row) for row in rows]


def write_json(rows: Sequence[Row], path: str) -> None:
  """Writes rows as JSON."""
  outputs.write(path, json.dumps(to_json(rows), indent=1) + "\n")


def read_json(path: str) -> dict[str, Row]:
  """Rows that `write_json` wrote, by name; none where there is no such file.

  Raises:
    options.UserError: The file is something else.
  """
  try:
    return {row["name"]: Row(**row) for row in json.loads(pathlib.Path(path).read_text())}
  except FileNotFoundError:
    return {}
  except (ValueError, TypeError, KeyError) as error:
    raise options.UserError(
      f"{path} holds no rows of this report ({error}); name another file for --json"
    ) from None


def same_work(row: Row | None, case: KernelCase, *, whole: bool) -> bool:
  """Whether a row tells something of what the case is now; nothing says that its kernel is still the same."""
  return (
    row is not None
    and not row.error
    and row.of_whole == (whole and case.whole is not None)
    and (row.part, row.gflop, row.mib) == (case.part, case.flops / 1e9, case.bytes / 2**20)
  )


def markdown(rows: Sequence[Row]) -> str:
  """The table in Markdown, with the part of the work each case is."""
  headings = [*HEADINGS, "part", "note"]
  lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
  lines += ["| " + " | ".join([*cells(row), row.part, row.note]) + " |" for row in rows]
  return "\n".join(lines) + "\n"


def write_markdown(rows: Sequence[Row], path: str) -> None:
  """Writes the table as Markdown."""
  outputs.write(path, markdown(rows))


def plot(rows: Sequence[Row], path: str) -> None:
  """Writes a bar chart: static time over the floor."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  live = [row for row in rows if row.ratio]
  figure, axes = plt.subplots(figsize=(10, 1 + 0.35 * max(len(live), 1)), layout="constrained")
  bars = axes.barh([row.name for row in live], [row.ratio for row in live])
  axes.bar_label(bars, labels=[f"{row.ratio:.2f}" for row in live], padding=3)
  axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
  axes.set_xlabel("least time of the kernel / floor of its shapes")
  axes.invert_yaxis()
  outputs.write_chart(figure, path, dpi=110)
  plt.close(figure)
