"""The bench: its statistics by hand, its batches, its order, and one real step."""

import json
import math
import re
import types
from typing import Any

import numpy as np
import pytest

from kernels.base import options
from rl import mesh_step
from tools.bench import arms, bench, main, spread, synthetic


def test_mean_and_error_by_hand():
  # Spread 1 of three values: t of 2 degrees of freedom, 9.925 x 1 / sqrt(3).
  found = spread.mean([9.0, 10.0, 11.0])
  assert found.value == 10 and found.error == pytest.approx(9.925 / math.sqrt(3), rel=1e-4)
  assert spread.mean([5.0]).error == math.inf
  with pytest.raises(ValueError, match="no replicates"):
    spread.mean([])


def test_ratio_of_pairs_by_hand():
  # The machine is twice as slow in the second round for both: pairs do not see it.
  found = spread.ratio([1.0, 2.0, 1.0], [1.1, 2.2, 1.1])
  assert found.value == pytest.approx(1.1) and found.error == pytest.approx(0, abs=1e-9)
  with pytest.raises(ValueError, match="pairs"):
    spread.ratio([1.0], [1.0, 2.0])


def test_values_far_off_do_not_count():
  # One of five is cut at either end: winsorised to 1, 1, 2, 3, 3, whose deviation is 1.
  found = spread.trimmed_mean([1.0, 2.0, 3.0, 1000.0, -1000.0])
  assert found.value == 2
  assert found.error == pytest.approx(9.925 * 1.0 / (0.6 * math.sqrt(5)), rel=1e-4)
  assert spread.trimmed_mean([1.0, 3.0]) == spread.mean([1.0, 3.0])


@pytest.mark.parametrize("shift, seen", [(1.0, False), (1.1, True)])
def test_the_error_covers_noise_and_not_a_shift(shift, seen):
  rng = np.random.default_rng(0)
  outside = 0
  for _ in range(200):
    machine = rng.lognormal(0, 0.3, 10)  # what both arms meet
    a = machine * rng.lognormal(0, 0.02, 10)
    b = machine * rng.lognormal(0, 0.02, 10) * shift
    found = spread.ratio(list(a), list(b))
    outside += abs(found.value - 1) > found.error
  assert (outside > 190) if seen else (outside <= 6)  # one in a hundred by definition


def workload(**changes):
  values: dict[str, Any] = {
    "seed": 0,
    "micro_batches": 2,
    "rows": 3,
    "row_tokens": 256,
    "max_segments": 4,
    "vocab_size": 100,
    "lengths": synthetic.Lengths(distribution="uniform", mean=60),
    "routing": synthetic.Routing(),
  }
  return synthetic.make(**(values | changes))


def test_batches_hold_what_was_drawn():
  made = workload()
  assert len(made.batches) == 2 and made.batches[0].tokens.shape == (3, 256)
  counts = []
  for batch in made.batches:
    for row in batch.segment_ids:
      counts += [int((row == k).sum()) for k in range(1, row.max() + 1)]
      assert row.max() <= 4
  assert sum(counts) == made.tokens and made.fill == pytest.approx(made.tokens / (2 * 3 * 256))
  assert made.effective_length == pytest.approx(sum(n * n for n in counts) / made.tokens)
  again = workload()
  assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(made.batches, again.batches))
  assert not np.array_equal(made.batches[0].tokens, workload(seed=1).batches[0].tokens)


def test_lengths_follow_their_distribution(tmp_path):
  rng = np.random.default_rng(0)
  draw = lambda **v: [synthetic.Lengths(**v).draw(rng, 100_000) for _ in range(4000)]
  for kind in ("uniform", "lognormal"):
    assert np.mean(draw(distribution=kind, mean=500)) == pytest.approx(500, rel=0.05)
  assert set(draw(distribution="full")) == {100_000}
  (tmp_path / "l.json").write_text("[10, 20]")
  assert set(draw(distribution="file", file=str(tmp_path / "l.json"))) == {10, 20}
  (tmp_path / "l.json").write_text('{"a": 1}')
  with pytest.raises(options.UserError, match="JSON list of lengths"):
    draw(distribution="file", file=str(tmp_path / "l.json"))


def test_routing_tables(tmp_path):
  rng = np.random.default_rng(0)
  uniform = synthetic.Routing(kind="uniform").draw(rng, 2000, 2, 16, 4)
  assert uniform.shape == (2000, 2, 4) and uniform.dtype == np.int16
  assert all(len(set(row)) == 4 for row in uniform[:50, 0])
  counts = np.bincount(uniform.reshape(-1), minlength=16)
  assert counts.max() / counts.min() < 1.2
  skewed = np.bincount(synthetic.Routing(kind="zipf").draw(rng, 2000, 2, 16, 4).reshape(-1))
  assert skewed[0] > 2.5 * skewed[15]
  np.save(tmp_path / "t.npy", uniform[:10])
  table = synthetic.Routing(kind="file", file=str(tmp_path / "t.npy"))
  assert table.draw(rng, 25, 2, 16, 4).shape == (25, 2, 4)
  with pytest.raises(options.UserError, match="want .tokens, 3 layers"):
    table.draw(rng, 25, 3, 16, 4)
  with pytest.raises(options.UserError, match="outside 0 to 3"):
    table.draw(rng, 25, 2, 4, 4)
  with pytest.raises(options.UserError, match="needs a model with experts"):
    workload(routing=synthetic.Routing(kind="zipf"))
  batch = workload(routing=table, layers=2, experts=16, top_k=4).batches[0]
  real = batch.segment_ids > 0
  assert (batch.routed_experts[real] >= 0).all() and (batch.routed_experts[~real] == -1).all()


class Fake:
  """An arm of given seconds a step, that writes down when it ran."""

  def __init__(self, name, seconds, log, chips=1.0, peak_flops=None):
    self.name, self._seconds, self._log = name, seconds, log
    self.chips, self.peak_flops = chips, peak_flops
    self.metrics = {}
    self.model_flops = 4e12
    self.workload = types.SimpleNamespace(tokens=1000, fill=0.5, effective_length=100.0)

  def step(self):
    self._log.append(self.name)
    s = self._seconds
    return arms.StepTimes((0.3 * s, 0.5 * s), 0.2 * s, s)


def test_arms_alternate_and_figures_follow():
  log: list[str] = []
  pair = [Fake("A", 2.0, log, 2.0, 10e12), Fake("B", 2.5, log, 4.0, 5e12)]
  limits: dict[str, Any] = {"error": 0.03, "most_rounds": 9}
  told: list[str] = []
  results = bench.measure(pair, rounds=3, steps=2, progress=told.append, **limits)
  assert told[:2] == ["compiling A ...", "compiling B ..."]
  # The first step compiles, the second settles; then in turns.
  assert "".join(log) == "AB" + "AB" + "ABBA" * 3
  a, b = results
  assert a.step.value == 2.0 and a.step.error == 0 and len(a.replicates) == 3
  assert a.micro_batches == pytest.approx((0.6, 1.0)) and a.update == pytest.approx(0.4)
  assert a.tokens_per_second_per_chip == pytest.approx(250)
  assert a.tflops_per_chip == pytest.approx(1.0) and a.mfu == pytest.approx(0.1)
  # Each by its own chips: B has twice as many, of half the peak.
  assert b.tokens_per_second_per_chip == pytest.approx(100) and b.chips == 4
  assert b.tflops_per_chip == pytest.approx(0.4) and b.mfu == pytest.approx(0.08)
  text = "\n".join(bench.lines(results))
  assert "B / A: 1.2500" in text and "a difference" in text and "not counted" in text
  assert bench.to_json(results)["ratio"]["value"] == pytest.approx(1.25)
  unknown = bench.measure([Fake("A", 2.0, log)], rounds=2, steps=1, **limits)
  assert unknown[0].mfu is None and "--peak_tflops" in bench.lines(unknown)[0]


def test_dropped_pairs_are_told():
  arm = Fake("A", 1.0, [])
  arm.metrics = {mesh_step.DROPPED: 7.0}
  results = bench.measure([arm], rounds=1, most_rounds=1, error=1.0, steps=1)
  assert results[0].dropped_pairs == 7 and "dropped pairs 7;" in bench.lines(results)[1]


def test_an_error_that_is_not_known_is_null():
  pair = [Fake("A", 1.0, []), Fake("B", 1.0, [])]
  results = bench.measure(pair, rounds=1, most_rounds=1, error=1.0, steps=1)
  out = json.loads(json.dumps(bench.to_json(results), allow_nan=False))
  assert out["ratio"]["error"] is None and out["arms"][1]["step"]["error"] is None


def test_the_header_has_the_devices_of_each_arm():
  assert main.header({"A": 4}, "cpu") == "4 x cpu" == main.header({"A": 4, "B": 4}, "cpu")
  assert main.header({"A": 4, "B": 8}, "cpu") == "A: 4 x cpu, B: 8 x cpu"


class Noisy(Fake):
  """Steps of 1 s with a tenth of noise, and now and then one that is interrupted."""

  def __init__(self, name, shift, seed):
    super().__init__(name, 1.0, [])
    self._shift, self._rng = shift, np.random.default_rng(seed)

  def step(self):
    self._seconds = self._shift * self._rng.lognormal(0, 0.05)
    if self._rng.random() < 0.05:
      self._seconds *= 3
    return super().step()


@pytest.mark.parametrize("shift", [1.0, 1.1])
def test_rounds_are_added_until_the_error_is_small(shift):
  right = 0
  for seed in range(100):
    pair = [Noisy("A", 1.0, seed), Noisy("B", shift, 1000 + seed)]
    results = bench.measure(pair, rounds=6, most_rounds=60, error=0.03, steps=4)
    found = spread.ratio(results[0].medians, results[1].medians)
    assert found.relative <= 0.03 and 6 <= found.count <= 60
    right += abs(found.value - shift) <= found.error
  # Stopping once it looks good costs a few of the hundred; 95 % intervals miss 12 here.
  assert right >= 95
  few = bench.measure([Noisy("A", 1.0, 0)], rounds=2, most_rounds=3, error=0.0, steps=1)
  assert few[0].step.count == 3


SMALL = [
  "bench",
  "--recipe=none",
  "--model_preset=tiny_moe",
  "--row_tokens=64",
  "--micro_batch_rows=1",
  "--num_micro_batches=2",
  "--logps_chunk_size=64",
  "--length_distribution=uniform",
  "--mean_length=20",
  "--routing=zipf",
  "--bench_rounds=2",
  "--bench_most_rounds=2",
  "--bench_steps=1",
]


def test_a_real_step_is_timed(tmp_path, capsys, monkeypatch):
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
  out = tmp_path / "bench.json"
  line = [*SMALL, f"--json={out}"]
  assert main.run(main.arm_settings(line, None), line) == 0
  assert "tokens/s/chip" in capsys.readouterr().out
  read = json.loads(out.read_text())
  (arm,) = read["arms"]
  assert len(arm["micro_batches"]) == 2 and len(arm["replicates"]) == 2
  assert all(0 < s < arm["first_step"] for s in arm["replicates"])
  assert (
    arm["devices"] == 1 and 0.3 < arm["fill"] <= 1 and read["options"]["model_preset"] == "tiny_moe"
  )


@pytest.mark.parametrize(
  "flags, word",
  [
    (["--length_file=x.json"], "length_distribution=file"),
    (["--routing=file"], "--routing_file goes with"),
    (["--b_flags=--routing=file"], "--routing_file goes with"),
    (["--length_distribution=full"], "--mean_length=20 is not read with .*=full"),
    (["--b_flags=--length_distribution=full --mean_length=30"], "--mean_length=30 is not read"),
    (["--bench_rounds=3"], "--bench_rounds=3 are more than --bench_most_rounds=2"),
    *(
      ([f"--b_flags=--{name}=1"], f"--{name}=1 has no place")
      for name in ("json", "bench_rounds", "bench_most_rounds", "bench_error", "bench_steps")
    ),
  ],
)
@pytest.mark.parametrize("more", [[], ["--check"]])
def test_flags_that_do_not_go_together_are_refused_before_the_start(flags, word, more, capsys):
  with pytest.raises(SystemExit) as ended:
    main.main([*SMALL, *flags, *more])
  assert ended.value.code == 2 and re.search(word, capsys.readouterr().err)


def test_an_arm_may_leave_the_mean_length_of_the_command_line_unread(capsys):
  with pytest.raises(SystemExit) as ended:
    main.main([*SMALL, "--b_flags=--length_distribution=full", "--check"])
  assert ended.value.code == 0, capsys.readouterr().err


def test_arm_b_has_its_own_flags():
  b = main.arm_settings(SMALL, "--remat_policy=none --row_tokens=32")
  assert (b.remat_policy, b.row_tokens, b.model_preset) == ("none", 32, "tiny_moe")
  with pytest.raises(options.OptionError, match="nosuch"):
    main.arm_settings(SMALL, "--nosuch=1")
