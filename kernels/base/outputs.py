"""Files that a tool will write, judged before it works: a mistake costs a second, not a run."""

from __future__ import annotations

import io
import os
import pathlib
from typing import Any

from kernels.base import options

CHARTS = (".png", ".pdf", ".svg")


def chart_fault(name: str) -> str | None:
  """What is wrong with the name of a chart's file; the check of an option."""
  return None if name.lower().endswith(CHARTS) else f"want a name in {', '.join(CHARTS)}"


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
  """Writes a file whole or not at all: what was there stays until the new one is on disk.

  Raises:
    options.UserError: It cannot be written.
  """
  final = pathlib.Path(path)
  partial = final.with_name(f".{final.name}.partial")
  try:
    # A link, a pipe or a terminal is written through: to replace it would take it away.
    if final.is_symlink() or (final.exists() and not final.is_file()):
      final.write_bytes(content.encode() if isinstance(content, str) else content)
      return
    with open(partial, "wb") as file:
      file.write(content.encode() if isinstance(content, str) else content)
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, final)
  except OSError as error:
    raise options.UserError(f"{final}: cannot be written ({error.strerror})") from None
  finally:
    partial.unlink(missing_ok=True)


def write_chart(figure: Any, path: str, *, dpi: int) -> None:
  """Writes a matplotlib figure in the format that its file's name ends in, whole or not at all."""
  held = io.BytesIO()
  figure.savefig(held, dpi=dpi, format=pathlib.Path(path).suffix.lower().removeprefix("."))
  write(path, held.getvalue())


def refuse_unwritable(settings: options.Settings, base: str) -> None:
  """Judges the values of all options that name a file to write.

  Args:
    settings: Parsed settings; relative paths are meant in `base`.
    base: Directory that the command was typed in.

  Raises:
    options.UserError: A directory is missing or not writable, a path is a directory, or one file
      would be written twice or in place of another that the command line names.
  """
  place = lambda text: pathlib.Path(base, text)
  named: dict[str, str] = {str(place(text).resolve()): text for text in settings.positionals}
  outputs = []
  for name, opt in settings.options.items():
    value = getattr(settings, name)
    if not isinstance(value, str) or not value:
      continue
    if opt.writes:
      outputs.append((name, value))
    elif place(value).is_file():
      named[str(place(value).resolve())] = f"--{name}={value}"
  for name, value in outputs:
    path, given = place(value), f"--{name}={value}"
    if path.is_dir():
      raise options.UserError(f"{given} is a directory; give a file to write")
    if not path.parent.is_dir():
      raise options.UserError(f"{given}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
      raise options.UserError(f"{given} cannot be written; give another file")
    other = named.setdefault(str(path.resolve()), given)
    if other != given:
      raise options.UserError(f"{given} would overwrite {other}; give another file")
