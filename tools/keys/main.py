"""Prints the mesh's keys: class, refusals, and what each changes in the lowered program.

bazel run //tools:keys_report
"""

from __future__ import annotations

import os
import sys

from tools.keys import table


def main() -> int:
  """Prints the table; 1 if a key does not show what it should."""
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from tools.keys import programs

  declared = table.settings_of({}).options
  bad = 0
  for key in table.KEYS:
    off, on = programs.probe(key)
    holds = key.holds(off, on)
    bad += not holds
    print(f"{key.title} [{key.promise}]\n  {declared[key.name].help}")
    print(f"  refused by: {', '.join(key.refusals()) or 'nothing'}")
    print(f"  {key.evidence}: {off} -> {on}: {'yes' if holds else 'NO'}", flush=True)
  return 1 if bad else 0


if __name__ == "__main__":
  sys.exit(main())
