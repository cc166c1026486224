"""Lines of the scoring tool: read and checked, and written back with their numbers."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kernels.base import options, outputs


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of the input.

  Attributes:
    number: Its number in the file, from 1.
    record: Its JSON object.
    tokens: Its ids, int32; at least one.
  """

  number: int
  record: dict[str, Any]
  tokens: np.ndarray


def encoder(checkpoint: pathlib.Path) -> Callable[[str], list[int]]:
  """Turns text into ids with the checkpoint's tokenizer.json, adding no special token.

  Raises:
    options.UserError: There is none, or it cannot be read.
  """
  path = checkpoint / "tokenizer.json"
  if not path.is_file():
    raise options.UserError(
      f'the input has a line with "text", and the checkpoint has no tokenizer ({path}): give '
      '"tokens", or put tokenizer.json there'
    )
  import tokenizers

  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The package raises nothing narrower.
    raise options.UserError(f"{path}: cannot be read as a tokenizer ({error})") from None
  return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def read(path: pathlib.Path, vocab_size: int, checkpoint: pathlib.Path) -> list[Line]:
  """Reads the input.

  Empty lines are passed over.  A line with "tokens" needs no tokenizer; where a line has "text" and
  no "tokens", its ids are added to it, so that the output says what the numbers belong to.

  Args:
    path: JSON Lines file.
    vocab_size: Ids must be below it.
    checkpoint: Directory that may have a tokenizer.

  Raises:
    options.UserError: Names the first line that is wrong, by its number.
  """
  found = []
  encode: Callable[[str], list[int]] | None = None
  try:
    data = path.read_bytes()
  except OSError as error:
    raise options.UserError(f"{path}: cannot be read ({error.strerror})") from None
  for number, text in enumerate(data.split(b"\n"), 1):
    if not text.strip():
      continue
    where = f"{path}:{number}"
    try:
      record = json.loads(text)
    except ValueError as error:
      raise options.UserError(f"{where}: no JSON ({error})") from None
    if not isinstance(record, dict):
      raise options.UserError(f"{where}: want a JSON object, found {type(record).__name__}")
    if taken := {"logprobs", "entropy"} & record.keys():
      raise options.UserError(
        f'{where}: has "{min(taken)}" already, which is what is written here; rename that key'
      )
    if "tokens" not in record:
      if not isinstance(record.get("text"), str):
        raise options.UserError(f'{where}: want "tokens" (a list of ids) or "text" (a string)')
      encode = encode or encoder(checkpoint)
      record = record | {"tokens": encode(record["text"])}
    found.append(Line(number, record, _tokens(record["tokens"], vocab_size, where)))
  if not found:
    raise options.UserError(f"{path}: there is no line to score")
  return found


def _tokens(given: Any, vocab_size: int, where: str) -> np.ndarray:
  if not isinstance(given, list) or not given:
    raise options.UserError(f"{where}: want at least one token, in a list; found {given!r:.80}")
  for place, token in enumerate(given):
    if not isinstance(token, int) or isinstance(token, bool):
      raise options.UserError(f"{where}: token {place} is {token!r:.80}, not an integer")
    if not 0 <= token < vocab_size:
      raise options.UserError(
        f"{where}: token {place} is {token}, outside the vocabulary of {vocab_size}"
      )
  return np.array(given, np.int32)


def scored(line: Line, logprobs: np.ndarray, entropy: np.ndarray) -> dict[str, Any]:
  """The line with its numbers.

  Args:
    line: The line, n tokens.
    logprobs: float32 [n - 1], of the second token and on.
    entropy: float32 [n - 1], of the distributions that those tokens are drawn from.

  Raises:
    options.UserError: A number is not finite.
  """
  for name, values in (("log-prob", logprobs), ("entropy", entropy)):
    if not np.isfinite(values).all():
      at = int(np.flatnonzero(~np.isfinite(values))[0]) + 1
      raise options.UserError(
        f"line {line.number}: the {name} of token {at} is {values[at - 1]}; the weights, or the "
        "type they are computed in, overflow"
      )
  return line.record | {"logprobs": _numbers(logprobs), "entropy": _numbers(entropy)}


def _numbers(values: np.ndarray) -> list[float | None]:
  # The shortest decimal that is this float32 and no other, not the digits of a float64.
  return [None, *(float(text) for text in values.astype(np.float32).astype(str))]


def write(path: pathlib.Path, records: Iterable[dict[str, Any]]) -> None:
  """Writes all lines, or, if anything fails, none.

  Raises:
    options.UserError: The file cannot be written.
  """
  dump = lambda record: json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
  outputs.write(path, "".join(map(dump, records)))


def check_writable(paths: Sequence[pathlib.Path]) -> None:
  """Refuses, before any work, a file that could not be written after it.

  Raises:
    options.UserError: A directory is missing or not writable, or a path is a directory.
  """
  for path in paths:
    if path.is_dir():
      raise options.UserError(f"{path} is a directory; give a file to write")
    if not path.parent.is_dir():
      raise options.UserError(f"{path}: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
      raise options.UserError(f"{path}: the directory {path.parent} cannot be written")
