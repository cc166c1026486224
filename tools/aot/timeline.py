"""The estimate: a scheduled module played on one device, by written rules.

1. An instruction takes max(FLOPs / peak, HBM bytes / HBM rate).  Where the text has the compiler's
   cycles, it takes max of that and cycles / clock, cycles of memory-bound work first divided by
   what the compiler is known to over-estimate them by.
2. A loop takes its body times its trip count, a conditional its longest branch.
3. A collective takes its bytes over the links of its axes.  A synchronous one adds all of that.
   An asynchronous one starts when the schedule starts it and the axis is free, and adds only what
   is left of it when the schedule reaches its done.
4. SparseCore work, copies between memory spaces and host transfers are asynchronous in the same
   way, each on a resource of its own: SparseCore and copies at the HBM rate, host transfers at the
   host link's.
5. What cannot be priced is listed, never zero in silence.

Nothing here is a measurement: seconds are for comparing programs, and for finding what a program
waits for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tools.aot import collectives, costs, hlo
from tools.roofline.machine import TPU7X, Chip, Grid

CLOCK_HZ = 2.2e9
MEMORY_BOUND_CYCLES = 2.65  # the compiler's cycles of memory-bound fusions over the real ones
_MAX_DEPTH = 40


@dataclasses.dataclass(kw_only=True)
class Row:
  """One scheduled instruction, over the whole program.

  Attributes:
    instruction: The instruction.
    computation: Name of the computation that schedules it.
    loops: Names of the loops around it, outermost first.
    count: How often it runs.
    resource: compute, wire, sparsecore, copy, host in, host out.
    busy: Seconds its resource works, all runs.
    exposed: Seconds the program waits for it, all runs.
    window: For asynchronous work, seconds of other work between start and done, all runs.
    flops: FLOPs of all runs.
    hbm_bytes: HBM bytes of all runs.
    host_bytes: Bytes to or from the host, all runs.
    collective: The collective, if it is one.
    axis_seconds: A collective's seconds by axis, all runs.
    axis_bytes: Bytes it brings to a chip by axis, all runs.
    unknown: What is not priced, or an empty string.
    cycles: The compiler's cycles of one run, if given.
  """

  instruction: hlo.Instruction
  computation: str
  loops: tuple[str, ...]
  count: int
  resource: str = "compute"
  busy: float = 0.0
  exposed: float = 0.0
  window: float | None = None
  flops: float = 0.0
  hbm_bytes: float = 0.0
  host_bytes: float = 0.0
  collective: collectives.Collective | None = None
  axis_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  axis_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
  unknown: str = ""
  cycles: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
  """One while loop.

  Attributes:
    name: The instruction's name.
    loops: Loops around it.
    trips: Trip count; 1 where it is unknown.
    known: Whether the condition told the trip count.
    instructions: Instructions of its body, of those it calls too.
    op_name: The traced operation.
    seconds: One iteration.
    runs: How often the loop as a whole runs.
  """

  name: str
  loops: tuple[str, ...]
  trips: int
  known: bool
  instructions: int
  op_name: str
  seconds: float
  runs: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """A played module.

  Attributes:
    seconds: Of one run of the program on one device.
    rows: Its scheduled instructions that cost something.
    loops: Its loops, in schedule order.
    unknown: What could not be priced, with the number of runs.
    conditionals: Conditionals charged with their longest branch.
  """

  seconds: float
  rows: tuple[Row, ...]
  loops: tuple[Loop, ...]
  unknown: dict[str, int]
  conditionals: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
  """Rates of one device, from its chip."""

  flops: Mapping[str, float]
  hbm: float
  host: float

  @classmethod
  def of(cls, chip: Chip) -> Rates:
    """A device's share of the chip."""
    return cls(
      flops={k: chip.peak(k) / chip.devices for k in ("bf16", "fp8")},
      hbm=chip.hbm_bytes_per_second / chip.devices,
      host=chip.host_bytes_per_second / chip.devices,
    )


@dataclasses.dataclass(frozen=True)
class _Begun:
  """Asynchronous work under way: when the schedule started it, when it will be done."""

  start: float
  finish: float
  row: Row


class _Player:
  def __init__(self, module: hlo.Module, grid: Grid | None, chip: Chip, use_cycles: bool):
    self.module, self.grid, self.rates = module, grid, Rates.of(chip)
    self.use_cycles = use_cycles
    self.rows: list[Row] = []
    self.loops: list[Loop] = []
    self.conditionals = 0

  def play(
    self, computation: hlo.Computation, loops: tuple[str, ...], count: int, depth: int = 0
  ) -> float:
    """Seconds of one run of a computation; adds a row per instruction for all its runs."""
    if depth > _MAX_DEPTH:
      raise ValueError(f"HLO text: computations nested deeper than {_MAX_DEPTH}")
    now = 0.0
    free: dict[str, float] = {}  # when each asynchronous resource is next free
    pending: dict[str, _Begun] = {}
    for instruction in computation.instructions:
      opcode = instruction.opcode
      if opcode == "while":
        now += self._loop(computation, instruction, loops, count, depth)
      elif opcode == "conditional":
        self.conditionals += 1
        branches = list(self.module.called_by(instruction))
        now += max((self.play(b, loops, count, depth + 1) for b in branches), default=0.0)
      elif opcode.endswith("-done") and instruction.operands:
        begun = pending.pop(self._start_of(computation, instruction), None)
        if begun is not None:
          begun.row.window = (now - begun.start) * count
          begun.row.exposed = max(0.0, begun.finish - now) * count
          now = max(now, begun.finish)
      elif opcode.endswith("-update") and instruction.operands:
        continue  # a link of the chain from start to done
      elif opcode == "call" and self._is_plain(instruction):
        for called in self.module.called_by(instruction):
          now += self.play(called, loops, count, depth + 1)
      else:
        row = self._row(computation, instruction, loops, count)
        if row is None:
          continue
        self.rows.append(row)
        once = row.busy / count
        if opcode.endswith("-start"):
          lanes = [f"wire:{a}" for a in row.axis_seconds] or [row.resource]
          begin = max([now, *(free.get(lane, 0.0) for lane in lanes)])
          for lane in lanes:
            free[lane] = begin + once
          pending[instruction.name] = _Begun(now, begin + once, row)
        else:
          row.exposed = row.busy
          now += once
    for begun in pending.values():  # never waited for: it ends with the computation
      begun.row.exposed = max(0.0, begun.finish - now) * count
    return max([now, *(begun.finish for begun in pending.values())])

  def _is_plain(self, instruction: hlo.Instruction) -> bool:
    """Whether a call runs ordinary instructions here, not one SparseCore operation."""
    return "sparsecore" not in instruction.attributes.lower()

  def _start_of(self, computation: hlo.Computation, done: hlo.Instruction) -> str:
    """Name of the start that a done waits for, through updates."""
    name = done.operands[0]
    for _ in range(_MAX_DEPTH):
      value = computation.by_name.get(name)
      if value is None or value.opcode.endswith("-start") or not value.operands:
        break
      name = value.operands[0]
    return name

  def _loop(
    self,
    computation: hlo.Computation,
    instruction: hlo.Instruction,
    loops: tuple[str, ...],
    count: int,
    depth: int,
  ) -> float:
    trips = hlo.trip_count(self.module, instruction, computation)
    body = self.module.computations[instruction.called["body"][0]]
    at = len(self.loops)
    self.loops.append(None)  # type: ignore[arg-type]
    runs = trips if trips is not None else 1
    once = 0.0
    if runs:
      once = self.play(body, (*loops, instruction.name), count * runs, depth + 1)
    self.loops[at] = Loop(
      name=instruction.name,
      loops=loops,
      trips=runs,
      known=trips is not None,
      instructions=self._size(body),
      op_name=instruction.op_name,
      seconds=once,
      runs=count,
    )
    return runs * once

  def _size(self, body: hlo.Computation) -> int:
    """Instructions of a loop's body, inner loops' bodies too, fused ones not."""
    total = len(body.instructions)
    for instruction in body.instructions:
      if instruction.opcode in ("while", "conditional", "call"):
        total += sum(self._size(c) for c in self.module.called_by(instruction))
    return total

  def _row(
    self,
    computation: hlo.Computation,
    instruction: hlo.Instruction,
    loops: tuple[str, ...],
    count: int,
  ) -> Row | None:
    collective = collectives.read(self.module, instruction, self.grid)
    base = Row(instruction=instruction, computation=computation.name, loops=loops, count=count)
    if collective is not None:
      seconds = collectives.wire_seconds(collective, self.grid)
      base.resource, base.collective = "wire", collective
      base.axis_seconds = {axis: s * count for axis, s in seconds.items()}
      arriving = collectives.wire_bytes(collective, self.grid)
      base.axis_bytes = {axis: n * count for axis, n in arriving.items()}
      base.busy = sum(base.axis_seconds.values())
      if "?" in collective.axes:
        base.unknown = (
          f"{collective.kind} over groups of {collective.group_size}: no axis of the mesh"
        )
      return base
    if host := _host_bytes(instruction, computation):
      out = any(s.space == hlo.HOST for s in instruction.shapes[:1])
      base.resource, base.host_bytes = "host out" if out else "host in", host * count
      base.busy = host * count / self.rates.host
      return base
    one = costs.cost(self.module, computation, instruction)
    base.flops = sum(one.flops.values()) * count
    base.hbm_bytes, base.unknown, base.cycles = one.hbm_bytes * count, one.unknown, one.cycles
    compute = sum(f / self.rates.flops[kind] for kind, f in one.flops.items())
    memory = one.hbm_bytes / self.rates.hbm
    seconds_once = max(compute, memory)
    if one.cycles is not None and self.use_cycles:
      said = one.cycles / CLOCK_HZ
      seconds_once = max(seconds_once, said / MEMORY_BOUND_CYCLES if memory > compute else said)
    base.busy = seconds_once * count
    if "sparsecore" in instruction.attributes.lower():
      base.resource = "sparsecore"
    elif instruction.opcode.endswith("-start"):
      base.resource = "copy"
    return base if base.busy or base.unknown else None


def _host_bytes(instruction: hlo.Instruction, computation: hlo.Computation) -> int:
  """Bytes that an instruction moves between HBM and host memory."""
  opcode = instruction.opcode
  if opcode in costs.FREE or opcode.endswith("-done") or opcode in ("while", "custom-call"):
    return 0
  spaces = [s for s in instruction.shapes if s.space == hlo.HOST]
  if opcode == "copy-start":
    ends = instruction.shapes[:2]
    if len({s.space == hlo.HOST for s in ends}) == 2:
      return next(s.bytes for s in ends if s.space == hlo.HOST)
    return 0
  operands = [computation.by_name[n] for n in instruction.operands if n in computation.by_name]
  read = [s for o in operands for s in o.shapes if s.space == hlo.HOST]
  if opcode in ("dynamic-slice", "slice"):
    return sum(s.bytes for s in instruction.shapes) if read and not spaces else 0
  if opcode == "dynamic-update-slice":
    return sum(s.bytes for s in operands[1].shapes) if spaces else 0
  if opcode in ("fusion", "copy", "call") or opcode.endswith("-start"):
    results = sum(s.bytes for s in instruction.shapes if s.space != hlo.HOST)
    if spaces and read and not opcode.endswith("-start"):
      updates = [s for o in operands for s in o.shapes if s.space != hlo.HOST and s.dims]
      return sum(s.bytes for s in updates)
    if read or spaces:
      touched = sum(s.bytes for s in (read or spaces))
      return min(touched, results) if results else touched
  return 0


def estimate(
  module: hlo.Module,
  grid: Grid | None = None,
  *,
  chip: Chip = TPU7X,
  use_cycles: bool = True,
) -> Estimate:
  """Plays a scheduled module.

  Args:
    module: The module.
    grid: Mesh axes in device order; without them collectives are charged to an axis "?".
    chip: The chip.
    use_cycles: Whether to use the compiler's cycles where the text has them.

  Returns:
    Seconds, rows, loops, and what is not priced.

  Raises:
    ValueError: The module is not scheduled, so that its order means nothing.
  """
  if not module.is_scheduled:
    raise ValueError(
      f"module {module.name} is not scheduled: give the text of *after_optimizations.txt or"
      " as_text() of a compiled program"
    )
  player = _Player(module, grid, chip, use_cycles)
  seconds = player.play(module.entry, (), 1)
  unknown: dict[str, int] = {}
  for row in player.rows:
    if row.unknown:
      unknown[row.unknown] = unknown.get(row.unknown, 0) + row.count
  for loop in player.loops:
    if not loop.known:
      unknown[f"loop {loop.name}: trip count not in its condition, taken as 1"] = loop.runs
  return Estimate(
    seconds=seconds,
    rows=tuple(player.rows),
    loops=tuple(player.loops),
    unknown=unknown,
    conditionals=player.conditionals,
  )
