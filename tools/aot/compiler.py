"""Compiles a program for a TPU in a process of its own, and reads back what the compiler says.

The compiler can abort its process, take minutes, or stop for want of HBM.  Each becomes an answer
here: an error that says what happened with the compiler's last relevant lines, a time limit, a
verdict "does not fit by X GiB".  The environment that the compiler needs is set in the child only.

By default a compile is stopped once the scheduled HLO, the buffer assignment and the memory report
lie complete on disk: they come long before code generation, which takes most of the time.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tools.aot import memory

_CHILD = pathlib.Path(__file__).with_name("child.py")
_POLL_SECONDS = 0.1
_REFUSALS = ("UserError", "OptionError")  # of kernels.base.options
# Where a ValueError is the trainer's word on its arguments; one from elsewhere, such as JAX, is a
# fault of the program.
_TRAINER = ("kernels.", "model.", "rl.")
_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "JAX_PLATFORMS": "cpu",
  "JAX_TRACEBACK_FILTERING": "off",  # whose line raised an error is told by its last frame
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
}
# What libtpu says on any machine without a TPU, and stack frames: never the reason.
_NOISE = re.compile(
  r"TPU_ACCELERATOR_TYPE|TPU_WORKER_HOSTNAMES|^\s*@ |^===|InitGoogle|symbolize|libtpu_init_utils"
  r"|coredump|^\s*$|^\*\*\*|process_state|Source Location Trace"
)
_REASON = re.compile(
  r"^F\d{4} |Check failed|FATAL|RET_CHECK|INTERNAL:|UNIMPLEMENTED:|^E\d{4} |Error"
)
# Severity, day, time and thread of a log line: the same fault should give the same text.
_STAMP = re.compile(r"^[EFIW]\d{4} [\d:.]+\s+\d+ ")
_DUMPED = re.compile(r"module_(?P<id>\d+)\.(?P<name>.+)\.cl_\d+\.after_optimizations\.txt")
_EXHAUSTED = re.compile(
  r"(\d+(?:\.\d+)?)([KMG])\) exceeds available (?:HBM|memory) \(([\d.]+)([KMG])\)"
)


class CompileError(RuntimeError):
  """A compile that gave no program; the text says why."""


class LibtpuMissingError(CompileError):
  """The TPU compiler is not installed."""


class CompilerAbortedError(CompileError):
  """The compiler ended its process."""


class CompileTimeoutError(CompileError):
  """The time limit passed."""


class CompileMemoryError(CompileError):
  """The compiling process took more memory than it may."""


class CompileStoppedError(CompileError):
  """The caller asked for an end."""


class ProgramError(CompileError):
  """Python raised while the program was built, or the compiler refused it."""


class ArgumentError(ProgramError):
  """The builder refused its arguments; the text is its own, in one line.

  Attributes:
    kind: Name of the error's class in the child.
  """

  def __init__(self, text: str, kind: str):
    super().__init__(" ".join(text.split("\n")))
    self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What to compile.

  Attributes:
    builder: "module:function"; returns a `jax.stages.Lowered`, or that and compiler options.
    arguments: Keyword arguments of the builder; plain JSON values.
    directory: Where everything is written; emptied first.
    full: Go through code generation, to a text with estimated cycles.
    serialize: Write the executable to `executable.pickle`; needs `full`.
    time_limit: Seconds until the child is killed.
    memory_limit: Bytes of memory at which the child is killed.
    init_args: Value of LIBTPU_INIT_ARGS.
    xla_flags: Flags added to XLA_FLAGS beside those of the dump.
    python_path: Import path of the child; this process's by default.
  """

  builder: str
  directory: str
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  full: bool = False
  serialize: bool = False
  time_limit: float = 300.0
  memory_limit: float = 16 * 2**30
  init_args: str = ""
  xla_flags: str = ""
  python_path: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What the compiler said.

  Attributes:
    hlo: The scheduled program's text: with estimated cycles after a full compile.
    buffer_assignment: File with every buffer's value and offset.
    memory: The memory report, read.
    memory_text: The same as the compiler wrote it.
    verdict: Whether it fits, and by how much.
    analysis: `memory_analysis()` in bytes after a full compile, else empty.
    executable: The serialized executable, if asked for.
    seconds: Wall time of the child.
    peak_rss_bytes: The child's memory.
    cpu_seconds: Processor time of the child, its start and lowering too.
    stages: Seconds at which the child passed each stage.
  """

  hlo: pathlib.Path
  buffer_assignment: pathlib.Path
  memory: memory.Report
  memory_text: str
  verdict: memory.Verdict
  analysis: dict[str, int]
  executable: pathlib.Path | None
  seconds: float
  peak_rss_bytes: int
  cpu_seconds: float
  stages: dict[str, float]


def require_libtpu(path: Sequence[str]) -> None:
  """Checks that the TPU compiler can be imported from `path`.

  Raises:
    LibtpuMissingError: It cannot; the text says how to get it.
  """
  if os.environ.get("TPU_LIBRARY_PATH"):
    return
  if importlib.machinery.PathFinder.find_spec("libtpu", list(path)) is None:
    raise LibtpuMissingError(
      "the TPU compiler (libtpu) is not on the import path. Under Bazel add"
      ' requirement("libtpu", "pip_libtpu") to the deps of the target that compiles; elsewhere'
      " run pip install libtpu (its versions: libtpu*_lock.txt in third_party/python)"
    )


@dataclasses.dataclass(frozen=True)
class _Dump:
  """The files of one compiled module."""

  hlo: pathlib.Path

  @property
  def buffer_assignment(self) -> pathlib.Path:
    return self._sibling("-buffer-assignment.txt")

  @property
  def memory_report(self) -> pathlib.Path:
    return self._sibling("-memory-usage-report.txt")

  @property
  def after_codegen(self) -> pathlib.Path:
    return self.hlo.with_name(self.hlo.name.replace("after_optimizations", "after_codegen"))

  def _sibling(self, suffix: str) -> pathlib.Path:
    return self.hlo.with_name(self.hlo.name.removesuffix(".txt") + suffix)

  def complete(self) -> bool:
    """Whether all three files are whole: each ends as its writer ends it.

    They are written in this order, the memory report last, whose sections add up when it is whole.
    """
    files = (self.hlo, self.buffer_assignment, self.memory_report)
    if not all(f.exists() for f in files):
      return False
    return (
      _tail(self.hlo).rstrip().endswith("}")
      and "ENTRY" in self.hlo.read_text(errors="replace")
      and _tail(self.buffer_assignment).endswith("\n")
      and memory.is_complete(self.memory_report.read_text(errors="replace"))
    )

  def sizes(self) -> tuple[int, ...]:
    return tuple(
      f.stat().st_size if f.exists() else -1
      for f in (self.hlo, self.buffer_assignment, self.memory_report)
    )


def _tail(path: pathlib.Path, count: int = 64) -> str:
  with open(path, "rb") as file:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - count))
    return file.read().decode(errors="replace")


def find_dump(directory: pathlib.Path) -> _Dump | None:
  """The dump of the largest module compiled for a TPU under `directory`, if any."""
  found = [f for f in directory.glob("*.txt") if _DUMPED.fullmatch(f.name)]
  return _Dump(max(found, key=lambda f: f.stat().st_size)) if found else None


def relevant_lines(text: str, count: int = 8) -> list[str]:
  """The last lines of the compiler's output that say why it stopped."""
  lines = [line.rstrip() for line in text.splitlines() if not _NOISE.search(line)]
  reasons = [line for line in lines if _REASON.search(line)]
  return [_STAMP.sub("", line)[:500] for line in (reasons or lines)[-count:]]


def compile_program(request: Request, stop: threading.Event | None = None) -> Result:
  """Compiles one program in a subprocess.

  Args:
    request: What to compile and how far.
    stop: Ends the compile when another thread sets it.

  Returns:
    What the compiler said.  A program that needs more HBM than there is comes back with a
    verdict that says so, whether the compiler refused it or was stopped before it could.

  Raises:
    LibtpuMissingError: The compiler is not installed.
    CompilerAbortedError: The compiler ended the process.
    CompileTimeoutError: `time_limit` passed.
    CompileMemoryError: `memory_limit` passed.
    CompileStoppedError: `stop` was set.
    ArgumentError: The builder refused its arguments.
    ProgramError: The builder raised, or the compiler refused the program.
  """
  path = list(sys.path if request.python_path is None else request.python_path)
  path = [p for p in path if p]
  require_libtpu(path)
  out = pathlib.Path(request.directory).resolve()
  shutil.rmtree(out, ignore_errors=True)
  dump = out / "dump"
  dump.mkdir(parents=True)
  body = dataclasses.asdict(request) | {"directory": str(out)}
  (out / "request.json").write_text(json.dumps(body, indent=2))
  flags = [request.xla_flags, f"--xla_dump_to={dump}", "--xla_dump_hlo_as_text"]
  environment = {
    **os.environ,
    **_ENVIRONMENT,
    "XLA_FLAGS": " ".join(f for f in flags if f),
    "LIBTPU_INIT_ARGS": request.init_args,
    "PYTHONPATH": os.pathsep.join(path),
  }
  start = time.monotonic()
  with open(out / "output.log", "wb") as log:
    child = subprocess.Popen(
      [sys.executable, str(_CHILD), str(out / "request.json")],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      env=environment,
      start_new_session=True,
    )
    try:
      ended, rss, cpu = _wait(child, request, dump, start, stop)
    finally:
      _kill(child)
  seconds = time.monotonic() - start
  stages = _read_status(out / "status.jsonl")
  if ended == "timeout":
    where = max((s for s in stages), key=lambda s: stages[s]["seconds"], default="started")
    raise CompileTimeoutError(
      f"no program after the time limit of {request.time_limit:g} s (last stage: {where});"
      f" give a longer one, or read {out / 'output.log'}"
    )
  if ended == "memory":
    raise CompileMemoryError(
      f"the compiling process took more than {request.memory_limit / 2**30:.1f} GiB of memory and"
      " was ended; give a smaller program, or a higher limit"
    )
  if ended == "stopped":
    raise CompileStoppedError("the compile was stopped")
  files = find_dump(dump)
  error = stages.get("error")
  if error and _is_refusal(error):
    raise ArgumentError(error["message"], error["kind"])
  if error and "RESOURCE_EXHAUSTED" not in error["message"]:
    lines = "\n  ".join(relevant_lines(error["traceback"], 12))
    raise ProgramError(f"{error['kind']} in {request.builder}:\n  {lines}")
  if ended == "signal":
    number = -child.returncode
    lines = "\n  ".join(relevant_lines((out / "output.log").read_text(errors="replace")))
    raise CompilerAbortedError(
      f"the compiler ended its process by signal {number} ({signal.Signals(number).name}):\n"
      f"  {lines}\n  all of it: {out / 'output.log'}"
    )
  if files is None or not files.complete():
    detail = error["message"] if error else f"exit status {child.returncode}"
    raise ProgramError(f"the compiler left no scheduled program: {detail}")
  memory_text = files.memory_report.read_text()
  report = memory.read_report(memory_text)
  verdict = memory.judge(report)
  if error:
    verdict = _refused(error["message"], verdict)
  text = out / "program.hlo.txt"
  if not text.exists():
    text = files.after_codegen if request.full and files.after_codegen.exists() else files.hlo
  executable = out / "executable.pickle"
  return Result(
    hlo=text,
    buffer_assignment=files.buffer_assignment,
    memory=report,
    memory_text=memory_text,
    verdict=verdict,
    analysis=stages.get("compiled", {}).get("memory", {}),
    executable=executable if executable.exists() else None,
    seconds=seconds,
    peak_rss_bytes=rss,
    cpu_seconds=cpu,
    stages={name: values["seconds"] for name, values in stages.items()},
  )


def _is_refusal(error: Mapping[str, Any]) -> bool:
  """Whether the builder refused its arguments, rather than failed."""
  trainers = error["kind"] == "ValueError" and error["module"].startswith(_TRAINER)
  return error["kind"] in _REFUSALS or trainers


def _wait(
  child: subprocess.Popen,
  request: Request,
  dump: pathlib.Path,
  start: float,
  stop: threading.Event | None,
) -> tuple[str, int, float]:
  """Waits for the child, the dump, memory, the clock or `stop`.

  Returns:
    What came first, the child's peak memory in bytes and its processor time in seconds.
  """
  before: tuple[int, ...] = ()
  peak, cpu = 0, 0.0
  while True:
    status = child.poll()
    if status is not None:
      return ("signal" if status < 0 else "exit"), peak, cpu
    peak, cpu = max(peak, _resident(child.pid)), max(cpu, _processor_seconds(child.pid))
    if peak > request.memory_limit:
      return "memory", peak, cpu
    if time.monotonic() - start > request.time_limit:
      return "timeout", peak, cpu
    if stop is not None and stop.is_set():
      return "stopped", peak, cpu
    if not request.full and (files := find_dump(dump)):
      sizes = files.sizes()
      # Two looks of equal size and proper endings: the writer is done with these files.
      if sizes == before and files.complete():
        return "dump", peak, cpu
      before = sizes
    time.sleep(_POLL_SECONDS)


def _resident(pid: int) -> int:
  """Peak resident bytes of a live process, 0 if it has just ended."""
  try:
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
  except OSError:
    return 0
  found = re.search(r"VmHWM:\s+(\d+) kB", text)
  return int(found[1]) * 1024 if found else 0


def _processor_seconds(pid: int) -> float:
  """User and system time of a live process, 0 if it has just ended."""
  try:
    # The name of the program, in brackets, may hold blanks; the times are fields 14 and 15.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return 0.0
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kill(child: subprocess.Popen) -> None:
  """Ends the child's whole process group, which is its own, and collects it."""
  if child.poll() is None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
  else:
    try:
      os.killpg(child.pid, signal.SIGKILL)  # whatever it started itself
    except ProcessLookupError:
      pass


def _read_status(path: pathlib.Path) -> dict[str, dict[str, Any]]:
  if not path.exists():
    return {}
  lines = path.read_text().splitlines()
  found = {}
  for line in lines:
    try:
      values = json.loads(line)
    except ValueError:  # the last line of a killed child
      continue
    found[values.pop("stage")] = values
  return found


def _refused(message: str, verdict: memory.Verdict) -> memory.Verdict:
  """The verdict of a compile that the compiler stopped for want of memory."""
  found = _EXHAUSTED.search(message)
  if not found:
    return dataclasses.replace(verdict, fits=False, detail=message[:300])
  scale = {"K": 2**10, "M": 2**20, "G": 2**30}
  used = float(found[1]) * scale[found[2]]
  limit = float(found[3]) * scale[found[4]]
  return memory.Verdict(fits=False, used_bytes=used, limit_bytes=limit, detail=message[:300])
