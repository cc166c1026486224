"""The compiling process: builds one program, compiles it, and says how far it came.

Run by `tools.aot.compiler` as `python child.py REQUEST.json`; never imported.  Everything that
the TPU compiler may do to a process (abort it, fill its memory, take minutes) happens here.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import pickle
import sys
import time


def _memory(compiled) -> dict[str, int]:
  analysis = compiled.memory_analysis()
  suffix = "_in_bytes"
  names = (n for n in dir(analysis) if n.endswith(suffix))
  return {n.removesuffix(suffix): int(getattr(analysis, n)) for n in names}


def _raised_in(error: BaseException) -> str:
  """The module whose line raised it."""
  place = error.__traceback__
  while place is not None and place.tb_next is not None:
    place = place.tb_next
  return "" if place is None else str(place.tb_frame.f_globals.get("__name__", ""))


def main(path: str) -> None:
  """Reads the request, writes one JSON line per stage to its status file."""
  request = json.loads(pathlib.Path(path).read_text())
  out = pathlib.Path(request["directory"])
  start = time.monotonic()
  with open(out / "status.jsonl", "a", buffering=1) as status:

    def report(stage: str, **values) -> None:
      seconds = round(time.monotonic() - start, 3)
      status.write(json.dumps({"stage": stage, "seconds": seconds, **values}) + "\n")

    try:
      module, _, name = request["builder"].partition(":")
      built = getattr(importlib.import_module(module), name)(**request["arguments"])
      lowered, options = built if isinstance(built, tuple) else (built, None)
      report("lowered")
      compiled = lowered.compile(compiler_options=options)
      report("compiled", memory=_memory(compiled))
      if request["full"]:
        try:
          (out / "program.hlo.txt").write_text(compiled.as_text())
          report("text")
        except Exception as error:  # some versions cannot; the dump has the text too
          report("no text", message=str(error)[:500])
      if request["serialize"]:
        from jax.experimental import serialize_executable

        # Deserialising needs the device kind that it was compiled for.
        payload = serialize_executable.serialize(compiled)
        (out / "executable.pickle").write_bytes(pickle.dumps(payload))
        report("serialized")
    except Exception as error:
      import traceback

      text = traceback.format_exc()
      report(
        "error",
        kind=type(error).__name__,
        module=_raised_in(error),
        message=str(error),
        traceback=text,
      )
      sys.exit(3)


if __name__ == "__main__":
  main(sys.argv[1])
