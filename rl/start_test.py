"""How a run starts: recipes, what is refused before anything is trained, and its directories."""

import dataclasses
import json
import pathlib
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
import tokenizers

from kernels.base import cli, options
from rl import finite, loop, memory, recipes, refusals, report, setup, trainer_options

# Saved by transformers' own save_pretrained.
ORACLE = "tests/data/oracle/moe"


def settings_of(*flags):
  argv = recipes.expand(["trainer", *flags])
  return cli.parse(argv, trainer_options.COMPONENTS, rules=refusals.RULES, environ={})


def test_recipes_parse_and_are_overridden_by_later_flags():
  for name in recipes.RECIPES:
    argv = recipes.expand(["trainer", f"--recipe={name}", "--entropy_bonus=0.125"])
    settings = cli.parse(argv, trainer_options.COMPONENTS, rules=refusals.RULES, environ={})
    assert settings.entropy_bonus == 0.125
  assert recipes.choose(["trainer"]) == "sort"
  assert recipes.choose(["trainer", "--checkpoint", "x"]) == "finetune"
  assert recipes.choose(["trainer", "--rollouts=x", "--checkpoint=y"]) == "recorded"
  assert recipes.choose(["trainer", "--rollouts=x", "--recipe=add"]) == "add"


def test_a_recipe_is_chosen_by_what_a_flag_file_holds(tmp_path, monkeypatch):
  (tmp_path / "my.flags").write_text("--checkpoint=/x\n--learning_rate=0.5\n")
  monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
  for argv in (["--flagfile=my.flags"], ["--flagfile", "my.flags"]):
    expanded = recipes.expand(["trainer", *argv])
    settings = cli.parse(expanded, trainer_options.COMPONENTS, rules=refusals.RULES)
    assert settings.max_steps == 20 and settings.learning_rate == 0.5
  with pytest.raises(options.OptionError, match="none.flags"):
    expanded = recipes.expand(["trainer", "--flagfile=none.flags"])
    cli.parse(expanded, trainer_options.COMPONENTS, rules=refusals.RULES)


def test_a_refused_start_leaves_no_folder(tmp_path):
  (tmp_path / "taken.jsonl").write_text("mine\n")
  flags = [f"--output_dir={tmp_path / 'o'}", f"--save_rollouts={tmp_path / 'taken.jsonl'}"]
  with pytest.raises(options.UserError, match="exists"):
    report.train_and_report(settings_of(*flags), started=0.0)
  assert not (tmp_path / "o").exists()


def test_what_the_machine_cannot_hold_is_refused(tmp_path):
  with pytest.raises(options.UserError, match="397,000,000,000 parameters take at least 5,916 GiB"):
    memory.refuse_what_does_not_fit(397_000_000_000, 397_000_000_000)
  with mock.patch.object(memory.os, "sysconf", return_value=1 << 10):
    with pytest.raises(options.UserError, match="take at least .* a smaller model"):
      setup.build(settings_of(f"--output_dir={tmp_path / 'o'}"))
  assert not (tmp_path / "o").exists()


def test_problems_that_cannot_be_asked_are_named_before_training(tmp_path):
  lines = [json.dumps({"prompt": f"{i:02d}", "answer": "1"}) for i in range(60)]
  flags = [f"--output_dir={tmp_path / 'o'}", "--task=json_lines"]
  for place, line, said in (
    (6, {"prompt": "9" * 99, "answer": "1"}, "line 7: the prompt has 99 tokens, want 1 to"),
    (9, {"prompt": "9", "answer": "1" * 99}, "line 10: the answer has 99 tokens, more than"),
  ):
    (tmp_path / "p.jsonl").write_text("\n".join([*lines[:place], json.dumps(line), *lines]))
    with pytest.raises(options.UserError, match=said):
      setup.build(settings_of(*flags, f"--prompts={tmp_path / 'p.jsonl'}"))
  assert not (tmp_path / "o").exists()


def test_output_directories_are_new_ones_and_relative_to_the_caller(tmp_path, monkeypatch):
  monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
  first = setup.output_directory(None, "sort4-seed0")
  second = setup.output_directory(None, "sort4-seed0")
  assert first == tmp_path / "runs/sort4-seed0-001" and second.name == "sort4-seed0-002"
  assert setup.output_directory("here", "x") == tmp_path / "here"
  assert dataclasses.is_dataclass(setup.Setup) and isinstance(first, pathlib.Path)


def test_exhausted_memory_names_the_flags_and_other_errors_stay():
  settings = settings_of("--micro_batch_rows=7")
  with pytest.raises(options.UserError, match=r"\(2 GiB in one piece\).*--micro_batch_rows=7"):
    with memory.exhaustion_told(settings):
      raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 2147483648 bytes.")
  with pytest.raises(RuntimeError, match="INTERNAL"), memory.exhaustion_told(settings):
    raise RuntimeError("INTERNAL: something else")


def test_tokenizer_of_another_model_is_refused(tmp_path):
  vocabulary = {f"w{i}": i for i in range(513)}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
  made.save(str(tmp_path / "tokenizer.json"))
  shutil.copy(f"{ORACLE}/config.json", tmp_path)
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))
  with pytest.raises(options.UserError, match="tokenizer has 513 ids, the model's vocabulary 512"):
    setup.build(settings_of(f"--checkpoint={tmp_path}", f"--output_dir={tmp_path / 'o'}"))


def test_weights_that_are_not_finite_end_a_run_and_begin_none(tmp_path):
  arguments = (
    f"--output_dir={tmp_path / 'run'}",
    "--warmup_steps=0",
    "--max_steps=0",
    "--eval_problems=2",
  )
  parts = setup.build(settings_of(*arguments))
  whole = parts.initial_params()
  assert finite.broken(whole) == []
  leaves, tree = jax.tree.flatten(whole)
  leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].set(np.nan)  # one number of one parameter
  broken = jax.tree.unflatten(tree, leaves)
  assert len(finite.broken(broken)) == 1
  run = loop.Loop(parts, say=lambda text: None)
  with mock.patch.object(loop.Loop, "weights", broken):
    with pytest.raises(
      options.UserError, match="1 parameters are not finite.*no model is exported"
    ):
      run.run()
  path = parts.export(broken)
  with pytest.raises(options.UserError, match="checkpoint=.*not finite.*take another"):
    setup.build(
      settings_of(f"--checkpoint={path}", f"--output_dir={tmp_path / 'again'}", "--max_steps=1")
    ).initial_params()
