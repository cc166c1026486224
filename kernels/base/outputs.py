"""Files that a tool will write, judged before it works: a mistake costs a second, not a run."""

from __future__ import annotations

import os
import pathlib

from kernels.base import options


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
