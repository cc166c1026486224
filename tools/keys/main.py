"""Prints the mesh's keys: class, refusals, what each changes in the lowered program, and its parity.

./bazelw run //tools:keys_report -- --keys=use_ragged_sort,query_proj
"""

from __future__ import annotations

import dataclasses
import os

from kernels.base import cli, options
from tools.keys import key as key_lib
from tools.keys import table

_NAMES = tuple(sorted({key.name for key in table.KEYS}))


def names_fault(names: tuple[str, ...]) -> str | None:
  """What is wrong with the names of options, the nearest to each named; None if nothing is."""
  wrong = [name for name in names if name not in _NAMES]
  if not wrong:
    return None
  found = "; ".join(f"{n} is none, the nearest is {options.nearest(n, _NAMES)}" for n in wrong)
  return f"want options of the mesh: {found} (--help lists all)"


def legend() -> list[str]:
  """A line for each class: what it promises, and what its rows are held to."""
  return [
    f"class {letter}: {what} ({allowance(letter)})" for letter, what in key_lib.CLASSES.items()
  ]


def allowance(letter: str) -> str:
  """What a class allows between a step and the step without the key, in words."""
  limit = key_lib.LIMITS[letter]
  return f"relative L2 at most {limit:g}" if limit else "every bit equal"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeysOptions:
  """What is shown."""

  keys: tuple[str, ...] = options.option(
    (),
    help="Options of the mesh to show, of "
    + ", ".join(_NAMES)
    + "; empty for all, which takes minutes.",
    check=names_fault,
  )


def run(settings: options.Settings) -> int:
  """Prints the table; 1 if a key does not show what it should or breaks its class's promise."""
  os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false"
  )
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from tools.keys import parity, programs

  declared = key_lib.settings_of({}).options
  bad = 0
  for key in (k for k in table.KEYS if not settings.keys or k.name in settings.keys):
    off, on = programs.probe(key)
    holds = key.holds(off, on)
    bad += not holds
    print(f"{key.title}\n  {declared[key.name].help}")
    print(f"  refused by: {', '.join(key.refusals()) or 'nothing'}")
    print(f"  {key.evidence}: {off} -> {on}: {'yes' if holds else 'NO'}", flush=True)
    allowed = allowance(key.promise)
    if key.held_by != key_lib.PARITY:
      print(f"  class {key.promise}, {allowed}: held by {key.held_by}")
      continue
    found = parity.parity(key)
    kept = found.keeps(key.promise)
    bad += not kept
    figure = "every bit equal" if found.equal else f"{found.distance:.1e} ({found.where})"
    print(f"  class {key.promise}, {allowed}: {figure}: {'yes' if kept else 'NO'}", flush=True)
  return 1 if bad else 0


if __name__ == "__main__":
  cli.main(run, components=[KeysOptions], description="\n".join([__doc__ or "", *legend()]))
