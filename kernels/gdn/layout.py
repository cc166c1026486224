"""What the gated delta rule's Pallas kernels read besides q, k, v: gates and segments per chunk.

The kernels need each token's decay once per sublane and once per lane.  `pack_gates` lays both out
for every chunk and every group of key heads; `unpack_gradients` turns the kernels' gradients of
those arrays back into gradients of g and beta.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.gdn import head_groups, reference

LANES = head_groups.LANES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Static shape of a call.

  Attributes:
    chunk: Tokens per chunk, C.
    key_heads: Key heads.
    heads: Value heads per key head.
    group: Key heads per grid step.
  """

  chunk: int
  key_heads: int
  heads: int
  group: int

  def __post_init__(self):
    if self.key_heads % self.group:
      raise ValueError(f"head group {self.group} does not divide {self.key_heads} key heads")
    if self.group > head_groups.most_key_heads(self.heads):
      raise ValueError(
        f"head group {self.group} of {self.heads} value heads each does not fit: "
        f"want at most {head_groups.most_key_heads(self.heads)} key heads per group"
      )

  @property
  def pack(self) -> int:
    """Heads whose C x C matrices lie side by side."""
    return 2 if self.heads % 2 == 0 and 2 * self.chunk <= LANES else 1

  @property
  def groups(self) -> int:
    return self.key_heads // self.group

  @property
  def group_heads(self) -> int:
    """Value heads per grid step."""
    return self.group * self.heads

  @property
  def rows(self) -> int:
    """Sublanes of the row form: one per pack of heads, then the segments, in eights."""
    return -(-(self.group_heads // self.pack + 1) // 8) * 8


class Gates(NamedTuple):
  """Gates in both forms.

  Attributes:
    columns: Tokens on sublanes.  Lanes: b of each head of the group, beta of each, then segment,
      real, reads the incoming state, reaches the outgoing state.
    rows: Tokens on lanes, `pack` heads side by side.  Sublanes: b of each pack, then the segment.
  """

  columns: Float[Array, "B N groups C 128"]
  rows: Float[Array, "B N groups rows pack*C"]


def selector(shape: Shape, width: int, dtype) -> Float[Array, "128 n"]:
  """Ones where a lane is the head of a column, for `tile_math.Chunk.spread`.

  Args:
    shape: Static shape.
    width: Lanes of each head of the result.
    dtype: bfloat16, or float32 for exact products.
  """
  head = jnp.arange(shape.group_heads * width) // width
  return (jnp.arange(LANES)[:, None] == head).astype(dtype)


def pack_gates(
  g: Float[Array, "B S nv"],
  beta: Float[Array, "B S nv"],
  segment_ids: Int[Array, "B S"],
  initial_segment: Int[Array, " B"],
  shape: Shape,
) -> Gates:
  """Lays out the gates of rows whose length is a multiple of the chunk.

  Args:
    g: Logarithm of the decay; ignored on padding.
    beta: Writing strength; ignored on padding.
    segment_ids: 0 is padding.
    initial_segment: Segment of the state that the row starts from.
    shape: Static shape.
  """
  batch, length, _ = g.shape
  chunks = length // shape.chunk
  real = segment_ids > 0
  owner = reference.owner_segments(segment_ids, initial_segment)
  # Segments are numbered along the row, so that any id is exact as a float32.
  before = jnp.concatenate([initial_segment[:, None].astype(owner.dtype), owner[:, :-1]], axis=1)
  number = jnp.cumsum((owner != before).astype(jnp.int32), axis=1)
  number = number.reshape(batch, chunks, shape.chunk)
  start = jnp.concatenate([jnp.zeros_like(number[:, :1, 0]), number[:, :-1, -1]], axis=1)
  mask = real.reshape(batch, chunks, shape.chunk)
  flags = jnp.stack(
    [number, mask, number == start[..., None], number == number[..., -1:]], axis=-1
  ).astype(jnp.float32)

  def per_group(x):
    x = jnp.where(real[..., None], x.astype(jnp.float32), 0.0)
    return x.reshape(batch, chunks, shape.chunk, shape.groups, shape.group_heads)

  b = jnp.cumsum(per_group(g), axis=2).transpose(0, 1, 3, 2, 4)
  beta = per_group(beta).transpose(0, 1, 3, 2, 4)
  flags = jnp.broadcast_to(flags[:, :, None], (*b.shape[:4], 4))
  columns = jnp.concatenate([b, beta, flags], axis=-1)
  columns = jnp.pad(columns, ((0, 0),) * 4 + ((0, LANES - columns.shape[-1]),))

  packs = shape.group_heads // shape.pack
  rows = b.swapaxes(-1, -2).reshape(*b.shape[:3], packs, shape.pack * shape.chunk)
  segment = jnp.tile(number.astype(jnp.float32), (1, 1, shape.pack))
  segment = jnp.broadcast_to(segment[:, :, None, None], (*rows.shape[:3], 1, rows.shape[-1]))
  rows = jnp.concatenate([rows, segment], axis=3)
  rows = jnp.pad(rows, ((0, 0),) * 3 + ((0, shape.rows - rows.shape[3]), (0, 0)))
  return Gates(columns, rows)


def unpack_gradients(
  columns: Float[Array, "B N groups C 128"],
  rows: Float[Array, "B N groups rows pack*C"],
  segment_ids: Int[Array, "B S"],
  shape: Shape,
) -> tuple[Float[Array, "B S nv"], Float[Array, "B S nv"]]:
  """Gradients of g and beta, float32 and zero on padding.

  Args:
    columns: Gradient of b and of beta, laid out as `Gates.columns`.
    rows: Further gradient of b, laid out as `Gates.rows`.
    segment_ids: 0 is padding.
    shape: Static shape.
  """
  batch, chunks = columns.shape[:2]
  packs = shape.group_heads // shape.pack
  from_rows = rows[:, :, :, :packs].reshape(
    batch, chunks, shape.groups, shape.group_heads, shape.chunk
  )
  heads = shape.group_heads
  d_b = columns[..., :heads] + from_rows.swapaxes(-1, -2)
  # b is a running sum, so g collects the gradients of the tokens after it.
  d_g = lax.cumsum(d_b, axis=3, reverse=True)

  def back(x):
    x = x.transpose(0, 1, 3, 2, 4).reshape(*segment_ids.shape, shape.groups * heads)
    return jnp.where((segment_ids > 0)[..., None], x, 0.0)

  return back(d_g), back(columns[..., heads : 2 * heads])
