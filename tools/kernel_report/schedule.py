"""Reads what libtpu says of a kernel's static schedule."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from tools.aot import hlo

_CYCLES = re.compile(r"estimated_cycles:\s*(\d+)")
_NAME = re.compile(r'hlo_op_name:\s*"([^"]+)"')
_BUNDLES = re.compile(r"total scheduled bundles:\s+(\d+)")
_SPILL = re.compile(r"#allocation(\d+)_spill\]")
_USED = re.compile(
  r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
  """Static facts of one kernel.

  Attributes:
    kernel: The instruction's name.
    cycles: Cycles of the schedule, every grid step simulated; no HBM bandwidth in it.
    bundles: VLIW bundles of its code.
    spills: Registers that the code spills to VMEM.
    vmem_bytes: Scoped VMEM it uses.
  """

  kernel: str
  cycles: int
  bundles: int
  spills: int
  vmem_bytes: int


class NoProfileError(RuntimeError):
  """The compiler left no profile of the kernel."""


def kernels_of(text: str, prefix: str) -> list[hlo.Instruction]:
  """Pallas kernels of a program whose name begins with `prefix`, the largest result first."""
  module = hlo.parse(text)
  found = [
    i
    for c in module.computations.values()
    for i in c.instructions
    if i.custom_call_target == "tpu_custom_call" and i.name.startswith(prefix)
  ]
  return sorted(found, key=lambda i: -i.bytes)


def read_cycles(folder: pathlib.Path) -> dict[str, int]:
  """Cycles by instruction from a folder of static profiles."""
  out = {}
  for file in sorted(folder.glob("*_static_llo_profile.textproto")):
    text = file.read_text()
    name, cycles = _NAME.search(text), _CYCLES.search(text)
    if name and cycles:
      out[name[1]] = int(cycles[1])
  return out


def read(text: str, prefix: str, cycles: dict[str, int] | None, schedules: pathlib.Path) -> Profile:
  """Gathers the profile of the kernel that `prefix` names.

  Args:
    text: Program text after code generation.
    prefix: What the kernel's name begins with; empty takes the only kernel.
    cycles: Cycles by instruction; None where the schedule was not simulated.
    schedules: Folder of the compiler's low-level dumps.

  Raises:
    NoProfileError: No such kernel, or no cycles for it.
  """
  found = kernels_of(text, prefix)
  named = found if cycles is None else [i for i in found if i.name in cycles]
  if not named:
    raise NoProfileError(
      f"no kernel {prefix or '(any)'} with a static profile; kernels: "
      f"{', '.join(i.name for i in found) or 'none'}; profiles: {', '.join(cycles or ()) or 'none'}"
    )
  taken = cycles or {}
  kernel = max(named, key=lambda i: (taken.get(i.name, 0), i.bytes))
  used = _USED.search(kernel.attributes)
  final = sorted(schedules.glob(f"*-{kernel.name}-*final_bundles.txt"))
  analysis = [f for f in final if "schedule-analysis" in f.name]
  bundles = [f for f in final if "schedule-analysis" not in f.name]
  counted = _BUNDLES.search(analysis[-1].read_text()) if analysis else None
  spilled = set(_SPILL.findall(bundles[-1].read_text())) if bundles else set()
  return Profile(
    kernel=kernel.name,
    cycles=taken.get(kernel.name, 0),
    bundles=int(counted[1]) if counted else 0,
    spills=len(spilled),
    vmem_bytes=int(used[1]) if used else 0,
  )
