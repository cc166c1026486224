"""FLOPs of the model per token, and of training it: what model FLOP utilisation counts.

With C = chunk of the delta rule, K = key dim and W = value dim of a Gated DeltaNet head:

  products     2 x parameters forward, twice that backward
  attention    4 x (S_eff / 2) x query width forward; S_eff = sum(len^2) / sum(len) over the packed
               segments: the causal half is real
  delta rule   key heads 4CK; value heads 2C^2/3 + 2C(K+W) + 6KW + 2CW forward, 4CK and
               14KW + 18CW backward
"""

from __future__ import annotations

from model.dims import ModelDims


def attention(dims: ModelDims, segment_length: float) -> float:
  """Forward FLOPs per token of attention's scores and values, all layers.

  Args:
    dims: The model.
    segment_length: S_eff, tokens.
  """
  return 4 * (segment_length / 2) * dims.query_width * dims.attention_layers


def delta_rule(dims: ModelDims, chunk: int) -> tuple[float, float]:
  """FLOPs per token of the chunked delta rule, all layers: forward, backward."""
  key, value = dims.linear_key_head_dim, dims.linear_value_head_dim
  key_heads = dims.linear_num_key_heads * 4 * chunk * key
  fwd = 2 * chunk**2 / 3 + 2 * chunk * (key + value) + 6 * key * value + 2 * chunk * value
  bwd = 14 * key * value + 18 * chunk * value
  heads, layers = dims.linear_num_value_heads, dims.gdn_layers
  return layers * (key_heads + heads * fwd), layers * (key_heads + heads * bwd)


def per_trained_token(dims: ModelDims, segment_length: float, chunk: int) -> float:
  """FLOPs of a trained token that count for utilisation, whatever a program repeats or pads.

  Six times the active parameters and three times the forward of attention and delta rule.

  Args:
    dims: The model.
    segment_length: S_eff = sum(len^2) / sum(len) over the segments, tokens.
    chunk: Tokens in a chunk of the delta rule.
  """
  mixing = attention(dims, segment_length) + delta_rule(dims, chunk)[0]
  return 6 * dims.active_params + 3 * mixing
