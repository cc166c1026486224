"""Each gate fails alone on the fault it is for; a reference pair passes all of them."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
)

import dataclasses  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from kernels.base import options  # noqa: E402
from model import config as model_config  # noqa: E402
from rl import retry  # noqa: E402
from tools.bench import synthetic  # noqa: E402
from tools.numerics import gates, main, runs, show  # noqa: E402

TOKENS, STEPS = 4000, 3


def good_run(seed=0, noise=1e-6):
  """Three steps whose noise is that of summing in another order."""
  truth, rng = np.random.default_rng(0), np.random.default_rng(100 + seed)
  out = []
  for _ in range(STEPS):
    exact = {"a": truth.normal(size=(8, 16)), "b": truth.normal(size=50), "zero": np.zeros(5)}
    logprobs, loss = -truth.exponential(size=TOKENS), truth.normal()
    shake = lambda x: x * (1 + noise * rng.normal(size=np.shape(x)))
    out.append(
      gates.Step(
        loss=float(shake(loss)),
        grad_norm=float(shake(2.0)),
        logprobs=shake(logprobs).astype(np.float32),
        gradients={name: shake(g).astype(np.float32) for name, g in exact.items()},
        counters=dict.fromkeys(gates.COUNTERS, 0.0),
      )
    )
  return out


def failing(candidate, **kwargs):
  reference = good_run(0)
  noise = gates.spread(reference, good_run(1))
  return [g.name for g in gates.judge(reference, candidate, noise, **kwargs) if not g.passed]


def planted(**changes):
  """A good run whose last step has something changed."""
  steps = good_run(2)
  values = {name: change(steps[-1]) for name, change in changes.items()}
  return [*steps[:-1], dataclasses.replace(steps[-1], **values)]


def with_entry(array, value, at=3):
  out = np.array(array)
  out.flat[at] = value
  return out


def test_a_reference_pair_passes():
  assert failing(good_run(2)) == []


FAULTS = {
  "a log-prob is NaN": ("N1", planted(logprobs=lambda s: with_entry(s.logprobs, np.nan))),
  "a gradient overflows": (
    "N1",
    planted(gradients=lambda s: {**s.gradients, "b": with_entry(s.gradients["b"], np.inf)}),
  ),
  "the loss is NaN": ("N1", planted(loss=lambda s: float("nan"))),
  "the loss is off by a denominator": ("N2", planted(loss=lambda s: s.loss * 1.002)),
  "the norm misses a parameter": ("N3", planted(grad_norm=lambda s: s.grad_norm * 0.997)),
  "log-probs drift": ("N4", planted(logprobs=lambda s: s.logprobs + np.float32(0.02))),
  "a few tokens are of another segment": (
    "N4",
    planted(logprobs=lambda s: np.where(np.arange(TOKENS) < 20, s.logprobs - 1, s.logprobs)),
  ),
  "a gradient has a sign wrong": (
    "N5",
    planted(
      gradients=lambda s: {**s.gradients, "b": s.gradients["b"] * with_entry(np.ones(50), -1)}
    ),
  ),
  "a gradient is lost": (
    "N5",
    planted(gradients=lambda s: {**s.gradients, "a": 0 * s.gradients["a"]}),
  ),
  "a zero gradient is not zero": (
    "N5",
    planted(gradients=lambda s: {**s.gradients, "zero": np.full(5, 1e-3)}),
  ),
  "tokens vanish": (
    "N6",
    planted(counters=lambda s: {**s.counters, "uncounted_dropped_tokens": 3.0}),
  ),
  "a master is not rebuilt": (
    "N6",
    planted(counters=lambda s: {**s.counters, "residual16_violations": 1.0}),
  ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_gate_alone(fault):
  gate, candidate = FAULTS[fault]
  assert failing(candidate) == [gate]


def test_lossy_configurations_have_a_wider_gate_of_gradients():
  rng = np.random.default_rng(5)
  rough = planted(
    gradients=lambda s: {
      n: g * (1 + 0.08 * rng.normal(size=g.shape)) for n, g in s.gradients.items()
    }
  )
  assert failing(rough) == ["N5"] and failing(rough, lossy=True) == []


def test_a_counter_that_is_not_there_is_said():
  bare = [dataclasses.replace(s, counters={}) for s in good_run(2)]
  reference = good_run(0)
  n6 = gates.judge(reference, bare, gates.Spread(0, 0))[-1]
  assert n6.passed and n6.detail.count("is not counted by this program") == 2


def test_runs_of_other_problems_are_refused():
  with pytest.raises(ValueError, match="steps"):
    gates.judge(good_run(0), good_run(1)[:2], gates.Spread(0, 0))
  other = [dataclasses.replace(s, logprobs=s.logprobs[:5]) for s in good_run(1)]
  with pytest.raises(ValueError, match="same tokens"):
    gates.judge(good_run(0), other, gates.Spread(0, 0))


def test_cosine_by_hand():
  assert gates.compare_gradients(np.array([3.0, 4.0]), np.array([4.0, 3.0])) == pytest.approx(
    (0.96, 2**0.5 / 5)
  )
  assert gates.compare_gradients(np.zeros(3), np.zeros(3)) == (1.0, 0.0)


def test_a_recorded_run_comes_back(tmp_path):
  path = str(tmp_path / "r.npz")
  runs.save(path, {"seed": "1"}, good_run(0))
  back = runs.load(path, {"seed": "1"})
  noise = gates.spread(good_run(0), good_run(1))
  again = gates.judge(good_run(0), back, noise)
  assert [g.value for g in again] == pytest.approx([0, 0, 0, 0, 1, 0], abs=1e-12)
  for other, word in (
    ({"seed": "2"}, "other rows.*--seed is 1 in the reference, 2 in the candidate"),
    ({"seed": "1", "new": "x"}, "--new is not recorded in the reference, x in the candidate"),
  ):
    with pytest.raises(options.UserError, match=word):
      runs.load(path, other)
  with pytest.raises(options.UserError, match="--record"):
    runs.load(str(tmp_path / "none.npz"), {})
  for content in (b"", b"{}", open(path, "rb").read()[:200]):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(options.UserError, match="is no recorded reference"):
      runs.load(str(tmp_path / "bad.npz"), {})


SMALL = [
  *("numerics", "--recipe=none", "--model_preset=tiny", "--dtype=float32", "--row_tokens=32"),
  *("--micro_batch_rows=2", "--num_micro_batches=1", "--gdn_chunk_size=8", "--logps_chunk_size=32"),
  *("--mean_length=12", "--numerics_steps=2", "--learning_rate=1e-4"),
]


def test_a_real_pair_passes_and_a_real_fault_does_not(tmp_path, capsys, monkeypatch):
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
  out, plot, npz = (str(tmp_path / n) for n in ("g.json", "g.png", "r.npz"))
  line = [
    *SMALL,
    f"--json={out}",
    f"--plot={plot}",
    f"--record={npz}",
    "--b_flags=--remat_policy=none",
  ]
  assert main.run(main.candidate_settings(line, ""), line) == 0
  read = json.loads(open(out).read())
  assert set(read) == {"reference pair", "candidate"}
  assert [g["name"] for g in read["candidate"]] == list(gates.NAMES)
  assert open(plot, "rb").read().startswith(b"\x89PNG")
  assert "not counted by this program" in capsys.readouterr().out
  # Another temperature is another training: loss, norm, log-probs and gradients all say so.
  line = [*SMALL, f"--json={out}", f"--recorded={npz}", "--temperature=1.3"]
  assert main.run(main.candidate_settings(line, ""), line) == 1
  failed = {g["name"] for g in json.loads(open(out).read())["candidate"] if not g["passed"]}
  assert "N4" in failed and "N1" not in failed


def test_a_token_lost_on_a_mesh_fails_the_counters(monkeypatch):
  small = [flag for flag in SMALL if "model_preset" not in flag]
  settings = lambda *flags: main.candidate_settings([*small, "--model_preset=tiny_moe", *flags], "")
  tight = (
    "--mesh=1x2x1",
    "--use_ring_of_experts",
    "--use_ragged_sort",
    "--ragged_buffer_factor=1.0",
  )
  problem = runs.make_problem(
    settings(),
    steps=2,
    lengths=synthetic.Lengths(distribution="uniform", mean=12),
    routing=synthetic.Routing(kind="zipf"),
    config=dataclasses.replace(
      model_config.preset("tiny_moe"), num_hidden_layers=1, full_attention_interval=1
    ),
  )
  reference = runs.run(problem, settings())
  judged = lambda run: {g.name: g for g in gates.judge(reference, run, gates.Spread(0, 0))}
  again = settings(*tight, "--retry_when_tokens_dropped")
  kept = judged(runs.run(problem, again))
  assert all(gate.passed for gate in kept.values()), kept
  assert "2 micro-batches run again" in kept["N6"].detail
  # Pairs that find no room and are not run again.
  lost = judged(runs.run(problem, settings(*tight)))
  assert not lost["N6"].passed and "uncounted_dropped_tokens" in lost["N6"].detail
  # A micro-batch that is discarded and not run again: no pair is counted, its tokens are missing.
  monkeypatch.setattr(retry.Retrying, "_again", lambda self, weights, sums, batch: sums)
  gone = judged(runs.run(problem, again))
  tokens = sum(b.loss_mask.sum() for batches in problem.steps for b in batches)
  assert not gone["N6"].passed and gone["N6"].value == tokens


@pytest.mark.parametrize(
  "flags, word",
  [
    ([], "nothing to judge"),
    (["--recorded=r.npz", "--b_flags=--remat_policy=none"], "leave --b_flags out"),
    (["--lossy", "--record=r.npz"], "--lossy is about a candidate"),
    (
      ["--b_flags=--row_tokens=64"],
      "the problem: --row_tokens is 32 in the reference, 64 in the candidate;",
    ),
    (["--b_flags=--trainable_parameters_mask=.*"], "--trainable_parameters_mask is .* in the ref"),
    (["--record=r.npz", "--routing=file"], "--routing_file goes with"),
    (["--record=r.npz", "--length_file=x"], "--length_file goes with"),
    (["--record=r.npz", "--length_distribution=full"], "--mean_length=12 is not read"),
  ],
)
@pytest.mark.parametrize("more", [[], ["--check"]])
def test_flags_that_do_not_go_together_are_refused_before_the_start(flags, word, more, capsys):
  with pytest.raises(SystemExit) as ended:
    main.main([*SMALL, *flags, *more])
  said = capsys.readouterr().err
  assert ended.value.code == 2 and re.search(word, said) and said.count("\n") == 1


def test_files_of_other_content_are_another_problem(tmp_path, monkeypatch):
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
  one, same, other = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
  for path, text in ((one, "[8]"), (same, "[8]"), (other, "[9]")):
    path.write_text(text)
  flags = lambda path: ["--length_distribution=file", f"--length_file={path}"]
  settings = lambda path: main.candidate_settings([*SMALL[:-3], *flags(path)], "")
  main.refuse_other_problem(settings(one), settings(same), files=True)
  main.refuse_other_problem(settings(one), settings(other), files=False)
  with pytest.raises(
    options.OptionError, match="--length_file is .{12} in the reference, .{12} in"
  ):
    main.refuse_other_problem(settings(one), settings(other), files=True)
  with pytest.raises(options.UserError, match="--length_file=.*none.json: No such file"):
    main.shared(settings(tmp_path / "none.json"))


@pytest.mark.parametrize("line_lossy", [False, True])
@pytest.mark.parametrize("b_lossy", [False, True])
def test_either_line_says_lossy(line_lossy, b_lossy, monkeypatch):
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
  monkeypatch.setattr(runs, "make_problem", lambda *a, **k: None)
  monkeypatch.setattr(runs, "run", lambda *a, **k: good_run())
  monkeypatch.setattr(show, "show", lambda answers: None)
  asked = []
  real = gates.judge

  def spy(*given, **named):
    asked.append(named.get("lossy", False))
    return real(*given, **named)

  monkeypatch.setattr(gates, "judge", spy)
  extra = "--lossy" if b_lossy else "--remat_policy=none"
  line = [*SMALL, f"--b_flags={extra}", *(["--lossy"] if line_lossy else [])]
  assert main.run(main.candidate_settings(line, ""), line) == 0
  assert asked == [False, line_lossy or b_lossy]  # the reference pair, the candidate
