"""Reads the reference checkpoints and numbers into the model's tree.

This conversion is written apart from the checkpoint loader, tensor by tensor, so that the two
check each other.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from safetensors import numpy as safetensors_numpy

from model import config as config_lib

_DATA = pathlib.Path(__file__).parents[1] / "data" / "oracle"
CASES = ("moe", "moe_fused", "dense", "ratios_397b", "near_zero_key")


def directory(case: str) -> pathlib.Path:
  """Folder of a reference checkpoint."""
  return _DATA / case


def load(case: str) -> tuple[config_lib.ModelConfig, dict[str, Any], Mapping[str, np.ndarray]]:
  """Configuration, parameters, and the reference's numbers of a case."""
  config = config_lib.ModelConfig.from_file(directory(case))
  tensors = safetensors_numpy.load_file(directory(case) / "model.safetensors")
  numbers = np.load(directory(case.removesuffix("_fused")) / "oracle.npz")
  return config, to_tree(config, tensors), numbers


def gradients(config: config_lib.ModelConfig, numbers: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """The reference's gradients as a tree of parameters."""
  named = {k.removeprefix("grad:"): numbers[k] for k in numbers if k.startswith("grad:")}
  return to_tree(config, named)


def to_tree(config: config_lib.ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Turns tensors under Hugging Face's names into the stacked tree."""
  interval, groups = config.full_attention_interval, config.num_groups
  layers = [_layer(config, tensors, i) for i in range(config.num_hidden_layers)]
  grouped = [layers[g * interval : (g + 1) * interval] for g in range(groups)]
  tree: dict[str, Any] = {
    "embed": {"embedding": tensors["model.embed_tokens.weight"]},
    "groups": {"attn": _stack([group[-1] for group in grouped])},
    "final_norm": {"scale": tensors["model.norm.weight"]},
  }
  if interval > 1:
    tree["groups"]["gdn"] = _stack([_stack(group[:-1]) for group in grouped])
  if config.num_tail_layers:
    tree["tail"] = _stack(layers[groups * interval :])
  if not config.tie_word_embeddings:
    tree["lm_head"] = {"kernel": tensors["lm_head.weight"]}
  return tree


def _stack(trees):
  return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _layer(config, tensors, index):
  prefix = f"model.layers.{index}."
  get = lambda name: tensors[prefix + name]
  kernel = lambda name: {"kernel": get(name + ".weight").T}
  out = {
    "input_norm": {"scale": get("input_layernorm.weight")},
    "post_norm": {"scale": get("post_attention_layernorm.weight")},
  }
  if (index + 1) % config.full_attention_interval == 0:
    out["attention"] = {
      name: kernel(f"self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    for name in ("q_norm", "k_norm"):
      out["attention"][name] = {"scale": get(f"self_attn.{name}.weight")}
  else:
    projections = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    out["gdn"] = {name: kernel(f"linear_attn.{name}") for name in projections}
    out["gdn"]["conv1d"] = {"kernel": get("linear_attn.conv1d.weight")[:, 0, :].T}
    out["gdn"]["norm"] = {"scale": get("linear_attn.norm.weight")}
    for name in ("A_log", "dt_bias"):
      out["gdn"][name] = get(f"linear_attn.{name}")
  gated = ("gate_proj", "up_proj", "down_proj")
  if not config.is_moe:
    out["mlp"] = {name: kernel(f"mlp.{name}") for name in gated}
    return out
  if prefix + "mlp.experts.gate_up_proj" in tensors:
    wi, wo = get("mlp.experts.gate_up_proj"), get("mlp.experts.down_proj")
  else:
    stack = lambda name: np.stack(
      [get(f"mlp.experts.{e}.{name}.weight") for e in range(config.num_experts)]
    )
    wi = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
    wo = stack("down_proj")
  out["mlp"] = {
    "router": kernel("mlp.gate"),
    "wi": wi.swapaxes(1, 2),
    "wo": wo.swapaxes(1, 2),
    "shared_expert": {name: kernel(f"mlp.shared_expert.{name}") for name in gated},
    "shared_expert_gate": kernel("mlp.shared_expert_gate"),
  }
  return out
