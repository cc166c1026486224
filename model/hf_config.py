"""Reads a Hugging Face `config.json` into the values of a `ModelConfig`.

Every key is taken, known to change nothing for text, or refused by name: a value ignored in
silence is a wrong model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kernels.base import options

LINEAR = "linear_attention"
FULL = "full_attention"

_MODEL_TYPES = {
  "qwen3_5": False,
  "qwen3_5_text": False,
  "qwen3_5_moe": True,
  "qwen3_5_moe_text": True,
}

# Values that change nothing in the forward pass of text, or that say how another program ran it.
_IGNORED = frozenset(
  """architectures auto_map _name_or_path transformers_version torch_dtype dtype use_cache
  return_dict output_attentions output_hidden_states output_router_logits attention_dropout
  chunk_size_feed_forward is_encoder_decoder problem_type id2label label2id
  _attn_implementation _experts_implementation mamba_ssm_dtype mtp_num_hidden_layers
  mtp_use_dedicated_embeddings image_token_id video_token_id vision_start_token_id
  vision_end_token_id vision_config language_model_only pretraining_tp""".split()
)

# Keys that must have one of these values when they are there.
_FIXED: dict[str, tuple[Any, ...]] = {
  "hidden_act": ("silu", "swish"),
  "output_gate_type": (None, "silu", "swish"),
  "attention_bias": (False, None),
  "attn_output_gate": (True,),
  "norm_topk_prob": (True, None),
  "use_sliding_window": (False, None),
  "sliding_window": (None,),
  "mlp_only_layers": (None, []),
  "decoder_sparse_step": (None, 1),
}

# Without a default that every release of transformers agrees on.
_REQUIRED = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "rope_theta",
)
_REQUIRED_DENSE = ("intermediate_size",)
_REQUIRED_MOE = (
  "num_experts",
  "num_experts_per_tok",
  "moe_intermediate_size",
  "shared_expert_intermediate_size",
)


def parse(given: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
  """Values of a `ModelConfig` from the mapping of a `config.json`.

  Args:
    given: Keys of transformers' `Qwen3_5TextConfig` or `Qwen3_5MoeTextConfig`, or a root mapping
      that holds one under `text_config`.  Rotary values may stand in `rope_parameters`, in
      `rope_scaling`, or plainly.
    fields: Names that `ModelConfig` has.

  Raises:
    options.UserError: Names the key that is missing, contradicts another, or asks for something
      that this model does not compute.
  """
  flat = _flatten(given)
  model_type = flat.pop("model_type", None)
  if model_type not in _MODEL_TYPES:
    _refuse("model_type", model_type, "want one of " + ", ".join(_MODEL_TYPES))
  for name, allowed in _FIXED.items():
    if name in flat and (value := flat.pop(name)) not in allowed:
      _refuse(name, value, f"this model computes {name}={allowed[-1]!r} only")
  values = _rope_values(flat)
  layer_types = flat.pop("layer_types", None)
  interval = flat.pop("full_attention_interval", None)
  depth = flat.get("num_hidden_layers")
  if layer_types is not None:
    values["full_attention_interval"] = _interval(layer_types, interval, depth)
  elif interval is not None:
    values["full_attention_interval"] = interval
  for name in list(flat):
    if name in fields:
      value = flat.pop(name)
      values[name] = tuple(value) if isinstance(value, list) else value
  unknown = {
    k: v for k, v in flat.items() if k not in _IGNORED and v not in (None, False, 0, [], {})
  }
  if unknown:
    name = sorted(unknown)[0]
    _refuse(name, unknown[name], "this key is not known, so what it asks for is not computed")
  moe = _MODEL_TYPES[model_type]
  wanted = _REQUIRED + (_REQUIRED_MOE if moe else _REQUIRED_DENSE)
  missing = [name for name in wanted if not values.get(name)]
  if missing:
    raise options.UserError("the model's configuration lacks " + ", ".join(missing))
  if moe:
    values.pop("intermediate_size", None)
  elif values.get("num_experts"):
    _refuse("num_experts", values["num_experts"], f"model_type {model_type} is dense")
  return values


def _refuse(name: str, value: Any, why: str):
  raise options.UserError(f"model configuration {name}={value!r}: {why}")


def _flatten(given: Mapping[str, Any]) -> dict[str, Any]:
  """Merges a root mapping with its `text_config`; what both say must agree."""
  text = given.get("text_config")
  if text is None:
    return dict(given)
  root = {k: v for k, v in given.items() if k != "text_config"}
  differs = {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version"}
  flat = dict(text)
  root_type: Any = root.get("model_type")
  text_type: Any = flat.setdefault("model_type", root_type)
  known = root_type in _MODEL_TYPES and text_type in _MODEL_TYPES
  if known and _MODEL_TYPES[root_type] != _MODEL_TYPES[text_type]:
    _refuse("model_type", root_type, f"text_config says {text_type!r}")
  for name, value in root.items():
    if name in differs:
      continue
    # Token ids at the root are the chat model's and win: generation stops at the root's.
    if name in ("eos_token_id", "bos_token_id", "pad_token_id"):
      flat[name] = value if value is not None else flat.get(name)
    elif name in flat and flat[name] != value:
      _refuse(name, value, f"text_config says {flat[name]!r}; they must agree")
    else:
      flat[name] = value
  return flat


def _rope_values(flat: dict[str, Any]) -> dict[str, Any]:
  """Takes the rotary values out of either spelling."""
  values: dict[str, Any] = {}
  for holder in ("rope_parameters", "rope_scaling"):
    inner = flat.pop(holder, None)
    if inner is None:
      continue
    if not isinstance(inner, Mapping):
      _refuse(holder, inner, "want a mapping")
    for name, value in inner.items():
      if name in ("rope_type", "type"):
        if value not in ("default", "mrope"):
          _refuse(f"{holder}.{name}", value, "only plain rotary positions (default) are computed")
      elif name == "mrope_interleaved":
        # With three equal position rows, the only case of text, either order is plain rotary.
        continue
      elif name in ("rope_theta", "partial_rotary_factor", "mrope_section"):
        value = tuple(value) if isinstance(value, list) else value
        if values.setdefault(name, value) != value:
          _refuse(f"{holder}.{name}", value, f"another spelling says {values[name]!r}")
      else:
        _refuse(f"{holder}.{name}", value, "this key is not known")
  for name in ("rope_theta", "partial_rotary_factor"):
    value = flat.pop(name, None)
    if value is not None and values.setdefault(name, value) != value:
      _refuse(name, value, f"rope_parameters says {values[name]!r}")
  flat.pop("mrope_interleaved", None)
  if values and "mrope_section" not in values:
    values.setdefault("mrope_section", ())
  return values


def _interval(layer_types: Any, interval: Any, depth: Any) -> int:
  """The attention interval that a list of layer kinds describes."""
  if not isinstance(layer_types, (list, tuple)) or FULL not in layer_types:
    _refuse("layer_types", layer_types, f"want a list with at least one {FULL}")
  n = list(layer_types).index(FULL) + 1
  wanted = [FULL if (i + 1) % n == 0 else LINEAR for i in range(len(layer_types))]
  if list(layer_types) != wanted:
    at = next(i for i, (a, b) in enumerate(zip(layer_types, wanted)) if a != b)
    _refuse(
      f"layer_types[{at}]",
      layer_types[at],
      f"want {wanted[at]!r}: {n - 1} {LINEAR} then one {FULL}, repeated, is what is computed",
    )
  if depth is not None and depth != len(layer_types):
    _refuse("num_hidden_layers", depth, f"layer_types has {len(layer_types)} entries")
  if interval is not None and interval != n:
    _refuse("full_attention_interval", interval, f"layer_types repeats every {n} layers")
  return n
