"""Recorded rollouts: trajectories in JSON Lines or Parquet files, from any producer.

One object (or row) is one trajectory:

| field | type | |
| --- | --- | --- |
| group_id | integer or string | required |
| prompt_ids, completion_ids | integers | required |
| loss_mask | 0 or 1 per completion token | required |
| sampler_logprobs | number per completion token | required |
| reward | number | required |
| old_logprobs | number per completion token | optional |
| truncated | bool | optional, false |
| policy_version | integer | optional, 0 |
| routed_experts | [tokens, layers, top_k] integers, -1 unset | optional |
| step | integer, the step it was recorded at | optional |

`routed_experts` covers prompt and completion, or the completion alone.  Fields of other names are
passed over, since producers keep notes of their own, except one that is nearly a known name: that
is a slip, and is refused.
"""

from __future__ import annotations

import difflib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kernels.base.options import UserError
from rl import jsonl
from rl import trajectory as trajectory_lib
from rl.trajectory import Trajectory

REQUIRED = (
  "group_id",
  "prompt_ids",
  "completion_ids",
  "loss_mask",
  "sampler_logprobs",
  "reward",
)
OPTIONAL = ("old_logprobs", "truncated", "policy_version", "routed_experts", "step")
# How alike an unknown name must be to a known one to count as a slip.
_SLIP = 0.85


def require_writable(path: str, flag: str) -> None:
  """Checks that rollouts can be written to a path, before there are any.

  Raises:
    options.UserError: Another ending, or a directory that is not there or cannot be written.
  """
  place = pathlib.Path(path)
  if place.suffix.lower() not in SUFFIXES:
    raise UserError(f"--{flag}={path}: want a file name that ends in {' or '.join(SUFFIXES)}")
  if place.is_dir():
    raise UserError(f"--{flag}={path}: is a directory; give a file")
  if not place.parent.is_dir() or not os.access(place.parent, os.W_OK):
    wrong = "cannot be written" if place.parent.is_dir() else "does not exist"
    raise UserError(
      f"--{flag}={path}: the directory {place.parent} {wrong}; make it, or name another file"
    )


def read(
  path: str,
  *,
  vocab_size: int | None = None,
  routing: trajectory_lib.Routing | None = None,
) -> list[Trajectory]:
  """Reads every trajectory of a file.

  Args:
    path: A `.jsonl` (or `.json`, `.ndjson`) or `.parquet` file.
    vocab_size: Size of the model's vocabulary; larger ids are refused.
    routing: What `routed_experts` must be to be replayed; None where they are not.

  Raises:
    UserError: The file is missing, empty or of another kind, or a line is malformed; the message
      has the line's number.
  """
  jsonl.require_file(path, "rollouts")
  lowered = path.lower()
  if lowered.endswith(".parquet"):
    records = _parquet_records(path)
  elif lowered.endswith((".jsonl", ".json", ".ndjson")):
    records = jsonl.read(path, "rollouts")
  else:
    raise UserError(f"rollouts file {path} must end in .jsonl or .parquet")
  found = [
    from_record(record, name, vocab_size=vocab_size, routing=routing) for name, record in records
  ]
  if not found:
    raise UserError(f"rollouts file {path} has no trajectories")
  return found


def _parquet_records(path: str) -> Iterator[tuple[str, Any]]:
  # Imported where it is used: JSON Lines needs no Arrow.
  import pyarrow
  import pyarrow.parquet as parquet

  try:
    file = parquet.ParquetFile(path)
    number = 0
    for batch in file.iter_batches(batch_size=64):
      for record in batch.to_pylist():
        number += 1
        # A column that other rows have and this one leaves out reads as null.
        yield f"{path} row {number}", {k: v for k, v in record.items() if v is not None}
  except pyarrow.ArrowInvalid as error:
    raise UserError(f"{path} is no readable Parquet file: {error}") from None


def from_record(
  record: Any,
  name: str,
  *,
  vocab_size: int | None = None,
  routing: trajectory_lib.Routing | None = None,
) -> Trajectory:
  """Turns one JSON object into a trajectory.

  Args:
    record: The parsed object.
    name: What messages call it.
    vocab_size: Size of the model's vocabulary, when known.
    routing: What `routed_experts` must be to be replayed; None where they are not.

  Raises:
    UserError: A field is missing, misspelt or of the wrong type or length.
  """
  if not isinstance(record, dict):
    raise UserError(f"{name} is no JSON object")
  missing = [field for field in REQUIRED if field not in record]
  for field in record:
    if field in REQUIRED or field in OPTIONAL:
      continue
    close = difflib.get_close_matches(field, REQUIRED + OPTIONAL, 1, _SLIP)
    if close and close[0] not in record:
      raise UserError(f"{name} has the unknown field {field}; {close[0]} is meant?")
  if missing:
    raise UserError(f"{name} lacks {', '.join(missing)}")

  group_id = record["group_id"]
  if isinstance(group_id, bool) or not isinstance(group_id, (int, str)):
    raise UserError(f"{name}: group_id must be an integer or a string, not {group_id!r}")
  reward = record["reward"]
  if not isinstance(reward, (int, float)):
    raise UserError(f"{name}: reward must be a number, not {reward!r}")
  truncated = record.get("truncated", False)
  if truncated not in (True, False):
    raise UserError(f"{name}: truncated must be true or false, not {truncated!r}")
  prompt = _array(record, "prompt_ids", np.int32, name)
  completion = _array(record, "completion_ids", np.int32, name)
  optional: dict[str, np.ndarray | None] = {"old_logprobs": None, "routed_experts": None}
  if record.get("old_logprobs") is not None:
    optional["old_logprobs"] = _array(record, "old_logprobs", np.float32, name)
  if record.get("routed_experts") is not None:
    routed = _array(record, "routed_experts", np.int16, name, ndim=3)
    if len(routed) == len(completion) and len(prompt):
      unset = np.full((len(prompt), *routed.shape[1:]), -1, np.int16)
      routed = np.concatenate([unset, routed])
    optional["routed_experts"] = routed
  made = Trajectory(
    group_id=group_id,
    prompt_ids=prompt,
    completion_ids=completion,
    loss_mask=_array(record, "loss_mask", np.float32, name),
    sampler_logprobs=_array(record, "sampler_logprobs", np.float32, name),
    reward=float(reward),
    truncated=bool(truncated),
    policy_version=_integer(record, "policy_version", name) or 0,
    step=_integer(record, "step", name),
    name=name,
    **optional,
  )
  wrong = trajectory_lib.problem(made, vocab_size, routing)
  if wrong:
    raise UserError(f"{name}: {wrong}")
  return made


def _array(record: dict[str, Any], field: str, dtype, name: str, ndim: int = 1) -> np.ndarray:
  given = record[field]
  try:
    if not isinstance(given, list):
      raise ValueError
    array = np.asarray(given) if given else np.zeros((0,) * ndim)
    if array.ndim != ndim or array.dtype.kind not in "iufb":
      raise ValueError
    if np.issubdtype(dtype, np.integer):
      limits = np.iinfo(dtype)
      if not np.all(array == np.floor(array)) or array.dtype.kind == "b":
        raise ValueError
      if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError
    with np.errstate(over="ignore"):
      return array.astype(dtype)
  except (ValueError, TypeError):
    kind = "integers" if np.issubdtype(dtype, np.integer) else "numbers"
    shape = "a list" if ndim == 1 else "lists of [tokens][layers][top_k]"
    raise UserError(f"{name}: {field} must be {shape} of {kind}") from None


def _integer(record: dict[str, Any], field: str, name: str) -> int | None:
  value = record.get(field)
  if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
    raise UserError(f"{name}: {field} must be an integer, not {value!r}")
  return value


def to_record(trajectory: Trajectory) -> dict[str, Any]:
  """The JSON object of a trajectory; `from_record` gives the trajectory back, bit for bit."""
  record: dict[str, Any] = {
    "group_id": trajectory.group_id,
    "prompt_ids": trajectory.prompt_ids.tolist(),
    "completion_ids": trajectory.completion_ids.tolist(),
    "loss_mask": [int(m) for m in trajectory.loss_mask],
    # float32 to Python floats and back is exact.
    "sampler_logprobs": trajectory.sampler_logprobs.astype(np.float32).tolist(),
    "reward": trajectory.reward,
    "truncated": trajectory.truncated,
    "policy_version": trajectory.policy_version,
  }
  if trajectory.old_logprobs is not None:
    record["old_logprobs"] = trajectory.old_logprobs.astype(np.float32).tolist()
  if trajectory.routed_experts is not None:
    record["routed_experts"] = trajectory.routed_experts.tolist()
  if trajectory.step is not None:
    record["step"] = trajectory.step
  return record


SUFFIXES = (".jsonl", ".parquet")


class Writer:
  """Writes trajectories to a `.jsonl` file, appended and flushed a batch, or to a `.parquet` one.

  A JSON Lines file is complete up to the last batch at every instant; a Parquet file is readable
  only after `close`.
  """

  def __init__(self, path: str, *, append: bool = False):
    """Opens the file.

    Args:
      path: Where to write; the ending chooses the format.
      append: Keep what a JSON Lines file already holds.

    Raises:
      UserError: The ending is neither, the file cannot be written, or Parquet is to be appended to.
    """
    self._path = path
    self._parquet = path.lower().endswith(".parquet")
    self._writer: Any = None
    if not self._parquet and not path.lower().endswith(".jsonl"):
      raise UserError(f"rollouts are saved to a .jsonl or .parquet file, not {path}")
    if self._parquet and append:
      raise UserError(f"{path}: a Parquet file cannot be appended to; save to a .jsonl file")
    try:
      os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
      self._file = None if self._parquet else open(path, "a" if append else "w", encoding="utf-8")
      if self._parquet:
        open(path, "wb").close()
    except OSError as error:
      raise UserError(f"cannot write rollouts to {path}: {error.strerror}") from None

  def write(self, trajectories: Iterable[Trajectory]) -> None:
    """Adds trajectories."""
    records = [to_record(t) for t in trajectories]
    if self._file is not None:
      self._file.writelines(json.dumps(r, allow_nan=False) + "\n" for r in records)
      self._file.flush()
      os.fsync(self._file.fileno())
      return
    if not records:
      return
    import pyarrow
    import pyarrow.parquet as parquet

    schema = _schema(records[0])
    table = pyarrow.Table.from_pylist(records, schema=schema)
    if self._writer is None:
      self._writer = parquet.ParquetWriter(self._path, schema)
    self._writer.write_table(table)

  def close(self) -> None:
    """Finishes the file."""
    if self._file is not None:
      self._file.close()
    if self._writer is not None:
      self._writer.close()

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def _schema(first: dict[str, Any]):
  """One schema for the whole file: every optional column, nullable."""
  import pyarrow as pa

  ids = pa.list_(pa.int32())
  numbers = pa.list_(pa.float32())
  return pa.schema(
    [
      ("group_id", pa.string() if isinstance(first["group_id"], str) else pa.int64()),
      ("prompt_ids", ids),
      ("completion_ids", ids),
      ("loss_mask", pa.list_(pa.int8())),
      ("sampler_logprobs", numbers),
      ("reward", pa.float64()),
      ("truncated", pa.bool_()),
      ("policy_version", pa.int64()),
      ("old_logprobs", numbers),
      ("routed_experts", pa.list_(pa.list_(pa.list_(pa.int16())))),
      ("step", pa.int64()),
    ]
  )


def group_size(trajectories: Sequence[Trajectory], expected: int | None = None) -> int:
  """The common size of a batch's groups.

  Args:
    trajectories: A batch, in any order.
    expected: The size that every group must have, or None for that of the first.

  Raises:
    UserError: A group has another size; named.
  """
  counts: dict[int | str, int] = {}
  first: dict[int | str, str] = {}
  for index, one in enumerate(trajectories):
    counts[one.group_id] = counts.get(one.group_id, 0) + 1
    first.setdefault(one.group_id, one.called(index))
  want = expected if expected is not None else next(iter(counts.values()), 0)
  for group, count in counts.items():
    if count != want:
      raise UserError(
        f"group {group} has {count} trajectories, want {want} as "
        + ("--generations_per_prompt says" if expected is not None else "the first group has")
        + f"; a group must be complete (this one starts at {first[group]})"
      )
  return want


def steps(
  trajectories: Sequence[Trajectory],
  *,
  generations_per_prompt: int | None = None,
  prompts_per_step: int | None = None,
) -> list[list[Trajectory]]:
  """Cuts recorded trajectories into the batches of training steps, in the order of the file.

  Trajectories that carry `step` are cut where it changes.  Without `prompts_per_step` each such
  run is a batch (the whole file, when none carries it); with it, each batch is that many groups of
  consecutive trajectories.  A later step may use the group ids of an earlier one again.

  Raises:
    UserError: A group is incomplete, or the trajectories do not divide into steps.
  """
  runs: list[list[Trajectory]] = []
  for one in trajectories:
    if not runs or one.step != runs[-1][-1].step:
      runs.append([])
    runs[-1].append(one)
  if prompts_per_step is None:
    batches = runs
  else:
    batches = []
    for run in runs:
      size = generations_per_prompt or group_size(run)
      count = prompts_per_step * size
      if len(run) % count:
        raise UserError(
          f"{len(run)} trajectories do not divide into steps of --prompts_per_step="
          f"{prompts_per_step} groups of {size}; want a multiple of {count} (they start at "
          f"{run[0].called(0)})"
        )
      batches += [run[start : start + count] for start in range(0, len(run), count)]
  for batch in batches:
    group_size(batch, generations_per_prompt)
  return batches
