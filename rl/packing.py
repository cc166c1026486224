"""Packing: trajectories into rows of a fixed number of tokens, rows into micro-batches.

Two halves.  A plan says which trajectory lies in which row of which micro-batch; it is a function
of the lengths alone, so that every host of a run makes the same plan, with the same number of
micro-batches, whatever its own rows hold.  `materialise` then writes the arrays of the rows asked
for, all of them or one host's share.

In a row, segment ids count 1, 2, ... and 0 is padding; positions restart at each segment.  Every
per-token field lies at its token: entry i of a log-prob, mask or advantage is about token i given
the tokens of its segment before it.  Masks come from positions in the trajectory, never from token
ids, so padding may use any id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kernels.base.options import UserError
from rl.config import BatchOptions
from rl.trajectory import Trajectory

# Numpy arrays as packed, JAX arrays inside a program.
AnyArray = Any


class PackedBatch(NamedTuple):
  """A micro-batch of R packed rows of S tokens with at most K segments each.

  Numpy or JAX arrays.  Fields that may be None are absent for a whole step or for none of it, so
  that the micro-batches of a step have one structure.

  Attributes:
    tokens: int32 [R, S].
    segment_ids: int32 [R, S], 1..K, 0 where padding.
    positions: int32 [R, S], from 0 in each segment.
    loss_mask: float32 [R, S].
    advantages: float32 [R, S], the trajectory's advantage on its completion tokens.
    sampler_logprobs: float32 [R, S], 0 where the loss mask is.
    old_logprobs: float32 [R, S], 0 where the loss mask is; or None.
    reference_logprobs: float32 [R, S], 0 where the loss mask is; or None.
    routed_experts: int16 [R, S, layers, top_k], -1 where unset; or None.
    segment_valid: float32 [R, K], 1 where a segment exists and its trajectory is valid.
    segment_truncated: float32 [R, K], 1 where it was truncated.
    segment_reward: float32 [R, K].
    segment_index: int32 [R, K], its trajectory's place in the step's batch, -1 where none.
  """

  tokens: AnyArray
  segment_ids: AnyArray
  positions: AnyArray
  loss_mask: AnyArray
  advantages: AnyArray
  sampler_logprobs: AnyArray
  old_logprobs: AnyArray | None
  reference_logprobs: AnyArray | None
  routed_experts: AnyArray | None
  segment_valid: AnyArray
  segment_truncated: AnyArray
  segment_reward: AnyArray
  segment_index: AnyArray


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where each trajectory lies.

  Attributes:
    micro_batches: For each micro-batch, for each of its rows, the trajectories in order.
    row_tokens: Tokens of a row.
    fill: Tokens over capacity of all rows, empty ones included; within [0, 1].
    fill_of_used_rows: The same over the rows that hold anything: how well the packer did.
  """

  micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
  row_tokens: int
  fill: float
  fill_of_used_rows: float


def plan(lengths: Sequence[int], options: BatchOptions, names: Sequence[str] | None = None) -> Plan:
  """Assigns trajectories to rows and rows to micro-batches.

  Args:
    lengths: Tokens of each trajectory of the step, over all hosts.
    options: Caps and shapes.
    names: What messages call the trajectories.

  Returns:
    The plan: deterministic in its arguments.

  Raises:
    UserError: A trajectory is longer than a row, or more micro-batches are needed than
      `num_micro_batches` allows.
  """
  refuse_longer(lengths, options.row_tokens, names)
  segments = options.max_segments_per_row if options.packing else 1
  rows = pack_rows(lengths, options.row_tokens, segments)
  used = len(rows)
  needed = max(1, -(-used // options.micro_batch_rows))
  count = options.num_micro_batches or needed
  if count < needed:
    raise UserError(
      f"{len(lengths)} trajectories fill {used} rows, which need {needed} micro-batches of "
      f"{options.micro_batch_rows} rows, more than --num_micro_batches={count}"
    )
  rows += [[] for _ in range(count * options.micro_batch_rows - used)]
  if options.padding_first:
    tokens = [sum(lengths[i] for i in row) for row in rows]
    rows = [rows[i] for i in sorted(range(len(rows)), key=lambda i: (tokens[i], i))]
  step = options.micro_batch_rows
  total = sum(lengths)
  return Plan(
    micro_batches=tuple(
      tuple(tuple(row) for row in rows[start : start + step]) for start in range(0, len(rows), step)
    ),
    row_tokens=options.row_tokens,
    fill=total / (len(rows) * options.row_tokens),
    fill_of_used_rows=total / (used * options.row_tokens) if used else 0.0,
  )


def refuse_longer(
  lengths: Sequence[int], row_tokens: int, names: Sequence[str] | None = None
) -> None:
  """Refuses trajectories that no row can hold.

  Args:
    lengths: Tokens of each.
    row_tokens: Tokens of a row.
    names: What messages call them.

  Raises:
    UserError: One is longer than a row; named.
  """
  for index, length in enumerate(lengths):
    if length > row_tokens:
      name = names[index] if names else f"trajectory {index}"
      raise UserError(
        f"{name} has {length} tokens, more than a row of --row_tokens={row_tokens}; trajectories "
        "are never cut: raise --row_tokens or leave it out"
      )


def pack_rows(lengths: Sequence[int], row_tokens: int, max_segments: int) -> list[list[int]]:
  """Assigns items to as few rows as two heuristics find.

  First-fit-decreasing, and a pass that closes one row after another, preferring what fills it
  exactly; the one with fewer rows, the first where they tie.

  Args:
    lengths: Tokens of each item, none above `row_tokens`.
    row_tokens: Capacity of a row.
    max_segments: Most items of a row.

  Returns:
    Rows of item indices; each item once.
  """
  order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
  first_fit = _first_fit_decreasing(order, lengths, row_tokens, max_segments)
  bound = max(-(-sum(lengths) // row_tokens), -(-len(lengths) // max_segments))
  if len(first_fit) == bound:
    return first_fit
  exact = _exact_fit(order, lengths, row_tokens, max_segments)
  return exact if len(exact) < len(first_fit) else first_fit


def _first_fit_decreasing(order, lengths, row_tokens, max_segments) -> list[list[int]]:
  rows: list[list[int]] = []
  free: list[int] = []
  for item in order:
    for row, space in enumerate(free):
      if lengths[item] <= space and len(rows[row]) < max_segments:
        break
    else:
      row = len(rows)
      rows.append([])
      free.append(row_tokens)
    rows[row].append(item)
    free[row] -= lengths[item]
  return rows


def _exact_fit(order, lengths, row_tokens, max_segments) -> list[list[int]]:
  """Closes one row after another: the longest item left, then what fills the space best.

  A space is filled by one item of exactly its size, else by two that add up to it, else by the
  largest that fits.
  """
  by_length: dict[int, list[int]] = {}
  for item in reversed(order):
    by_length.setdefault(lengths[item], []).append(item)
  rows = []
  left = len(order)
  while left:
    row: list[int] = []
    space = row_tokens
    while len(row) < max_segments and left:
      chosen = _best_lengths(by_length, space, max_segments - len(row)) if row else None
      if not row:
        chosen = (max(by_length),)
      if not chosen:
        break
      for length in chosen:
        row.append(by_length[length].pop())
        if not by_length[length]:
          del by_length[length]
        space -= length
        left -= 1
    rows.append(row)
  return rows


def _best_lengths(by_length: dict[int, list[int]], space: int, slots: int) -> tuple[int, ...]:
  if space in by_length:
    return (space,)
  if slots > 1:
    for length in by_length:
      other = space - length
      if length > other:
        continue
      if len(by_length.get(other, ())) > (1 if length == other else 0):
        return (other, length)
  fitting = [length for length in by_length if length <= space]
  return (max(fitting),) if fitting else ()


def materialise(
  trajectories: Sequence[Trajectory],
  advantages: Sequence[float] | np.ndarray,
  step_plan: Plan,
  max_segments: int,
  *,
  with_old_logprobs: bool = False,
  with_routed_experts: bool = False,
  valid: Sequence[bool] | None = None,
  rows: slice = slice(None),
  pad_id: int = 0,
) -> list[PackedBatch]:
  """Writes the arrays of a plan.

  Args:
    trajectories: The step's batch, as in the plan.
    advantages: One for each trajectory.
    step_plan: The plan.
    max_segments: Segments K of the per-segment fields.
    with_old_logprobs: Fill `old_logprobs`; every trajectory must have them.
    with_routed_experts: Fill `routed_experts`, -1 where a trajectory has none.
    valid: Which trajectories take part in the loss; None for all.
    rows: The rows of each micro-batch that this host holds.
    pad_id: Token id of padding; any, since nothing reads it.

  Returns:
    One batch of numpy arrays for each micro-batch.

  Raises:
    UserError: A trajectory lacks what was asked for.
  """
  if with_old_logprobs:
    for index, one in enumerate(trajectories):
      if one.old_logprobs is None:
        raise UserError(
          f"{one.called(index)} has no old_logprobs; record them, or use --old_logprobs=recompute"
        )
  routed_shape = None
  if with_routed_experts:
    shapes = {t.routed_experts.shape[1:] for t in trajectories if t.routed_experts is not None}
    if len(shapes) != 1:
      raise UserError(
        f"router replay wants routed_experts of one [layers, top_k]; the batch has {sorted(shapes)}"
      )
    routed_shape = shapes.pop()
  made = []
  for micro_batch in step_plan.micro_batches:
    made.append(
      _write(
        [[(i, trajectories[i]) for i in row] for row in micro_batch[rows]],
        advantages,
        step_plan.row_tokens,
        max_segments,
        with_old_logprobs,
        routed_shape,
        valid,
        pad_id,
      )
    )
  return made


def _write(
  rows: list[list[tuple[int, Trajectory]]],
  advantages,
  row_tokens: int,
  max_segments: int,
  with_old_logprobs: bool,
  routed_shape: tuple[int, ...] | None,
  valid: Sequence[bool] | None,
  pad_id: int,
) -> PackedBatch:
  shape = (len(rows), row_tokens)
  per_segment = (len(rows), max_segments)
  batch = PackedBatch(
    tokens=np.full(shape, pad_id, np.int32),
    segment_ids=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    loss_mask=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    sampler_logprobs=np.zeros(shape, np.float32),
    old_logprobs=np.zeros(shape, np.float32) if with_old_logprobs else None,
    reference_logprobs=None,
    routed_experts=None if routed_shape is None else np.full((*shape, *routed_shape), -1, np.int16),
    segment_valid=np.zeros(per_segment, np.float32),
    segment_truncated=np.zeros(per_segment, np.float32),
    segment_reward=np.zeros(per_segment, np.float32),
    segment_index=np.full(per_segment, -1, np.int32),
  )
  for r, row in enumerate(rows):
    start = 0
    for k, (index, one) in enumerate(row):
      end = start + one.num_tokens
      completion = slice(end - len(one.completion_ids), end)
      batch.tokens[r, start:end] = np.concatenate([one.prompt_ids, one.completion_ids])
      batch.segment_ids[r, start:end] = k + 1
      batch.positions[r, start:end] = np.arange(end - start)
      batch.loss_mask[r, completion] = one.loss_mask
      batch.advantages[r, completion] = advantages[index]
      batch.sampler_logprobs[r, completion] = one.sampler_logprobs * one.loss_mask
      if batch.old_logprobs is not None:
        batch.old_logprobs[r, completion] = one.old_logprobs * one.loss_mask
      if batch.routed_experts is not None and one.routed_experts is not None:
        batch.routed_experts[r, start:end] = one.routed_experts
      # A segment's first token is predicted from nothing: it never has a loss.
      batch.loss_mask[r, start] = 0.0
      batch.segment_valid[r, k] = 1.0 if valid is None else float(valid[index])
      batch.segment_truncated[r, k] = float(one.truncated)
      batch.segment_reward[r, k] = one.reward
      batch.segment_index[r, k] = index
      start = end
  return batch


def pack(
  trajectories: Sequence[Trajectory],
  advantages: Sequence[float] | np.ndarray,
  options: BatchOptions,
  **kwargs,
) -> tuple[list[PackedBatch], Plan]:
  """Plans and writes a step's batch; see `plan` and `materialise`.

  Returns:
    The micro-batches, all of one shape, and the plan.

  Raises:
    UserError: As `plan` and `materialise` do.
  """
  names = [one.called(index) for index, one in enumerate(trajectories)]
  step_plan = plan([one.num_tokens for one in trajectories], options, names)
  segments = options.max_segments_per_row if options.packing else 1
  return materialise(trajectories, advantages, step_plan, segments, **kwargs), step_plan


def unpack(
  values: Sequence[np.ndarray], step_plan: Plan, lengths: Sequence[int]
) -> list[np.ndarray]:
  """Takes per-token results apart again.

  Args:
    values: For each micro-batch an array [R, S, ...], such as recomputed log-probs.
    step_plan: The plan the micro-batches were written by.
    lengths: Tokens of each trajectory.

  Returns:
    For each trajectory its array [tokens, ...].
  """
  found: list[np.ndarray | None] = [None] * len(lengths)
  for array, micro_batch in zip(values, step_plan.micro_batches, strict=True):
    for r, row in enumerate(micro_batch):
      start = 0
      for index in row:
        found[index] = np.asarray(array[r, start : start + lengths[index]])
        start += lengths[index]
  if any(one is None for one in found):
    raise ValueError("the plan is of another batch")
  return found  # type: ignore[return-value]
