"""Both tables are measured, and go where the command says; what they hold is the machine's."""

import json

from kernels.base import options
from tools.bench_decode import bench_decode


def test_a_relative_path_is_seen_from_where_the_command_was_typed(tmp_path, monkeypatch):
  monkeypatch.chdir(".")  # To come back at the end.
  monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
  monkeypatch.setattr(bench_decode, "throughput", lambda settings, batch: 2.0 * batch)
  monkeypatch.setattr(bench_decode, "step_times", lambda settings: {64: (0.5, 0.25)})
  settings = options.Settings([bench_decode.BenchOptions], {"batches": (4,), "json": "n.json"})
  assert bench_decode.run(settings) == 0
  assert json.loads((tmp_path / "n.json").read_text()) == {
    "tokens_per_second": {"4": 8.0},
    "step_ms": {"64": 500.0},
    "gdn_step_ms": {"64": 250.0},
  }


def test_both_tables_are_measured(tmp_path, capsys):
  path = tmp_path / "numbers.json"
  values = {
    "model_preset": "tiny",
    "batches": (2,),
    "new_tokens": 4,
    "prompt_tokens": 4,
    "contexts": (4, 8),
    "repeats": 1,
    "json": str(path),
  }
  assert bench_decode.run(options.Settings([bench_decode.BenchOptions], values)) == 0
  numbers = json.loads(path.read_text())
  assert numbers["tokens_per_second"].keys() == {"2"}
  assert numbers["step_ms"].keys() == numbers["gdn_step_ms"].keys() == {"4", "8"}
  assert all(value > 0 for table in numbers.values() for value in table.values())
  assert "tokens/s" in capsys.readouterr().out
