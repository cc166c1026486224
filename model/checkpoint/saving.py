"""Saves parameters as a Hugging Face checkpoint, tensor by tensor, atomically.

  1. Plan: names, shapes and types of all tensors, and which file each is in (`_plan`).
  2. Write: a file's header is known from the plan, so its tensors are streamed after it in windows
     of bounded size; nothing larger is ever on the host.
  3. Commit: files are synced, then the directory takes the target's place in one step.

With several processes the files are dealt out among them; all join in fetching windows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils

from kernels.base import options
from model import config as config_lib
from model.checkpoint import commit, companions, hf_names, tensor_file, windows
from model.checkpoint import directory as directory_lib

# Bytes of a tensor that are on the host at once.
_WINDOW_BYTES = 64 << 20
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
MAX_SHARD_BYTES = 5_000_000_000


@dataclasses.dataclass(frozen=True)
class SaveReport:
  """What a save wrote.

  Attributes:
    files: Names of the weight files.
    tensors: Number of tensors, carried ones included.
    total_bytes: Bytes of all tensors.
    carried: Number of tensors copied from the source, by prefix.
    dropped: Number of the source's tensors that were not written, by prefix.
    companions: Names of the files copied beside the weights.
  """

  files: tuple[str, ...]
  tensors: int
  total_bytes: int
  carried: Mapping[str, int]
  dropped: Mapping[str, int]
  companions: tuple[str, ...]

  def __str__(self) -> str:
    text = f"{self.tensors:,} tensors in {len(self.files)} files, {self.total_bytes / 1e9:,.2f} GB"
    for word, counts in (("carried over", self.carried), ("left out", self.dropped)):
      text += "".join(f"; {count:,} {prefix}* {word}" for prefix, count in sorted(counts.items()))
    return text


@dataclasses.dataclass(frozen=True)
class _Item:
  """A tensor to write; `tensor` is None for one that is copied from the source."""

  name: str
  shape: tuple[int, ...]
  dtype: str
  nbytes: int
  tensor: hf_names.Tensor | None


def save_params(
  directory: str | pathlib.Path,
  config: config_lib.ModelConfig,
  params: Mapping[str, Any],
  *,
  experts: str = hf_names.PER_EXPERT,
  prefix: str = hf_names.TEXT_PREFIX,
  dtype: str | None = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  source: str | pathlib.Path | None = None,
  carry: tuple[str, ...] = (),
  overwrite: bool = False,
) -> SaveReport:
  """Writes a checkpoint directory: weights, index, config.json and what the source has beside it.

  A save that is interrupted leaves the directory as it was.  Tensors are fetched in windows of
  64 MiB.  Of several processes, all must call, and see one file system.

  Args:
    directory: Where to.
    config: The model.
    params: Its parameters, float32 or bfloat16, numpy or jax arrays of any sharding.
    experts: Spelling of the routed experts: "per_expert" (what transformers writes) or "fused"
      (one tensor for all of a layer's).
    prefix: "model." for a text model, "model.language_model." as in published checkpoints.
    dtype: "float32" or "bfloat16" for all but A_log and the norm of Gated DeltaNet, which are
      float32 in every checkpoint; None keeps each parameter's own type, so that loading gives
      the same bits.
    max_shard_bytes: A file grows to this many bytes of tensors; a larger tensor has its own.
    source: Checkpoint directory that the weights descend from: tokenizer, chat template and
      generation settings are copied from it.
    carry: Which of the source's other tensors to copy unchanged: "mtp.", "model.visual.".  The
      rest is left out, and the report counts it.
    overwrite: Whether a checkpoint that is there may be replaced.

  Raises:
    options.UserError: The directory cannot be written or is in use, or the source does not fit.
    ValueError: An argument outside its choices, or parameters that are not the model's.
  """
  if prefix not in hf_names.PREFIXES:
    raise ValueError(f"prefix={prefix!r}: want one of {', '.join(hf_names.PREFIXES)}")
  if dtype is not None and dtype not in _DTYPES:
    raise ValueError(f"dtype={dtype!r}: want None or one of {', '.join(_DTYPES)}")
  if max_shard_bytes < 1:
    raise ValueError(f"max_shard_bytes={max_shard_bytes}: want at least 1")
  unknown = set(carry) - set(hf_names.SKIPPED)
  if unknown or (carry and source is None):
    raise ValueError(
      f"carry={carry!r}: want some of {', '.join(hf_names.SKIPPED)}, and a source to copy from"
    )
  parameters = hf_names.parameters(config, experts)
  leaves = _leaves(params, parameters)
  target = pathlib.Path(os.path.realpath(directory))
  source = None if source is None else pathlib.Path(source)
  _check_target(target, overwrite)

  opened = directory_lib.Checkpoint(source) if source is not None and _has_weights(source) else None
  try:
    if carry and opened is None:
      raise options.UserError(f"{source}: no safetensors files to carry {', '.join(carry)} from")
    items = _items(parameters, leaves, prefix, dtype)
    if opened is not None:
      items += _carried(opened, carry)
    stored = max(_DTYPES, key=lambda n: sum(i.nbytes for i in items if _DTYPES_OF[n] == i.dtype))
    record = companions.config_json(
      config, prefix=prefix, dtype=stored, carried=carry, source=source
    )
    plan = _plan(items, max_shard_bytes)
    copied = _write_all(target, plan, leaves, opened, record, source, hf_names.VISION in carry)
    counts = {} if opened is None else dict(opened.skipped)
  finally:
    if opened is not None:
      opened.close()
  return SaveReport(
    tuple(plan),
    len(items),
    sum(item.nbytes for item in items),
    {p: n for p, n in counts.items() if p in carry},
    {p: n for p, n in counts.items() if p not in carry},
    tuple(copied),
  )


_DTYPES_OF = {name: tensor_file.NAMES[dtype] for name, dtype in _DTYPES.items()}


def _leaves(params, parameters: list[hf_names.Parameter]) -> dict[tuple[str, ...], Any]:
  found = {
    tuple(key.key for key in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(params))
  }
  want = {p.path: p.shape for p in parameters}
  for path in sorted(want.keys() | found.keys()):
    name = "/".join(path)
    if path not in found:
      raise ValueError(f"the parameter {name} {list(want[path])} is missing")
    if path not in want:
      raise ValueError(f"the model has no parameter {name}")
    if tuple(found[path].shape) != want[path]:
      raise ValueError(f"{name}: wanted {list(want[path])}, found {list(found[path].shape)}")
    if np.dtype(found[path].dtype) not in _DTYPES.values():
      raise ValueError(f"{name}: wanted float32 or bfloat16, found {found[path].dtype}")
  return found


def _check_target(target: pathlib.Path, overwrite: bool) -> None:
  if not os.path.lexists(target):
    return
  if not target.is_dir():
    raise options.UserError(f"{target} is a file; give a directory to save to")
  if not any(target.iterdir()):
    return
  if not overwrite:
    raise options.UserError(f"{target} is not empty; give a new directory, or ask to overwrite")
  if not (target / "config.json").exists():
    raise options.UserError(
      f"{target} holds something else than a checkpoint (no config.json) and would be lost; give "
      "another directory"
    )


def _has_weights(source: pathlib.Path) -> bool:
  return (source / directory_lib.INDEX).exists() or any(source.glob("*.safetensors"))


def _items(parameters, leaves, prefix, dtype) -> list[_Item]:
  """The model's tensors, layer by layer."""
  found = []
  for tensor in hf_names.tensors(parameters, prefix):
    own = np.dtype(leaves[tensor.parameter.path].dtype)
    stored = own if dtype is None else _DTYPES[dtype]
    if tensor.part.stored_float32:
      stored = _DTYPES["float32"]
    size = math.prod(tensor.shape) * stored.itemsize
    found.append(_Item(tensor.name, tensor.shape, tensor_file.NAMES[stored], size, tensor))
  last = max(_layer_of(item) for item in found)
  # Embedding before the layers, final norm and head after them: the order in which they are used.
  place = lambda item: -1 if "embed_tokens" in item.name else last + 1
  return sorted(found, key=lambda i: _layer_of(i) if _layer_of(i) >= 0 else place(i))


def _layer_of(item: _Item) -> int:
  _, layers, rest = item.name.partition("layers.")
  return int(rest.split(".", 1)[0]) if layers else -1


def _carried(source: directory_lib.Checkpoint, carry: tuple[str, ...]) -> list[_Item]:
  found = []
  for prefix in carry:
    for name in source.skipped_names(prefix):
      entry = source.entry(name)
      found.append(_Item(name, entry.shape, entry.dtype, entry.stop - entry.start, None))
  return found


def _plan(items: list[_Item], max_shard_bytes: int) -> dict[str, list[_Item]]:
  """Deals the tensors out to files, in order."""
  shards: list[list[_Item]] = [[]]
  used = 0
  for item in items:
    if shards[-1] and used + item.nbytes > max_shard_bytes:
      shards.append([])
      used = 0
    shards[-1].append(item)
    used += item.nbytes
  # Wider types first within a file, so that every tensor is aligned to its type.
  width = lambda item: -tensor_file.DTYPES[item.dtype].itemsize
  shards = [sorted(shard, key=width) for shard in shards]
  if len(shards) == 1:
    return {directory_lib.SINGLE: shards[0]}
  return {
    f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
    for number, shard in enumerate(shards, 1)
  }


def _write_all(target, plan, leaves, opened, record, source, vision) -> list[str]:
  """Writes every file and commits; returns the names of the companions."""
  first = jax.process_index() == 0
  partial = commit.partial_path(target)
  copied: list[str] = []
  try:
    failure = _attempt(target, commit.begin) if first else None
    _agree(target, failure, "begin")
    failure = None
    for number, (name, items) in enumerate(plan.items()):
      mine = number % jax.process_count() == jax.process_index()
      failure = _write_file(partial / name if mine else None, items, leaves, opened) or failure
    _agree(target, failure, "write")
    failure = None
    if first:
      try:
        _check_sizes(partial, plan)
        if source is not None:
          copied = companions.copy_files(source, partial, vision=vision)
        if len(plan) > 1:
          _write_json(partial / directory_lib.INDEX, _index(plan))
        _write_json(partial / "config.json", record)
        for path in partial.iterdir():
          commit.sync(path)
        commit.commit(target)
      except (OSError, options.UserError) as error:
        failure = error
    _agree(target, failure, "commit")
  except BaseException:
    if first:
      commit.abandon(target)
    raise
  return copied


def _attempt(target: pathlib.Path, action: Callable[[pathlib.Path], Any]) -> Exception | None:
  try:
    action(target)
  except OSError as error:
    return error
  return None


def _agree(target: pathlib.Path, failure: Exception | None, stage: str) -> None:
  """Waits for all processes; raises on each where one failed.

  A process that failed stays in step until here: the others would wait for it for ever.
  """
  failed = failure is not None
  if jax.process_count() > 1:
    flags = multihost_utils.process_allgather(np.array([failed]))
    if flags.any() and not failed:
      failure = options.UserError(f"{target}: another process failed to {stage} the checkpoint")
  if isinstance(failure, options.UserError):
    raise failure
  if failure is not None:
    why = getattr(failure, "strerror", None) or str(failure)
    raise options.UserError(f"{target}: cannot be written ({why})") from failure


def _check_sizes(partial: pathlib.Path, plan) -> None:
  for name, items in plan.items():
    path = partial / name
    want = len(_header(items)) + sum(item.nbytes for item in items)
    if not path.is_file() or path.stat().st_size != want:
      raise options.UserError(
        f"{path} is not there in full: the processes must share the file system they save to"
      )


def _index(plan) -> dict[str, Any]:
  total = sum(item.nbytes for items in plan.values() for item in items)
  where = {item.name: name for name, items in plan.items() for item in items}
  return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}


def _write_json(path: pathlib.Path, value: Any) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _header(items: list[_Item]) -> bytes:
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  start = 0
  for item in items:
    header[item.name] = {
      "dtype": item.dtype,
      "shape": list(item.shape),
      "data_offsets": [start, start + item.nbytes],
    }
    start += item.nbytes
  text = json.dumps(header, separators=(",", ":")).encode("utf-8")
  text += b" " * (-len(text) % 8)  # Tensors begin at a multiple of eight.
  return len(text).to_bytes(8, "little") + text


def _collective(item: _Item, leaves) -> bool:
  return item.tensor is not None and windows.needs_every_process(leaves[item.tensor.parameter.path])


def _write_file(path, items, leaves, opened) -> Exception | None:
  """Streams one file; with no path only joins in what all processes must do."""
  failure: Exception | None = None
  file: BinaryIO | None = None
  try:
    if path is not None:
      try:
        file = open(path, "wb", buffering=0)
        _write(file, _header(items))
      except OSError as error:
        failure = error
    for item in items:
      wanted = file is not None and failure is None
      if not wanted and not _collective(item, leaves):
        continue
      blocks = _blocks(item, leaves, opened, wanted)
      try:
        for values in blocks:
          if file is not None and values is not None and failure is None:
            _write(file, _stored(item, values))
      except (OSError, options.UserError) as error:
        failure = error
        for _ in blocks:  # What is left of it, in step with the other processes.
          pass
    if file is not None and failure is None:
      try:
        os.fsync(file.fileno())
      except OSError as error:
        failure = error
  finally:
    if file is not None:
      file.close()
  return failure


def _write(file: BinaryIO, data: Any) -> None:
  view = memoryview(data).cast("B")
  while view:
    view = view[file.write(view) :]


def _blocks(item: _Item, leaves, opened, wanted: bool) -> Iterator[np.ndarray | None]:
  """A tensor's values in order, in blocks of bounded size; None each where they are not wanted."""
  whole = tuple(slice(0, size) for size in item.shape)
  for region in _rows(whole, item.nbytes):
    if item.tensor is None:
      yield opened.file_of[item.name].read(item.name, region)
    else:
      yield _tensor_rows(item.tensor, leaves[item.tensor.parameter.path], region, wanted)


def _stored(item: _Item, values: np.ndarray) -> np.ndarray:
  values = np.ascontiguousarray(values, tensor_file.DTYPES[item.dtype])
  return values.reshape(-1).view(np.uint8)


def _rows(whole: tuple[slice, ...], nbytes: int) -> Iterator[tuple[slice, ...]]:
  if not whole or nbytes <= _WINDOW_BYTES:
    yield whole
    return
  count = whole[0].stop
  step = max(_WINDOW_BYTES // (nbytes // count), 1)
  for start in range(0, count, step):
    yield (slice(start, min(start + step, count)), *whole[1:])


def _tensor_rows(
  tensor: hf_names.Tensor, leaf: Any, region: tuple[slice, ...], wanted: bool
) -> np.ndarray | None:
  part = tensor.part
  window = tensor.parameter.window(part, tensor.index, region)
  values = windows.fetch(leaf, window, wanted=wanted)
  if values is None:
    return None
  values = values.transpose([axis for axis in part.axes if axis is not None])
  return np.expand_dims(values, tensor.parameter.dropped(part))
