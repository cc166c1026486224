"""A checkpoint directory: which tensors it holds, in which files, and whether they are the model's.

Everything is judged from headers before one byte of a tensor is read, so a wrong checkpoint fails
in milliseconds with the tensors it is wrong in.
"""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from kernels.base import options
from model import config as config_lib
from model.checkpoint import hf_names, tensor_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Stored types that weights can be read from.
READABLE = ("BF16", "F32", "F16")
_SHOWN = 3


class Checkpoint:
  """An open checkpoint directory.

  Attributes:
    directory: Where it is.
    file_of: The open file that holds each tensor, by the tensor's name.
    skipped: Number of tensors passed over by name, by prefix ("mtp.", "model.visual.").
  """

  def __init__(self, directory: str | pathlib.Path):
    """Opens every file and checks headers and index against each other.

    Raises:
      options.UserError: No checkpoint is there; the index names a file that is missing or
        contradicts the files; a tensor is in two files; a file is damaged.
    """
    self.directory = pathlib.Path(directory)
    self._files: dict[str, tensor_file.TensorFile] = {}
    with contextlib.ExitStack() as stack:
      stack.callback(self.close)
      weight_map = self._find_files()
      self.file_of = self._tensors(weight_map)
      stack.pop_all()
    self.skipped = collections.Counter(
      prefix for name in self.file_of for prefix in hf_names.SKIPPED if name.startswith(prefix)
    )

  def close(self) -> None:
    """Closes the files."""
    for file in self._files.values():
      file.close()
    self._files = {}

  def __enter__(self) -> Checkpoint:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  @property
  def bytes_read(self) -> int:
    """Bytes of tensors read so far."""
    return sum(file.bytes_read for file in self._files.values())

  def entry(self, name: str) -> tensor_file.Entry:
    """A tensor's type, shape and place."""
    return self.file_of[name].entries[name]

  def skipped_names(self, prefix: str) -> list[str]:
    """Tensors under one of the prefixes that are passed over, in file order."""
    return [name for name in self.file_of if name.startswith(prefix)]

  def _find_files(self) -> dict[str, str] | None:
    """The index's map of tensor to file; None where a single file is all there is."""
    folder = self.directory
    if not folder.is_dir():
      raise options.UserError(
        f"{folder}: no such directory; a checkpoint is a local directory with config.json and "
        "safetensors files, so download a published one first"
      )
    if (folder / INDEX).exists():
      weight_map = _read_index(folder / INDEX)
      for file in dict.fromkeys(weight_map.values()):
        if not (folder / file).is_file():
          lost = [name for name, place in weight_map.items() if place == file]
          raise options.UserError(
            f"{folder / INDEX} names the file {file}, which is not there ({len(lost)} tensors, "
            f"first {lost[0]}); the download may be incomplete"
          )
        self._files[file] = tensor_file.TensorFile(folder / file)
      return weight_map
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in found:
      found = [SINGLE]
    if not found:
      hint = ""
      if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        hint = "; convert the torch files to safetensors first"
      raise options.UserError(f"{folder}: there is neither {INDEX} nor {SINGLE}{hint}")
    if len(found) > 1:
      raise options.UserError(
        f"{folder}: {len(found)} safetensors files but no {INDEX} that says which tensor is where"
      )
    self._files[found[0]] = tensor_file.TensorFile(folder / found[0])
    return None

  def _tensors(self, weight_map: dict[str, str] | None) -> dict[str, tensor_file.TensorFile]:
    place: dict[str, str] = {}
    for file, opened in self._files.items():
      for name in opened.entries:
        if name in place:
          raise options.UserError(
            f"{self.directory}: {name} is in two files, {place[name]} and {file}"
          )
        place[name] = file
    for name, file in (weight_map or {}).items():
      if place.get(name) != file:
        where = f"it is in {place[name]}" if name in place else "no file has it"
        raise options.UserError(f"{self.directory / INDEX} puts {name} in {file}, but {where}")
    if weight_map is not None:
      unlisted = [name for name in place if name not in weight_map]
      if unlisted:
        raise options.UserError(
          f"{self.directory / place[unlisted[0]]} has {_some(unlisted)}, not in {INDEX}"
        )
    return {name: self._files[file] for name, file in place.items()}

  def prefix(self) -> str:
    """The prefix of the text model's tensors.

    Raises:
      options.UserError: Both prefixes are in use, or neither.
    """
    kept = [name for name in self.file_of if not name.startswith(hf_names.SKIPPED)]
    multimodal = [n for n in kept if n.startswith(hf_names.MULTIMODAL_PREFIX)]
    text = [
      n
      for n in kept
      if n.startswith(hf_names.TEXT_PREFIX) and not n.startswith(hf_names.MULTIMODAL_PREFIX)
    ]
    if multimodal and text:
      raise options.UserError(
        f"{self.directory}: two spellings of the text model at once: {multimodal[0]} and {text[0]}"
      )
    if not multimodal and not text:
      raise options.UserError(
        f"{self.directory}: no tensor of a text model: want names that begin with "
        f"{hf_names.TEXT_PREFIX} or {hf_names.MULTIMODAL_PREFIX}, found {_some(kept)}"
      )
    return hf_names.MULTIMODAL_PREFIX if multimodal else hf_names.TEXT_PREFIX

  def experts(self) -> str:
    """The spelling of the routed experts; per-expert for a model without any.

    Raises:
      options.UserError: Both are in use.
    """
    routed = [
      name
      for name in self.file_of
      if ".mlp.experts." in name and not name.startswith(hf_names.SKIPPED)
    ]
    is_fused = lambda name: name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
    fused = [name for name in routed if is_fused(name)]
    single = [name for name in routed if not is_fused(name)]
    if fused and single:
      raise options.UserError(
        f"{self.directory}: experts in both spellings: {fused[0]} and {single[0]}"
      )
    return hf_names.FUSED if fused else hf_names.PER_EXPERT

  def match(self, config: config_lib.ModelConfig) -> tuple[list[hf_names.Parameter], str]:
    """Checks that the tensors are exactly this model's.

    Returns:
      The parameters in the spelling found, and the prefix of their tensors' names.

    Raises:
      options.UserError: A tensor is missing, unknown, or of another shape or type.
    """
    prefix, spelling = self.prefix(), self.experts()
    parameters = hf_names.parameters(config, spelling)
    missing, wrong, known = [], [], set()
    for tensor in hf_names.tensors(parameters, prefix):
      known.add(tensor.name)
      if tensor.name not in self.file_of:
        missing.append(f"{tensor.name} {list(tensor.shape)}")
        continue
      entry = self.entry(tensor.name)
      if entry.shape != tensor.shape:
        wrong.append(f"{tensor.name}: wanted shape {list(tensor.shape)}, found {list(entry.shape)}")
      elif entry.dtype not in READABLE:
        wrong.append(f"{tensor.name}: wanted type {' or '.join(READABLE)}, found {entry.dtype}")
    extra = [
      name for name in self.file_of if name not in known and not name.startswith(hf_names.SKIPPED)
    ]
    if not missing and not wrong and not extra:
      return parameters, prefix
    parts = []
    if wrong:
      parts.append(_some(wrong))
    if missing:
      parts.append(f"missing {_some(missing)}")
    if extra:
      parts.append(f"unknown {_some(extra)}{self._hint(extra, config)}")
    raise options.UserError(
      f"{self.directory}: the tensors are not those of the configured model: " + "; ".join(parts)
    )

  def _hint(self, extra: list[str], config: config_lib.ModelConfig) -> str:
    if any("scale" in name.rsplit(".", 1)[-1] for name in extra):
      return " (scales of a quantised checkpoint; use the bfloat16 one)"
    if hf_names.HEAD in extra and config.tie_word_embeddings:
      return (
        " (config.json says tie_word_embeddings, so a head of its own would not be used: set it to "
        "false, or remove the tensor if it is the embedding)"
      )
    return ""

  def report(self) -> str:
    """One line on what is there and what is passed over."""
    total = sum(self.entry(name).stop - self.entry(name).start for name in self.file_of)
    text = f"{self.directory}: {len(self.file_of):,} tensors in {len(self._files)} files"
    text += f", {total / 1e9:,.2f} GB"
    for prefix, count in sorted(self.skipped.items()):
      text += f"; {count:,} {prefix}* passed over"
    return text


def _read_index(path: pathlib.Path) -> dict[str, str]:
  twice: list[str] = []

  def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
      if key in found:
        twice.append(key)
      found[key] = value
    return found

  try:
    given = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
  except (OSError, ValueError) as error:
    raise options.UserError(f"{path}: cannot be read as JSON ({error})") from None
  weight_map = given.get("weight_map") if isinstance(given, dict) else None
  if not isinstance(weight_map, dict) or not weight_map:
    raise options.UserError(f"{path}: there is no weight_map from tensor to file")
  if twice:
    raise options.UserError(f"{path}: {twice[0]} is there twice")
  for name, file in weight_map.items():
    parts = pathlib.PurePosixPath(file).parts if isinstance(file, str) else ()
    if not parts or ".." in parts or parts[0] == "/":
      raise options.UserError(f"{path}: {name} is in {file!r}; want a file inside the directory")
  return weight_map


def _some(names: list[str]) -> str:
  shown = ", ".join(names[:_SHOWN])
  return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "") or "none"


def say_nothing(_: str) -> None:
  """For callers that want no line."""


Say = Callable[[str], None]
