"""One compiled program as a report: memory, collectives, loops, custom calls, estimate.

A report is plain data: what the tables, the plots and the comparison of two programs read, and
what JSON holds.
"""

from __future__ import annotations

import collections as std
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from tools.aot import costs, hlo, memory, origins, timeline
from tools.roofline.machine import TPU7X, Chip, Grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRow:
  """Collectives alike: same kind, axes, payload, loops, kernel of origin.

  Attributes:
    kind: Such as all-gather.
    axes: Mesh axes.
    dtypes: Element types.
    group_size: Devices in a group.
    payload_bytes: Of one run, per device.
    loops: Trip counts of the loops around it, outermost first.
    instructions: How many such instructions the program has.
    runs: How often they run in all.
    is_async: Whether other work can lie between start and done.
    offloaded: Whether they run on the SparseCores.
    wire_bytes: Bytes arriving at a chip by axis, all runs.
    seconds: On their links, all runs.
    exposed: What the program waits for, all runs.
    window: Work between start and done, seconds, all runs.
    origin: Tail of the traced operation's name.
    component: Component of the program.
    pass_name: forward, replay or backward.
    self_pairs: A permute's pairs that send to themselves.
  """

  kind: str
  axes: tuple[str, ...]
  dtypes: tuple[str, ...]
  group_size: int
  payload_bytes: int
  loops: tuple[int, ...]
  instructions: int
  runs: int
  is_async: bool
  offloaded: bool
  wire_bytes: dict[str, float]
  seconds: float
  exposed: float
  window: float
  origin: str
  component: str
  pass_name: str
  self_pairs: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopRow:
  """One loop: see `timeline.Loop`; `path` holds the trip counts around it and its own."""

  path: tuple[int, ...]
  instructions: int
  seconds: float
  runs: int
  known: bool
  origin: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferRow:
  """One large buffer, with the operation that makes it."""

  bytes: int
  shape: str
  kind: str
  name: str
  origin: str
  component: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallRow:
  """Custom calls of one name in one pass."""

  name: str
  pass_name: str
  instructions: int
  runs: int
  flops: float
  hbm_bytes: float
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Everything about one program.

  Attributes:
    name: Name of the module, or as given.
    mesh: Axes and sizes in device order; empty where not known.
    fits: The memory verdict in words; empty without a memory report.
    hbm_bytes: HBM per device.
    host_bytes: Host memory per device.
    memory: Bytes by kind: arguments, outputs, temporaries, spaces.
    buffers: Largest buffers.
    instructions: Instructions of the text.
    loop_instructions: Instructions inside loops, each counted once.
    fusions: Fusions by kind.
    loops: Loops in schedule order.
    collectives: Collectives, dearest first.
    custom_calls: Custom calls.
    sparsecore: SparseCore operations that are no collectives: number of instructions.
    seconds: Estimated seconds of one run.
    seconds_by_rule: The estimate from FLOPs and bytes alone, where `seconds` used cycles.
    components: Estimated seconds by component and pass; waits for collectives included.
    resources: Seconds that each resource is busy, and that the program waits for it.
    host_transfer_bytes: Bytes to and from the host, one run.
    flops: FLOPs of one run on one device.
    unknown: What is not priced, with the number of runs.
  """

  name: str
  mesh: dict[str, int]
  fits: str
  hbm_bytes: int
  host_bytes: int
  memory: dict[str, int]
  buffers: tuple[BufferRow, ...]
  instructions: int
  loop_instructions: int
  fusions: dict[str, int]
  loops: tuple[LoopRow, ...]
  collectives: tuple[CollectiveRow, ...]
  custom_calls: tuple[CallRow, ...]
  sparsecore: int
  seconds: float
  seconds_by_rule: float
  components: dict[str, dict[str, float]]
  resources: dict[str, dict[str, float]]
  host_transfer_bytes: float
  flops: float
  unknown: dict[str, int]

  def to_json(self) -> dict[str, Any]:
    """Plain data."""
    return dataclasses.asdict(self)


def from_json(data: dict[str, Any]) -> Report:
  """The report that `to_json` gave.

  Raises:
    ValueError: It is no report.
  """
  rows = {
    "buffers": BufferRow,
    "loops": LoopRow,
    "collectives": CollectiveRow,
    "custom_calls": CallRow,
  }
  if not isinstance(data, dict) or "buffers" not in data:
    raise ValueError("this JSON is no AOT report (//tools:aot_report --json writes one)")
  values = dict(data)
  try:
    for field, kind in rows.items():
      values[field] = tuple(
        kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
        for row in values[field]
      )
    return Report(**values)
  except (KeyError, TypeError) as error:
    raise ValueError(f"this JSON is no AOT report: {error}") from error


def read(path: str) -> Report:
  """Reads a report from a JSON file."""
  return from_json(json.loads(pathlib.Path(path).read_text()))


def _tail(op_name: str, parts: int = 3) -> str:
  """The end of an operation's name without the words of loops and transforms."""
  skipped = ("while", "body", "closed_call", "checkpoint", "rematted_computation", "shard_map")
  kept = [p for p in op_name.split("/")[1:] if p not in skipped and not p.startswith("jvp()")]
  kept = [p for p in kept if not p.startswith("transpose(jvp())")]
  return "/".join(kept[-parts:])


def make(
  text: str,
  grid: Grid | None = None,
  *,
  name: str = "",
  memory_report: str = "",
  buffer_assignment: str = "",
  analysis: dict[str, int] | None = None,
  chip: Chip = TPU7X,
  buffers: int = 24,
) -> Report:
  """Makes a report from what the compiler wrote.

  Args:
    text: Scheduled HLO text.
    grid: Mesh axes in device order.
    name: Name of the program; the module's by default.
    memory_report: Text of the memory report, if there is one.
    buffer_assignment: Text of the buffer assignment, if there is one.
    analysis: `memory_analysis()` in bytes, if there is one.
    chip: The chip.
    buffers: How many of the largest buffers to keep.

  Returns:
    The report.

  Raises:
    ValueError: The text is no scheduled HLO module.
  """
  module = hlo.parse(text)
  played = timeline.estimate(module, grid, chip=chip)
  by_rule = played
  if any(row.cycles is not None for row in played.rows):
    by_rule = timeline.estimate(module, grid, chip=chip, use_cycles=False)
  read_memory = memory.read_report(memory_report) if memory_report else None
  kinds = {k: v for k, v in (analysis or {}).items() if v}
  if read_memory:
    kinds |= {f"{name} (report)": s.total_bytes for name, s in read_memory.spaces.items()}
  names = origins.trace(module)
  found = memory.read_buffers(buffer_assignment) if buffer_assignment else []
  in_loops = _loop_instructions(module)
  return Report(
    name=name or module.name,
    mesh=dict(grid.sizes) if grid else {},
    fits=str(memory.judge(read_memory)) if read_memory else "",
    hbm_bytes=read_memory.hbm_bytes if read_memory else 0,
    host_bytes=_host_bytes(read_memory, found),
    memory=kinds,
    buffers=tuple(_buffer_row(b, names) for b in memory.largest(found, buffers)),
    instructions=module.instruction_count,
    loop_instructions=in_loops,
    fusions=_fusions(module),
    loops=tuple(_loop_rows(played)),
    collectives=tuple(_collective_rows(played, names)),
    custom_calls=tuple(_call_rows(played, names)),
    sparsecore=sum(row.resource == "sparsecore" for row in played.rows),
    seconds=played.seconds,
    seconds_by_rule=by_rule.seconds,
    components=_components(played, names),
    resources=_resources(played),
    host_transfer_bytes=sum(row.host_bytes for row in played.rows),
    flops=sum(row.flops for row in played.rows),
    unknown=played.unknown,
  )


def _host_bytes(report: memory.Report | None, buffers: Iterable[memory.Buffer]) -> int:
  counted = {(b.allocation, b.offset, b.bytes) for b in buffers if b.on_host}
  return max(report.host_bytes if report else 0, sum(size for _, _, size in counted))


def _buffer_row(buffer: memory.Buffer, names: dict[str, str]) -> BufferRow:
  name = re.sub(r"\{[\d,]*\}$", "", buffer.name)
  op_name = names.get(name, "")
  shape = hlo.parse_shapes(buffer.shape)
  return BufferRow(
    bytes=buffer.bytes,
    shape=str(shape[0]) if shape else buffer.shape,
    kind=f"{buffer.kind}, host" if buffer.on_host else buffer.kind,
    name=buffer.name,
    origin=_tail(op_name),
    component=origins.named_component(op_name),
  )


def _loop_instructions(module: hlo.Module) -> int:
  """Instructions of everything that loop bodies hold, fused and called ones too, once each."""
  seen: set[str] = set()
  for computation in module.computations.values():
    for instruction in computation.instructions:
      if instruction.opcode == "while":
        pending = [instruction.called["body"][0]]
        while pending:
          name = pending.pop()
          if name in seen or name not in module.computations:
            continue
          seen.add(name)
          for inner in module.computations[name].instructions:
            pending += [c for names in inner.called.values() for c in names]
  return sum(len(module.computations[name].instructions) for name in seen)


def _fusions(module: hlo.Module) -> dict[str, int]:
  found: std.Counter[str] = std.Counter()
  for computation in module.computations.values():
    for instruction in computation.instructions:
      if instruction.opcode == "fusion":
        found[instruction.attribute("kind")] += 1
  return dict(sorted(found.items()))


def _trips(played: timeline.Estimate) -> dict[str, int]:
  return {loop.name: loop.trips for loop in played.loops}


def _loop_rows(played: timeline.Estimate) -> Iterable[LoopRow]:
  trips = _trips(played)
  for loop in played.loops:
    yield LoopRow(
      path=(*(trips[name] for name in loop.loops), loop.trips),
      instructions=loop.instructions,
      seconds=loop.seconds,
      runs=loop.runs,
      known=loop.known,
      origin=_tail(loop.op_name),
    )


def _collective_rows(played: timeline.Estimate, names: dict[str, str]) -> list[CollectiveRow]:
  trips = _trips(played)
  groups: dict[Any, list[timeline.Row]] = {}
  for row in played.rows:
    if (c := row.collective) is None:
      continue
    key = (c.kind, c.axes, c.dtypes, c.payload_bytes, row.loops, c.is_async, c.offloaded)
    op_name = c.op_name or names[row.instruction.name]
    groups.setdefault((*key, _tail(op_name, 1), origins.pass_of(op_name)), []).append(row)
  out = []
  for rows in groups.values():
    first = rows[0]
    c = first.collective
    assert c is not None
    op_name = c.op_name or names[first.instruction.name]
    wire: dict[str, float] = {}
    for row in rows:
      for axis, arriving in row.axis_bytes.items():
        wire[axis] = wire.get(axis, 0.0) + arriving
    out.append(
      CollectiveRow(
        kind=c.kind,
        axes=c.axes,
        dtypes=c.dtypes,
        group_size=c.group_size,
        payload_bytes=c.payload_bytes,
        loops=tuple(trips[name] for name in first.loops),
        instructions=len(rows),
        runs=sum(row.count for row in rows),
        is_async=c.is_async,
        offloaded=c.offloaded,
        wire_bytes=wire,
        seconds=sum(row.busy for row in rows),
        exposed=sum(row.exposed for row in rows),
        window=sum(row.window or 0.0 for row in rows),
        origin=_tail(op_name),
        component=origins.component_of(op_name, "wire"),
        pass_name=origins.pass_of(op_name),
        self_pairs=c.self_pairs,
      )
    )
  return sorted(out, key=lambda r: (-r.seconds, r.kind, r.origin))


def _call_rows(played: timeline.Estimate, names: dict[str, str]) -> list[CallRow]:
  groups: dict[tuple[str, str], list[timeline.Row]] = {}
  for row in played.rows:
    if row.instruction.opcode == "custom-call":
      key = (costs.kernel_name(row.instruction), origins.pass_of(names[row.instruction.name]))
      groups.setdefault(key, []).append(row)
  return [
    CallRow(
      name=name,
      pass_name=pass_name,
      instructions=len(rows),
      runs=sum(r.count for r in rows),
      flops=sum(r.flops for r in rows),
      hbm_bytes=sum(r.hbm_bytes for r in rows),
      seconds=sum(r.busy for r in rows),
    )
    for (name, pass_name), rows in sorted(groups.items())
  ]


def _components(played: timeline.Estimate, names: dict[str, str]) -> dict[str, dict[str, float]]:
  out: dict[str, dict[str, float]] = {}
  for row in played.rows:
    op_name = (row.collective and row.collective.op_name) or names[row.instruction.name]
    component = origins.component_of(op_name, row.resource)
    passes = out.setdefault(component, dict.fromkeys(origins.PASSES, 0.0))
    passes[origins.pass_of(op_name)] += row.exposed
  return dict(sorted(out.items(), key=lambda item: -sum(item[1].values())))


def _resources(played: timeline.Estimate) -> dict[str, dict[str, float]]:
  out: dict[str, dict[str, float]] = {}
  for row in played.rows:
    shares = {f"wire:{a}": s for a, s in row.axis_seconds.items()} or {row.resource: row.busy}
    whole = sum(shares.values())
    for name, seconds in shares.items():
      entry = out.setdefault(name, {"busy": 0.0, "exposed": 0.0})
      entry["busy"] += seconds
      entry["exposed"] += row.exposed * (seconds / whole if whole else 0.0)
  return dict(sorted(out.items()))


def kinds_in_loops(report: Report) -> dict[tuple[str, str, bool], tuple[int, int, float]]:
  """Collectives summed by (kind, axes, inside a loop): instructions, runs, payload of all runs."""
  out: dict[tuple[str, str, bool], tuple[int, int, float]] = {}
  for row in report.collectives:
    key = (row.kind, "+".join(row.axes), bool(row.loops))
    a, b, c = out.get(key, (0, 0, 0.0))
    out[key] = (a + row.instructions, b + row.runs, c + row.runs * row.payload_bytes)
  return out
