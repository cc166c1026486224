"""What every part of a sharded model needs to know, and what it needs to know of its rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.attention import zigzag
from model import layers
from model.config import ModelConfig, ModelOptions
from model.sharded import collectives
from model.sharded.layout import Layout
from model.sharded.options import ShardedOptions

CONTEXT = "context"


@dataclasses.dataclass(frozen=True)
class Cell:
  """A model on a mesh.

  Attributes:
    config: The model.
    model_options: How it is computed.
    options: How it crosses the mesh.
    layout: Where its weights lie.
  """

  config: ModelConfig
  model_options: ModelOptions
  options: ShardedOptions
  layout: Layout

  @property
  def implementation(self) -> str:
    """Of the kernels; see `kernels.base.implementation`."""
    return self.model_options.kernel_implementation

  @property
  def dtype(self):
    """Type of activations."""
    return jnp.dtype(self.model_options.activation_dtype)

  @property
  def ranks(self) -> int:
    """Ranks that a row is split over."""
    return self.layout.size(CONTEXT)

  @property
  def regathers_query_kernel(self) -> bool:
    """Whether the backward pass gathers an attention layer's query kernel for each of its uses."""
    replayed = self.model_options.remat_policy == "custom" and self.options.query_proj == "remat"
    return replayed and not self.options.query_proj_kernel_gather_once

  @property
  def balanced(self) -> bool:
    """Whether attention works in zig-zag order."""
    return self.options.context_parallel_attention_load_balance and self.ranks > 1


class AttentionOrder(NamedTuple):
  """A row's tokens as attention layers order them.

  Attributes:
    segment_ids: Of this rank's tokens; 0 is padding.
    positions: In the segment.
    key_segment_ids: Of the whole row's, as the ranks hold them one after another.
    key_positions: Likewise.
    cos: Cosines of the rotary angles of this rank's tokens.
    sin: Their sines.
  """

  segment_ids: Int[Array, "B T"]
  positions: Int[Array, "B T"]
  key_segment_ids: Int[Array, "B S"]
  key_positions: Int[Array, "B S"]
  cos: Float[Array, "B T half"]
  sin: Float[Array, "B T half"]


class Rows(NamedTuple):
  """Packed rows as one context rank sees them.

  A rank knows the ids of the whole row, 8 bytes a token, so that no layer has to ask for those at
  its edges.

  Attributes:
    segment_ids: Of this rank's tokens, in sequence order.
    whole_segment_ids: Of the whole row.
    whole_positions: Of the whole row.
    attention: In the order of attention; None where each layer makes it.
  """

  segment_ids: Int[Array, "B T"]
  whole_segment_ids: Int[Array, "B S"]
  whole_positions: Int[Array, "B S"]
  attention: AttentionOrder | None


def attention_order(cell: Cell, rows: Rows) -> AttentionOrder:
  """The row's ids in the order in which attention layers work."""
  segments, positions = rows.whole_segment_ids, rows.whole_positions
  if cell.balanced:
    order = zigzag.permutation(segments.shape[1], cell.ranks)
    segments, positions = segments[:, order], positions[:, order]
  own_segments, own_positions = (collectives.own_part(a, CONTEXT, 1) for a in (segments, positions))
  cos, sin = layers.rotary_angles(own_positions, cell.config, cell.dtype)
  return AttentionOrder(own_segments, own_positions, segments, positions, cos, sin)


def make_rows(cell: Cell, segment_ids: Int[Array, "B S"], positions: Int[Array, "B S"]) -> Rows:
  """Rows from the ids of whole rows."""
  rows = Rows(collectives.own_part(segment_ids, CONTEXT, 1), segment_ids, positions, None)
  in_layers = cell.balanced and not cell.options.context_parallel_attention_load_balance_hoist_ids
  return rows if in_layers else rows._replace(attention=attention_order(cell, rows))
