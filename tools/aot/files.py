"""Makes a report from files: HLO text with its dump beside it, or a report's JSON."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Sequence

from kernels.base import options
from tools.aot import report
from tools.roofline.machine import TPU7X, Grid, Mesh


def grid_of(mesh: str | None, axes: tuple[str, ...]) -> Grid | None:
  """Mesh axes from flags.

  Args:
    mesh: fsdp x expert x context, such as 32x2x4.
    axes: name:size each, in device order, for programs with other axes.

  Raises:
    options.OptionError: Neither form fits, or an axis is named twice.
  """
  try:
    if mesh:
      grid = Mesh.parse(mesh).grid(TPU7X)
    elif axes:
      pairs = [part.split(":") for part in axes]
      if any(len(p) != 2 or not p[0] or not p[1].isdecimal() or int(p[1]) < 1 for p in pairs):
        raise ValueError("want name:size each, such as fsdp:32,context:4")
      names = [name for name, _ in pairs]
      if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is named twice; name each axis once")
      grid = Grid({name: int(size) for name, size in pairs}, TPU7X)
    else:
      return None
    _ = grid.on_chip  # refuses axes that do not fill chips
    return grid
  except ValueError as error:
    given = f"--mesh={mesh}" if mesh else f"--mesh_axes={','.join(axes)}"
    raise options.OptionError(f"{given}: {error}") from error


def is_report(path: str) -> bool:
  """Whether a file is taken for a report's JSON, rather than HLO text."""
  return pathlib.Path(path).suffix == ".json"


def refuse_unread(settings: options.Settings, names: Sequence[str]) -> None:
  """Refuses options of HLO text where every input is a report, which has them in it.

  Raises:
    options.OptionError: One of them is given.
  """
  given = [f"--{name}" for name in names if getattr(settings, name)]
  if given and all(map(is_report, settings.positionals)):
    raise options.OptionError(
      f"{', '.join(given)}: only HLO text reads it, and a report ({', '.join(settings.positionals)}) has"
      " its own; leave it out"
    )


def load(path: str, grid: Grid | None = None, name: str = "") -> report.Report:
  """Reads a report's JSON, or makes a report from scheduled HLO text.

  Where the text is a dump, its memory report and buffer assignment are read from beside it.

  Raises:
    options.UserError: The file is not there, is neither a report nor HLO text, or is of a program
      for another number of devices.
  """
  file = pathlib.Path(path)
  if file.is_dir():
    raise options.UserError(f"{path} is a directory; give HLO text or a report's JSON in it")
  if not file.is_file():
    raise options.UserError(f"{path}: no such file; give HLO text or a report's JSON")
  try:
    if is_report(path):
      return report.read(path)
    stem = file.name.removesuffix(".txt")
    beside = lambda suffix: file.with_name(stem + suffix)
    read = lambda p: p.read_text() if p.is_file() else ""
    text = file.read_text()
    _check_devices(text, grid)
    return report.make(
      text,
      grid,
      name=name,
      memory_report=read(beside("-memory-usage-report.txt")),
      buffer_assignment=read(beside("-buffer-assignment.txt")),
    )
  except json.JSONDecodeError as error:
    raise options.UserError(f"{path}: is no JSON ({error}); give a report's JSON") from error
  except UnicodeDecodeError as error:
    raise options.UserError(f"{path}: is no text; give scheduled HLO text, not a proto") from error
  except ValueError as error:
    raise options.UserError(f"{path}: {error}") from error


def _check_devices(text: str, grid: Grid | None) -> None:
  header = text[: text.find("\n")]
  counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
  if grid is None or not counts:
    return
  devices = math.prod(map(int, counts))
  if devices != grid.devices:
    axes = ", ".join(f"{axis} {size}" for axis, size in grid.sizes.items())
    raise ValueError(
      f"the program is for {devices} devices, the mesh ({axes}) has {grid.devices}; give the"
      " program's own"
    )
