"""Reads one shard of a huge fused expert tensor and says what that took.

./bazelw run //tools:bench_checkpoint -- --parts=256

Makes a sparse file with the shape of the 397B model's fused expert tensor, [512, 2048, 4096]
bfloat16 (8.6 GB, no disk space), writes known values where the shard lies, and reads that shard as a
device would, twice: cut by experts alone, and by experts and the hidden axis, where each row gives a
few hundred bytes.  Prints bytes read, time, and by how much the process's peak memory grew.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from kernels.base import cli, options
from model import config as model_config
from model.checkpoint import directory, hf_names, loading

_DTYPE = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
  """The tensor and its division."""

  experts: int = options.option(512, help="Experts of the tensor.", minimum=1)
  inner: int = options.option(1024, help="Width of an expert.", minimum=1)
  hidden_size: int = options.option(4096, help="Width of the model.", minimum=1)
  parts: int = options.option(256, help="Devices that share the tensor.", minimum=1)
  expert_parts: int = options.option(
    8,
    help="Of the second cut: parts along the experts; the rest is along the hidden axis.",
    minimum=1,
  )


def model_of(chosen: BenchOptions) -> model_config.ModelConfig:
  """A one-layer model with that expert tensor and little else."""
  tiny = model_config.preset("tiny_moe").to_hf()
  tiny.pop("layer_types")
  return model_config.ModelConfig.from_hf(
    tiny
    | {
      "num_hidden_layers": 1,
      "full_attention_interval": 1,
      "hidden_size": chosen.hidden_size,
      "num_experts": chosen.experts,
      "moe_intermediate_size": chosen.inner,
    }
  )


def make_checkpoint(folder: pathlib.Path, config: model_config.ModelConfig) -> None:
  """A sparse safetensors file of all the model's tensors, bfloat16, holes throughout."""
  header: dict[str, Any] = {}
  place = 0
  for tensor in hf_names.tensors(hf_names.parameters(config, hf_names.FUSED)):
    size = math.prod(tensor.shape) * _DTYPE.itemsize
    header[tensor.name] = {
      "dtype": "BF16",
      "shape": list(tensor.shape),
      "data_offsets": [place, place + size],
    }
    place += size
  text = json.dumps(header).encode()
  with open(folder / directory.SINGLE, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + place)


def plant(checkpoint: directory.Checkpoint, name: str, region: tuple[slice, ...]) -> np.ndarray:
  """Writes values into a region of a tensor [experts, rows, columns]; returns them."""
  file = checkpoint.file_of[name]
  entry = file.entries[name]
  _, rows, columns = entry.shape
  experts, _, cut = region
  shape = (experts.stop - experts.start, rows, cut.stop - cut.start)
  values = np.random.default_rng(0).standard_normal(shape, np.float32).astype(_DTYPE)
  with open(file.path, "r+b") as handle:
    for i, expert in enumerate(range(experts.start, experts.stop)):
      block = np.zeros((rows, columns), _DTYPE)
      block[:, cut] = values[i]
      handle.seek(entry.start + expert * block.nbytes)
      handle.write(block.tobytes())
  return values


def _memory(field: str) -> int:
  """Bytes of this process: VmRSS now, VmHWM at its highest since `_forget_peak`."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(field):
      return int(line.split()[1]) * 1024
  raise options.UserError(f"/proc/self/status has no {field}; this runs on Linux alone")


def _forget_peak() -> None:
  gc.collect()
  pathlib.Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def _room(chosen: BenchOptions) -> Iterator[None]:
  """Tells of sizes that no file, disk or memory here holds.

  Raises:
    options.UserError: With the tensor's size and what stood in the way.
  """
  try:
    yield
  except (OverflowError, MemoryError, OSError) as error:
    size = chosen.experts * 2 * chosen.inner * chosen.hidden_size * _DTYPE.itemsize
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    raise options.UserError(
      f"--experts={chosen.experts} --inner={chosen.inner} --hidden_size={chosen.hidden_size}: a tensor"
      f" of {size / 1e9:,.0f} GB in {chosen.parts} parts does not fit here ({why}); give smaller sizes"
    ) from error


def measure(chosen: BenchOptions, folder: pathlib.Path) -> list[dict[str, Any]]:
  """Reads one shard under each cut.

  Args:
    chosen: The tensor and its division.
    folder: Where the sparse file goes.

  Raises:
    options.UserError: The parts do not divide the tensor, or it does not fit here.
    AssertionError: A value that was read is not the one that was written.
  """
  width = chosen.parts // chosen.expert_parts
  for name, size, by in (
    ("experts", chosen.experts, chosen.parts),
    ("experts", chosen.experts, chosen.expert_parts),
    ("parts", chosen.parts, chosen.expert_parts),
    ("hidden_size", chosen.hidden_size, width),
  ):
    if size % by:
      raise options.UserError(f"--{name}={size} is not a multiple of {by}")
  config = model_of(chosen)
  with _room(chosen):
    make_checkpoint(folder, config)
  found = []
  with (
    directory.Checkpoint(folder) as checkpoint,
    concurrent.futures.ThreadPoolExecutor(8) as pool,
  ):
    parameters, prefix = checkpoint.match(config)
    wi = next(p for p in parameters if p.path[-1] == "wi")
    name = wi.tensor_name(wi.parts[0], (0,), prefix)
    source = loading.Source(checkpoint, wi, prefix, _DTYPE, pool)
    cuts = {
      "experts": (chosen.experts // chosen.parts, chosen.hidden_size),
      "experts x hidden": (chosen.experts // chosen.expert_parts, chosen.hidden_size // width),
    }
    for cut, (count, columns) in cuts.items():
      # The last part: the furthest into the file.
      experts = slice(chosen.experts - count, chosen.experts)
      hidden = slice(chosen.hidden_size - columns, chosen.hidden_size)
      with _room(chosen):
        want = plant(checkpoint, name, (experts, slice(0, 2 * chosen.inner), hidden))
      _forget_peak()
      read, before, started = checkpoint.bytes_read, _memory("VmRSS"), time.monotonic()
      got = source.read((slice(0, 1), experts, hidden, slice(0, 2 * chosen.inner)))
      seconds = time.monotonic() - started
      grown = _memory("VmHWM") - before
      if not np.array_equal(got[0].transpose(0, 2, 1), want):
        raise AssertionError(f"{cut}: the shard that was read is not the one that was written")
      found.append(
        {
          "cut": cut,
          "tensor_bytes": checkpoint.entry(name).stop - checkpoint.entry(name).start,
          "shard_bytes": got.nbytes,
          "bytes_read": checkpoint.bytes_read - read,
          "peak_growth_bytes": grown,
          "seconds": seconds,
        }
      )
      del got, want
  return found


def run(settings: options.Settings) -> int:
  """Measures each cut and prints a table."""
  chosen = settings.of(BenchOptions)
  with tempfile.TemporaryDirectory() as folder:
    rows = measure(chosen, pathlib.Path(folder))
  print(f"one of {chosen.parts} parts of a tensor of {rows[0]['tensor_bytes'] / 1e9:.2f} GB")
  print(f"{'cut':18} {'shard MB':>9} {'read MB':>9} {'peak + MB':>10} {'seconds':>8}")
  for row in rows:
    sizes = (row["shard_bytes"], row["bytes_read"], row["peak_growth_bytes"])
    shard, read, peak = (size / 1e6 for size in sizes)
    print(f"{row['cut']:18} {shard:9.1f} {read:9.1f} {peak:10.1f} {row['seconds']:8.3f}")
  return 0


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  cli.main(run, components=[BenchOptions], description=__doc__)
