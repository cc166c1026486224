"""What a Qwen3.5 text model is (`ModelConfig`) and how it is run (`ModelOptions`).

Field names are those of a Hugging Face `config.json` (its `text_config` where there is one), so
that a value can be looked up in either place by the same name.  Whatever such a file may say that
this model does not compute is refused by name: a value ignored in silence is a wrong model.

No JAX is imported here: a launcher or a flag check reads this module in milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from kernels.attention import options as attention_options
from kernels.base import options
from kernels.gmm import options as gmm_options
from model import hf_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Shapes and constants of one Qwen3.5 text model; immutable and hashable.

  Layer i is softmax attention when (i + 1) is a multiple of `full_attention_interval`, else Gated
  DeltaNet.  A model is sparse when `num_experts` > 0; `intermediate_size` then means nothing.

  Raises:
    options.UserError: A value is out of range or two values contradict each other.
  """

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int = 256
  full_attention_interval: int = 4
  linear_num_key_heads: int = 16
  linear_num_value_heads: int = 32
  linear_key_head_dim: int = 128
  linear_value_head_dim: int = 128
  linear_conv_kernel_dim: int = 4
  intermediate_size: int = 0
  num_experts: int = 0
  num_experts_per_tok: int = 0
  moe_intermediate_size: int = 0
  shared_expert_intermediate_size: int = 0
  router_aux_loss_coef: float = 0.001
  tie_word_embeddings: bool = False
  rms_norm_eps: float = 1e-6
  rope_theta: float = 1e7
  partial_rotary_factor: float = 0.25
  mrope_section: tuple[int, ...] = (11, 11, 10)
  max_position_embeddings: int = 262_144
  initializer_range: float = 0.02
  eos_token_id: int | tuple[int, ...] | None = None
  bos_token_id: int | None = None
  pad_token_id: int | None = None

  def __post_init__(self):
    for name in (
      "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
      "full_attention_interval linear_num_key_heads linear_num_value_heads linear_key_head_dim "
      "linear_value_head_dim linear_conv_kernel_dim max_position_embeddings"
    ).split():
      _require(
        _is_int(getattr(self, name)) and getattr(self, name) > 0,
        name,
        getattr(self, name),
        "want an integer >= 1",
      )
    sparse = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    wanted = sparse if self.num_experts else ("intermediate_size",)
    for name in wanted:
      _require(
        _is_int(getattr(self, name)) and getattr(self, name) > 0,
        name,
        getattr(self, name),
        f"want an integer >= 1 in a {'sparse' if self.num_experts else 'dense'} model",
      )
    if self.num_experts:
      _require(
        self.num_experts_per_tok <= self.num_experts,
        "num_experts_per_tok",
        self.num_experts_per_tok,
        f"want at most num_experts={self.num_experts}",
      )
    _require(
      self.num_attention_heads % self.num_key_value_heads == 0,
      "num_attention_heads",
      self.num_attention_heads,
      f"want a multiple of {self.num_key_value_heads=}",
    )
    _require(
      self.linear_num_value_heads % self.linear_num_key_heads == 0,
      "linear_num_value_heads",
      self.linear_num_value_heads,
      f"want a multiple of {self.linear_num_key_heads=}",
    )
    _require(
      self.num_hidden_layers >= self.full_attention_interval,
      "num_hidden_layers",
      self.num_hidden_layers,
      f"want at least one attention layer, so >= {self.full_attention_interval=}",
    )
    _require(
      0 < self.partial_rotary_factor <= 1,
      "partial_rotary_factor",
      self.partial_rotary_factor,
      "want a number in (0, 1]",
    )
    _require(
      self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
      "partial_rotary_factor",
      self.partial_rotary_factor,
      f"want head_dim times it even and positive, not {self.rotary_dim}",
    )
    if self.mrope_section:
      _require(
        sum(self.mrope_section) == self.rotary_dim // 2,
        "mrope_section",
        self.mrope_section,
        f"want a sum of {self.rotary_dim // 2}, half the rotary dims",
      )
    _require(self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "want a number > 0")
    _require(self.rope_theta > 0, "rope_theta", self.rope_theta, "want a number > 0")
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
      value = getattr(self, name)
      for one in value if isinstance(value, tuple) else (value,):
        _require(
          one is None or (_is_int(one) and 0 <= one < self.vocab_size),
          name,
          value,
          f"want ids below vocab_size={self.vocab_size}",
        )

  @property
  def is_moe(self) -> bool:
    """Whether the feed-forward layers are mixtures of experts."""
    return self.num_experts > 0

  @property
  def rotary_dim(self) -> int:
    """Leading dimensions of a head that are rotated by position."""
    return int(self.head_dim * self.partial_rotary_factor)

  @property
  def key_dim(self) -> int:
    """Width of all Gated DeltaNet query heads, and of all its key heads."""
    return self.linear_num_key_heads * self.linear_key_head_dim

  @property
  def value_dim(self) -> int:
    """Width of all Gated DeltaNet value heads."""
    return self.linear_num_value_heads * self.linear_value_head_dim

  @property
  def conv_dim(self) -> int:
    """Channels of the causal convolution: queries, keys, values."""
    return 2 * self.key_dim + self.value_dim

  @property
  def num_groups(self) -> int:
    """Groups of (full_attention_interval - 1) Gated DeltaNet layers and one attention layer."""
    return self.num_hidden_layers // self.full_attention_interval

  @property
  def gdn_per_group(self) -> int:
    """Gated DeltaNet layers of a group."""
    return self.full_attention_interval - 1

  @property
  def num_tail_layers(self) -> int:
    """Gated DeltaNet layers after the last whole group."""
    return self.num_hidden_layers % self.full_attention_interval

  @property
  def layer_types(self) -> tuple[str, ...]:
    """Kind of every layer, by Hugging Face's names."""
    n = self.full_attention_interval
    return tuple(
      hf_config.FULL if (i + 1) % n == 0 else hf_config.LINEAR
      for i in range(self.num_hidden_layers)
    )

  @classmethod
  def from_file(cls, path: str | pathlib.Path) -> ModelConfig:
    """Reads a `config.json`, or the one in a checkpoint directory.

    Raises:
      options.UserError: There is no such file, it is not JSON, or `from_hf` refuses it.
    """
    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    given = _read_json(path)
    try:
      return cls.from_hf(given)
    except options.UserError as error:
      raise options.UserError(f"{path}: {error}") from None

  @classmethod
  def from_hf(cls, given: Mapping[str, Any]) -> ModelConfig:
    """Reads the mapping of a `config.json`, plain or with `text_config` inside.

    Args:
      given: Keys of transformers' `Qwen3_5TextConfig` or `Qwen3_5MoeTextConfig`, or a root
        mapping that holds one under `text_config`.  Rotary values may stand in
        `rope_parameters`, in `rope_scaling`, or plainly.

    Raises:
      options.UserError: Names the key that is missing, contradicts another, or asks for
        something that this model does not compute.
    """
    return cls(**hf_config.parse(given, [f.name for f in dataclasses.fields(cls)]))

  def to_hf(self) -> dict[str, Any]:
    """The mapping of a text-only `config.json`, as transformers reads it."""
    kind = "qwen3_5_moe" if self.is_moe else "qwen3_5"
    camel = "Qwen3_5Moe" if self.is_moe else "Qwen3_5"
    out: dict[str, Any] = {
      "architectures": [camel + "ForCausalLM"],
      "model_type": kind + "_text",
      "attention_bias": False,
      "attention_dropout": 0.0,
      "hidden_act": "silu",
      "layer_types": list(self.layer_types),
      "rope_parameters": {
        "rope_type": "default",
        "rope_theta": self.rope_theta,
        "partial_rotary_factor": self.partial_rotary_factor,
      },
    }
    if self.mrope_section:
      out["rope_parameters"] |= {
        "mrope_section": list(self.mrope_section),
        "mrope_interleaved": True,
      }
    dense_only = {"intermediate_size"}
    moe_only = {
      "num_experts",
      "num_experts_per_tok",
      "moe_intermediate_size",
      "shared_expert_intermediate_size",
      "router_aux_loss_coef",
    }
    skip = {"rope_theta", "partial_rotary_factor", "mrope_section"}
    skip |= dense_only if self.is_moe else moe_only
    for field in dataclasses.fields(self):
      if field.name not in skip:
        value = getattr(self, field.name)
        out[field.name] = list(value) if isinstance(value, tuple) else value
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(attention_options.AttentionOptions, gmm_options.GmmOptions):
  """How the model is computed; the options of kernel families are among its own."""

  dtype: str = options.option(
    "auto",
    help="Type of activations and matrix products; auto is the one that the checkpoint's "
    "config.json names, bfloat16 where none does. Norms, the router's softmax, attention's "
    "softmax and the Gated DeltaNet core are float32 inside either way.",
    choices=("auto", "bfloat16", "float32"),
  )
  weight_dtype: str = options.option(
    "float32",
    help="Type in which weights are kept; A_log, dt_bias and the Gated DeltaNet norm are always "
    "float32.",
    choices=("bfloat16", "float32"),
  )
  gdn_chunk_size: int = options.option(
    64,
    help="Tokens per chunk of the chunked gated delta rule; a power of two. It changes rounding "
    "only.",
    minimum=1,
    maximum=1024,
    check=lambda n: None if n & (n - 1) == 0 else "want a power of two",
  )
  kernel_implementation: str = options.option(
    "reference",
    help="How Gated DeltaNet, softmax attention, the RMS norms, the experts' dispatch, (with use_tokamax_gmm) the experts "
    "and the log-prob head run where their channels fill a TPU's lanes: auto takes Pallas kernels where a "
    "program is compiled for a "
    "TPU and plain JAX elsewhere (attention of up to 1,024 x 1,024 tokens is plain JAX there too), "
    "interpret runs the Pallas bodies on any device, reference is plain JAX. Pallas kernels are not "
    "partitioned: on a mesh of several devices they must lie inside shard_map.",
    choices=("auto", "interpret", "reference"),
  )
  gdn_fwd_kernel_head_group_size: int = options.option(
    1,
    help="Key heads per grid step of the delta rule's forward Pallas kernel; divides the key heads. The "
    "backward kernel and the scans take as many as fit.",
    minimum=1,
  )
  float32_gate_logits: bool = options.option(
    False,
    help="Router logits from a float32 product instead of one in the activations' type.",
  )
  moe_fallback_topk_capacity: int = options.option(
    0,
    help="With replayed routing, tokens without a recorded one are put in a row of so many, on every "
    "device, and only they go through top-k; where there are more, or with 0, all tokens do.",
    minimum=0,
  )
  scan_layers: bool = options.option(
    True,
    help="One body of each kind of layer in a loop; false writes every layer out: the compiler sees "
    "across layers, at the price of a program that grows with the model.",
  )
  param_scan_axis: int = options.option(
    0,
    help="Axis of stacked weights along which the groups of layers lie; only 0 is computed.",
    choices=(0, 1),
  )
  remat_policy: str = options.option(
    "full",
    help="What the backward pass recomputes: full keeps each layer's input alone, none keeps "
    "everything, custom what the options of single tensors (query_proj and others) keep besides.",
    choices=("full", "none", "custom"),
  )

  @property
  def activation_dtype(self) -> str:
    """The type that activations have: `dtype`, or bfloat16 while that is still auto."""
    return "bfloat16" if self.dtype == "auto" else self.dtype

  def for_checkpoint(self, directory: str | pathlib.Path | None) -> ModelOptions:
    """These options with an auto dtype settled by a checkpoint's config.json (None: by no one).

    Raises:
      options.UserError: The file cannot be read, or names a type that is neither of the two.
    """
    if self.dtype != "auto":
      return self
    named = None if directory is None else stored_dtype(directory)
    if named not in (None, "bfloat16", "float32"):
      raise options.UserError(
        f"{directory}: config.json names dtype {named}; give --dtype=bfloat16 or --dtype=float32"
      )
    return dataclasses.replace(self, dtype=named or "bfloat16")


def stored_dtype(directory: str | pathlib.Path) -> str | None:
  """The type that a checkpoint's config.json names for its weights, or None.

  Newer files say `dtype`, older ones `torch_dtype`; of a multimodal model the text part counts.

  Raises:
    options.UserError: The file cannot be read or is no JSON object.
  """
  given = _read_json(pathlib.Path(directory) / "config.json")
  for mapping in (given.get("text_config") or {}, given):
    for name in ("dtype", "torch_dtype"):
      if mapping.get(name) is not None:
        return str(mapping[name]).removeprefix("torch.")
  return None


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    given = json.loads(path.read_text())
  except OSError as error:
    raise options.UserError(f"{path}: cannot be read ({error.strerror})") from None
  except ValueError as error:
    raise options.UserError(f"{path}: not JSON ({error})") from None
  if not isinstance(given, dict):
    raise options.UserError(f"{path}: want a JSON object, found {type(given).__name__}")
  return given


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _refuse(name: str, value: Any, why: str):
  raise options.UserError(f"model configuration {name}={value!r}: {why}")


def _require(holds: bool, name: str, value: Any, why: str):
  if not holds:
    _refuse(name, value, why)


_PUBLISHED: dict[str, Any] = {"vocab_size": 248_320, "eos_token_id": 248_044}


def _dense(hidden, layers, heads, kv_heads, value_heads, ffn, tied):
  return ModelConfig(
    hidden_size=hidden,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    num_key_value_heads=kv_heads,
    linear_num_value_heads=value_heads,
    intermediate_size=ffn,
    tie_word_embeddings=tied,
    **_PUBLISHED,
  )


def _moe(hidden, layers, heads, value_heads, experts, top_k, ffn):
  return ModelConfig(
    hidden_size=hidden,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    num_key_value_heads=2,
    linear_num_value_heads=value_heads,
    num_experts=experts,
    num_experts_per_tok=top_k,
    moe_intermediate_size=ffn,
    shared_expert_intermediate_size=ffn,
    **_PUBLISHED,
  )


_TINY: dict[str, Any] = {
  "vocab_size": 512,
  "hidden_size": 64,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
  "linear_key_head_dim": 16,
  "linear_value_head_dim": 16,
  "mrope_section": (2, 1, 1),
  "max_position_embeddings": 65_536,
}

PRESETS: dict[str, ModelConfig] = {
  "0.8B": _dense(1024, 24, 8, 2, 16, 3584, True),
  "2B": _dense(2048, 24, 8, 2, 16, 6144, True),
  "4B": _dense(2560, 32, 16, 4, 32, 9216, True),
  "9B": _dense(4096, 32, 16, 4, 32, 12_288, False),
  "27B": _dense(5120, 64, 24, 4, 48, 17_408, False),
  "35B-A3B": _moe(2048, 40, 16, 32, 256, 8, 512),
  "122B-A10B": _moe(3072, 48, 32, 64, 256, 8, 1024),
  "397B-A17B": _moe(4096, 60, 32, 64, 512, 10, 1024),
  "tiny": ModelConfig(intermediate_size=192, **_TINY),
  "tiny_moe": ModelConfig(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    **_TINY,
  ),
}


def check_preset(name: str) -> str | None:
  """What is wrong with a preset's name, the nearest one named; None if nothing is."""
  if name in PRESETS:
    return None
  return f"no such preset, the nearest is {options.nearest(name, PRESETS)}; there are {', '.join(PRESETS)}"


def preset(name: str) -> ModelConfig:
  """The configuration of a published or tiny size.

  Raises:
    options.UserError: There is no such preset.
  """
  if wrong := check_preset(name):
    raise options.UserError(f"model preset {name!r}: {wrong}")
  return PRESETS[name]
