import json
import os
import pathlib
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kernels.base import options
from model import config as config_lib
from model.checkpoint import (
  commit,
  fixtures,
  hf_names,
  loading,
  saving,
  tensor_file,
  windows,
)

jax.config.update("jax_num_cpu_devices", 8)

_TINY = config_lib.preset("tiny")
_TINY_MOE = config_lib.preset("tiny_moe")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [_TINY, _TINY_MOE, fixtures.with_tail()])
def test_save_then_load_gives_the_same_bits(tmp_path, config, dtype):
  params = fixtures.random_params(config, dtype)
  report = saving.save_params(tmp_path / "c", config, params)
  found, loaded = loading.load_params(tmp_path / "c", dtype=dtype)
  assert found == config and fixtures.same_bits(loaded, params)
  tensors = load_file(tmp_path / "c" / "model.safetensors")
  assert report.tensors == len(tensors) and report.files == ("model.safetensors",)
  assert report.total_bytes == sum(t.nbytes for t in tensors.values())


def test_what_is_written(tmp_path):
  params = fixtures.random_params(_TINY_MOE)
  saving.save_params(tmp_path / "c", _TINY_MOE, params, dtype="bfloat16", experts="fused")
  assert sorted(os.listdir(tmp_path / "c")) == ["config.json", "model.safetensors"]
  record = json.loads((tmp_path / "c" / "config.json").read_text())
  assert record["dtype"] == "bfloat16" and record["architectures"] == ["Qwen3_5MoeForCausalLM"]
  with safe_open(tmp_path / "c" / "model.safetensors", "np") as file:
    assert file.metadata() == {"format": "pt"}
    kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}
    fused = file.get_tensor("model.layers.1.mlp.experts.gate_up_proj")
  want = np.asarray(params["groups"]["gdn"]["mlp"]["wi"])[0, 1].transpose(0, 2, 1)
  np.testing.assert_array_equal(fused, want.astype(ml_dtypes.bfloat16))
  wide = {name for name, kind in kinds.items() if kind == "F32"}
  assert set(kinds.values()) == {"F32", "BF16"}
  assert {name.split(".", 3)[3] for name in wide} == {
    "linear_attn.A_log",
    "linear_attn.norm.weight",
  }
  # Each tensor starts at a multiple of its type's size, as a mapping wants.
  with tensor_file.TensorFile(tmp_path / "c" / "model.safetensors") as file:
    for entry in file.entries.values():
      assert entry.start % tensor_file.DTYPES[entry.dtype].itemsize == 0


def test_files_are_bounded_and_indexed(tmp_path):
  params = fixtures.random_params(_TINY_MOE)
  limit = 60_000
  report = saving.save_params(tmp_path / "c", _TINY_MOE, params, max_shard_bytes=limit)
  index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
  assert index["metadata"]["total_size"] == report.total_bytes
  count = len(report.files)
  assert count > 10 and report.files[0] == f"model-00001-of-{count:05d}.safetensors"
  for name in report.files:
    tensors = load_file(tmp_path / "c" / name)
    assert {n for n, f in index["weight_map"].items() if f == name} == set(tensors)
    size = sum(t.nbytes for t in tensors.values())
    assert size <= limit or len(tensors) == 1
  # Layers stay together, so that a reader of a few layers opens few files.
  place = [
    report.files.index(index["weight_map"][f"model.layers.{i}.mlp.gate.weight"]) for i in range(4)
  ]
  assert place == sorted(place) and place[0] < place[3]


def _sharded(params, mesh, spread):
  def put(leaf):
    names = [None] * leaf.ndim
    for axis in range(leaf.ndim - 1, -1, -1):
      if leaf.shape[axis] % 8 == 0:
        names[axis] = spread
        break
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*names)))

  return jax.tree.map(put, params)


@pytest.mark.parametrize("spread", ["fsdp", ("expert", "fsdp"), None])
def test_sharded_parameters_save_the_same_file(tmp_path, spread):
  params = fixtures.random_params(_TINY_MOE, "bfloat16")
  mesh = jax.make_mesh((2, 4), ("expert", "fsdp"))
  saving.save_params(tmp_path / "a", _TINY_MOE, params)
  saving.save_params(tmp_path / "b", _TINY_MOE, _sharded(params, mesh, spread))
  assert fixtures.files(tmp_path / "a") == fixtures.files(tmp_path / "b")


def test_windows_are_cut_on_the_device_where_that_is_not_the_host(monkeypatch):
  values = np.random.default_rng(0).standard_normal((3, 8, 12)).astype(ml_dtypes.bfloat16)
  mesh = jax.make_mesh((2, 4), ("expert", "fsdp"))
  array = jax.device_put(values, NamedSharding(mesh, PartitionSpec(None, "expert", "fsdp")))
  cuts = []
  cut = windows._dynamic_slice
  monkeypatch.setattr(windows, "_on_host", lambda _: False)
  monkeypatch.setattr(windows, "_dynamic_slice", lambda *a: cuts.append(a[2]) or cut(*a))
  got = windows.fetch(array, (1, slice(3, 6), slice(2, 7)))
  np.testing.assert_array_equal(got, values[1, 3:6, 2:7])
  # Rows 3 and 4, 5 on two devices each times columns 2, 3 to 5, 6 on three.
  assert sorted(cuts) == sorted((1, r, c) for r in (1, 2) for c in (1, 3, 1))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_window_collected_over_the_mesh_is_exact(dtype):
  """The program that several processes run, here over the devices of one."""
  mesh = jax.make_mesh((2, 2, 2), ("expert", "fsdp", "context"))
  values = np.random.default_rng(0).standard_normal((3, 8, 12, 4)).astype(dtype)
  values[0, 0, 0] = [-0.0, np.inf, np.nan, -np.inf]
  for spec in (
    PartitionSpec(None, "expert", ("fsdp", "context")),
    PartitionSpec(None, ("context", "expert"), None, "fsdp"),
    PartitionSpec(),
  ):
    array = jax.device_put(values, NamedSharding(mesh, spec))
    for window in (
      (slice(0, 1), slice(0, 8), slice(0, 12), slice(0, 4)),
      (slice(2, 3), slice(3, 6), slice(5, 9), slice(1, 4)),
      (slice(0, 2), slice(7, 8), slice(0, 3), slice(0, 1)),
    ):
      starts = [w.start for w in window]
      sizes = tuple(w.stop - w.start for w in window)
      bits = np.asarray(windows._from_all_processes(array, starts, sizes).addressable_data(0))
      np.testing.assert_array_equal(bits, values[window].view(bits.dtype))
      np.testing.assert_array_equal(
        windows.fetch(array, window).view(bits.dtype), values[window].view(bits.dtype)
      )


def test_no_window_is_larger_than_the_limit(tmp_path, monkeypatch):
  """Nothing larger than the limit, or than one row, is ever brought to the host."""
  monkeypatch.setattr(saving, "_WINDOW_BYTES", 1024)
  sizes = []
  fetch = windows.fetch

  def recording(array, window, *, wanted=True):
    values = fetch(array, window, wanted=wanted)
    sizes.append(values.nbytes)
    return values

  monkeypatch.setattr(windows, "fetch", recording)
  params = fixtures.random_params(_TINY_MOE)
  saving.save_params(tmp_path / "c", _TINY_MOE, params, experts="fused")
  expert_row = 4 * 64 * 64  # One expert of a fused tensor.
  assert max(sizes) == expert_row and len(sizes) > 400
  _, loaded = loading.load_params(tmp_path / "c")
  assert fixtures.same_bits(loaded, params)


def _break_after(monkeypatch, count):
  write = saving._write

  def failing(file, data):
    failing.left -= 1
    if failing.left < 0:
      raise OSError(28, "No space left on device")
    write(file, data)

  failing.left = count
  monkeypatch.setattr(saving, "_write", failing)


@pytest.mark.parametrize("count", [0, 1, 30])
def test_a_full_disk_leaves_the_old_one(tmp_path, monkeypatch, count):
  old, new = (fixtures.random_params(_TINY, seed=seed) for seed in (0, 1))
  saving.save_params(tmp_path / "c", _TINY, old)
  _break_after(monkeypatch, count)
  for target in ("c", "fresh"):
    with pytest.raises(options.UserError, match="cannot be written .No space left on device"):
      saving.save_params(tmp_path / target, _TINY, new, overwrite=True)
  assert os.listdir(tmp_path) == ["c"]
  _, loaded = loading.load_params(tmp_path / "c")
  assert fixtures.same_bits(loaded, old)


_KILLED = """
import os, sys
from model import config as config_lib
from model.checkpoint import commit, fixtures, saving
where, at = sys.argv[1:]
config = config_lib.preset("tiny")
params = fixtures.random_params(config, seed=1)
module, name = (saving, "_write_json") if at == "late" else (commit, "commit")
if at == "early":
  write = saving._write
  def dying(file, data):
    write(file, data)
    if file.tell() > 300_000:
      os._exit(9)
  saving._write = dying
else:
  setattr(module, name, lambda *_: os._exit(9))
saving.save_params(where, config, params, overwrite=True)
"""


@pytest.mark.parametrize("at", ["early", "late", "before the rename"])
def test_a_killed_save_leaves_the_old_one_or_none(tmp_path, at):
  old, new = (fixtures.random_params(_TINY, seed=seed) for seed in (0, 1))
  saving.save_params(tmp_path / "c", _TINY, old)
  for target in ("c", "fresh"):
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / target), at], check=False)
    assert done.returncode == 9
  assert sorted(p.name for p in tmp_path.iterdir()) == [".c.partial", ".fresh.partial", "c"]
  assert fixtures.same_bits(loading.load_params(tmp_path / "c")[1], old)
  # The next save clears up what is left and replaces the old one.
  saving.save_params(tmp_path / "c", _TINY, new, overwrite=True)
  saving.save_params(tmp_path / "fresh", _TINY, new)
  assert sorted(os.listdir(tmp_path)) == ["c", "fresh"]
  assert fixtures.same_bits(loading.load_params(tmp_path / "c")[1], new)


def test_exchange_of_directories_has_no_moment_without_either(tmp_path, monkeypatch):
  (tmp_path / "c").mkdir()
  (tmp_path / "c" / "old").touch()
  commit.begin(tmp_path / "c")
  (commit.partial_path(tmp_path / "c") / "new").touch()
  monkeypatch.setattr(commit.os, "rename", None)  # Two renames would leave such a moment.
  commit.commit(tmp_path / "c")
  assert os.listdir(tmp_path / "c") == ["new"] and os.listdir(tmp_path) == ["c"]


def test_where_directories_cannot_be_exchanged(tmp_path, monkeypatch):
  def refused(*_):
    raise OSError(22, "Invalid argument")

  monkeypatch.setattr(commit, "_exchange", refused)
  old, new = (fixtures.random_params(_TINY, seed=seed) for seed in (0, 1))
  saving.save_params(tmp_path / "c", _TINY, old)
  saving.save_params(tmp_path / "c", _TINY, new, overwrite=True)
  assert os.listdir(tmp_path) == ["c"]
  assert fixtures.same_bits(loading.load_params(tmp_path / "c")[1], new)


def test_nothing_of_the_users_is_overwritten(tmp_path):
  params = fixtures.random_params(_TINY)
  save = lambda **kw: saving.save_params(tmp_path / "c", _TINY, params, **kw)
  (tmp_path / "c").mkdir()
  save()  # An empty directory is no loss.
  with pytest.raises(options.UserError, match="is not empty"):
    save()
  (tmp_path / "c" / "config.json").unlink()
  with pytest.raises(options.UserError, match="holds something else than a checkpoint"):
    save(overwrite=True)
  (tmp_path / "f").touch()
  with pytest.raises(options.UserError, match="is a file"):
    saving.save_params(tmp_path / "f", _TINY, params, overwrite=True)


def _source(path, config):
  """A published-like multimodal checkpoint with all that lies beside the weights."""
  saving.save_params(
    path,
    config,
    fixtures.random_params(config),
    prefix="model.language_model.",
    max_shard_bytes=400_000,
  )
  record = json.loads((path / "config.json").read_text())
  record["vision_config"] = {"depth": 27}
  record["text_config"]["mtp_num_hidden_layers"] = 1
  record["image_token_id"] = 7
  (path / "config.json").write_text(json.dumps(record))
  extra = {
    "mtp.fc.weight": np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16),
    "mtp.norm.weight": np.arange(3, dtype=np.float32),
    "model.visual.pos_embed.weight": np.arange(5, dtype=np.float16),
  }
  save_file(extra, path / "extra.safetensors", metadata={"format": "pt"})
  index = json.loads((path / "model.safetensors.index.json").read_text())
  index["weight_map"] |= dict.fromkeys(extra, "extra.safetensors")
  (path / "model.safetensors.index.json").write_text(json.dumps(index))
  beside = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"a": 1}',
    "generation_config.json": '{"eos_token_id": 2}',
    "chat_template.jinja": "{{ messages }}",
    "preprocessor_config.json": '{"size": 3}',
  }
  for name, text in beside.items():
    (path / name).write_text(text)
  return extra, beside


def test_what_lies_beside_the_weights_comes_along(tmp_path):
  _, beside = _source(tmp_path / "s", _TINY_MOE)
  params = fixtures.random_params(_TINY_MOE, seed=1)
  report = saving.save_params(tmp_path / "c", _TINY_MOE, params, source=tmp_path / "s")
  for name, text in beside.items():
    if name != "preprocessor_config.json":
      assert (tmp_path / "c" / name).read_text() == text
  assert not (tmp_path / "c" / "preprocessor_config.json").exists()
  assert set(report.companions) == set(beside) - {"preprocessor_config.json"}
  # What is left out is said, and the configuration does not promise it.
  assert report.dropped == {"mtp.": 2, "model.visual.": 1} and report.carried == {}
  assert "1 model.visual.* left out; 2 mtp.* left out" in str(report)
  record = json.loads((tmp_path / "c" / "config.json").read_text())
  assert record["mtp_num_hidden_layers"] == 0 and "vision_config" not in record


def test_carried_tensors_are_the_sources_bytes(tmp_path):
  extra, _ = _source(tmp_path / "s", _TINY_MOE)
  params = fixtures.random_params(_TINY_MOE, seed=1)
  report = saving.save_params(
    tmp_path / "c",
    _TINY_MOE,
    params,
    prefix="model.language_model.",
    dtype="bfloat16",
    experts="fused",
    source=tmp_path / "s",
    carry=("mtp.", "model.visual."),
  )
  assert report.carried == {"mtp.": 2, "model.visual.": 1} and report.dropped == {}
  tensors = load_file(tmp_path / "c" / "model.safetensors")
  for name, want in extra.items():
    assert tensors[name].dtype == want.dtype
    np.testing.assert_array_equal(tensors[name], want)
  record = json.loads((tmp_path / "c" / "config.json").read_text())
  assert record["vision_config"] == {"depth": 27} and record["image_token_id"] == 7
  assert record["text_config"]["mtp_num_hidden_layers"] == 1
  assert record["dtype"] == record["text_config"]["dtype"] == "bfloat16"
  assert (tmp_path / "c" / "preprocessor_config.json").exists()
  lines = []
  found, _ = loading.load_params(tmp_path / "c", say=lines.append)
  assert found == _TINY_MOE and "2 mtp.* passed over" in lines[0]


def test_a_source_in_place(tmp_path):
  """Exporting over the checkpoint that the run began from, which stays readable until the end."""
  extra, beside = _source(tmp_path / "s", _TINY_MOE)
  params = fixtures.random_params(_TINY_MOE, seed=1)
  saving.save_params(
    tmp_path / "s", _TINY_MOE, params, source=tmp_path / "s", carry=("mtp.",), overwrite=True
  )
  assert fixtures.same_bits(loading.load_params(tmp_path / "s")[1], params)
  assert (tmp_path / "s" / "chat_template.jinja").read_text() == beside["chat_template.jinja"]
  tensors = load_file(tmp_path / "s" / "model.safetensors")
  np.testing.assert_array_equal(tensors["mtp.norm.weight"], extra["mtp.norm.weight"])


def test_a_source_that_does_not_fit(tmp_path):
  _source(tmp_path / "s", _TINY_MOE)
  params = fixtures.random_params(_TINY)
  with pytest.raises(options.UserError, match="describes another model .*num_experts"):
    saving.save_params(tmp_path / "c", _TINY, params, source=tmp_path / "s")
  (tmp_path / "t").mkdir()
  (tmp_path / "t" / "config.json").write_text(json.dumps(_TINY.to_hf()))
  with pytest.raises(options.UserError, match="no safetensors files to carry mtp. from"):
    saving.save_params(tmp_path / "c", _TINY, params, source=tmp_path / "t", carry=("mtp.",))
  assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
  "kwargs, message",
  [
    ({"prefix": "text."}, "prefix='text.': want one of"),
    ({"dtype": "float16"}, "want None or one of float32, bfloat16"),
    ({"max_shard_bytes": 0}, "want at least 1"),
    ({"carry": ("mtp.",)}, "and a source to copy from"),
    ({"carry": ("lm_head",), "source": "x"}, "want some of mtp., model.visual."),
    ({"experts": "both"}, "experts='both'"),
  ],
)
def test_arguments(tmp_path, kwargs, message):
  with pytest.raises(ValueError, match=message):
    saving.save_params(tmp_path / "c", _TINY, fixtures.random_params(_TINY), **kwargs)


def test_parameters_that_are_not_the_models(tmp_path):
  for change, message in {
    lambda p: p.pop("lm_head"): "the parameter lm_head/kernel .* is missing",
    lambda p: p.update(head={"x": np.zeros(1, np.float32)}): "the model has no parameter head/x",
    lambda p: p["embed"].update(embedding=np.zeros((3, 4), np.float32)): (
      r"embed/embedding: wanted \[512, 64\], found \[3, 4\]"
    ),
    lambda p: p["embed"].update(embedding=np.zeros((512, 64), np.float64)): (
      "embed/embedding: wanted float32 or bfloat16, found float64"
    ),
  }.items():
    params = fixtures.random_params(_TINY)
    change(params)
    with pytest.raises(ValueError, match=message):
      saving.save_params(tmp_path / "c", _TINY, params)
  assert os.listdir(tmp_path) == []


def test_float32_of_another_spelling(tmp_path):
  """Per-expert to fused and back is a renaming of the same numbers."""
  assert hf_names.SPELLINGS == ("per_expert", "fused")
  params = fixtures.random_params(_TINY_MOE)
  saving.save_params(tmp_path / "a", _TINY_MOE, params)
  _, loaded = loading.load_params(tmp_path / "a")
  saving.save_params(tmp_path / "b", _TINY_MOE, loaded, experts="fused")
  _, loaded = loading.load_params(tmp_path / "b")
  saving.save_params(tmp_path / "c", _TINY_MOE, loaded)
  assert fixtures.files(tmp_path / "a") == fixtures.files(pathlib.Path(tmp_path / "c"))
