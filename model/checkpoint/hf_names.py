"""Where every Hugging Face tensor lies in the parameter tree, and the other way round.

Pure arithmetic on a configuration: no file and no array is touched.  A `Parameter` is one leaf of
the tree; its leading `stack` axes count tensors (group, layer, expert), and its `parts` say which
tensors those are and how their axes lie in the leaf's other axes.

Torch keeps a projection as [outputs, inputs] and the tree as [inputs, outputs], so most parts swap
two axes; a fused expert tensor [E, 2I, h] is the leaf's [E, h, 2I]; the per-expert spelling puts
gate and up of one expert into the two halves of that last axis.

Source: `modeling_qwen3_5_moe.py` of transformers 5.17 and the tensors of published checkpoints.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from model import config as config_lib

PER_EXPERT = "per_expert"
FUSED = "fused"
SPELLINGS = (PER_EXPERT, FUSED)

# Published multimodal checkpoints, and what transformers writes for a text model.
MULTIMODAL_PREFIX = "model.language_model."
TEXT_PREFIX = "model."
PREFIXES = (MULTIMODAL_PREFIX, TEXT_PREFIX)

HEAD = "lm_head.weight"

# Tensors of a checkpoint that are no part of the text model: multi-token prediction and vision.
MTP = "mtp."
VISION = "model.visual."
SKIPPED = (MTP, VISION)

# Tensors that published checkpoints keep in float32 whatever the rest is in.
_STORED_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")


@dataclasses.dataclass(frozen=True)
class Part:
  """One kind of tensor inside a parameter.

  Attributes:
    pattern: The tensor's name with `{prefix}`, `{layer}` and `{expert}` open.
    shape: The tensor's shape.
    axes: For each axis of the tensor, the parameter's axis after the stack; None for an axis of
      size one that the parameter drops.
    offset: For each axis of the tensor, where it starts on the parameter's axis.
    stored_float32: Whether it is float32 in files of any type.
  """

  pattern: str
  shape: tuple[int, ...]
  axes: tuple[int | None, ...]
  offset: tuple[int, ...]
  stored_float32: bool


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One leaf of the parameter tree.

  Attributes:
    path: Keys from the root.
    shape: The whole leaf, stack axes first.
    stack: Sizes of the leading axes that count tensors.
    layer_stride: Layers per step of each stack axis that counts layers.
    first_layer: Layer of stack index zero.
    parts: Tensors at one index of the stack.
    wide: Whether the leaf is float32 whatever type weights are kept in.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  stack: tuple[int, ...]
  layer_stride: tuple[int, ...]
  first_layer: int
  parts: tuple[Part, ...]
  wide: bool

  @property
  def name(self) -> str:
    """The path as text."""
    return "/".join(self.path)

  def tensor_name(self, part: Part, index: tuple[int, ...], prefix: str) -> str:
    """The full name of a part's tensor at an index of the stack."""
    layer = self.first_layer + sum(i * s for i, s in zip(index, self.layer_stride))
    return part.pattern.format(prefix=prefix, layer=layer, expert=index[-1] if index else 0)

  def indices(self) -> Iterator[tuple[int, ...]]:
    """Every index of the stack, in order."""
    return itertools.product(*map(range, self.stack))

  def window(
    self, part: Part, index: tuple[int, ...], region: tuple[slice, ...]
  ) -> tuple[int | slice, ...]:
    """The parameter's index that holds `region` of a part's tensor.

    Args:
      part: Which tensor.
      index: Where in the stack.
      region: Slices with explicit bounds, one for each axis of the tensor.

    Returns:
      Integers for the stack, then slices: an index of the whole leaf.
    """
    inner: list[slice] = [slice(0, 0)] * (len(self.shape) - len(self.stack))
    for axis, start, cut in zip(part.axes, part.offset, region):
      if axis is not None:
        inner[axis] = slice(start + cut.start, start + cut.stop)
    return (*index, *inner)

  def transpose(self, part: Part) -> tuple[int, ...]:
    """Permutation of the tensor's kept axes that gives the parameter's order."""
    kept = [axis for axis in part.axes if axis is not None]
    return tuple(sorted(range(len(kept)), key=kept.__getitem__))

  def dropped(self, part: Part) -> tuple[int, ...]:
    """Axes of the tensor, of size one, that the parameter does not have."""
    return tuple(i for i, axis in enumerate(part.axes) if axis is None)


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a checkpoint and where it belongs."""

  name: str
  shape: tuple[int, ...]
  parameter: Parameter
  part: Part
  index: tuple[int, ...]


def parameters(config: config_lib.ModelConfig, experts: str = PER_EXPERT) -> list[Parameter]:
  """Every leaf of the parameter tree with the tensors that make it up.

  Args:
    config: The model.
    experts: How routed experts are spelled: "per_expert" or "fused".

  Raises:
    ValueError: Another spelling.
  """
  if experts not in SPELLINGS:
    raise ValueError(f"experts={experts!r}: want one of {', '.join(SPELLINGS)}")
  h, vocab = config.hidden_size, config.vocab_size
  found = [
    _plain(("embed", "embedding"), "{prefix}embed_tokens.weight", (vocab, h)),
    _plain(("final_norm", "scale"), "{prefix}norm.weight", (h,)),
  ]
  if not config.tie_word_embeddings:
    found.append(_plain(("lm_head", "kernel"), HEAD, (vocab, h)))
  interval, groups = config.full_attention_interval, config.num_groups
  per_group, tail = config.gdn_per_group, config.num_tail_layers
  if per_group:
    stack = _Stack(("groups", "gdn"), (groups, per_group), (interval, 1), 0)
    found += _layer(config, experts, stack, _gdn(config))
  stack = _Stack(("groups", "attn"), (groups,), (interval,), interval - 1)
  found += _layer(config, experts, stack, _attention(config))
  if tail:
    stack = _Stack(("tail",), (tail,), (1,), groups * interval)
    found += _layer(config, experts, stack, _gdn(config))
  return found


def tensors(params: list[Parameter], prefix: str = TEXT_PREFIX) -> Iterator[Tensor]:
  """Every tensor of a checkpoint."""
  for parameter in params:
    for index in parameter.indices():
      for part in parameter.parts:
        name = parameter.tensor_name(part, index, prefix)
        yield Tensor(name, part.shape, parameter, part, index)


@dataclasses.dataclass(frozen=True)
class _Stack:
  path: tuple[str, ...]
  sizes: tuple[int, ...]
  stride: tuple[int, ...]
  first: int


def _plain(path, name, shape) -> Parameter:
  axes = tuple(range(len(shape)))
  part = Part(name, shape, axes, (0,) * len(shape), False)
  return Parameter(path, shape, (), (), 0, (part,), False)


def _gdn(config) -> dict[tuple[str, ...], tuple[str, tuple[int, ...]]]:
  """Leaf path -> name after the layer's, shape of the tensor."""
  h, heads, value = config.hidden_size, config.linear_num_value_heads, config.value_dim
  channels = config.conv_dim
  return {
    ("gdn", "in_proj_qkv", "kernel"): ("linear_attn.in_proj_qkv.weight", (channels, h)),
    ("gdn", "in_proj_z", "kernel"): ("linear_attn.in_proj_z.weight", (value, h)),
    ("gdn", "in_proj_b", "kernel"): ("linear_attn.in_proj_b.weight", (heads, h)),
    ("gdn", "in_proj_a", "kernel"): ("linear_attn.in_proj_a.weight", (heads, h)),
    ("gdn", "conv1d", "kernel"): (
      "linear_attn.conv1d.weight",
      (channels, 1, config.linear_conv_kernel_dim),
    ),
    ("gdn", "A_log"): ("linear_attn.A_log", (heads,)),
    ("gdn", "dt_bias"): ("linear_attn.dt_bias", (heads,)),
    ("gdn", "norm", "scale"): ("linear_attn.norm.weight", (config.linear_value_head_dim,)),
    ("gdn", "out_proj", "kernel"): ("linear_attn.out_proj.weight", (h, value)),
  }


def _attention(config) -> dict[tuple[str, ...], tuple[str, tuple[int, ...]]]:
  h, size = config.hidden_size, config.head_dim
  queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
  return {
    ("attention", "q_proj", "kernel"): ("self_attn.q_proj.weight", (2 * queries, h)),
    ("attention", "k_proj", "kernel"): ("self_attn.k_proj.weight", (keys, h)),
    ("attention", "v_proj", "kernel"): ("self_attn.v_proj.weight", (keys, h)),
    ("attention", "o_proj", "kernel"): ("self_attn.o_proj.weight", (h, queries)),
    ("attention", "q_norm", "scale"): ("self_attn.q_norm.weight", (size,)),
    ("attention", "k_norm", "scale"): ("self_attn.k_norm.weight", (size,)),
  }


def _mlp(path, name, inner, h) -> dict[tuple[str, ...], tuple[str, tuple[int, ...]]]:
  return {
    (*path, "gate_proj", "kernel"): (f"{name}.gate_proj.weight", (inner, h)),
    (*path, "up_proj", "kernel"): (f"{name}.up_proj.weight", (inner, h)),
    (*path, "down_proj", "kernel"): (f"{name}.down_proj.weight", (h, inner)),
  }


def _layer(config, experts, stack: _Stack, mixer) -> list[Parameter]:
  h = config.hidden_size
  simple = {
    ("input_norm", "scale"): ("input_layernorm.weight", (h,)),
    **mixer,
    ("post_norm", "scale"): ("post_attention_layernorm.weight", (h,)),
  }
  if config.is_moe:
    shared = config.shared_expert_intermediate_size
    simple[("mlp", "router", "kernel")] = ("mlp.gate.weight", (config.num_experts, h))
    simple |= _mlp(("mlp", "shared_expert"), "mlp.shared_expert", shared, h)
    simple[("mlp", "shared_expert_gate", "kernel")] = ("mlp.shared_expert_gate.weight", (1, h))
  else:
    simple |= _mlp(("mlp",), "mlp", config.intermediate_size, h)
  found = []
  for path, (name, shape) in simple.items():
    if "conv1d" in path:  # [channels, 1, taps] is [taps, channels]; the last tap is the newest.
      axes: tuple[int | None, ...] = (1, None, 0)
    elif len(shape) == 2:
      axes = (1, 0)
    else:
      axes = (0,)
    part = Part(
      "{prefix}layers.{layer}." + name, shape, axes, (0,) * len(shape), name in _STORED_FLOAT32
    )
    inner = _inner_shape([part])
    wide = path[:2] in (("gdn", "A_log"), ("gdn", "dt_bias"), ("gdn", "norm"))
    found.append(
      Parameter(
        (*stack.path, *path),
        (*stack.sizes, *inner),
        stack.sizes,
        stack.stride,
        stack.first,
        (part,),
        wide,
      )
    )
  if config.is_moe:
    found += _experts(config, experts, stack)
  return found


def _experts(config, experts, stack: _Stack) -> list[Parameter]:
  h, count, inner = config.hidden_size, config.num_experts, config.moe_intermediate_size
  base = "{prefix}layers.{layer}.mlp.experts."
  sizes = stack.sizes
  if experts == FUSED:
    up: tuple[Part, ...] = (
      Part(base + "gate_up_proj", (count, 2 * inner, h), (0, 2, 1), (0, 0, 0), False),
    )
    down = (Part(base + "down_proj", (count, h, inner), (0, 2, 1), (0, 0, 0), False),)
  else:
    # One stack axis more: each expert has tensors of its own.
    sizes = (*sizes, count)
    one = base + "{expert}."
    up = (
      Part(one + "gate_proj.weight", (inner, h), (1, 0), (0, 0), False),
      Part(one + "up_proj.weight", (inner, h), (1, 0), (inner, 0), False),
    )
    down = (Part(one + "down_proj.weight", (h, inner), (1, 0), (0, 0), False),)
  return [
    Parameter(
      (*stack.path, "mlp", name),
      (*stack.sizes, count, *shape),
      sizes,
      stack.stride,
      stack.first,
      parts,
      False,
    )
    for name, shape, parts in (("wi", (h, 2 * inner), up), ("wo", (inner, h), down))
  ]


def _inner_shape(parts) -> tuple[int, ...]:
  sizes: dict[int, int] = {}
  for part in parts:
    for axis, size, start in zip(part.axes, part.shape, part.offset):
      if axis is not None:
        sizes[axis] = max(sizes.get(axis, 0), start + size)
  return tuple(sizes[axis] for axis in sorted(sizes))
