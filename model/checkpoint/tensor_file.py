"""One safetensors file: its header, checked, and reads of just the bytes a slice covers.

Format: eight bytes of little-endian header length, a JSON object of that many bytes, then the
tensors' bytes.  An entry is {"dtype", "shape", "data_offsets": [start, stop]} with offsets counted
from the end of the header; entries must tile the rest of the file without overlap or hole.

The `safetensors` package reads slices too, into an array of its own; here they land in the caller's
array in pieces of bounded size, and a damaged file is told by the tensor that it damages.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import pathlib
import threading
from typing import Any

import ml_dtypes
import numpy as np

from kernels.base import options

DTYPES: dict[str, np.dtype] = {
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F16": np.dtype(np.float16),
  "F32": np.dtype(np.float32),
  "F64": np.dtype(np.float64),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
  "I8": np.dtype(np.int8),
  "U8": np.dtype(np.uint8),
  "I16": np.dtype(np.int16),
  "U16": np.dtype(np.uint16),
  "I32": np.dtype(np.int32),
  "U32": np.dtype(np.uint32),
  "I64": np.dtype(np.int64),
  "U64": np.dtype(np.uint64),
  "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The safetensors package's own limit; a longer header is a damaged or hostile file.
_MAX_HEADER = 100_000_000
# Shorter runs of bytes are copied out of a mapping: a system call each would cost more.
_LONG_RUN = 1 << 16


@dataclasses.dataclass(frozen=True)
class Entry:
  """A tensor's place in a file.

  Attributes:
    name: Its name.
    dtype: Name of its type in the format ("BF16", "F32", ...).
    shape: Its shape.
    start: First byte in the file.
    stop: One past its last byte.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  start: int
  stop: int


class TensorFile:
  """An open safetensors file; safe to read from several threads.

  Attributes:
    path: Where it is.
    entries: Its tensors by name.
    metadata: The header's "__metadata__".
    bytes_read: Bytes of tensors that `read` has taken from the file.
  """

  def __init__(self, path: str | pathlib.Path):
    """Opens the file and checks its header.

    Raises:
      options.UserError: The file cannot be read, is no safetensors file, is cut short, or its
        header contradicts itself.
    """
    self.path = pathlib.Path(path)
    self.bytes_read = 0
    self._lock = threading.Lock()
    try:
      self._handle = os.open(self.path, os.O_RDONLY)
    except OSError as error:
      raise options.UserError(f"{self.path}: cannot be opened ({error.strerror})") from None
    try:
      self._size = os.fstat(self._handle).st_size
      self.entries, self.metadata = _parse(self.path, self._read_header(), self._size)
    except BaseException:
      os.close(self._handle)
      raise

  def close(self) -> None:
    """Closes the file."""
    os.close(self._handle)

  def __enter__(self) -> TensorFile:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _read_header(self) -> bytes:
    if self._size < 8:
      raise options.UserError(
        f"{self.path}: {self._size} bytes is no safetensors file; it may be a download cut short"
      )
    length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
    if length > _MAX_HEADER:
      raise options.UserError(
        f"{self.path}: no safetensors file: its first bytes give a header of {length} bytes"
      )
    if 8 + length > self._size:
      raise options.UserError(
        f"{self.path}: truncated: its header ends at byte {8 + length}, the file at {self._size}"
      )
    return os.pread(self._handle, length, 8)

  def read(self, name: str, region: tuple[slice, ...]) -> np.ndarray:
    """A slice of a tensor, in the file's type, reading no other bytes of it.

    Args:
      name: The tensor.
      region: Slices with explicit bounds, step one, one for each axis.

    Returns:
      A new array of the slice's shape.

    Raises:
      options.UserError: The file became shorter since it was opened, or the disk fails.
    """
    entry = self.entries[name]
    dtype = DTYPES[entry.dtype]
    out = np.empty(tuple(cut.stop - cut.start for cut in region), dtype)
    if out.size == 0:
      return out
    run, outer = _runs(entry.shape, region)
    run_bytes = run * dtype.itemsize
    try:
      if run_bytes >= _LONG_RUN or outer == 1:
        self._read_runs(entry, region, out, run)
      else:
        self._copy_mapped(entry, region, out)
    except OSError as error:
      raise options.UserError(f"{self.path}: reading {name} failed ({error.strerror})") from None
    with self._lock:
      self.bytes_read += out.nbytes
    return out

  def _read_runs(self, entry: Entry, region, out: np.ndarray, run: int) -> None:
    """One `pread` for each contiguous run, straight into `out`."""
    flat = memoryview(out.reshape(-1).view(np.uint8).data)
    size = out.dtype.itemsize
    strides = [math.prod(entry.shape[i + 1 :]) for i in range(len(entry.shape))]
    split = _split(entry.shape, region)
    base = sum(cut.start * s for cut, s in zip(region[split:], strides[split:]))
    position = 0
    for index in np.ndindex(*(cut.stop - cut.start for cut in region[:split])):
      element = base + sum((c.start + i) * s for c, i, s in zip(region, index, strides))
      self._pread(entry, flat[position : position + run * size], entry.start + element * size)
      position += run * size

  def _pread(self, entry: Entry, target: memoryview, offset: int) -> None:
    while target:
      count = os.preadv(self._handle, [target], offset)
      if count == 0:
        raise options.UserError(
          f"{self.path}: truncated while reading {entry.name}: no byte at {offset}"
        )
      target, offset = target[count:], offset + count

  def _copy_mapped(self, entry: Entry, region, out: np.ndarray) -> None:
    """Copies short runs out of a mapping of the rows that hold them; unmapped at once."""
    row = math.prod(entry.shape[1:]) * out.dtype.itemsize
    first = entry.start + region[0].start * row
    stop = entry.start + region[0].stop * row
    if os.fstat(self._handle).st_size < stop:
      raise options.UserError(
        f"{self.path}: truncated while reading {entry.name}: it ends before byte {stop}"
      )
    aligned = first - first % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(self._handle, stop - aligned, prot=mmap.PROT_READ, offset=aligned)
    # Reading ahead would bring in what other shards hold.
    mapping.madvise(mmap.MADV_RANDOM)
    try:
      rows = np.frombuffer(mapping, np.uint8, stop - first, first - aligned)
      rows = rows.view(out.dtype).reshape(-1, *entry.shape[1:])
      out[...] = rows[(slice(None), *region[1:])]
      del rows
    finally:
      mapping.close()


def _split(shape, region) -> int:
  """Number of leading axes to walk: what follows them is one contiguous run."""
  split = len(shape)
  while split and region[split - 1] == slice(0, shape[split - 1]):
    split -= 1
  return max(split - 1, 0)


def _runs(shape, region) -> tuple[int, int]:
  """Elements of a contiguous run, and the number of runs."""
  counts = [cut.stop - cut.start for cut in region]
  split = _split(shape, region)
  return math.prod(counts[split:]), math.prod(counts[:split])


def _parse(path: pathlib.Path, header: bytes, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
  twice: list[str] = []

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
      if key in found:
        twice.append(key)
      found[key] = value
    return found

  try:
    given = json.loads(header, object_pairs_hook=unique)
  except (ValueError, RecursionError) as error:
    raise options.UserError(f"{path}: its header is no JSON ({error})") from None
  if not isinstance(given, dict):
    raise options.UserError(f"{path}: its header is a JSON {type(given).__name__}, not an object")
  if twice:
    raise options.UserError(f"{path}: its header has {twice[0]} twice")
  metadata = given.pop("__metadata__", None) or {}
  begin = 8 + len(header)
  entries = {name: _entry(path, name, value, begin) for name, value in given.items()}
  _check_tiling(path, list(entries.values()), begin, size)
  return entries, metadata


def _entry(path: pathlib.Path, name: str, value: Any, begin: int) -> Entry:
  def is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 0

  try:
    dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    right = isinstance(shape, list) and all(map(is_count, [*shape, start, stop]))
  except (TypeError, KeyError, ValueError):
    right = False
  if not right:
    raise options.UserError(f"{path}: bad header: {name} is {value!r:.200}")
  if dtype not in DTYPES:
    raise options.UserError(
      f"{path}: {name} has the unknown type {dtype!r}; known are {', '.join(DTYPES)}"
    )
  want = math.prod(shape) * DTYPES[dtype].itemsize
  if stop - start != want:
    raise options.UserError(
      f"{path}: bad header: {name} {dtype}{shape} takes {want} bytes, its offsets "
      f"[{start}, {stop}] hold {stop - start}"
    )
  return Entry(name, dtype, tuple(shape), begin + start, begin + stop)


def _check_tiling(path: pathlib.Path, entries: list[Entry], begin: int, size: int) -> None:
  place, before = begin, None
  for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
    if entry.start < place:
      raise options.UserError(
        f"{path}: bad header: {entry.name} and {before} overlap at byte {entry.start}"
      )
    if entry.start > place:
      raise options.UserError(
        f"{path}: bad header: {entry.start - place} bytes before {entry.name} belong to no tensor"
      )
    if entry.stop > size:
      raise options.UserError(
        f"{path}: truncated: {entry.name} ends at byte {entry.stop}, the file at {size}"
      )
    place, before = entry.stop, entry.name
  if place != size:
    raise options.UserError(f"{path}: {size - place} bytes after the last tensor belong to none")
