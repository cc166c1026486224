import pytest

from kernels.base import options
from model.checkpoint import tensor_file
from tools.bench_checkpoint import main

# 67 MB in 16 parts of 4.2 MB.
_SMALL = main.BenchOptions(experts=16, inner=1024, hidden_size=1024, parts=16, expert_parts=4)


def _measure(folder):
  return {row["cut"]: row for row in main.measure(_SMALL, folder)}


def test_a_shard_costs_a_shard(tmp_path):
  rows = _measure(tmp_path)
  assert set(rows) == {"experts", "experts x hidden"}
  for row in rows.values():
    assert row["tensor_bytes"] == 67_108_864 and row["shard_bytes"] == 67_108_864 // 16
    assert row["bytes_read"] == row["shard_bytes"]
    # The shard, and one read: at most 32 MiB of bytes or of rows that are mapped.
    assert row["peak_growth_bytes"] < row["shard_bytes"] + (32 << 20) + 8e6
  assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 67_108_864 / 2


def test_reading_the_tensor_and_cutting_it_would_show(tmp_path, monkeypatch):
  read = tensor_file.TensorFile.read

  def wasteful(self, name, region):
    whole = tuple(slice(0, size) for size in self.entries[name].shape)
    return read(self, name, whole)[region]

  monkeypatch.setattr(tensor_file.TensorFile, "read", wasteful)
  for row in _measure(tmp_path).values():
    assert row["bytes_read"] > 15 * row["shard_bytes"]
    assert row["peak_growth_bytes"] > 64e6


def test_parts_that_do_not_divide(tmp_path):
  with pytest.raises(options.UserError, match="--experts=64 is not a multiple of 48"):
    main.measure(main.BenchOptions(experts=64, parts=48), tmp_path)


@pytest.mark.parametrize("sizes", [{"experts": 512 * 10**9}, {"hidden_size": 10**18}])
def test_a_tensor_that_no_file_holds_is_told(tmp_path, sizes):
  name, size = next(iter(sizes.items()))
  with pytest.raises(options.UserError, match=f"--{name}={size}.*does not fit here.*smaller sizes"):
    main.measure(main.BenchOptions(**sizes, parts=8), tmp_path)
