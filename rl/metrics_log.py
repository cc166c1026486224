"""Metrics of a run: JSON Lines, TensorBoard, a progress bar or plain lines, a PNG plot.

metrics.jsonl is the record: one object a step, handed to the operating system as one write before
the next step starts, so that a killed process leaves every finished step.  On resume the lines
after the restored step are dropped; those steps are run, and written, again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from kernels.base import options

PLOTTED = (
  ("reward_mean", "reward"),
  ("eval/pass@1", "held-out pass@1"),
  ("loss", "loss"),
  ("grad_norm", "gradient norm"),
)


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """The whole objects of a metrics file, oldest first; a cut-off last line is left out.

  Raises:
    options.UserError: A line before the last is no JSON object.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  lines = path.read_text(encoding="utf-8").split("\n")
  found = []
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      found.append(json.loads(line))
    except ValueError as error:
      if number == len(lines):  # No newline follows: the write was cut.
        break
      raise options.UserError(f"{path}, line {number}: no valid JSON: {error}") from None
  return found


class JsonLines:
  """An append-only JSON Lines file of steps."""

  def __init__(self, path: str | pathlib.Path, last_step: int = 0, *, first_step: int = 1):
    """Opens the file, keeping the lines of steps up to `last_step`.

    Args:
      path: File; made when missing.
      last_step: Last step that the run has made; 0 starts afresh.
      first_step: Number of the first line's step.

    Raises:
      options.UserError: It cannot be written.
    """
    self.path = pathlib.Path(path)
    try:
      kept = [r for r in read(self.path) if first_step <= r["step"] <= last_step]
      fresh = self.path.with_name(self.path.name + ".tmp")
      with open(fresh, "w", encoding="utf-8") as file:
        file.writelines(_line(r) for r in kept)
        file.flush()
        os.fsync(file.fileno())
      os.replace(fresh, self.path)
      self._file: IO[bytes] = open(self.path, "ab", buffering=0)
    except OSError as error:
      raise options.UserError(f"{self.path}: cannot be written: {error.strerror}") from None
    self.records = kept

  def write(self, record: Mapping[str, Any]) -> None:
    """Appends one object in one write.

    Raises:
      options.UserError: The write failed, as on a full disk.
    """
    self.records.append(dict(record))
    data = _line(record).encode()
    try:
      if self._file.write(data) != len(data):
        raise OSError(0, "the line was cut")
    except OSError as error:
      raise options.UserError(f"{self.path}: cannot be written: {error.strerror}") from None

  def close(self) -> None:
    self._file.close()


def _line(record: Mapping[str, Any]) -> str:
  # JSON has no NaN or infinity: they become null, so that any reader can read the file.
  clean = {
    k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
  }
  return json.dumps(clean, allow_nan=False) + "\n"


class Progress:
  """A bar on a terminal; elsewhere a plain line now and then.  For one phase of known length."""

  def __init__(
    self,
    label: str,
    total: int,
    done: int = 0,
    *,
    stream: IO[str] | None = None,
    every_seconds: float = 10.0,
  ):
    """Starts the display.

    Args:
      label: What the phase is called.
      total: Steps of the phase.
      done: Steps done already.
      stream: Where to; standard error by default.
      every_seconds: Least time between two plain lines.
    """
    self._stream = sys.stderr if stream is None else stream
    self._label, self._total, self._every = label, total, every_seconds
    self._last = -math.inf
    self._bar: Any = None
    if self._stream.isatty():
      import tqdm

      self._bar = tqdm.tqdm(
        total=total, initial=done, desc=label, file=self._stream, dynamic_ncols=True
      )

  def update(self, step: int, **shown: float | str) -> None:
    """Shows that `step` steps are done, with a few values beside."""
    texts = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()]
    if self._bar is not None:
      self._bar.update(step - self._bar.n)
      self._bar.set_postfix_str(", ".join(texts))
    elif (now := time.monotonic()) - self._last >= self._every or step == self._total:
      self._last = now
      print(
        f"{self._label} {step}/{self._total}: " + ", ".join(texts), file=self._stream, flush=True
      )

  def say(self, text: str) -> None:
    """Prints a line of its own, above the bar where there is one."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()


class _Board:
  """TensorBoard's copy of the metrics.  When it cannot be written, that is said and the run goes on.

  Written by the caller's thread: tensorboardX's own ends when a write fails, and all later writes
  would wait for it for ever.
  """

  def __init__(self, directory: pathlib.Path, last_step: int):
    """Opens a file of events; those of steps after `last_step` in earlier files are to be hidden."""
    self._directory = directory
    self._file: Any = None
    self._try(self._open, last_step)

  def _open(self, last_step: int) -> None:
    from tensorboardX import record_writer
    from tensorboardX.proto import event_pb2

    self._directory.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
    self._file = record_writer.RecordWriter(str(self._directory / name))
    self._put(file_version="brain.Event:2")
    if last_step:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._put(step=last_step + 1, session_log=start)

  def _put(self, **fields: Any) -> None:
    from tensorboardX.proto import event_pb2

    self._file.write(event_pb2.Event(wall_time=time.time(), **fields).SerializeToString())
    self._file.flush()

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds one step's finite numbers."""
    if self._file is None:
      return
    from tensorboardX import summary
    from tensorboardX.proto import summary_pb2

    found = [summary.scalar(k, v).value[0] for k, v in metrics.items() if math.isfinite(v)]
    self._try(lambda: self._put(step=step, summary=summary_pb2.Summary(value=found)))

  def close(self) -> None:
    if self._file is not None:
      self._try(self._file.close)
      self._file = None

  def _try(self, action: Callable[..., None], *arguments: Any) -> None:
    try:
      action(*arguments)
    except OSError as error:
      print(
        f"note: {self._directory} cannot be written: {error.strerror}; TensorBoard's curves end "
        "here, metrics.jsonl goes on",
        file=sys.stderr,
      )
      with contextlib.suppress(OSError):
        if self._file is not None:
          self._file.close()
      self._file = None


class MetricsLog:
  """JSON Lines and TensorBoard of one run."""

  def __init__(self, directory: str | pathlib.Path, last_step: int = 0):
    """Opens both in the output directory.

    Args:
      directory: Output directory; must exist.
      last_step: Step from which the run goes on.
    """
    self._directory = pathlib.Path(directory)
    self._json = JsonLines(self._directory / "metrics.jsonl", last_step)
    self._board = _Board(self._directory / "tensorboard", last_step)

  @property
  def records(self) -> list[dict[str, Any]]:
    """Every record so far, those before a resume included."""
    return self._json.records

  @property
  def path(self) -> pathlib.Path:
    """The JSON Lines file."""
    return self._json.path

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes one step's metrics to both."""
    record = {"step": step, **{k: float(v) for k, v in metrics.items()}}
    self._json.write(record)
    self._board.write(step, metrics)

  def close(self) -> None:
    self._json.close()
    self._board.close()

  def plot(self, title: str) -> pathlib.Path:
    """Draws reward, held-out score, loss and gradient norm over steps; returns the PNG's path."""
    return plot(self.records, self._directory / "metrics.png", title)


def plot(records: list[dict[str, Any]], path: str | pathlib.Path, title: str) -> pathlib.Path:
  """Draws the main curves of metrics records into a PNG file.

  Args:
    records: Objects with `step` and metrics; a metric may be missing in some.
    path: File to write.
    title: Title of the figure.
  """
  # The object interface of matplotlib: no display, no global state.
  from matplotlib.backends import backend_agg
  from matplotlib.figure import Figure
  from matplotlib.ticker import MaxNLocator

  path = pathlib.Path(path)
  figure = Figure(figsize=(10, 7), layout="constrained")
  backend_agg.FigureCanvasAgg(figure)
  figure.suptitle(title)
  for axes, (name, label) in zip(figure.subplots(2, 2).flat, PLOTTED):
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    if points:
      steps, values = zip(*points)
      axes.plot(steps, values, marker="o" if len(points) < 20 else None, linewidth=1.2, label=name)
    greedy = [(r["step"], r["eval/greedy"]) for r in records if r.get("eval/greedy") is not None]
    if name == "eval/pass@1" and greedy:
      axes.plot(*zip(*greedy), marker="s", linewidth=1.0, linestyle="--", label="greedy")
      axes.legend()
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
  figure.savefig(path, dpi=110)
  return path
