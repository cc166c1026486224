"""Checkpoints of a run: Orbax arrays, a record of everything else, and a manifest written last.

    OUTPUT_DIR/checkpoints/
      0000000050/            a whole checkpoint
        arrays/              the state's arrays, by Orbax
        record.json          step, phase, options, ...: what is no array
        manifest.json        size and digest of every file above
      .0000000100.partial/   one that is being written

Saving is asynchronous: `save` returns once the arrays are copied to the host, and a background
thread writes, digests, and renames.  The rename is the commit: a process killed before it leaves
a `.partial` that nothing ever loads.  A folder that was damaged later fails its manifest, is said
so in one line, and the checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from kernels.base import options

_MANIFEST = "manifest.json"
_BLOCK = 1 << 20
_WHOLE = re.compile(r"[0-9]{10,}")
# Folders of ours that a killed process may leave; all else that is hidden is somebody else's.
_LEFT = re.compile(r"\.[0-9]{10,}\.(partial|removed)")


class Store:
  """The checkpoints of one run."""

  def __init__(
    self,
    directory: str | pathlib.Path,
    *,
    keep: int = 2,
    say: Callable[[str], None] = print,
  ):
    """Opens the folder and clears away what an earlier, killed process left unfinished.

    Args:
      directory: Folder of checkpoints; made when missing.
      keep: Newest checkpoints that stay.
      say: Takes one line for the user.

    Raises:
      options.UserError: The folder cannot be made or written.
    """
    self._directory = pathlib.Path(directory).absolute()
    self._keep, self._say = keep, say
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None
    self._saving = 0
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      if jax.process_index() == 0:
        for left in self._directory.iterdir():
          if _LEFT.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
    except OSError as error:
      raise options.UserError(f"{self._directory}: cannot be written: {error.strerror}") from None
    self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

  def numbers(self) -> list[int]:
    """Numbers of the committed checkpoints, oldest first; damaged ones are among them."""
    return sorted(
      int(p.name) for p in self._directory.iterdir() if _WHOLE.fullmatch(p.name) and p.is_dir()
    )

  def save(self, number: int, arrays: Any, record: Mapping[str, Any]) -> None:
    """Starts to write a checkpoint; waits first for the one before.

    Args:
      number: Its number; steps grow, and so do numbers.
      arrays: Pytree of arrays.  They may be donated or changed once this returns.
      record: What JSON can hold.

    Raises:
      options.UserError: This save or the one before failed, as on a full disk.  Earlier
        checkpoints are untouched.
    """
    self.wait()
    partial = self._directory / f".{number:010d}.partial"
    final = self._directory / f"{number:010d}"
    self._saving = number
    if final.exists():  # Left by a run that went further before it was killed, then damaged.
      _remove(final)
    try:
      partial.mkdir(exist_ok=True)
      (partial / "record.json").write_text(json.dumps(record), encoding="utf-8")
      arrays = jax.tree.map(_detached, arrays)
      self._checkpointer.save(partial / "arrays", args=ocp.args.PyTreeSave(arrays))
    except Exception as error:
      self._error = error
      self._fail(partial)
      self.wait()
    self._thread = threading.Thread(target=self._finish, args=(partial, final), daemon=True)
    self._thread.start()

  def _finish(self, partial: pathlib.Path, final: pathlib.Path) -> None:
    try:
      self._checkpointer.wait_until_finished()
      if jax.process_index() == 0:
        _write_manifest(partial)
        os.replace(partial, final)
        _sync_directory(self._directory)
        for old in self.numbers()[: -self._keep]:
          _remove(self._directory / f"{old:010d}")
    except Exception as error:  # Reported by the next wait, in the thread of the loop.
      self._error = error
      self._fail(partial)

  def _fail(self, partial: pathlib.Path) -> None:
    """Removes what was written, to give its room back."""
    # Another of Orbax's threads may still be adding files when the first error surfaces.
    for _ in range(100):
      shutil.rmtree(partial, ignore_errors=True)
      if not partial.exists():
        return
      time.sleep(0.1)

  def wait(self) -> None:
    """Returns once the save under way is committed.

    Raises:
      options.UserError: It failed.
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    if self._error is not None:
      error, self._error = self._error, None
      kept = self.numbers()
      rest = f"the checkpoint of step {kept[-1]} is whole and kept" if kept else "there is none yet"
      raise options.UserError(
        f"{self._directory}: the checkpoint of step {self._saving} could not be written "
        f"({_why(error)}); {rest}; free some space and run the same command again"
      ) from error

  def newest_whole(self) -> int | None:
    """Number of the newest checkpoint that passes its manifest; None when there is none.

    Every damaged one that is passed over is said in one line.

    Raises:
      options.UserError: There are checkpoints, and all are damaged.
    """
    numbers = self.numbers()
    for number in reversed(numbers):
      wrong = check(self._directory / f"{number:010d}")
      if wrong is None:
        return number
      self._say(f"checkpoint {number} is passed over: {wrong}")
    if numbers:
      raise options.UserError(
        f"{self._directory}: every checkpoint is damaged; remove the folder to start afresh"
      )
    return None

  def record(self, number: int) -> dict[str, Any]:
    """The record of a checkpoint."""
    path = self._directory / f"{number:010d}" / "record.json"
    return json.loads(path.read_text(encoding="utf-8"))

  def restore(self, number: int, like: Any) -> Any:
    """Reads the arrays of a checkpoint.

    Args:
      number: Which one.
      like: Pytree of arrays or ShapeDtypeStructs that gives structure, dtypes and shardings.

    Raises:
      options.UserError: The saved tree is not of this structure or these shapes.
    """
    path = self._directory / f"{number:010d}" / "arrays"
    abstract = jax.tree.map(_abstract, like)
    restore_args = jax.tree.map(
      lambda leaf, known: known if leaf.sharding is not None else ocp.RestoreArgs(np.ndarray),
      abstract,
      ocp.checkpoint_utils.construct_restore_args(abstract),
    )
    try:
      restored = self._checkpointer.restore(
        path, args=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args)
      )
    except (ValueError, KeyError) as error:
      raise options.UserError(f"{path}: is of another model or optimizer: {error}") from None
    for want, got in zip(jax.tree.leaves(abstract), jax.tree.leaves(restored), strict=True):
      if want.shape != got.shape or want.dtype != got.dtype:
        raise options.UserError(
          f"{path}: holds {got.dtype}{list(got.shape)} where {want.dtype}{list(want.shape)} is due"
        )
    return jax.tree.map(jnp.asarray, restored)

  def close(self) -> None:
    """Waits for the save under way and lets Orbax's threads go."""
    try:
      self.wait()
    finally:
      self._checkpointer.close()


def check(path: pathlib.Path) -> str | None:
  """What is wrong with a checkpoint folder, or None: every file, its size, its digest."""
  try:
    manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    files = {n: (int(f["size"]), str(f["blake2b"])) for n, f in manifest["files"].items()}
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return f"{path / _MANIFEST} is missing or unreadable"
  for name, (size, digest) in files.items():
    file = path / name
    if not file.is_file():
      return f"{file} is missing"
    if file.stat().st_size != size:
      return f"{file} has {file.stat().st_size} bytes, not {size}"
    if _digest(file) != digest:
      return f"{file} does not have the digest it was saved with"
  return None


def _why(error: BaseException) -> str:
  """The operating system's words where an error or one that it follows from has them.

  TensorStore's message is one long line of keys and paths with the system's error number at its
  end.
  """
  cause: BaseException | None = error
  while cause is not None:
    if isinstance(cause, OSError) and cause.strerror:
      return cause.strerror
    cause = cause.__cause__ or cause.__context__
  number = re.search(r"os_error_code='?(\d+)", str(error))
  if number is not None:
    return os.strerror(int(number[1]))
  return textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")


def _detached(leaf: Any) -> Any:
  # On CPU a "copy to the host" may be a view of the very buffer that the next step donates.
  on_cpu = isinstance(leaf, jax.Array) and all(d.platform == "cpu" for d in leaf.devices())
  return np.array(leaf) if on_cpu and leaf.is_fully_addressable else leaf


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  # What was put nowhere in particular stays so: a program compiled for the one would be compiled
  # again for the other.
  placed = getattr(leaf, "sharding", None) if getattr(leaf, "_committed", True) else None
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)


def _digest(path: pathlib.Path) -> str:
  digest = hashlib.blake2b(digest_size=16)
  with open(path, "rb") as file:
    while block := file.read(_BLOCK):
      digest.update(block)
  return digest.hexdigest()


def _write_manifest(folder: pathlib.Path) -> None:
  files = sorted(p for p in folder.rglob("*") if p.is_file())
  for path in files:
    _sync_file(path)
  entries = {
    str(p.relative_to(folder)): {"size": p.stat().st_size, "blake2b": _digest(p)} for p in files
  }
  path = folder / _MANIFEST
  path.write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")
  _sync_file(path)
  _sync_directory(folder)


def _sync_file(path: pathlib.Path) -> None:
  with open(path, "rb") as file:
    os.fsync(file.fileno())


def _sync_directory(path: pathlib.Path) -> None:
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _remove(path: pathlib.Path) -> None:
  # Renamed first: a removal cut half-way must not leave something that looks committed.
  gone = path.with_name(f".{path.name}.removed")
  os.replace(path, gone)
  shutil.rmtree(gone, ignore_errors=True)
