import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from kernels.base import options
from model.checkpoint import tensor_file


def _slices(*bounds):
  return tuple(slice(*b) for b in bounds)


def _write(path: pathlib.Path, header, data: bytes = b"", length: int | None = None):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  length = len(text) if length is None else length
  path.write_bytes(length.to_bytes(8, "little") + text + data)
  return path


def _f32(start, stop, shape=None):
  shape = [(stop - start) // 4] if shape is None else shape
  return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


@pytest.fixture
def sample(tmp_path):
  rng = np.random.default_rng(0)
  arrays = {
    "matrix": rng.standard_normal((6, 8)).astype(ml_dtypes.bfloat16),
    "deep": rng.standard_normal((5, 4, 300)).astype(np.float32),
    "wide": rng.standard_normal((4, 40_000)).astype(np.float32),  # Runs of more than 64 KiB.
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "odd": rng.integers(0, 255, 7).astype(np.uint8),  # What follows is not aligned.
    "after": rng.standard_normal((9, 11)).astype(ml_dtypes.bfloat16),
  }
  path = tmp_path / "x.safetensors"
  save_file(arrays, path, metadata={"format": "pt"})
  return path, arrays


def test_slices_are_what_the_safetensors_package_reads(sample):
  path, arrays = sample
  cases = {
    "matrix": [[(0, 6), (0, 8)], [(2, 5), (0, 8)], [(1, 6), (3, 4)], [(2, 2), (0, 8)]],
    "deep": [[(0, 5), (0, 4), (0, 300)], [(1, 3), (2, 4), (7, 290)], [(4, 5), (0, 4), (0, 300)]],
    "wide": [[(1, 4), (100, 39_000)], [(0, 4), (0, 40_000)], [(3, 4), (5, 6)]],
    "after": [[(0, 9), (5, 11)]],
    "odd": [[(2, 7)]],
    "scalar": [[]],
    "empty": [[(0, 0), (0, 3)]],
  }
  with tensor_file.TensorFile(path) as file, safe_open(path, "np") as reference:
    assert file.metadata == {"format": "pt"} and set(file.entries) == set(arrays)
    total = 0
    for name, regions in cases.items():
      for bounds in regions:
        region = _slices(*bounds)
        got = file.read(name, region)
        want = arrays[name][region]
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
        if bounds and want.size:  # The package refuses an empty slice.
          np.testing.assert_array_equal(got, reference.get_slice(name)[region])
        total += got.nbytes
    assert file.bytes_read == total


def _syscall_bytes():
  fields = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
  return int(fields["rchar"])


def test_long_runs_read_no_other_byte(tmp_path):
  """Counted by the kernel, not by the reader itself."""
  path = tmp_path / "x.safetensors"
  save_file({"a": np.zeros((64, 32, 1024), np.float32)}, path)
  with tensor_file.TensorFile(path) as file:
    for region, size in (
      (_slices((3, 5), (0, 32), (0, 1024)), 2 * 32 * 4096),
      (_slices((0, 64), (8, 24), (0, 1024)), 64 * 16 * 4096),
    ):
      before = _syscall_bytes()
      file.read("a", region)
      after = _syscall_bytes()
      assert size <= after - before < size + 4096  # Reading the counter itself counts.


_BROKEN = {
  "short": (lambda p: p.write_bytes(b"abc"), "3 bytes is no safetensors file"),
  "a web page": (lambda p: p.write_bytes(b"<!DOCTYPE html>"), "no safetensors file: its first"),
  "header cut": (lambda p: _write(p, {"a": _f32(0, 4)}, length=5000), "truncated: its header ends"),
  "no json": (lambda p: _write(p, b"{nonsense"), "its header is no JSON"),
  "no object": (lambda p: _write(p, b"[1]"), "a JSON list, not an object"),
  "twice": (
    lambda p: _write(p, b'{"a": %s, "a": %s}' % ((json.dumps(_f32(0, 4)).encode(),) * 2), b"1234"),
    "its header has a twice",
  ),
  "no offsets": (lambda p: _write(p, {"a": {"dtype": "F32", "shape": [1]}}), "bad header: a is"),
  "negative": (lambda p: _write(p, {"a": _f32(0, 4, [-1])}), "bad header: a is"),
  "type": (
    lambda p: _write(p, {"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 1]}}, b"1"),
    "a has the unknown type 'Q4'",
  ),
  "size": (
    lambda p: _write(p, {"a": _f32(0, 8, [3])}, b"12345678"),
    r"a F32\[3\] takes 12 bytes, its offsets \[0, 8\] hold 8",
  ),
  "overlap": (
    lambda p: _write(p, {"a": _f32(0, 8), "b": _f32(4, 12)}, bytes(12)),
    "b and a overlap at byte",
  ),
  "hole": (
    lambda p: _write(p, {"a": _f32(0, 4), "b": _f32(8, 12)}, bytes(12)),
    "4 bytes before b belong to no tensor",
  ),
  "truncated": (
    lambda p: _write(p, {"a": _f32(0, 4), "b": _f32(4, 12)}, bytes(10)),
    "truncated: b ends at byte",
  ),
  "trailing": (lambda p: _write(p, {"a": _f32(0, 4)}, bytes(9)), "5 bytes after the last tensor"),
}


@pytest.mark.parametrize("case", _BROKEN)
def test_a_damaged_file_is_told(tmp_path, case):
  path = tmp_path / "x.safetensors"
  breaks, message = _BROKEN[case]
  breaks(path)
  with pytest.raises(options.UserError, match=message) as error:
    tensor_file.TensorFile(path)
  assert str(path) in str(error.value)


@pytest.mark.parametrize("columns", [(0, 40_000), (0, 3)])
def test_a_file_that_shrinks_under_the_reader(sample, columns):
  path, _ = sample
  with tensor_file.TensorFile(path) as file:
    with open(path, "r+b") as handle:
      handle.truncate(file.entries["wide"].start + 100)
    with pytest.raises(options.UserError, match="truncated while reading wide"):
      file.read("wide", _slices((0, 4), columns))


def test_no_file(tmp_path):
  with pytest.raises(options.UserError, match="cannot be opened"):
    tensor_file.TensorFile(tmp_path / "x")
