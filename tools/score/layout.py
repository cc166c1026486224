"""Lays lines out in arrays of few shapes, so that few programs are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kernels.base import options
from tools.score import lines as lines_lib

# Shorter rows take other matrix-product kernels on a CPU, which round otherwise.
_SHORTEST = 128
# Rows of a packing that are looked through for room.
_OPEN_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a line is: tokens [start, start + len) of a row."""

  line: lines_lib.Line
  row: int
  start: int


@dataclasses.dataclass(frozen=True)
class Batch:
  """Rows for one call; int32 [rows, tokens] each.  Padding has segment 0."""

  tokens: np.ndarray
  segment_ids: np.ndarray
  positions: np.ndarray
  places: tuple[Place, ...]


def bucket(length: int) -> int:
  """The row length for a line: 128, 192, 256, 384, 512, ...; at most half as long again."""
  size = _SHORTEST
  while size < length:
    if size + size // 2 >= length:
      return size + size // 2
    size *= 2
  return size


def alone(lines: Sequence[lines_lib.Line], row_tokens: int) -> list[Batch]:
  """One line a row; lines of like length share a batch of about `row_tokens` tokens."""
  groups: dict[int, list[lines_lib.Line]] = {}
  for line in lines:
    groups.setdefault(bucket(len(line.tokens)), []).append(line)
  batches = []
  for size, members in sorted(groups.items()):
    # The same number of rows in every batch of a size: the last is filled with empty ones.
    rows = max(1, row_tokens // size)
    for first in range(0, len(members), rows):
      chosen = members[first : first + rows]
      batches.append(_batch([[line] for line in chosen], rows, size))
  return batches


def packed(lines: Sequence[lines_lib.Line], row_tokens: int, alignment: int) -> list[Batch]:
  """Several lines a row of `row_tokens`, the longest first, each in the first row with room.

  Args:
    lines: What to lay out.
    row_tokens: Tokens of a row.
    alignment: Lines start at its multiples.  Where it is the chunk of the delta rule, a line is cut
      into the same chunks as when it is alone, so that even rounding is the same.

  Raises:
    options.UserError: A line is longer than a row.
  """
  rows: list[list[lines_lib.Line]] = []
  ends: list[int] = []
  for line in sorted(lines, key=lambda one: -len(one.tokens)):
    size = len(line.tokens)
    if size > row_tokens:
      raise options.UserError(
        f"line {line.number}: {size} tokens do not fit a row of --row_tokens={row_tokens}; give "
        "more, or leave --pack out"
      )
    open_rows = range(max(0, len(rows) - _OPEN_ROWS), len(rows))
    place = next((i for i in open_rows if ends[i] + size <= row_tokens), None)
    if place is None:
      rows.append([])
      ends.append(0)
      place = len(rows) - 1
    rows[place].append(line)
    ends[place] += -(-size // alignment) * alignment
  return [_batch([row], 1, row_tokens, alignment) for row in rows]


def _batch(rows: list[list[lines_lib.Line]], count: int, size: int, alignment: int = 1) -> Batch:
  tokens, segments, positions = (np.zeros((count, size), np.int32) for _ in range(3))
  places = []
  for row, members in enumerate(rows):
    start = 0
    for segment, line in enumerate(members, 1):
      stop = start + len(line.tokens)
      tokens[row, start:stop] = line.tokens
      segments[row, start:stop] = segment
      positions[row, start:stop] = np.arange(stop - start)
      places.append(Place(line, row, start))
      start = -(-stop // alignment) * alignment
  return Batch(tokens, segments, positions, tuple(places))
