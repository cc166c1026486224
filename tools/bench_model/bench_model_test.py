import json

import numpy as np

from kernels.base import options
from model import config as config_lib
from tools.bench_model import bench_model


def _settings(**values):
  return options.Settings([bench_model.BenchOptions, config_lib.ModelOptions], values)


def test_rows_are_full_and_packed():
  inputs = bench_model.packed_rows(_settings(rows=3, row_tokens=40, segments=5), 512)
  assert inputs.tokens.shape == (3, 40) and inputs.tokens.max() < 512
  for segments, positions in zip(inputs.segment_ids, inputs.positions):
    assert segments[0] == 1 and segments[-1] == 5 and set(np.diff(segments)) == {0, 1}
    starts = np.flatnonzero(np.diff(segments, prepend=0))
    np.testing.assert_array_equal(positions[starts], 0)
    assert positions.max() == np.diff([*starts, 40]).max() - 1


def test_both_passes_are_measured(tmp_path, capsys, monkeypatch):
  path = tmp_path / "numbers.json"
  # A relative path is seen from where the command was typed.
  monkeypatch.chdir(".")  # To come back at the end.
  monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
  settings = _settings(model_presets=("tiny",), rows=1, row_tokens=32, repeats=1, json=path.name)
  assert bench_model.run(settings) == 0
  records = json.loads(path.read_text())
  assert [r["pass"] for r in records] == ["forward", "backward"]
  assert all(r["tokens_per_s"] > 0 and r["compile_s"] > 0 for r in records)
  assert records[0]["preset"] in capsys.readouterr().out
