import math

import jax
import numpy as np
import pytest

from model import api
from model import config as config_lib
from model.checkpoint import hf_names


def _by_path(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def _no_gdn():
  base = config_lib.preset("tiny").to_hf()
  base.pop("layer_types")
  return config_lib.ModelConfig.from_hf(
    base | {"num_hidden_layers": 2, "full_attention_interval": 1}
  )


def _with_tail():
  base = config_lib.preset("tiny_moe").to_hf()
  base.pop("layer_types")
  return config_lib.ModelConfig.from_hf(
    base | {"num_hidden_layers": 6, "full_attention_interval": 4}
  )


_CONFIGS = [*config_lib.PRESETS, _no_gdn, _with_tail]


@pytest.mark.parametrize("experts", hf_names.SPELLINGS)
@pytest.mark.parametrize("which", _CONFIGS)
def test_parameters_are_the_models(which, experts):
  config = which() if callable(which) else config_lib.preset(which)
  options = config_lib.ModelOptions(weight_dtype="bfloat16")
  want = _by_path(api.abstract_params(config, options))
  got = {p.path: p for p in hf_names.parameters(config, experts)}
  assert {path: leaf.shape for path, leaf in want.items()} == {
    path: p.shape for path, p in got.items()
  }
  assert {path for path, leaf in want.items() if leaf.dtype == np.float32} == {
    path for path, p in got.items() if p.wide
  }


@pytest.mark.parametrize("experts", hf_names.SPELLINGS)
@pytest.mark.parametrize("which", ["tiny", "tiny_moe", _no_gdn, _with_tail])
def test_tensors_tile_every_parameter_once(which, experts):
  config = which() if callable(which) else config_lib.preset(which)
  parameters = hf_names.parameters(config, experts)
  counts = {p.path: np.zeros(p.shape, np.int8) for p in parameters}
  names = set()
  for tensor in hf_names.tensors(parameters):
    assert tensor.name not in names
    names.add(tensor.name)
    region = tuple(slice(0, n) for n in tensor.shape)
    window = tensor.parameter.window(tensor.part, tensor.index, region)
    hole = counts[tensor.parameter.path][window]
    assert hole.size == math.prod(tensor.shape)
    hole += 1
  assert all((c == 1).all() for c in counts.values())


def test_published_number_of_tensors():
  """The index of the published 397B model lists 1,038 text tensors, experts fused."""
  parameters = hf_names.parameters(config_lib.preset("397B-A17B"), hf_names.FUSED)
  shapes = {t.name: t.shape for t in hf_names.tensors(parameters, hf_names.MULTIMODAL_PREFIX)}
  assert len(shapes) == 1038
  base = "model.language_model.layers."
  assert shapes[base + "59.mlp.experts.gate_up_proj"] == (512, 2048, 4096)
  assert shapes[base + "0.mlp.experts.down_proj"] == (512, 4096, 1024)
  assert shapes[base + "0.linear_attn.in_proj_qkv.weight"] == (12288, 4096)
  assert shapes[base + "0.linear_attn.conv1d.weight"] == (12288, 1, 4)
  assert shapes[base + "3.self_attn.q_proj.weight"] == (16384, 4096)
  assert shapes[base + "3.mlp.shared_expert_gate.weight"] == (1, 4096)
  assert base + "3.linear_attn.A_log" not in shapes and base + "2.linear_attn.A_log" in shapes
  assert shapes["lm_head.weight"] == (248320, 4096)


def test_float32_in_files():
  parameters = hf_names.parameters(config_lib.preset("tiny"))
  kept = {t.name.split(".", 3)[3] for t in hf_names.tensors(parameters) if t.part.stored_float32}
  assert kept == {"linear_attn.A_log", "linear_attn.norm.weight"}


def test_unknown_spelling():
  with pytest.raises(ValueError, match="per_expert, fused"):
    hf_names.parameters(config_lib.preset("tiny_moe"), "stacked")
