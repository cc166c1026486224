import concurrent.futures
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from kernels.base import options
from model import config as config_lib
from model.checkpoint import directory as directory_lib
from model.checkpoint import fixtures, hf_names, loading, saving

jax.config.update("jax_num_cpu_devices", 8)

_TINY_MOE = config_lib.preset("tiny_moe")
_LAYER = "model.layers.1."


def _saved(path, config=_TINY_MOE, **kwargs):
  params = fixtures.random_params(config)
  saving.save_params(path, config, params, **kwargs)
  return params


def test_leaves_are_the_tensors_by_name(tmp_path):
  """Independent of the table of names: spelled out, with the safetensors package reading."""
  params = _saved(tmp_path / "c")
  tensors = load_file(tmp_path / "c" / "model.safetensors")
  gdn = jax.tree.map(lambda x: np.asarray(x)[0, 1], params["groups"]["gdn"])
  attention = jax.tree.map(lambda x: np.asarray(x)[0], params["groups"]["attn"])
  kernel = gdn["gdn"]["in_proj_qkv"]["kernel"]
  wi, inner = gdn["mlp"]["wi"], _TINY_MOE.moe_intermediate_size
  for name, want in {
    "model.embed_tokens.weight": params["embed"]["embedding"],
    "model.norm.weight": params["final_norm"]["scale"],
    "lm_head.weight": params["lm_head"]["kernel"],
    _LAYER + "linear_attn.in_proj_qkv.weight": kernel.T,
    _LAYER + "linear_attn.conv1d.weight": gdn["gdn"]["conv1d"]["kernel"].T[:, None, :],
    _LAYER + "linear_attn.A_log": gdn["gdn"]["A_log"],
    _LAYER + "linear_attn.norm.weight": gdn["gdn"]["norm"]["scale"],
    _LAYER + "mlp.gate.weight": gdn["mlp"]["router"]["kernel"].T,
    _LAYER + "mlp.experts.5.gate_proj.weight": wi[5, :, :inner].T,
    _LAYER + "mlp.experts.5.up_proj.weight": wi[5, :, inner:].T,
    _LAYER + "mlp.experts.5.down_proj.weight": gdn["mlp"]["wo"][5].T,
    _LAYER + "mlp.shared_expert_gate.weight": gdn["mlp"]["shared_expert_gate"]["kernel"].T,
    "model.layers.3.self_attn.q_proj.weight": attention["attention"]["q_proj"]["kernel"].T,
    "model.layers.3.post_attention_layernorm.weight": attention["post_norm"]["scale"],
  }.items():
    np.testing.assert_array_equal(tensors[name], want, err_msg=name)


@pytest.mark.parametrize("experts", hf_names.SPELLINGS)
@pytest.mark.parametrize("prefix", hf_names.PREFIXES)
def test_any_spelling_loads_alike(tmp_path, experts, prefix):
  config = fixtures.with_tail()
  params = _saved(tmp_path / "c", config, experts=experts, prefix=prefix, max_shard_bytes=100_000)
  assert (tmp_path / "c" / directory_lib.INDEX).exists()
  found, loaded = loading.load_params(tmp_path / "c")
  assert found == config and fixtures.same_bits(loaded, params)


def test_dtype_of_weights(tmp_path):
  params = _saved(tmp_path / "c")
  _, loaded = loading.load_params(tmp_path / "c", dtype="bfloat16")
  gdn = loaded["groups"]["gdn"]["gdn"]
  for leaf in (gdn["A_log"], gdn["dt_bias"], gdn["norm"]["scale"]):
    assert leaf.dtype == np.float32
  want = params["embed"]["embedding"].astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(loaded["embed"]["embedding"], want)
  assert gdn["in_proj_z"]["kernel"].dtype == ml_dtypes.bfloat16
  with pytest.raises(options.UserError, match="want one of float32, bfloat16"):
    loading.load_params(tmp_path / "c", dtype="float16")


def _shardings(config):
  mesh = jax.make_mesh((2, 4), ("expert", "fsdp"))

  def spec(parameter):
    # The last axis over fsdp, experts over expert, and the layer stack whole.
    names: list = [None] * len(parameter.shape)
    if parameter.path[-1] in ("wi", "wo"):
      names[-3] = "expert"
    if parameter.shape[-1] % 4 == 0:
      names[-1] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*names))

  tree: dict = {}
  for parameter in hf_names.parameters(config):
    branch = tree
    for key in parameter.path[:-1]:
      branch = branch.setdefault(key, {})
    branch[parameter.path[-1]] = spec(parameter)
  return tree, mesh


@pytest.mark.parametrize("experts", hf_names.SPELLINGS)
def test_sharded_load_is_the_whole_load_cut(tmp_path, experts):
  params = _saved(tmp_path / "c", experts=experts)
  tree, _ = _shardings(_TINY_MOE)
  _, loaded = loading.load_params(tmp_path / "c", shardings=tree)
  assert fixtures.same_bits(loaded, params)
  assert jax.tree.map(lambda x: x.sharding, loaded) == tree
  wi = loaded["groups"]["attn"]["mlp"]["wi"]
  assert wi.addressable_shards[0].data.shape == (1, 4, 64, 16)


def test_one_sharding_for_a_branch(tmp_path):
  _saved(tmp_path / "c")
  _, mesh = _shardings(_TINY_MOE)
  whole = NamedSharding(mesh, PartitionSpec())
  single = jax.sharding.SingleDeviceSharding(jax.devices()[3])
  tree = dict.fromkeys(("embed", "groups", "final_norm"), whole) | {"lm_head": single}
  _, loaded = loading.load_params(tmp_path / "c", shardings=tree)
  assert loaded["lm_head"]["kernel"].devices() == {jax.devices()[3]}
  assert len(loaded["groups"]["attn"]["mlp"]["wo"].devices()) == 8
  with pytest.raises(ValueError, match="no sharding for the parameter lm_head/kernel"):
    loading.load_params(tmp_path / "c", shardings={k: whole for k in tree if k != "lm_head"})


def test_a_device_reads_its_part_and_equal_parts_are_read_once(tmp_path):
  _saved(tmp_path / "c", experts="fused")
  _, mesh = _shardings(_TINY_MOE)
  with directory_lib.Checkpoint(tmp_path / "c") as checkpoint:
    parameters, prefix = checkpoint.match(_TINY_MOE)
    wi = next(p for p in parameters if p.path[-1] == "wi" and "gdn" in p.path)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      source = loading.Source(checkpoint, wi, prefix, np.dtype(np.float32), pool)
      part = source.read((slice(None), slice(1, 2), slice(2, 4), slice(None), slice(40, 48)))
      assert part.shape == (1, 1, 2, 64, 8) and checkpoint.bytes_read == part.nbytes
      before = checkpoint.bytes_read
      # Experts over two, the other axis of the mesh unused: four devices hold each half.
      sharding = NamedSharding(mesh, PartitionSpec(None, None, "expert"))
      loading._place(source, sharding, None)
      whole = 4 * int(np.prod(wi.shape))
      assert checkpoint.bytes_read - before == whole


def test_skipped_by_name_and_counted(tmp_path):
  params = _saved(tmp_path / "c", prefix="model.language_model.")
  path = tmp_path / "c" / "model.safetensors"
  tensors = load_file(path) | {
    "mtp.fc.weight": np.zeros((4, 8), np.float32),
    "mtp.layers.0.mlp.experts.0.up_proj.weight": np.zeros(3, np.int64),
    "model.visual.blocks.0.norm1.weight": np.zeros(2, np.float16),
  }
  save_file(tensors, path)
  lines = []
  _, loaded = loading.load_params(tmp_path / "c", say=lines.append)
  assert fixtures.same_bits(loaded, params)
  assert "1 model.visual.* passed over; 2 mtp.* passed over" in lines[0]


def _edit(change):
  """A fault planted in the tensors of a single-file checkpoint."""

  def plant(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)

  return plant


def _rename(old, new):
  return _edit(lambda t: t.__setitem__(new, t.pop(old)))


def _as_fused(t):
  t[_LAYER + "mlp.experts.gate_up_proj"] = np.zeros((8, 64, 64), np.float32)


_DOWN = _LAYER + "mlp.experts.3.down_proj.weight"
_WRONG = {
  "missing": (
    _edit(lambda t: t.pop(_DOWN)),
    r"missing model.layers.1.mlp.experts.3.down_proj.weight \[64, 32\]$",
  ),
  "renamed": (
    _rename(_LAYER + "linear_attn.A_log", _LAYER + "linear_attn.a_log"),
    "missing model.layers.1.linear_attn.A_log .*; unknown model.layers.1.linear_attn.a_log",
  ),
  "extra": (
    _edit(lambda t: t.__setitem__(_LAYER + "self_attn.q_proj.bias", np.zeros(3, np.float32))),
    "unknown model.layers.1.self_attn.q_proj.bias",
  ),
  "extra at the top": (
    _edit(lambda t: t.__setitem__("visual.x", np.zeros(3, np.float32))),
    "unknown visual.x",
  ),
  "shape": (
    _edit(lambda t: t.__setitem__(_DOWN, np.zeros((64, 31), np.float32))),
    r"experts.3.down_proj.weight: wanted shape \[64, 32\], found \[64, 31\]",
  ),
  "transposed": (
    _edit(lambda t: t.__setitem__(_DOWN, np.zeros((32, 64), np.float32))),
    r"wanted shape \[64, 32\], found \[32, 64\]",
  ),
  "type": (
    _edit(lambda t: t.__setitem__(_DOWN, np.zeros((64, 32), np.int32))),
    "wanted type BF16 or F32 or F16, found I32",
  ),
  "quantised": (
    _edit(lambda t: t.__setitem__(_DOWN + "_scale_inv", np.zeros(3, np.float32))),
    "scales of a quantised checkpoint",
  ),
  "both spellings": (
    _edit(_as_fused),
    "experts in both spellings: .*gate_up_proj and model.layers.*down_proj.weight",
  ),
  "both prefixes": (
    _rename(_LAYER + "mlp.gate.weight", "model.language_model.layers.1.mlp.gate.weight"),
    "two spellings of the text model",
  ),
  "no text": (
    lambda folder: save_file({"x": np.zeros(1)}, folder / "model.safetensors"),
    "no tensor of a text model",
  ),
  "truncated": (
    lambda folder: (folder / "model.safetensors").write_bytes(
      (folder / "model.safetensors").read_bytes()[:-8]
    ),
    "truncated: .* ends at byte",
  ),
  "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "there is neither"),
  "torch files": (
    lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "convert the torch files",
  ),
  "two files, no index": (
    lambda folder: [
      (folder / "model.safetensors").rename(folder / "a.safetensors"),
      save_file({"x": np.zeros(1)}, folder / "b.safetensors"),
    ],
    "2 safetensors files but no model.safetensors.index.json",
  ),
  "no config": (lambda folder: (folder / "config.json").unlink(), "cannot be read"),
}


@pytest.mark.parametrize("case", _WRONG)
def test_a_wrong_checkpoint_is_told(tmp_path, case):
  _saved(tmp_path / "c")
  plant, message = _WRONG[case]
  plant(tmp_path / "c")
  with pytest.raises(options.UserError, match=message):
    loading.load_params(tmp_path / "c")


def test_a_head_of_its_own_beside_tied_embeddings(tmp_path):
  config = fixtures.with_tail()
  _saved(tmp_path / "c", config)
  _edit(lambda t: t.__setitem__("lm_head.weight", t["model.embed_tokens.weight"]))(tmp_path / "c")
  with pytest.raises(options.UserError, match="config.json says tie_word_embeddings"):
    loading.load_params(tmp_path / "c")


def _edit_index(change):
  def plant(folder):
    path = folder / directory_lib.INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"], folder)
    path.write_text(json.dumps(index))

  return plant


def _duplicate(weight_map, folder):
  name = _LAYER + "linear_attn.A_log"
  other = next(f for f in sorted(set(weight_map.values())) if f != weight_map[name])
  tensors = load_file(folder / other)
  save_file(tensors | {name: np.zeros(4, np.float32)}, folder / other)


def _unlisted(weight_map, folder):
  weight_map.pop(_LAYER + "linear_attn.A_log")


def _misplaced(weight_map, folder):
  name = _LAYER + "linear_attn.A_log"
  weight_map[name] = next(f for f in sorted(set(weight_map.values())) if f != weight_map[name])


_WRONG_INDEX = {
  "file not there": (
    lambda folder: sorted(folder.glob("model-*"))[2].unlink(),
    r"names the file model-00003-of-.*, which is not there \(\d+ tensors, first model.layers",
  ),
  "in two files": (_edit_index(_duplicate), "linear_attn.A_log is in two files"),
  "unlisted": (_edit_index(_unlisted), "has model.layers.1.linear_attn.A_log, not in model.saf"),
  "misplaced": (_edit_index(_misplaced), "puts model.layers.1.linear_attn.A_log in .*, but it is"),
  "nowhere": (
    _edit_index(lambda w, _: w.__setitem__("model.x", next(iter(w.values())))),
    "puts model.x in .*, but no file has it",
  ),
  "outside": (
    _edit_index(lambda w, _: w.__setitem__("model.x", "../x.safetensors")),
    "model.x is in '../x.safetensors'; want a file inside the directory",
  ),
  "twice": (
    lambda folder: (folder / directory_lib.INDEX).write_text(
      '{"weight_map": {"a": "b", "a": "c"}}'
    ),
    "a is there twice",
  ),
  "no map": (
    lambda folder: (folder / directory_lib.INDEX).write_text('{"metadata": {}}'),
    "there is no weight_map",
  ),
  "no json": (lambda folder: (folder / directory_lib.INDEX).write_text("{"), "cannot be read as"),
}


@pytest.mark.parametrize("case", _WRONG_INDEX)
def test_a_wrong_index_is_told(tmp_path, case):
  _saved(tmp_path / "c", max_shard_bytes=100_000)
  plant, message = _WRONG_INDEX[case]
  plant(tmp_path / "c")
  with pytest.raises(options.UserError, match=message):
    loading.load_params(tmp_path / "c")


def test_published_file_names_and_files_beside_the_index(tmp_path):
  """Names with a doubled prefix; a stray file that the index does not name is not looked at."""
  params = _saved(tmp_path / "c", max_shard_bytes=100_000)
  path = tmp_path / "c" / directory_lib.INDEX
  index = json.loads(path.read_text())
  for file in set(index["weight_map"].values()):
    (tmp_path / "c" / file).rename(tmp_path / "c" / file.replace("model-", "model.safetensors-"))
  index["weight_map"] = {
    name: file.replace("model-", "model.safetensors-") for name, file in index["weight_map"].items()
  }
  path.write_text(json.dumps(index))
  (tmp_path / "c" / "consolidated.safetensors").write_bytes(b"stray")
  _, loaded = loading.load_params(tmp_path / "c")
  assert fixtures.same_bits(loaded, params)


def test_no_directory(tmp_path):
  with pytest.raises(options.UserError, match="no such directory; a checkpoint is a local dir"):
    loading.load_params(tmp_path / "Qwen")


def test_another_configuration(tmp_path):
  _saved(tmp_path / "c")
  with pytest.raises(options.UserError, match="are not those of the configured model"):
    loading.load_params(tmp_path / "c", config_lib.preset("tiny"))


def test_progress_counts_every_byte(tmp_path):
  _saved(tmp_path / "c")
  counts = []
  loading.load_params(tmp_path / "c", dtype="bfloat16", progress=counts.append)
  assert sum(counts) == loading.total_bytes(_TINY_MOE, "bfloat16")
