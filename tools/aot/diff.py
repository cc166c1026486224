"""Two reports side by side: what changed in memory, collectives, loops and the estimate."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tools.aot.report import Report, kinds_in_loops
from tools.aot.show import amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """One compared quantity.

  Attributes:
    section: memory, collectives, instructions, estimate.
    name: What it is.
    a: Its value in A.
    b: Its value in B.
    unit: bytes, s, or an empty string for a count.
  """

  section: str
  name: str
  a: float
  b: float
  unit: str = ""

  @property
  def changed(self) -> bool:
    """Whether the two differ by more than rounding."""
    return abs(self.a - self.b) > 1e-9 * max(abs(self.a), abs(self.b))


def compare(a: Report, b: Report) -> list[Line]:
  """Every compared quantity of two reports, changed or not."""
  lines = [
    Line(section="memory", name="HBM", a=a.hbm_bytes, b=b.hbm_bytes, unit="bytes"),
    Line(section="memory", name="host", a=a.host_bytes, b=b.host_bytes, unit="bytes"),
  ]
  for name in _union(a.memory, b.memory):
    values: tuple[float, float] = a.memory.get(name, 0), b.memory.get(name, 0)
    lines.append(Line(section="memory", name=name, a=values[0], b=values[1], unit="bytes"))
  lines += _buffer_lines(a, b)
  found = kinds_in_loops(a), kinds_in_loops(b)
  for key in sorted(set(found[0]) | set(found[1])):
    kind, axes, looped = key
    name = f"{kind} {axes} {'in loops' if looped else 'outside'}"
    (i, r, p), (j, s, q) = (f.get(key, (0, 0, 0.0)) for f in found)
    lines.append(Line(section="collectives", name=f"{name}: instructions", a=i, b=j))
    lines.append(Line(section="collectives", name=f"{name}: runs", a=r, b=s))
    lines.append(Line(section="collectives", name=f"{name}: payload", a=p, b=q, unit="bytes"))
  for name in ("instructions", "loop_instructions", "sparsecore"):
    lines.append(
      Line(
        section="instructions",
        name=name.replace("_", " "),
        a=getattr(a, name),
        b=getattr(b, name),
      )
    )
  calls = [{f"{c.name}, {c.pass_name}": c.runs for c in report.custom_calls} for report in (a, b)]
  for name in _union(*calls):
    values = calls[0].get(name, 0), calls[1].get(name, 0)
    lines.append(Line(section="instructions", name=f"{name}: runs", a=values[0], b=values[1]))
  lines.append(Line(section="estimate", name="whole run", a=a.seconds, b=b.seconds, unit="s"))
  sums = [{n: sum(p.values()) for n, p in r.components.items()} for r in (a, b)]
  for name in _union(*sums):
    values = sums[0].get(name, 0.0), sums[1].get(name, 0.0)
    lines.append(Line(section="estimate", name=name, a=values[0], b=values[1], unit="s"))
  waits = [{n: e["exposed"] for n, e in r.resources.items()} for r in (a, b)]
  for name in _union(*waits):
    if name != "compute":
      values = waits[0].get(name, 0.0), waits[1].get(name, 0.0)
      lines.append(
        Line(section="estimate", name=f"waits for {name}", a=values[0], b=values[1], unit="s")
      )
  return lines


def _buffer_lines(a: Report, b: Report) -> list[Line]:
  """Largest buffers by shape and kind, where the two programs differ in how many they hold."""
  counts: list[dict[str, float]] = []
  for report in (a, b):
    held: dict[str, float] = {}
    for row in report.buffers:
      held[f"largest: {row.shape} {row.kind}"] = (
        held.get(f"largest: {row.shape} {row.kind}", 0) + row.bytes
      )
    counts.append(held)
  out = []
  for name in _union(*counts):
    values = counts[0].get(name, 0), counts[1].get(name, 0)
    out.append(Line(section="memory", name=name, a=values[0], b=values[1], unit="bytes"))
  return out


def _union(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
  return [*a, *(name for name in b if name not in a)]


def _show(value: float, unit: str) -> str:
  if unit == "bytes":
    return amount(value)
  return f"{value * 1e3:.3f} ms" if unit == "s" else f"{value:,.0f}"


def table(a: Report, b: Report, *, everything: bool = False) -> Table:
  """The changed lines, or all of them."""
  out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
  out.add_column("")
  out.add_column("what")
  for heading in (f"A {a.name}", f"B {b.name}", "B - A", "change"):
    out.add_column(heading, justify="right")
  section = ""
  for line in compare(a, b):
    if not (line.changed or everything):
      continue
    if line.section != section and section:
      out.add_section()
    difference = line.b - line.a
    sign = "+" if difference > 0 else "-" if difference < 0 else ""
    out.add_row(
      line.section if line.section != section else "",
      line.name,
      _show(line.a, line.unit),
      _show(line.b, line.unit),
      sign + _show(abs(difference), line.unit),
      f"{difference / line.a:+.1%}" if line.a else ("new" if line.b else ""),
    )
    section = line.section
  return out


def show(a: Report, b: Report, *, everything: bool = False, console: Console | None = None) -> None:
  """Prints the comparison."""
  console = console or Console()
  if not console.is_terminal:
    console.width = 200
  lines = compare(a, b)
  if not any(line.changed for line in lines) and not everything:
    console.print("no difference in memory, collectives, instructions or estimate")
    return
  console.print(table(a, b, everything=everything))
