"""Collectives of a module: kind, mesh axes, bytes, and what they bring onto the wire."""

from __future__ import annotations

import dataclasses
import math
import re

from tools.aot import hlo
from tools.roofline.machine import TPU7X, Grid

KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-broadcast",
  "collective-permute",
)
_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One collective instruction.

  Attributes:
    name: Name of the instruction in the schedule that runs it.
    kind: One of `KINDS`.
    axes: Mesh axes its groups span, "?" where the groups are no product of axes.
    group_size: Devices in a group.
    dtypes: Element types.
    payload_bytes: Bytes per device of its larger side: what is gathered, reduced or sent.
    is_async: Whether it is a start that a later done waits for.
    offloaded: Whether it runs on the SparseCores.
    op_name: The traced operation.
    self_pairs: A permute's pairs that send to themselves.
    pairs: A permute's pairs.
  """

  name: str
  kind: str
  axes: tuple[str, ...]
  group_size: int
  dtypes: tuple[str, ...]
  payload_bytes: int
  is_async: bool
  offloaded: bool
  op_name: str
  self_pairs: int = 0
  pairs: int = 0


def kind_of(opcode: str) -> str | None:
  """The collective kind of an opcode, with or without -start."""
  base = opcode.removesuffix("-start")
  return base if base in KINDS else None


def read(module: hlo.Module, instruction: hlo.Instruction, grid: Grid | None) -> Collective | None:
  """Reads the collective that an instruction is, or that the computation it calls holds.

  Args:
    module: The module.
    instruction: A scheduled instruction: a collective, an async start, a call or a fusion.
    grid: Mesh axes in device order, or None where they are not known.

  Returns:
    The collective, or None where the instruction is none.
  """
  inner = instruction
  if kind_of(inner.opcode) is None:
    wraps = inner.opcode in ("call", "fusion") or inner.opcode.endswith("-start")
    if not wraps or not inner.called:
      return None
    found = next((i for i in module.inside(inner) if kind_of(i.opcode)), None)
    if found is None:
      return None
    inner = found
  kind = kind_of(inner.opcode)
  assert kind is not None
  shapes = [s for s in inner.shapes if s.dims or s.dtype not in ("u32", "token")]
  if inner.opcode in ("all-gather-start", "collective-permute-start"):
    half = len(shapes) // 2  # operands, then as many results
    payload = max(sum(s.bytes for s in part) for part in (shapes[:half], shapes[half:]))
  else:
    payload = sum(s.bytes for s in shapes)
  pairs = self_pairs = 0
  if kind == "collective-permute":
    sends = _groups(inner.attribute("source_target_pairs"))
    pairs, self_pairs = len(sends), sum(a == b for a, b in sends)
    size = 2
    axes = _axes_of_pairs(sends, grid)
  else:
    first, count = _first_group(inner.attribute("replica_groups"))
    size = len(first) or (grid.devices if grid else 0)
    axes = axes_of_group(first, grid) if first else _all_axes(grid)
  if kind == "reduce-scatter":
    payload *= max(size, 1)  # its result is a share of what goes in
  return Collective(
    name=instruction.name,
    kind=kind,
    axes=axes,
    group_size=size,
    dtypes=tuple(dict.fromkeys(s.dtype for s in shapes)),
    payload_bytes=payload,
    is_async=instruction.opcode.endswith("-start"),
    offloaded="sparsecore" in instruction.attributes.lower(),
    op_name=inner.op_name or instruction.op_name,
    self_pairs=self_pairs,
    pairs=pairs,
  )


def _first_group(text: str) -> tuple[list[int], int]:
  """Device numbers of the first replica group, and the number of groups."""
  text = text.strip()
  if m := _IOTA.match(text):
    shape = [int(n) for n in m[1].split(",")]
    dims = [int(n) for n in m[2].split(",")]
    order = [int(n) for n in m[3].split(",")] if m[3] else list(range(len(dims)))
    size = math.prod(shape[1:]) if len(shape) > 1 else 1
    strides = [math.prod(dims[k + 1 :]) for k in range(len(dims))]
    turned, turned_strides = [dims[k] for k in order], [strides[k] for k in order]
    group = []
    for flat in range(size):
      number = 0
      for extent, stride in zip(reversed(turned), reversed(turned_strides)):
        number += flat % extent * stride
        flat //= extent
      group.append(number)
    return group, shape[0]
  groups = _groups(text)
  return (groups[0], len(groups)) if groups else ([], 0)


def _groups(text: str) -> list[list[int]]:
  """Groups of device numbers as written: {{0,1},{2,3}}."""
  return [
    [int(n) for n in group.split(",") if n.strip()] for group in re.findall(r"\{([\d, ]+)\}", text)
  ]


def _coordinates(number: int, grid: Grid) -> tuple[int, ...]:
  out = []
  for size in reversed(grid.sizes.values()):
    out.append(number % size)
    number //= size
  return tuple(reversed(out))


def axes_of_group(group: list[int], grid: Grid | None) -> tuple[str, ...]:
  """Axes along which a group of device numbers varies; ("?",) where it is no full product."""
  if grid is None or max(group) >= grid.devices:
    return ("?",)
  spots = [_coordinates(number, grid) for number in group]
  varying = [axis for k, axis in enumerate(grid.sizes) if len({spot[k] for spot in spots}) > 1]
  full = math.prod(grid.sizes[axis] for axis in varying)
  return tuple(varying) if full == len(set(group)) else ("?",)


def _all_axes(grid: Grid | None) -> tuple[str, ...]:
  return tuple(a for a, size in grid.sizes.items() if size > 1) if grid else ("?",)


def _axes_of_pairs(sends: list[list[int]], grid: Grid | None) -> tuple[str, ...]:
  if grid is None or not sends or max(map(max, sends)) >= grid.devices:
    return ("?",)
  moved: set[str] = set()
  for source, target in sends:
    a, b = _coordinates(source, grid), _coordinates(target, grid)
    moved |= {axis for k, axis in enumerate(grid.sizes) if a[k] != b[k]}
  return tuple(axis for axis in grid.sizes if axis in moved)


def wire_bytes(collective: Collective, grid: Grid | None) -> dict[str, float]:
  """Bytes that arrive at one chip by axis.

  A gather over several axes goes axis by axis, innermost first, so that the longest way carries
  whole blocks only once; a reduce-scatter is its reverse, an all-reduce one of each.  Groups that
  are no product of axes are charged as one axis "?" with nothing inside a chip.
  """
  payload, size = collective.payload_bytes, max(collective.group_size, 1)
  if collective.kind == "collective-permute":
    live = 1 - collective.self_pairs / max(collective.pairs, 1)
    streams = grid.devices_per_chip if grid else 1
    axes = [a for a in collective.axes if grid and a != "?" and grid.chip_extent[a] > 1]
    if grid and "?" not in collective.axes:
      return {axes[0]: payload * streams * live} if axes else {}
    return {"?": payload * streams * live}
  times = 2 if collective.kind == "all-reduce" else 1
  if grid is None or "?" in collective.axes:
    streams = grid.devices_per_chip if grid else 1
    return {"?": times * streams * payload * (size - 1) / size}
  if "all-to-all" in collective.kind:
    # Each device keeps its own share; what goes to other chips crosses their axis.
    out = {}
    for axis in collective.axes:
      extent = grid.chip_extent[axis]
      if extent > 1:
        out[axis] = grid.devices_per_chip * payload * (extent - 1) / extent
    return out
  out, block = {}, payload / size
  for axis in reversed(list(grid.sizes)):
    if axis in collective.axes:
      if arriving := grid.gathered(axis, block):
        out[axis] = times * arriving
      block *= grid.sizes[axis]
  return out


def wire_seconds(collective: Collective, grid: Grid | None) -> dict[str, float]:
  """Seconds on each axis at the link rate; an unknown axis is given two links."""
  out = {}
  for axis, arriving in wire_bytes(collective, grid).items():
    links = grid.links[axis] if grid and axis != "?" else 2
    rate = (grid.chip if grid else TPU7X).link_bytes_per_second
    out[axis] = arriving / (links * rate)
  return out
