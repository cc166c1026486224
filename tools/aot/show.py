"""A report as tables on a terminal, as JSON, and as plots."""

from __future__ import annotations

import json

from rich import box
from rich.console import Console
from rich.table import Table

from kernels.base import outputs
from tools.aot.origins import PASSES
from tools.aot.report import Report

GIB = 2**30


def amount(count: float) -> str:
  """Bytes in the largest binary unit that leaves at least one."""
  for unit in ("B", "KiB", "MiB", "GiB"):
    if abs(count) < 1024 or unit == "GiB":
      return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
    count /= 1024
  raise AssertionError


def path(trips: tuple[int, ...]) -> str:
  """Loops around something: trip counts from the outside in."""
  return " x ".join(map(str, trips)) if trips else "-"


def _table(title: str, *columns: str) -> Table:
  table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
  for column in columns:
    left = column.startswith("<")
    table.add_column(column.lstrip("<"), justify="left" if left else "right", overflow="fold")
  return table


def tables(report: Report, rows: int = 25) -> list[Table]:
  """The report's tables: memory, collectives, loops, calls, estimate."""
  out = [_estimate(report), _resources(report), _collectives(report, rows)]
  if report.buffers:
    out.append(_buffers(report, rows))
  return [*out, _loops(report, rows), _calls(report)]


def _estimate(report: Report) -> Table:
  table = _table("Estimated ms by component, waits included", "<component", *PASSES, "sum", "share")
  for component, passes in report.components.items():
    total = sum(passes.values())
    cells = [f"{passes[p] * 1e3:.2f}" for p in PASSES]
    table.add_row(
      component, *cells, f"{total * 1e3:.2f}", f"{total / max(report.seconds, 1e-12):.1%}"
    )
  return table


def _resources(report: Report) -> Table:
  table = _table("Resources", "<resource", "busy ms", "waited for ms")
  for name, entry in report.resources.items():
    table.add_row(name, f"{entry['busy'] * 1e3:.2f}", f"{entry['exposed'] * 1e3:.2f}")
  return table


def _collectives(report: Report, rows: int) -> Table:
  table = _table(
    f"Collectives (dearest {min(rows, len(report.collectives))} of {len(report.collectives)})",
    *("<kind", "<axes", "<dtype", "payload", "<loops", "inst", "runs", "<how"),
    *("link ms", "waited ms", "work between ms", "<pass", "<operation"),
  )
  for row in report.collectives[:rows]:
    how = ("async" if row.is_async else "sync") + (" SC" if row.offloaded else "")
    table.add_row(
      *(row.kind, "+".join(row.axes), ",".join(row.dtypes), amount(row.payload_bytes)),
      *(path(row.loops), str(row.instructions), str(row.runs), how),
      *(f"{row.seconds * 1e3:.2f}", f"{row.exposed * 1e3:.2f}", f"{row.window * 1e3:.2f}"),
      *(row.pass_name, row.origin),
    )
  return table


def _buffers(report: Report, rows: int) -> Table:
  table = _table("Largest buffers", "size", "<shape", "<kind", "<component", "<operation", "<name")
  for row in report.buffers[:rows]:
    table.add_row(amount(row.bytes), row.shape, row.kind, row.component, row.origin, row.name[:48])
  return table


def _loops(report: Report, rows: int) -> Table:
  table = _table("Loops", "<trips", "instructions", "one trip ms", "all ms", "<operation")
  for row in sorted(report.loops, key=lambda r: -r.seconds * r.path[-1] * r.runs)[:rows]:
    trips = path(row.path) + ("" if row.known else " ?")
    whole = row.seconds * row.path[-1] * row.runs
    table.add_row(
      trips, str(row.instructions), f"{row.seconds * 1e3:.3f}", f"{whole * 1e3:.2f}", row.origin
    )
  return table


def _calls(report: Report) -> Table:
  table = _table("Custom calls", "<name", "<pass", "inst", "runs", "TFLOP", "HBM", "ms")
  for row in report.custom_calls:
    table.add_row(
      *(row.name, row.pass_name, str(row.instructions), str(row.runs)),
      *(f"{row.flops / 1e12:.2f}", amount(row.hbm_bytes), f"{row.seconds * 1e3:.2f}"),
    )
  return table


def summary(report: Report) -> list[str]:
  """Lines above the tables."""
  mesh = ", ".join(f"{axis} {size}" for axis, size in report.mesh.items())
  lines = [f"{report.name}: " + (f"mesh {mesh}" if mesh else "mesh not given: axes are unknown")]
  if report.fits:
    lines.append(f"HBM {report.fits}; host memory {amount(report.host_bytes)}")
  fusions = ", ".join(f"{n} {kind}" for kind, n in report.fusions.items())
  lines.append(
    f"{report.instructions:,} instructions, {report.loop_instructions:,} of them in loops;"
    f" fusions: {fusions or 'none'}; SparseCore operations: {report.sparsecore}"
  )
  lines.append(
    f"estimated {report.seconds * 1e3:.2f} ms a run, {report.flops / 1e12:.2f} TFLOP a device,"
    f" {amount(report.host_transfer_bytes)} to and from the host"
  )
  if report.seconds_by_rule != report.seconds:
    ratio = report.seconds / max(report.seconds_by_rule, 1e-12)
    lines.append(
      f"with the compiler's cycles; by FLOPs and bytes alone {report.seconds_by_rule * 1e3:.2f} ms,"
      f" ratio {ratio:.2f}"
    )
  for what, runs in report.unknown.items():
    lines.append(f"not priced ({runs} runs): {what}")
  return lines


def show(report: Report, console: Console | None = None, rows: int = 25) -> None:
  """Prints everything; piped output is not cut at a terminal's width."""
  console = console or Console()
  if not console.is_terminal:
    console.width = 220
  for line in summary(report):
    console.print(line, highlight=False, markup=False)
  for table in tables(report, rows):
    console.print(table)


def write_json(report: Report, file: str) -> None:
  """Writes the report as JSON, from which `report.read` makes it again."""
  outputs.write(file, json.dumps(report.to_json(), indent=1) + "\n")


def plot(report: Report, file: str) -> None:
  """Writes a picture: seconds by component and pass, resources, largest buffers."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, (left, middle, right) = plt.subplots(1, 3, figsize=(18, 6), layout="constrained")
  names = list(report.components)
  start = [0.0] * len(names)
  for name in PASSES:
    widths = [report.components[c][name] * 1e3 for c in names]
    left.barh(names, widths, left=start, label=name)
    start = [a + b for a, b in zip(start, widths)]
  left.set_xlabel("estimated ms, waits included")
  left.set_title(f"components: {report.seconds * 1e3:.1f} ms")
  left.invert_yaxis()
  left.legend()
  names = list(report.resources)
  middle.barh(names, [report.resources[n]["busy"] * 1e3 for n in names], label="busy", alpha=0.4)
  middle.barh(names, [report.resources[n]["exposed"] * 1e3 for n in names], label="waited for")
  middle.set_xlabel("ms")
  middle.set_title("resources")
  middle.invert_yaxis()
  middle.legend()
  largest = report.buffers[:16]
  labels = [f"{b.shape} {b.component or b.kind} #{k}" for k, b in enumerate(largest)]
  right.barh(labels, [b.bytes / GIB for b in largest])
  right.set_xlabel("GiB")
  right.set_title("largest buffers")
  right.invert_yaxis()
  figure.suptitle(f"{report.name}: {report.fits}" if report.fits else report.name)
  outputs.write_chart(figure, file, dpi=100)
  plt.close(figure)
