"""The record of a run: whole after a kill, whole after a resume, drawn at the end."""

import io
import json
import os
import signal
import struct
import subprocess
import sys

import pytest
from tensorboardX.proto import event_pb2

from kernels.base import options
from rl import metrics_log


def _steps(path):
  return [r["step"] for r in metrics_log.read(path)]


def test_every_finished_step_survives_a_kill(tmp_path):
  code = f"""
import os, signal
from rl import metrics_log
log = metrics_log.JsonLines({str(tmp_path / "m.jsonl")!r})
for step in range(1, 8):
  log.write({{"step": step, "loss": step / 3}})
os.kill(os.getpid(), signal.SIGKILL)
"""
  env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
  done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert _steps(tmp_path / "m.jsonl") == list(range(1, 8))


def test_resume_drops_later_steps_and_a_cut_line(tmp_path):
  path = tmp_path / "m.jsonl"
  log = metrics_log.JsonLines(path)
  for step in range(1, 6):
    log.write({"step": step})
  log.close()
  with open(path, "a") as file:
    file.write('{"step": 6, "lo')  # the kill came in the middle of a write
  assert _steps(path) == [1, 2, 3, 4, 5]
  again = metrics_log.JsonLines(path, last_step=3)
  again.write({"step": 4})
  again.close()
  assert _steps(path) == [1, 2, 3, 4]
  assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_bad_line_in_the_middle_is_named(tmp_path):
  path = tmp_path / "m.jsonl"
  path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
  with pytest.raises(options.UserError, match="line 2"):
    metrics_log.read(path)


def test_numbers_that_json_lacks_become_null(tmp_path):
  log = metrics_log.JsonLines(tmp_path / "m.jsonl")
  log.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
  log.close()
  assert metrics_log.read(tmp_path / "m.jsonl") == [{"step": 1, "loss": None, "grad_norm": None}]


def test_full_disk_is_one_clear_error():
  log = metrics_log.JsonLines.__new__(metrics_log.JsonLines)
  log.path, log.records = "/dev/full", []
  log._file = open("/dev/full", "ab", buffering=0)
  with pytest.raises(options.UserError, match="cannot be written: No space left"):
    log.write({"step": 1})


def test_unwritable_file_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(options.UserError, match="cannot be written"):
    metrics_log.JsonLines(tmp_path / "file" / "m.jsonl")


def test_tensorboard_and_plot(tmp_path):
  log = metrics_log.MetricsLog(tmp_path)
  for step in range(1, 4):
    log.write(step, {"loss": 1 / step, "reward_mean": step / 3, "grad_norm": float("nan")})
  log.write(4, {"loss": 0.1, "eval/pass@1": 0.5, "eval/greedy": 0.6})
  picture = log.plot("a run")
  log.close()
  metrics_log.MetricsLog(tmp_path, last_step=2).close()
  assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 5000
  first, resumed = sorted((tmp_path / "tensorboard").iterdir(), key=os.path.getmtime)
  steps = [(e.step, [v.tag for v in e.summary.value]) for e in _events(first)]
  assert steps[0] == (0, []) and steps[1] == (1, ["loss", "reward_mean"])
  assert steps[4] == (4, ["loss", "eval/pass_1", "eval/greedy"]) and len(steps) == 5
  # TensorBoard drops what follows step 2 in the earlier file.
  start = _events(resumed)[1]
  assert (start.step, start.session_log.status) == (3, event_pb2.SessionLog.START)


def test_a_board_that_cannot_be_written_is_told_once_and_stops_nothing(tmp_path, capfd):
  log = metrics_log.MetricsLog(tmp_path)
  log.write(1, {"loss": 1.0})
  # A full disk under TensorBoard's file alone.
  full = os.open("/dev/full", os.O_WRONLY)
  os.dup2(full, log._board._file._writer.fileno())
  for step in range(2, 30):
    log.write(step, {f"m{i}": 1.0 for i in range(20)})
  log.close()
  os.close(full)
  assert _steps(tmp_path / "metrics.jsonl") == list(range(1, 30))
  told = capfd.readouterr().err.splitlines()
  assert len(told) == 1 and "tensorboard cannot be written: No space left" in told[0]
  # Nor does one that cannot even be made.
  (tmp_path / "b").mkdir()
  (tmp_path / "b/tensorboard").write_text("")
  log = metrics_log.MetricsLog(tmp_path / "b")
  log.write(1, {"loss": 1.0})
  log.close()
  assert _steps(tmp_path / "b/metrics.jsonl") == [1]
  assert "tensorboard cannot be written: File exists" in capfd.readouterr().err


def _events(path):
  """Every event of a TensorBoard file: length, checksum, bytes, checksum each."""
  data, found, at = path.read_bytes(), [], 0
  while at < len(data):
    (size,) = struct.unpack_from("<Q", data, at)
    found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
    at += 16 + size
  return found


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
  plain = io.StringIO()
  shown = metrics_log.Progress("train", 3, stream=plain, every_seconds=0)
  for step in (1, 2, 3):
    shown.update(step, reward=0.5)
  shown.say("hello")
  shown.close()
  assert plain.getvalue().splitlines() == [
    "train 1/3: reward 0.5",
    "train 2/3: reward 0.5",
    "train 3/3: reward 0.5",
    "hello",
  ]
  terminal = _Terminal()
  shown = metrics_log.Progress("train", 3, stream=terminal)
  shown.update(3, reward=0.5)
  shown.close()
  assert "\r" in terminal.getvalue() and "3/3" in terminal.getvalue()


def test_plain_lines_are_few(monkeypatch):
  plain = io.StringIO()
  shown = metrics_log.Progress("train", 100, stream=plain, every_seconds=3600)
  for step in range(1, 101):
    shown.update(step)
  assert len(plain.getvalue().splitlines()) == 2  # the first and the last
