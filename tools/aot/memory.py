"""Reads the compiler's memory report and buffer assignment, and judges whether a program fits."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

GIB = 2**30
# HBM that the compiler leaves to a program on a v7x device.
HBM_LIMIT_BYTES = 94.75 * GIB
HOST_COLOR = 5  # written S(5) in layouts

_SPACE = re.compile(r"^(\S+) \(color=(\d+)\)$")
_TOTAL = re.compile(r"^Total bytes: (\d+) ")
_ROW = re.compile(r"^\s*\S+\(\s*(\d+)%\);\s*([\d.]+)([KMGT]?i?B);\s*(\d+);\s*(\d+);\s*(.*)$")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), ?(.*):$")
_VALUE = re.compile(r"^ value: <\d+ ([^ {>]+)\S* @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")


@dataclasses.dataclass(frozen=True)
class Slot:
  """A stretch of memory that several values use one after another.

  Attributes:
    bytes: Its size.
    offset: Where it lies.
    values: How many values use it.
    shapes: Their shapes, as the compiler abbreviates them.
  """

  bytes: float
  offset: int
  values: int
  shapes: str


@dataclasses.dataclass(frozen=True)
class Space:
  """One memory space of the report, its slots largest first."""

  name: str
  color: int
  total_bytes: int
  slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True)
class Report:
  """The memory report: spaces by name; "default" is HBM."""

  spaces: dict[str, Space]

  @property
  def hbm_bytes(self) -> int:
    """Bytes of HBM per device."""
    return self.spaces["default"].total_bytes if "default" in self.spaces else 0

  @property
  def host_bytes(self) -> int:
    """Bytes of host memory per device."""
    return sum(s.total_bytes for s in self.spaces.values() if s.color == HOST_COLOR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """Whether a program fits into HBM.

  Attributes:
    fits: The answer.
    used_bytes: What it needs.
    limit_bytes: What there is.
    detail: The compiler's own words, if it refused.
  """

  fits: bool
  used_bytes: float
  limit_bytes: float
  detail: str = ""

  def __str__(self) -> str:
    used, limit = self.used_bytes / GIB, self.limit_bytes / GIB
    if self.fits:
      return f"fits: {used:.2f} GiB of {limit:.2f}, {limit - used:.2f} GiB free"
    if used > limit:
      return f"does not fit by {used - limit:.2f} GiB: {used:.2f} GiB of {limit:.2f}"
    return f"does not fit: {self.detail}"


def is_complete(text: str) -> bool:
  """Whether a memory report is written to its end: every section whole, and closed by blank lines.

  Rows of a section need not add up to its total: the compiler leaves the smallest out of long ones,
  and VMEM that a kernel reserves for itself has none.
  """
  sections = text.split("Memory Space: ")[1:]
  if not sections or not text.endswith("\n\n\n"):
    return False
  for section in sections:
    rows = [line for line in section.splitlines() if _ROW.match(line)]
    total = re.search(r"^Total bytes: (\d+) ", section, re.M)
    if not total or (int(total[1]) and not rows and not section.startswith("vmem ")):
      return False
  return True


def read_report(text: str) -> Report:
  """Reads a `*memory-usage-report.txt`."""
  spaces: dict[str, Space] = {}
  for section in text.split("Memory Space: ")[1:]:
    lines = section.splitlines()
    head = _SPACE.match(lines[0])
    if not head:
      raise ValueError(f"no memory report: a section begins with {lines[0][:60]!r}")
    name, color = head[1], int(head[2])
    total = next((int(m[1]) for line in lines if (m := _TOTAL.match(line))), 0)
    slots = []
    for line in lines:
      if m := _ROW.match(line):
        size = float(m[2]) * _UNITS[m[3]]
        slots.append(Slot(size, int(m[4]), int(m[5]), m[6].strip()))
    spaces[name] = Space(name, color, total, tuple(slots))
  return Report(spaces)


def judge(report: Report, limit_bytes: float = HBM_LIMIT_BYTES) -> Verdict:
  """Compares a report's HBM with the limit."""
  used = report.hbm_bytes
  return Verdict(fits=used <= limit_bytes, used_bytes=used, limit_bytes=limit_bytes)


@dataclasses.dataclass(frozen=True)
class Buffer:
  """One value of the buffer assignment.

  Attributes:
    name: The instruction that defines it.
    bytes: Its size.
    offset: Where it lies in its allocation.
    shape: Shape with layout; S(5) is host memory.
    allocation: Number of the allocation.
    kind: parameter, output, temporary or constant.
  """

  name: str
  bytes: int
  offset: int
  shape: str
  allocation: int
  kind: str

  @property
  def on_host(self) -> bool:
    """Whether it lies in host memory."""
    return f"S({HOST_COLOR})" in self.shape and not self.shape.startswith("(")


def read_buffers(text: str) -> list[Buffer]:
  """Reads a `*buffer-assignment.txt`: every value, largest first, aliases of one place once."""
  found: dict[tuple[int, int, int], Buffer] = {}
  allocation, kind = -1, ""
  for line in text.splitlines():
    if line.startswith("allocation "):
      if m := _ALLOCATION.match(line):
        allocation, kind = int(m[1]), _kind(m[3])
    elif line.startswith(" value: ") and (m := _VALUE.match(line)):
      key = (allocation, int(m[3]), int(m[2]))
      found.setdefault(key, Buffer(m[1], int(m[2]), int(m[3]), m[4], allocation, kind))
    elif line and not line.startswith(" ") and not line.startswith("BufferAssignment"):
      break  # statistics follow
  return sorted(found.values(), key=lambda b: (-b.bytes, b.name))


def _kind(text: str) -> str:
  for word, kind in (
    ("parameter", "parameter"),
    ("output", "output"),
    ("constant", "constant"),
    ("thread-local", "thread-local"),
  ):
    if word in text:
      return kind
  return "temporary"


def largest(buffers: Sequence[Buffer], count: int = 20) -> list[Buffer]:
  """The largest values, one per instruction and size."""
  seen: set[tuple[str, int]] = set()
  out = []
  for buffer in buffers:
    if (buffer.name, buffer.bytes) not in seen and buffer.kind != "thread-local":
      seen.add((buffer.name, buffer.bytes))
      out.append(buffer)
    if len(out) == count:
      break
  return out
