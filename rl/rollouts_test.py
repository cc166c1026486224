"""Recorded rollouts: what is read is what was written, and what is wrong is named with its line."""

import json

import numpy as np
import pytest

from kernels.base.options import UserError
from rl import rollouts, trajectory

GOOD = {
  "group_id": 7,
  "prompt_ids": [1, 2],
  "completion_ids": [3, 4, 5],
  "loss_mask": [1, 0, 1],
  "sampler_logprobs": [-0.1, -0.25, -1.7],
  "reward": 0.35,
}


def _file(tmp_path, *records):
  path = tmp_path / "rollouts.jsonl"
  lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
  path.write_text("\n".join(lines) + "\n")
  return str(path)


def test_reads_a_line_with_defaults(tmp_path):
  (one,) = rollouts.read(_file(tmp_path, GOOD))
  assert (one.group_id, one.reward, one.truncated, one.policy_version) == (7, 0.35, False, 0)
  assert one.num_tokens == 5 and one.num_loss_tokens == 2
  assert one.old_logprobs is None and one.routed_experts is None
  assert one.sampler_logprobs.dtype == np.float32


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_write_then_read_is_bit_exact(tmp_path, ending):
  rng = np.random.default_rng(0)
  routed = rng.integers(-1, 8, (5, 4, 2)).tolist()
  records = [
    GOOD | {"sampler_logprobs": (-rng.random(3, np.float32)).tolist(), "step": 3},
    GOOD | {"truncated": True, "policy_version": 9, "old_logprobs": [-1.0, -2.0, -3.0]},
    GOOD | {"routed_experts": routed},
  ]
  given = [rollouts.from_record(r, "x") for r in records]
  path = str(tmp_path / f"out.{ending}")
  with rollouts.Writer(path) as writer:
    writer.write(given[:1])
    writer.write(given[1:])
  back = rollouts.read(path)
  assert [rollouts.to_record(t) for t in back] == [rollouts.to_record(t) for t in given]
  np.testing.assert_array_equal(back[0].sampler_logprobs, given[0].sampler_logprobs)
  np.testing.assert_array_equal(back[2].routed_experts, np.asarray(routed))


def test_routed_experts_of_the_completion_alone_leave_the_prompt_unset():
  routed = np.arange(3 * 2 * 2).reshape(3, 2, 2)
  one = rollouts.from_record(GOOD | {"routed_experts": routed.tolist()}, "x")
  assert one.routed_experts.shape == (5, 2, 2) and one.routed_experts.dtype == np.int16
  assert (one.routed_experts[:2] == -1).all()
  np.testing.assert_array_equal(one.routed_experts[2:], routed)


@pytest.mark.parametrize(
  "change, text",
  [
    ({"reward": float("nan")}, "reward is nan"),
    ({"reward": "high"}, "reward must be a number"),
    ({"sampler_logprobs": [-0.1, float("nan"), -1.0]}, "not finite at entry 1"),
    ({"sampler_logprobs": [-0.1, -1.0]}, "sampler_logprobs has 2 entries for 3"),
    ({"sampler_logprobs": [0.5, 0.1, 0.9]}, "want log-probs, not probabilities"),
    ({"loss_mask": [1, 0.5, 1]}, "want 0 or 1"),
    ({"completion_ids": [3, 4, 512]}, "token id 512 is outside the model's vocabulary of 512"),
    ({"completion_ids": [3, -4, 5]}, "negative"),
    ({"completion_ids": [3, 4.5, 5]}, "completion_ids must be a list of integers"),
    ({"prompt_ids": []}, "prompt_ids is empty"),
    ({"prompt_ids": "abc"}, "prompt_ids must be a list"),
    ({"old_logprobs": [[-1.0]]}, "old_logprobs must be a list"),
    ({"routed_experts": [[[0]], [[0]]]}, "routed_experts has shape"),
    ({"routed_experts": [[[-2]]] * 5}, "want an expert or -1"),
    ({"truncated": "no"}, "truncated must be true or false"),
    ({"group_id": 1.5}, "group_id must be"),
    ({"policy_version": "a"}, "policy_version must be an integer"),
  ],
)
def test_a_bad_value_is_named_with_its_line(tmp_path, change, text):
  path = _file(tmp_path, GOOD, GOOD | change)
  with pytest.raises(UserError, match="line 2") as caught:
    rollouts.read(path, vocab_size=512)
  assert text in str(caught.value) and "\n" not in str(caught.value)


ROUTING = trajectory.Routing(layers=4, top_k=2, experts=8)


@pytest.mark.parametrize(
  "shape, highest, routing, text",
  [
    ((5, 4, 2), 8, ROUTING, "has expert 8; the model has 8"),
    ((3, 4, 2), 99, ROUTING, "has expert 99; the model has 8"),
    ((5, 3, 2), 7, ROUTING, "has 3 layers of 2 experts a token; the model has 4 of 2"),
    ((5, 4, 1), 7, ROUTING, "has 4 layers of 1 experts a token; the model has 4 of 2"),
    ((5, 4, 2), 7, trajectory.Routing(layers=4, top_k=0, experts=0), "the model has no experts"),
  ],
)
def test_experts_to_replay_must_be_the_models(tmp_path, shape, highest, routing, text):
  good = np.full((5, 4, 2), -1)
  good[0] = 7
  wrong = np.zeros(shape, int)
  wrong[-1, 0, 0] = highest
  given = [GOOD, GOOD | {"routed_experts": wrong.tolist()}]
  with pytest.raises(UserError, match="rollouts.jsonl line 2: ") as caught:
    rollouts.read(_file(tmp_path, *given), routing=routing)
  assert text in str(caught.value) and "\n" not in str(caught.value)
  assert len(rollouts.read(_file(tmp_path, *given))) == 2  # not replayed, so of no concern
  given[1]["routed_experts"] = good.tolist()
  assert len(rollouts.read(_file(tmp_path, *given), routing=ROUTING)) == 2


def test_text_that_is_no_utf8_is_named_and_a_mark_is_passed_over(tmp_path):
  path = tmp_path / "rollouts.jsonl"
  line = json.dumps(GOOD | {"note": "a\u2028b\x85c"}, ensure_ascii=False).encode()
  path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\n")
  assert len(rollouts.read(str(path))) == 2
  path.write_bytes(line + b"\n" + b"\x80\x04\x95")
  with pytest.raises(UserError, match=r"line 2 is no UTF-8 text \(byte 1"):
    rollouts.read(str(path))


def test_malformed_line_and_missing_field_have_a_number(tmp_path):
  with pytest.raises(UserError, match="line 3 is no JSON"):
    rollouts.read(_file(tmp_path, GOOD, "", '{"group_id": 1,'))
  with pytest.raises(UserError, match="Unterminated string starting at column 2$"):
    rollouts.read(_file(tmp_path, '{"group_id'))
  with pytest.raises(UserError, match="line 1 is no JSON that can be read"):
    rollouts.read(_file(tmp_path, "9" * 5000))
  short = {k: v for k, v in GOOD.items() if k != "loss_mask"}
  with pytest.raises(UserError, match="line 1 lacks loss_mask"):
    rollouts.read(_file(tmp_path, short))
  with pytest.raises(UserError, match="line 1 is no JSON object"):
    rollouts.read(_file(tmp_path, "[1, 2]"))


def test_notes_of_the_producer_pass_and_slips_do_not(tmp_path):
  assert rollouts.read(_file(tmp_path, GOOD | {"prompt_text": "2+2", "latency_s": 0.1}))
  slip = GOOD | {"old_logprob": [-1.0, -1.0, -1.0]}
  with pytest.raises(UserError, match="unknown field old_logprob; old_logprobs is meant"):
    rollouts.read(_file(tmp_path, slip))


def test_files_that_cannot_be_read(tmp_path):
  with pytest.raises(UserError, match="--rollouts=.*/none.jsonl: no such file"):
    rollouts.read(str(tmp_path / "none.jsonl"))
  (tmp_path / "empty.jsonl").write_text("\n")
  with pytest.raises(UserError, match="no trajectories"):
    rollouts.read(str(tmp_path / "empty.jsonl"))
  (tmp_path / "x.csv").write_text("a")
  with pytest.raises(UserError, match="must end in"):
    rollouts.read(str(tmp_path / "x.csv"))
  (tmp_path / "x.parquet").write_text("not parquet")
  with pytest.raises(UserError, match="no readable Parquet"):
    rollouts.read(str(tmp_path / "x.parquet"))
  with pytest.raises(UserError, match="cannot write"):
    rollouts.Writer(str(tmp_path / "x.csv" / "out.jsonl"))


def _batch(groups, **extra):
  made = [GOOD | {"group_id": g} | extra for g in groups]
  return [rollouts.from_record(record, f"line {i}") for i, record in enumerate(made, 1)]


def test_steps_are_cut_where_the_recorded_step_changes():
  made = _batch([0, 0, 1, 1], step=1) + _batch([0, 0, 1, 1], step=2)
  assert [len(b) for b in rollouts.steps(made)] == [4, 4]
  assert [len(b) for b in rollouts.steps(_batch([0, 0, 1, 1]))] == [4]
  cut = rollouts.steps(_batch([0, 1, 0, 1, 2, 2, 3, 3]), prompts_per_step=2)
  assert [[t.group_id for t in b] for b in cut] == [[0, 1, 0, 1], [2, 2, 3, 3]]


def test_incomplete_groups_are_refused():
  with pytest.raises(UserError, match="group 1 has 1 trajectories, want 2.* starts at line 3"):
    rollouts.steps(_batch([0, 0, 1]))
  with pytest.raises(UserError, match="group 0 has 2 trajectories, want 4"):
    rollouts.steps(_batch([0, 0, 1, 1]), generations_per_prompt=4)
  with pytest.raises(UserError, match="do not divide into steps.* start at line 1"):
    rollouts.steps(_batch([0, 0, 1, 1, 2, 2]), prompts_per_step=2)
