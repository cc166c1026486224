"""The dimensions of a Qwen3.5 text model that its costs depend on, and its parameter counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDims:
  """Fields of Hugging Face's text_config, and counts derived from them.

  A dense model has `num_experts` 0 and an `intermediate_size`; a mixture of experts, whose
  `intermediate_size` means nothing, has the MoE fields.
  """

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  full_attention_interval: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  linear_num_key_heads: int
  linear_num_value_heads: int
  linear_key_head_dim: int
  linear_value_head_dim: int
  intermediate_size: int = 0
  num_experts: int = 0
  num_experts_per_tok: int = 0
  moe_intermediate_size: int = 0
  shared_expert_intermediate_size: int = 0
  tie_word_embeddings: bool = False

  @classmethod
  def from_config(cls, config: Any) -> ModelDims:
    """Takes the fields from a configuration object or dictionary with the same names.

    Raises:
      ValueError: A field is absent, or neither a dense nor a MoE feed-forward is described.
    """
    if isinstance(config, Mapping):
      source = {**config, **config.get("text_config", {})}
    else:
      source = {f.name: getattr(config, f.name, None) for f in dataclasses.fields(cls)}
    values = {}
    for field in dataclasses.fields(cls):
      value = source.get(field.name)
      if value is None:
        if field.default is dataclasses.MISSING:
          raise ValueError(f"the model configuration has no {field.name}")
        value = field.default
      values[field.name] = value
    dims = cls(**values)
    if not dims.num_experts and not dims.intermediate_size:
      raise ValueError("the model configuration has neither experts nor an intermediate_size")
    return dims

  @property
  def is_moe(self) -> bool:
    """Whether the feed-forward is a mixture of experts."""
    return self.num_experts > 0

  @property
  def attention_layers(self) -> int:
    """Layers of full attention."""
    return self.num_hidden_layers // self.full_attention_interval

  @property
  def gdn_layers(self) -> int:
    """Layers of Gated DeltaNet."""
    return self.num_hidden_layers - self.attention_layers

  @property
  def query_width(self) -> int:
    """Width of all query heads."""
    return self.num_attention_heads * self.head_dim

  @property
  def kv_width(self) -> int:
    """Width of all key (or value) heads of attention."""
    return self.num_key_value_heads * self.head_dim

  @property
  def gdn_key_width(self) -> int:
    """Width of all key heads of Gated DeltaNet."""
    return self.linear_num_key_heads * self.linear_key_head_dim

  @property
  def gdn_value_width(self) -> int:
    """Width of all value heads of Gated DeltaNet."""
    return self.linear_num_value_heads * self.linear_value_head_dim

  @property
  def attention_params(self) -> int:
    """Matrix parameters of one attention layer; the query projection also makes a gate."""
    width = 2 * self.query_width + 2 * self.kv_width + self.query_width
    return self.hidden_size * width

  @property
  def gdn_params(self) -> int:
    """Matrix parameters of one Gated DeltaNet layer."""
    projected = 2 * self.gdn_key_width + 2 * self.gdn_value_width + 2 * self.linear_num_value_heads
    return self.hidden_size * (projected + self.gdn_value_width)

  @property
  def expert_params(self) -> int:
    """Parameters of one routed expert."""
    return 3 * self.hidden_size * self.moe_intermediate_size

  @property
  def shared_params(self) -> int:
    """Parameters of the shared expert and its gate, and of the router."""
    if not self.is_moe:
      return 0
    shared = 3 * self.shared_expert_intermediate_size + 1
    return self.hidden_size * (shared + self.num_experts)

  @property
  def mlp_params(self) -> int:
    """Parameters of one dense feed-forward."""
    return 0 if self.is_moe else 3 * self.hidden_size * self.intermediate_size

  @property
  def table_params(self) -> int:
    """Parameters of one vocabulary table."""
    return self.vocab_size * self.hidden_size

  @property
  def dense_params(self) -> int:
    """Matrix parameters outside routed experts and vocabulary tables, all layers."""
    per_layer = self.shared_params + self.mlp_params
    mixers = self.attention_layers * self.attention_params + self.gdn_layers * self.gdn_params
    return mixers + self.num_hidden_layers * per_layer

  @property
  def total_params(self) -> int:
    """Matrix parameters stored (norms, convolutions and decay rates are left out)."""
    experts = self.num_hidden_layers * self.num_experts * self.expert_params
    tables = self.table_params * (1 if self.tie_word_embeddings else 2)
    return self.dense_params + experts + tables

  @property
  def active_params(self) -> int:
    """Matrix parameters that multiply each token; the embedding look-up is no product."""
    routed = self.num_hidden_layers * self.num_experts_per_tok * self.expert_params
    return self.dense_params + routed + self.table_params
