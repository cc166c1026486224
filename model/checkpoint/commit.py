"""Replaces a directory in one step, so that a reader finds the old one or the new one, never half.

Everything is written to a hidden sibling, `.NAME.partial`, synced to disk, and renamed.  Where a
directory is there already the two are exchanged by one system call (Linux); elsewhere the old one is
moved aside first.  A killed process leaves only the sibling, which the next save clears away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib
import shutil

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def partial_path(target: pathlib.Path) -> pathlib.Path:
  """Where a directory is written before it is committed."""
  return target.with_name(f".{target.name}.partial")


def begin(target: pathlib.Path) -> pathlib.Path:
  """Makes an empty partial directory, clearing what a killed process left.

  Raises:
    OSError: It cannot be made.
  """
  partial = partial_path(target)
  target.parent.mkdir(parents=True, exist_ok=True)
  if partial.exists():
    shutil.rmtree(partial)
  partial.mkdir()
  return partial


def abandon(target: pathlib.Path) -> None:
  """Removes the partial directory."""
  shutil.rmtree(partial_path(target), ignore_errors=True)


def commit(target: pathlib.Path) -> None:
  """Puts the partial directory, whose files are synced, in the target's place.

  Raises:
    OSError: It cannot be renamed; the target is untouched.
  """
  partial = partial_path(target)
  sync(partial)
  if not target.exists():
    os.rename(partial, target)
    sync(target.parent)
    return
  try:
    _exchange(partial, target)
  except OSError as error:
    if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
      raise
    aside = target.with_name(f".{target.name}.old")
    os.rename(target, aside)
    os.rename(partial, target)
    os.rename(aside, partial)
  sync(target.parent)
  shutil.rmtree(partial, ignore_errors=True)  # The old one by now.


def sync(path: pathlib.Path) -> None:
  """Forces a file or directory to disk."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _exchange(first: pathlib.Path, second: pathlib.Path) -> None:
  try:
    call = ctypes.CDLL(None, use_errno=True).renameat2
  except AttributeError:
    raise OSError(errno.ENOSYS, "no renameat2") from None
  names = os.fsencode(first), os.fsencode(second)
  if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), str(second))
