"""What counts as lost, and where the runs are put; the runs themselves are the tool's own work."""

import json

import pytest

from tools.kill_resume import kill_resume


def test_a_relative_directory_is_seen_from_where_the_command_was_typed(tmp_path, monkeypatch):
  monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
  root = kill_resume.work_directory("here/there")
  assert root == tmp_path / "here/there" and root.is_dir()
  assert kill_resume.work_directory(str(tmp_path / "x")) == tmp_path / "x"
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY")
  monkeypatch.chdir(tmp_path)
  assert kill_resume.work_directory("y") == tmp_path / "y"
  made = kill_resume.work_directory(None)
  assert made.is_absolute() and not list(made.iterdir())
  made.rmdir()


def _ended(folder, weights=b"weights", steps=range(1, 17)):
  (folder / "model").mkdir(parents=True)
  (folder / "model/model-00001-of-00001.safetensors").write_bytes(weights)
  for name, numbers in (("warmup.jsonl", range(1, 9)), ("metrics.jsonl", steps)):
    (folder / name).write_text("".join(json.dumps({"step": n}) + "\n" for n in numbers))
  return folder


def test_a_run_that_lost_nothing(tmp_path):
  want = kill_resume.weights(_ended(tmp_path / "undisturbed"))
  assert kill_resume.check(_ended(tmp_path / "resumed"), want) == []


@pytest.mark.parametrize(
  "change, told",
  [
    ({"weights": b"weighTs"}, "weights differ"),
    ({"weights": b""}, "weights differ"),
    ({"steps": [*range(1, 9), *range(8, 17)]}, "metrics.jsonl has the steps"),
    ({"steps": range(1, 16)}, "metrics.jsonl has the steps"),
  ],
)
def test_what_was_lost_is_told(tmp_path, change, told):
  want = kill_resume.weights(_ended(tmp_path / "undisturbed"))
  (wrong,) = kill_resume.check(_ended(tmp_path / "resumed", **change), want)
  assert told in wrong


def test_no_export_is_not_the_same_weights(tmp_path):
  want = kill_resume.weights(_ended(tmp_path / "undisturbed"))
  resumed = _ended(tmp_path / "resumed")
  (resumed / "model/model-00001-of-00001.safetensors").unlink()
  assert kill_resume.weights(resumed) == "none" != want
  assert kill_resume.check(resumed, want)
