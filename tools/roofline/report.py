"""A priced step as a table, as JSON and as a bar chart."""

from __future__ import annotations

import json

from rich import box
from rich.console import Console
from rich.table import Table

from kernels.base import outputs
from kernels.base.mesh import AXES
from tools.roofline.roofline import Component, Roofline


def _number(value: float, digits: int = 3) -> str:
  return f"{value:.{digits}f}" if value else "-"


def table(roofline: Roofline) -> Table:
  """Components by row; FLOPs, bytes and seconds by column, per chip and step."""
  axes = [axis for axis in AXES if f"wire:{axis}" in roofline.seconds]
  out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
  out.add_column("per chip and step")
  headings = ["fwd TF", "bwd TF", "replay TF", "HBM TB", *(f"{a} GB" for a in axes), "host GB"]
  headings += ["compute s", "HBM s", *(f"{a} s" for a in axes), "host s", "floor s"]
  for heading in headings:
    out.add_column(heading, justify="right")
  for component in roofline.components:
    out.add_row(f"{component.name} ({component.dtype})", *_cells(component, axes))
  total = Component(name="total")
  for component in roofline.components:
    total.forward += component.forward
    total.backward += component.backward
    total.replay += component.replay
    total.hbm += component.hbm
    total.host += component.host
    for axis, n in component.wire.items():
      total.wire[axis] = total.wire.get(axis, 0.0) + n
  total.seconds = {k: v for k, v in roofline.seconds.items() if k != "floor"}
  out.add_section()
  out.add_row("total", *_cells(total, axes), style="bold")
  return out


def _cells(component: Component, axes: list[str]) -> list[str]:
  cells = [_number(f / 1e12, 1) for f in (component.forward, component.backward, component.replay)]
  cells.append(_number(component.hbm / 1e12, 2))
  cells += [_number(component.wire.get(axis, 0.0) / 1e9, 1) for axis in axes]
  cells.append(_number(component.host / 1e9, 1))
  resources = ("compute", "hbm", *(f"wire:{axis}" for axis in axes), "host")
  cells += [_number(component.seconds.get(r, 0.0)) for r in resources]
  return [*cells, _number(component.floor)]


def summary(roofline: Roofline, measured_seconds: float | None = None) -> list[str]:
  """Lines under the table."""
  work = roofline.workload
  dims = work.dims
  slowest = max((k for k in roofline.seconds if k != "floor"), key=roofline.seconds.__getitem__)
  floor = roofline.floor
  bare = roofline.compute_seconds(replay=False)
  lines = [
    f"{dims.total_params / 1e9:.2f} B parameters, {dims.active_params / 1e9:.2f} B active; "
    f"mesh {work.mesh} = {work.mesh.devices} devices, {work.chips} {work.chip.name} chips",
    f"{work.step_tokens:,} tokens a step = {work.micro_batches} x {work.rows} rows x "
    f"{work.row_tokens:,}; {work.device_tokens:,.0f} a micro-batch and device; effective length "
    f"{work.segment_length:,.0f}",
    f"floor {floor:.2f} s ({slowest}, the largest sum of a column), "
    f"{roofline.tokens_per_second_per_chip(floor):,.0f} tokens/s/chip, MFU {roofline.mfu(floor):.1%}; products without replay {bare:.2f} s",
  ]
  if measured_seconds:
    lines.append(
      f"at {measured_seconds:g} s: "
      f"{roofline.tokens_per_second_per_chip(measured_seconds):,.0f} tokens/s/chip, "
      f"MFU {roofline.mfu(measured_seconds):.1%}, {measured_seconds / floor:.2f} x the floor"
    )
  lines += [f"{name}: {value / 1e9:.2f} GB" for name, value in roofline.notes.items()]
  return lines


def show(
  roofline: Roofline, measured_seconds: float | None = None, console: Console | None = None
) -> None:
  """Prints table and summary; piped output is not cut at a terminal's width."""
  console = console or Console(soft_wrap=True)
  if not console.is_terminal:
    console.width = 250
  console.print(table(roofline))
  for line in summary(roofline, measured_seconds):
    console.print(line, highlight=False)


def write_json(roofline: Roofline, path: str) -> None:
  """Writes everything as JSON."""
  outputs.write(path, json.dumps(roofline.to_json(), indent=2) + "\n")


def plot(roofline: Roofline, path: str) -> None:
  """Writes a bar chart: components stacked on each resource, seconds per step."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  resources = [r for r in roofline.seconds if r != "floor"]
  figure, axes = plt.subplots(figsize=(10, 1.2 + 0.7 * len(resources)), layout="constrained")
  colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
  start = dict.fromkeys(resources, 0.0)
  for index, component in enumerate(roofline.components):
    widths = [component.seconds.get(r, 0.0) for r in resources]
    if not any(widths):
      continue
    axes.barh(
      resources,
      widths,
      left=[start[r] for r in resources],
      color=colours[index % len(colours)],
      label=component.name,
    )
    for resource, width in zip(resources, widths):
      start[resource] += width
  axes.axvline(roofline.floor, color="black", linestyle="--", linewidth=1)
  axes.set_xlabel(f"seconds per step at peak rates; floor {roofline.floor:.2f} s")
  axes.set_title(f"mesh {roofline.workload.mesh}, {roofline.workload.chip.name}")
  axes.invert_yaxis()
  axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
  outputs.write_chart(figure, path, dpi=120)
  plt.close(figure)
