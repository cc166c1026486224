import dataclasses
import json

import pytest

from kernels.base import options
from model import config as config_lib

_BASE = {
  "model_type": "qwen3_5_text",
  "vocab_size": 512,
  "hidden_size": 64,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "intermediate_size": 96,
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
  "rope_parameters": {
    "rope_type": "default",
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
  },
}
_MOE = {
  "model_type": "qwen3_5_moe_text",
  "num_experts": 8,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 32,
  "shared_expert_intermediate_size": 48,
}


@pytest.mark.parametrize("name", list(config_lib.PRESETS))
def test_presets_survive_the_file_format(name):
  config = config_lib.preset(name)
  assert config_lib.ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_both_rope_spellings_and_both_nestings_agree():
  nested = config_lib.ModelConfig.from_hf(_BASE)
  assert nested.rope_theta == 1e6 and nested.rotary_dim == 16
  plain = {k: v for k, v in _BASE.items() if k != "rope_parameters"}
  plain |= {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
  plain["rope_scaling"] = {"type": "mrope", "mrope_section": [3, 3, 2]}
  assert config_lib.ModelConfig.from_hf(plain) == nested
  root = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
    "image_token_id": 9,
    "eos_token_id": [3, 4],
    "text_config": _BASE | {"eos_token_id": 3},
  }
  from_root = config_lib.ModelConfig.from_hf(root)
  assert from_root == dataclasses.replace(nested, eos_token_id=(3, 4))


def test_layer_types_give_the_interval():
  kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
  config = config_lib.ModelConfig.from_hf(_BASE | {"layer_types": kinds})
  assert config.full_attention_interval == 2 and config.layer_types == tuple(kinds)
  kinds = ["linear_attention", "full_attention", "linear_attention"]
  config = config_lib.ModelConfig.from_hf(_BASE | {"layer_types": kinds, "num_hidden_layers": 3})
  assert (config.num_groups, config.gdn_per_group, config.num_tail_layers) == (1, 1, 1)


_REFUSED = {
  "gate": ({"output_gate_type": "sigmoid"}, "output_gate_type"),
  "bias": ({"attention_bias": True}, "attention_bias"),
  "window": ({"sliding_window": 128}, "sliding_window"),
  "use window": ({"use_sliding_window": True}, "use_sliding_window"),
  "activation": ({"hidden_act": "gelu"}, "hidden_act"),
  "no attention gate": ({"attn_output_gate": False}, "attn_output_gate"),
  "model type": ({"model_type": "qwen3_next"}, "model_type"),
  "no model type": ({"model_type": None}, "model_type"),
  "unknown key": ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
  "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
  "yarn": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type"),
  "rope key": ({"rope_parameters": {"rope_theta": 1e6, "factor": 4.0}}, "factor"),
  "rope twice": ({"rope_theta": 1e4}, "rope_theta"),
  "no rope": ({"rope_parameters": None}, "rope_theta"),
  "pattern": ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, r"layer_types\[1\]"),
  "kind": (
    {"layer_types": ["linear_attention", "sliding", "linear_attention", "full_attention"]},
    r"layer_types\[1\]='sliding'",
  ),
  "no attention layer": ({"layer_types": ["linear_attention"] * 4}, "at least one full_attention"),
  "depth": ({"layer_types": ["full_attention"] * 3}, "3 entries"),
  "interval": (
    {"layer_types": ["full_attention"] * 4, "full_attention_interval": 4},
    "full_attention_interval",
  ),
  "missing": ({"hidden_size": None}, "lacks hidden_size"),
  "no ffn": ({"intermediate_size": None}, "lacks intermediate_size"),
  "sparse keys on a dense model": ({"num_experts": 8}, "num_experts"),
  "kv heads": ({"num_key_value_heads": 3}, "num_attention_heads"),
  "value heads": ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
  "mrope": ({"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 1, 1]}}, "mrope_section"),
  "eos beyond the vocabulary": ({"eos_token_id": 512}, "eos_token_id"),
  "negative": ({"head_dim": -1}, "head_dim"),
}


@pytest.mark.parametrize("name", list(_REFUSED))
def test_refusals_name_the_key(name):
  change, message = _REFUSED[name]
  with pytest.raises(options.UserError, match=message):
    config_lib.ModelConfig.from_hf(_BASE | change)


def test_sparse_refusals():
  moe = _BASE | _MOE
  assert config_lib.ModelConfig.from_hf(moe).is_moe
  with pytest.raises(options.UserError, match="lacks num_experts"):
    config_lib.ModelConfig.from_hf(moe | {"num_experts": None})
  with pytest.raises(options.UserError, match="num_experts_per_tok"):
    config_lib.ModelConfig.from_hf(moe | {"num_experts_per_tok": 9})
  with pytest.raises(options.UserError, match="norm_topk_prob"):
    config_lib.ModelConfig.from_hf(moe | {"norm_topk_prob": False})


@pytest.mark.parametrize(
  "change", [{"vocab_size": 1024}, {"tie_word_embeddings": True}, {"model_type": "qwen3_5_moe"}]
)
def test_root_and_text_config_must_agree(change):
  text = _BASE | {"tie_word_embeddings": False}
  with pytest.raises(options.UserError, match=next(iter(change))):
    config_lib.ModelConfig.from_hf({"model_type": "qwen3_5", "text_config": text} | change)


def test_files(tmp_path):
  with pytest.raises(options.UserError, match="cannot be read"):
    config_lib.ModelConfig.from_file(tmp_path)
  path = tmp_path / "config.json"
  path.write_text("{")
  with pytest.raises(options.UserError, match="not JSON"):
    config_lib.ModelConfig.from_file(tmp_path)
  path.write_text("[]")
  with pytest.raises(options.UserError, match="want a JSON object"):
    config_lib.ModelConfig.from_file(path)
  path.write_text(json.dumps(_BASE))
  assert config_lib.ModelConfig.from_file(tmp_path) == config_lib.ModelConfig.from_hf(_BASE)


def test_unknown_preset():
  with pytest.raises(options.UserError, match="397B-A17B, tiny"):
    config_lib.preset("397b")


def _write_config(tmp_path, **extra):
  given = config_lib.preset("tiny").to_hf() | extra
  (tmp_path / "config.json").write_text(json.dumps(given))
  return tmp_path


@pytest.mark.parametrize(
  "extra, want",
  [
    ({}, "bfloat16"),
    ({"dtype": "float32"}, "float32"),
    ({"torch_dtype": "bfloat16"}, "bfloat16"),
    ({"dtype": "bfloat16", "text_config": {"dtype": "float32"}}, "float32"),
  ],
)
def test_auto_dtype_is_the_checkpoints(tmp_path, extra, want):
  directory = _write_config(tmp_path, **extra)
  auto = config_lib.ModelOptions()
  assert auto.activation_dtype == "bfloat16"
  assert auto.for_checkpoint(directory).dtype == want
  assert auto.for_checkpoint(None).dtype == "bfloat16"
  assert config_lib.ModelOptions(dtype="bfloat16").for_checkpoint(directory).dtype == "bfloat16"


def test_auto_dtype_refuses_what_it_cannot_compute(tmp_path):
  directory = _write_config(tmp_path, dtype="float16")
  with pytest.raises(options.UserError, match="float16"):
    config_lib.ModelOptions().for_checkpoint(directory)
