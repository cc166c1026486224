"""Writes an .npz piece by piece, so that no array of it need be whole in memory."""

from __future__ import annotations

import os
import pathlib
import zipfile
from collections.abc import Iterable
from types import TracebackType

import numpy as np

from kernels.base import options


class NpzWriter:
  """An .npz that appears under its name when it is complete.

  Used as a context: left by an exception, nothing appears.
  """

  def __init__(self, path: pathlib.Path):
    """Begins to write.

    Raises:
      options.UserError: The file cannot be written.
    """
    self._path = path
    self._partial = path.with_name(f".{path.name}.partial")
    try:
      self._archive = zipfile.ZipFile(self._partial, "w", zipfile.ZIP_STORED, allowZip64=True)
    except OSError as error:
      raise options.UserError(f"{path}: cannot be written ({error.strerror})") from None

  def add(self, name: str, shape: tuple[int, ...], dtype, blocks: Iterable[np.ndarray]) -> None:
    """Adds an array from blocks that follow each other along its first axis.

    Raises:
      options.UserError: The disk is full.
    """
    header = {
      "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
      "fortran_order": False,
      "shape": shape,
    }
    try:
      with self._archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array_header_2_0(file, header)
        for block in blocks:
          file.write(np.ascontiguousarray(block, dtype).tobytes())
    except OSError as error:
      raise options.UserError(f"{self._path}: cannot be written ({error.strerror})") from None

  def __enter__(self) -> NpzWriter:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    try:
      self._archive.close()
      if kind is None:
        with open(self._partial, "rb") as file:
          os.fsync(file.fileno())
        os.replace(self._partial, self._path)
    finally:
      self._partial.unlink(missing_ok=True)
