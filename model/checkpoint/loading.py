"""Loads a Hugging Face checkpoint straight into sharded arrays.

For each device that this process drives, the part of each parameter that lies on it is filled from
the slices of the tensors it is made of, converted, and put on the device; then the next.  So a host
reads its own devices' bytes and no others, and holds one device's part of one parameter at a time.
Devices with equal parts share one read.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from kernels.base import options
from model import config as config_lib
from model.checkpoint import directory as directory_lib
from model.checkpoint import hf_names

# Bytes of one read: what a thread holds besides the array it fills.
_READ_BYTES = 32 << 20
_THREADS = 8

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def load_params(
  directory: str | pathlib.Path,
  config: config_lib.ModelConfig | None = None,
  *,
  shardings: Any = None,
  dtype: str = "float32",
  say: directory_lib.Say = directory_lib.say_nothing,
  progress: Callable[[int], None] | None = None,
) -> tuple[config_lib.ModelConfig, dict[str, Any]]:
  """Reads a checkpoint.

  Either spelling of the experts and either prefix is read.  Tensors of multi-token prediction and
  of the vision tower are passed over by name and counted; any other unknown one is refused.

  Args:
    directory: With config.json and one safetensors file, or several with their index.
    config: The model; the directory's config.json where absent.
    shardings: One `jax.sharding.Sharding` for all parameters, or a tree of the parameters'
      structure whose leaves (or whole branches) are shardings; None for the default device.
    dtype: "float32" or "bfloat16": type that weights are kept in.  A_log, dt_bias and the norm of
      Gated DeltaNet are float32 always.
    say: Takes one line on what was found and passed over.
    progress: Called with the number of bytes of parameters that were filled.

  Returns:
    The configuration and the parameter tree.

  Raises:
    options.UserError: The checkpoint is damaged or is not this model's; the text names the tensor,
      what was wanted and what was found.
  """
  if dtype not in _DTYPES:
    raise options.UserError(f"dtype={dtype!r}: want one of {', '.join(_DTYPES)}")
  if config is None:
    config = config_lib.ModelConfig.from_file(_existing(directory))
  with directory_lib.Checkpoint(directory) as checkpoint:
    parameters, prefix = checkpoint.match(config)
    say(checkpoint.report())
    params: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      for parameter in parameters:
        wide = np.dtype(np.float32) if parameter.wide else _DTYPES[dtype]
        source = Source(checkpoint, parameter, prefix, wide, pool)
        sharding = _sharding_of(shardings, parameter.path)
        branch = params
        for key in parameter.path[:-1]:
          branch = branch.setdefault(key, {})
        branch[parameter.path[-1]] = _place(source, sharding, progress)
  return config, params


def _existing(directory: str | pathlib.Path) -> pathlib.Path:
  path = pathlib.Path(directory)
  if not path.is_dir():
    raise options.UserError(
      f"{path}: no such directory; a checkpoint is a local directory with config.json and "
      "safetensors files, so download a published one first"
    )
  return path


class Source:
  """One parameter, readable by any index of it."""

  def __init__(
    self,
    checkpoint: directory_lib.Checkpoint,
    parameter: hf_names.Parameter,
    prefix: str,
    dtype: np.dtype,
    pool: concurrent.futures.Executor,
  ):
    self.parameter = parameter
    self.dtype = dtype
    self._checkpoint = checkpoint
    self._prefix = prefix
    self._pool = pool

  def read(self, index: tuple[slice, ...]) -> np.ndarray:
    """The part of the parameter at `index`, touching no other byte of the files.

    Args:
      index: A slice of step one for each axis of the parameter, open bounds allowed.
    """
    bounds = [cut.indices(size)[:2] for cut, size in zip(index, self.parameter.shape)]
    out = np.empty([stop - start for start, stop in bounds], self.dtype)
    stack = len(self.parameter.stack)
    jobs = [
      (part, place)
      for place in itertools.product(*(range(*b) for b in bounds[:stack]))
      for part in self.parameter.parts
    ]
    for _ in self._pool.map(lambda job: self._fill(out, bounds, *job), jobs):
      pass
    return out

  def _fill(self, out: np.ndarray, bounds, part: hf_names.Part, place: tuple[int, ...]) -> None:
    """Fills what one tensor gives."""
    stack = len(place)
    region = []  # Of the tensor: where its own extent meets the bounds.
    for axis, size, offset in zip(part.axes, part.shape, part.offset):
      start, stop = (0, size) if axis is None else bounds[stack + axis]
      cut = slice(max(start - offset, 0), min(stop - offset, size))
      if cut.start >= cut.stop:
        return
      region.append(cut)
    name = self.parameter.tensor_name(part, place, self._prefix)
    file = self._checkpoint.file_of[name]
    for piece in _pieces(
      part.shape, tuple(region), file.entries[name].stop - file.entries[name].start
    ):
      values = file.read(name, piece)
      values = np.squeeze(values, self.parameter.dropped(part))
      values = values.transpose(self.parameter.transpose(part))
      window = self.parameter.window(part, place, piece)
      target = tuple(
        w - b[0] if isinstance(w, int) else slice(w.start - b[0], w.stop - b[0])
        for w, b in zip(window, bounds)
      )
      _assign(out, target, values)


def _pieces(shape: tuple[int, ...], region: tuple[slice, ...], size: int):
  """Cuts a region along its first axis so that a piece, with what lies between, is bounded."""
  if not region:
    yield region
    return
  row = max(size // shape[0], 1)
  step = max(_READ_BYTES // row, 1)
  for start in range(region[0].start, region[0].stop, step):
    yield (slice(start, min(start + step, region[0].stop)), *region[1:])


def _assign(out: np.ndarray, target: tuple[Any, ...], values: np.ndarray) -> None:
  if out.dtype == values.dtype and out.dtype.itemsize == 2:
    # Same bits: plain integers copy several times faster than an extension type.
    out, values = out.view(np.uint16), values.view(np.uint16)
  out[target] = values


def _sharding_of(shardings: Any, path: tuple[str, ...]) -> jax.sharding.Sharding | None:
  for key in path:
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
      return shardings
    if key not in shardings:
      raise ValueError(f"no sharding for the parameter {'/'.join(path)}")
    shardings = shardings[key]
  return shardings


def _place(
  source: Source,
  sharding: jax.sharding.Sharding | None,
  progress: Callable[[int], None] | None,
) -> jax.Array:
  shape = source.parameter.shape
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  # Devices with one index get one read; the order of the map groups nothing, so group here.
  devices: dict[tuple[Any, ...], list[jax.Device]] = {}
  cuts: dict[tuple[Any, ...], tuple[slice, ...]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    assert index is not None
    key = tuple(cut.indices(size)[:2] for cut, size in zip(index, shape))
    devices.setdefault(key, []).append(device)
    cuts[key] = index
  arrays = []
  for key, index in cuts.items():
    values = source.read(index)
    if progress is not None:
      progress(values.nbytes)
    for device in devices[key]:
      single = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
      arrays.append(jax.block_until_ready(jax.device_put(values, single)))
    del values
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=source.dtype)


def total_bytes(config: config_lib.ModelConfig, dtype: str) -> int:
  """Bytes of all parameters in a type, for a progress bar."""
  size = lambda p: 4 if p.wide else _DTYPES[dtype].itemsize
  return sum(math.prod(p.shape) * size(p) for p in hf_names.parameters(config))
