"""Problems, their split, exact scores, and files with mistakes in them."""

import json
import subprocess
import sys

import pytest

from kernels.base import options
from rl.tasks import arithmetic, registry, task


def _held_out_multisets(made, count):
  return {"".join(sorted(made.held_out_problem(i).answer)) for i in range(count)}


@pytest.mark.parametrize("name", ["sort4", "add2", "add2_msd", "subtract2", "multiply2"])
def test_held_out_answers_share_no_digit_multiset_with_training(name):
  made = registry.make(name)
  assert made.held_out_size >= 900
  held_out = _held_out_multisets(made, made.held_out_size)
  train = {
    "".join(sorted(made.train_problem(seed, i).answer)) for seed in (0, 1) for i in range(2000)
  }
  assert not held_out & train
  assert len(train) > 20
  # The held-out problems are distinct.
  questions = [made.held_out_problem(i).question for i in range(made.held_out_size)]
  assert len(set(questions)) == made.held_out_size


@pytest.mark.parametrize("name", list(arithmetic.FAMILIES))
def test_demonstrations_score_one_and_other_answers_zero(name):
  made = registry.make(name)
  for i in range(200):
    problem = made.train_problem(3, i)
    assert made.score(problem, problem.demonstration) == 1.0
    assert made.score(problem, f" {problem.answer}\n") == 1.0
    wrong = str((int(problem.answer) + 1) % 10 ** len(problem.answer)).zfill(len(problem.answer))
    assert made.score(problem, wrong) == 0.0
    # Holding the answer among other text earns nothing.
    assert made.score(problem, problem.answer + "0") == 0.0
    assert made.score(problem, problem.answer[:-1]) == 0.0


@pytest.mark.parametrize(
  "name, question, answer",
  [
    ("sort4", "3102>", "0123"),
    ("add2", "73+85=", "590"),  # 37 + 58 = 095
    ("add2_msd", "37+58=", "095"),
    ("multiply2", "21*43=", "8040"),  # 12 * 34 = 0408
    ("subtract2", "25-73=", "51"),  # 52 - 37 = 15
  ],
)
def test_answers_by_hand(name, question, answer):
  family = arithmetic.FAMILIES[name]()
  made = dict(family.make(i) for i in range(family.size))
  assert made[question] == answer


def test_problems_depend_on_seed_and_index_alone():
  first, second = registry.make("sort4"), registry.make("sort4")
  ahead = [first.train_problem(1, i) for i in range(50)]
  assert [second.train_problem(1, i) for i in reversed(range(50))] == ahead[::-1]
  assert ahead != [first.train_problem(2, i) for i in range(50)]
  assert first.held_out_problem(7) == second.held_out_problem(7)


def test_unknown_task_gets_the_nearest_name():
  with pytest.raises(options.UserError, match="nearest is sort4"):
    registry.make("sort44")


def _write(path, lines):
  path.write_text("\n".join(lines) + "\n")
  return str(path)


def test_json_lines(tmp_path):
  lines = [json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) for i in range(40)]
  made = registry.make("json_lines", prompts=_write(tmp_path / "p.jsonl", lines))
  assert made.train_size + made.held_out_size == 40 and made.held_out_size > 0
  train = [made.train_problem(0, i) for i in range(made.train_size)]
  assert len({p.question for p in train}) == made.train_size  # one epoch sees each once
  held_out = {made.held_out_problem(i).question for i in range(made.held_out_size)}
  assert not held_out & {p.question for p in train}
  assert made.score(train[0], f" {train[0].answer} ") == 1.0
  assert made.score(train[0], "x") == 0.0
  second = [made.train_problem(0, made.train_size + i) for i in range(made.train_size)]
  assert second != train and {p.question for p in second} == {p.question for p in train}


@pytest.mark.parametrize(
  "lines, message",
  [
    ([], "holds no problem"),
    (["", "  "], "holds no problem"),
    (['{"prompt": "a", "answer": "b"}', "{oops"], "line 2 is no JSON: Expecting"),
    (['{"prompt": "a"}'], "line 1: want a text or a number under 'answer'; keys given: prompt"),
    (['{"prompt": "a", "answer": null}'], "line 1: want a text .* under 'answer'; found null"),
    (['{"prompt": "a", "answer": NaN}'], "line 1: want a text .* under 'answer'; found NaN"),
    (['{"prompt": "\\ud800", "answer": "b"}'], "line 1 holds half of a surrogate pair"),
    (['{"prompt": "a", "answer": "b"}'] * 9, "its 1 different prompts are too few"),
    (['["a", "b"]'], "line 1: want an object"),
    (['{"prompt": "", "answer": "b"}'], "line 1: the text under 'prompt' is empty"),
  ],
)
def test_json_lines_mistakes_are_named(tmp_path, lines, message):
  with pytest.raises(options.UserError, match=message):
    registry.make("json_lines", prompts=_write(tmp_path / "p.jsonl", lines))


def test_missing_files_are_named(tmp_path):
  with pytest.raises(options.UserError, match="give --prompts"):
    registry.make("json_lines")
  with pytest.raises(options.UserError, match="--prompts=.*/absent: no such file"):
    registry.make("json_lines", prompts=str(tmp_path / "absent"))
  one = _write(tmp_path / "a.jsonl", ['{"prompt": "a", "answer": "b"}'])
  with pytest.raises(options.UserError, match="--held_out_prompts=.*/absent: no such file"):
    registry.make("json_lines", prompts=one, held_out_prompts=str(tmp_path / "absent"))
  with pytest.raises(options.UserError, match="--prompts=.*: is a directory"):
    registry.make("json_lines", prompts=str(tmp_path))


def test_held_out_prompts_must_not_be_trained_on(tmp_path):
  one = _write(tmp_path / "a.jsonl", ['{"prompt": "a", "answer": "b"}'])
  with pytest.raises(options.UserError, match="1 of its prompts are in"):
    registry.make("json_lines", prompts=one, held_out_prompts=one)


def test_command_verifier(tmp_path):
  prompts = _write(
    tmp_path / "p.jsonl", [json.dumps({"prompt": f"q{i}", "answer": "7"}) for i in range(20)]
  )
  script = tmp_path / "judge.py"
  script.write_text(
    "import json, sys\ne = json.load(sys.stdin)\nprint(float(e['completion'] == e['answer']))\n"
  )
  made = registry.make("command", prompts=prompts, verifier_command=f"{sys.executable} {script}")
  problem = made.train_problem(0, 0)
  assert made.score(problem, "7") == 1.0 and made.score(problem, "8") == 0.0
  for text, said in (
    ("print('seven')", "printed 'seven'; want one number from 0 to 1"),
    ("print(7)", "printed 7.0; want one number"),
    ("raise SystemExit('no such rule')", r"ended with status 1 \(no such rule\); want one number"),
  ):
    script.write_text(text + "\n")
    with pytest.raises(options.UserError, match=said):
      made.score(problem, "7")
  with pytest.raises(options.UserError, match="there is no program './absent'"):
    registry.make("command", prompts=prompts, verifier_command="./absent now")


@pytest.mark.parametrize(
  "name, distribution",
  [("reasoning_gym:leg_counting", "reasoning-gym"), ("math_verify", "math-verify")],
)
def test_adapters_say_what_to_install(tmp_path, name, distribution):
  prompts = _write(tmp_path / "p.jsonl", ['{"prompt": "a", "answer": "b"}'])
  with pytest.raises(options.UserError, match=f"--target=DIR {distribution}`.* PYTHONPATH=DIR"):
    registry.make(name, prompts=prompts)


def test_no_adapter_is_imported_unless_chosen():
  code = (
    "import sys\nfrom rl.tasks import registry\nregistry.make('sort4').train_problem(0, 0)\n"
    "bad = {'reasoning_gym', 'math_verify', 'jax', 'rl.tasks.adapters'} & set(sys.modules)\n"
    "sys.exit(str(bad) if bad else 0)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True
  )
  assert done.returncode == 0, done.stderr


class _FakeDataset:
  """Pays half for a substring, as the real scorers may."""

  def __init__(self, size, seed):
    self._size, self._seed = size, seed

  def __getitem__(self, i):
    n = (i * 7 + self._seed) % 100_003
    return {"question": f"double {n}", "answer": str(2 * n), "metadata": {}}

  def score_answer(self, text, entry):
    return 1.0 if text == entry["answer"] else 0.5 if entry["answer"] in text else 0.0


def test_reasoning_gym_scores_exactly(monkeypatch):
  class Gym:
    @staticmethod
    def create_dataset(name, size, seed):
      if name != "double":
        raise ValueError(f"Dataset {name} not registered")
      return _FakeDataset(size, seed)

  monkeypatch.setitem(sys.modules, "reasoning_gym", Gym)
  made = registry.make("reasoning_gym:double")
  problem = made.train_problem(0, 0)
  assert made.score(problem, f" {problem.answer} ") == 1.0
  assert made.score(problem, f"{problem.answer} {problem.answer}") == 0.0  # the dataset says 0.5
  held_out = {made.held_out_problem(i).question for i in range(made.held_out_size)}
  assert not held_out & {made.train_problem(0, i).question for i in range(500)}
  with pytest.raises(options.UserError, match="not registered"):
    registry.make("reasoning_gym:absent")


def test_exact_match_strips_outer_space_only():
  assert task.exact_match("1 2", " 1 2\n") == 1.0
  assert task.exact_match("1 2", "12") == 0.0
