"""Makes tools/aot/testdata again: what the TPU compiler wrote for two small programs.

./bazelw run //tools/aot:record

Source tables, kernel bodies and most of the backend's configuration are left out: nothing reads
them, and they name files of the machine that recorded them.
"""

from __future__ import annotations

import os
import pathlib
import re
import tempfile

from tools.aot import compiler, narrow, show

_TESTDATA = pathlib.Path("tools/aot/testdata")
_KEPT = re.compile(
  r'"estimated_cycles":"\d+"|"cost_estimate":\{[^}]*\}|"device_type":"DEVICE_TYPE_SPARSECORE"'
)


def shorten(text: str) -> str:
  """Scheduled HLO text without what names the machine or is never read."""
  lines = []
  table = False
  for line in text.splitlines():
    if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
      table = True
    elif line.startswith(("%", "ENTRY", "HloModule")):
      table = False
    if table:
      continue
    head, marker, config = line.partition(", backend_config={")
    if marker:
      line = head + ", backend_config={" + ",".join(_KEPT.findall(config)) + "}"
    line = re.sub(r" stack_frame_id=\d+", "", line)
    lines.append(line)
  return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def main() -> None:
  """Compiles and writes."""
  root = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
  out = root / _TESTDATA
  with tempfile.TemporaryDirectory() as scratch:
    show.write_json(narrow.compile_report(f"{scratch}/narrow"), str(root / narrow.RECORD))
    for name, full in (("sharded_product", False), ("offloaded_update", True)):
      result = compiler.compile_program(
        compiler.Request(
          builder=f"tools.aot.programs:{name}",
          directory=f"{scratch}/{name}",
          full=full,
          time_limit=300.0,
        )
      )
      (out / f"{name}.txt").write_text(shorten(result.hlo.read_text()))
      (out / f"{name}-memory-usage-report.txt").write_text(result.memory_text)
      (out / f"{name}-buffer-assignment.txt").write_text(result.buffer_assignment.read_text())
      print(f"wrote {_TESTDATA / name}.txt and what belongs to it")


if __name__ == "__main__":
  main()
