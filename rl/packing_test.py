"""Packing: caps are never exceeded, nothing is cut or lost, and fields lie at their tokens."""

import dataclasses

import numpy as np
import pytest

from kernels.base.options import UserError
from rl import packing
from rl.config import BatchOptions
from rl.trajectory import Trajectory


def _options(row_tokens=64, micro_batch_rows=2, max_segments_per_row=16, **kwargs):
  return BatchOptions(
    row_tokens=row_tokens,
    micro_batch_rows=micro_batch_rows,
    max_segments_per_row=max_segments_per_row,
    **kwargs,
  )


def _trajectory(rng, prompt, completion, **kwargs):
  values = {
    "group_id": 0,
    "prompt_ids": rng.integers(0, 50, prompt, dtype=np.int32),
    "completion_ids": rng.integers(0, 50, completion, dtype=np.int32),
    "loss_mask": rng.integers(0, 2, completion).astype(np.float32),
    "sampler_logprobs": -rng.random(completion, np.float32),
    "old_logprobs": -rng.random(completion, np.float32),
    "reward": 0.5,
  }
  return Trajectory(**(values | kwargs))


def test_the_token_budget_is_never_exceeded():
  # Eight items of 7 in rows of 8: one a row, not two.
  rows = packing.pack_rows([7] * 8, 8, 16)
  assert sorted(len(row) for row in rows) == [1] * 8


@pytest.mark.parametrize("seed", range(20))
def test_rows_hold_every_item_once_within_both_caps(seed):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, 65, rng.integers(0, 80)).tolist()
  segments = int(rng.integers(1, 6))
  rows = packing.pack_rows(lengths, 64, segments)
  assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
  assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
  assert all(0 < len(row) <= segments for row in rows)
  # No pair of rows could have been one.
  sums = sorted((sum(lengths[i] for i in row), len(row)) for row in rows)
  if len(sums) > 1:
    assert sums[0][0] + sums[1][0] > 64 or sums[0][1] + sums[1][1] > segments or segments < 3


def test_exact_fit_beats_first_fit_where_it_can():
  # First fit makes 5+4, 3+3+3 and 2 in rows of 10; 5+3+2 and 4+3+3 are two full rows.
  lengths = [5, 4, 3, 3, 3, 2]
  assert len(packing._first_fit_decreasing(range(6), lengths, 10, 16)) == 3
  rows = packing.pack_rows(lengths, 10, 16)
  assert sorted(sorted(lengths[i] for i in row) for row in rows) == [[2, 3, 5], [3, 3, 4]]


def test_fill_is_a_fraction_of_the_capacity():
  plan = packing.plan([64, 32], _options(num_micro_batches=2))
  assert plan.fill == 96 / 256 and plan.fill_of_used_rows == 96 / 128


def test_too_long_trajectory_is_refused_by_name():
  rng = np.random.default_rng(0)
  long = _trajectory(rng, 5, 60, name="rollouts.jsonl line 3")
  with pytest.raises(UserError, match=r"rollouts.jsonl line 3 has 65 tokens, more than a row"):
    packing.pack([_trajectory(rng, 2, 3), long], [0, 0], _options())


def test_number_of_micro_batches_is_fixed_and_checked():
  plan = packing.plan([60] * 3, _options(num_micro_batches=4))
  assert len(plan.micro_batches) == 4 and all(len(m) == 2 for m in plan.micro_batches)
  assert len(packing.plan([60] * 3, _options()).micro_batches) == 2
  assert len(packing.plan([], _options()).micro_batches) == 1
  with pytest.raises(UserError, match="need 2 micro-batches of 2 rows, more than"):
    packing.plan([60] * 3, _options(num_micro_batches=1))


def test_padding_first_puts_the_emptiest_rows_first():
  lengths = [64, 40, 10]
  plan = packing.plan(lengths, _options(padding_first=True, packing=False, num_micro_batches=2))
  tokens = [sum(lengths[i] for i in row) for m in plan.micro_batches for row in m]
  assert tokens == [0, 10, 40, 64]
  unsorted = packing.plan(lengths, _options(packing=False, num_micro_batches=2))
  tokens = [sum(lengths[i] for i in row) for m in unsorted.micro_batches for row in m]
  assert tokens == [64, 40, 10, 0]


def test_hosts_share_one_schedule():
  # Rows 0..3 of a micro-batch lie on two hosts; one of them would need fewer micro-batches alone.
  rng = np.random.default_rng(1)
  batch = [_trajectory(rng, 4, int(n)) for n in rng.integers(4, 60, 9)]
  options = _options(micro_batch_rows=4, packing=False)
  plan = packing.plan([t.num_tokens for t in batch], options)
  whole = packing.materialise(batch, np.arange(9.0), plan, 1)
  parts = [
    packing.materialise(batch, np.arange(9.0), plan, 1, rows=rows)
    for rows in (slice(0, 2), slice(2, 4))
  ]
  assert len(parts[0]) == len(parts[1]) == len(whole) == 3
  for micro, (a, b) in zip(whole, zip(*parts)):
    for field in ("tokens", "segment_ids", "loss_mask", "segment_valid"):
      joined = np.concatenate([getattr(a, field), getattr(b, field)])
      np.testing.assert_array_equal(joined, getattr(micro, field))
  # The second host's last micro-batch is a dummy of weight zero.
  assert parts[1][2].loss_mask.sum() == 0 and parts[1][2].segment_valid.sum() == 0


def test_fields_lie_at_their_tokens_and_come_back():
  rng = np.random.default_rng(2)
  batch = [_trajectory(rng, int(p), int(c)) for p, c in rng.integers(1, 20, (7, 2))]
  batch[3] = dataclasses.replace(batch[3], truncated=True, reward=2.0)
  advantages = rng.standard_normal(7)
  micro, plan = packing.pack(batch, advantages, _options(), with_old_logprobs=True)
  lengths = [t.num_tokens for t in batch]

  def column(field):
    return packing.unpack([getattr(m, field) for m in micro], plan, lengths)

  for i, one in enumerate(batch):
    p = len(one.prompt_ids)
    np.testing.assert_array_equal(column("tokens")[i][:p], one.prompt_ids)
    np.testing.assert_array_equal(column("tokens")[i][p:], one.completion_ids)
    np.testing.assert_array_equal(column("positions")[i], np.arange(lengths[i]))
    assert len(set(column("segment_ids")[i])) == 1
    assert not column("loss_mask")[i][:p].any()
    np.testing.assert_array_equal(column("loss_mask")[i][p:], one.loss_mask)
    np.testing.assert_array_equal(
      column("sampler_logprobs")[i][p:], one.sampler_logprobs * one.loss_mask
    )
    np.testing.assert_array_equal(column("old_logprobs")[i][p:], one.old_logprobs * one.loss_mask)
    np.testing.assert_array_equal(column("advantages")[i][p:], np.float32(advantages[i]))
  for m in micro:
    # Segments are numbered 1, 2, ... along the row, and the per-segment columns agree.
    for r in range(len(m.tokens)):
      ids = m.segment_ids[r][m.segment_ids[r] > 0]
      assert (np.diff(ids) >= 0).all()
      for k in range(m.segment_valid.shape[1]):
        index = m.segment_index[r, k]
        assert (index >= 0) == (m.segment_valid[r, k] == 1) == bool((ids == k + 1).any())
        if index >= 0:
          assert m.segment_truncated[r, k] == batch[index].truncated
          assert m.segment_reward[r, k] == np.float32(batch[index].reward)


def test_padding_id_may_be_the_end_of_sequence_id():
  # End-of-sequence in the middle, and padding of the same id: masks are about positions.
  rng = np.random.default_rng(3)
  eos = 7
  one = _trajectory(rng, 3, 6, completion_ids=np.array([1, eos, 2, eos, 3, eos], np.int32))
  one = dataclasses.replace(one, loss_mask=np.ones(6, np.float32))
  a, _ = packing.pack([one], [1.0], _options(), pad_id=eos)
  b, _ = packing.pack([one], [1.0], _options(), pad_id=0)
  assert a[0].loss_mask.sum() == 6
  for field in ("loss_mask", "segment_ids", "positions", "advantages", "segment_valid"):
    np.testing.assert_array_equal(getattr(a[0], field), getattr(b[0], field))


def test_missing_fields_are_refused_by_name():
  rng = np.random.default_rng(4)
  one = _trajectory(rng, 2, 3, old_logprobs=None, name="line 9")
  with pytest.raises(UserError, match="line 9 has no old_logprobs"):
    packing.pack([one], [0.0], _options(), with_old_logprobs=True)
  with pytest.raises(UserError, match="router replay wants routed_experts"):
    packing.pack([one], [0.0], _options(), with_routed_experts=True)


def test_routed_experts_ride_along_and_padding_is_unset():
  rng = np.random.default_rng(5)
  routed = rng.integers(0, 8, (5, 4, 2)).astype(np.int16)
  batch = [_trajectory(rng, 2, 3, routed_experts=routed), _trajectory(rng, 2, 2)]
  micro, plan = packing.pack(batch, [0.0, 0.0], _options(), with_routed_experts=True)
  back = packing.unpack([m.routed_experts for m in micro], plan, [5, 4])
  np.testing.assert_array_equal(back[0], routed)
  assert (back[1] == -1).all()
  assert all((m.routed_experts[m.segment_ids == 0] == -1).all() for m in micro)
