"""Memory of a batch of rows being decoded: one slot a row, each with a length of its own.

A slot is emptied with `reset_slots`, filled by a prefill in which the other rows are all padding
(they are left untouched), or replaced by a row prefilled elsewhere with `insert_rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model import attention, gated_delta_net, qwen3_5
from model import config as config_lib


class Cache(NamedTuple):
  """Leading axes: G groups, n Gated DeltaNet layers a group, r layers of the tail, B slots.

  Attributes:
    lengths: Tokens each slot holds, int32.
    keys: Rotated keys, in the activations' type.
    values: Values.
    states: Gated DeltaNet states, float32; None where a group has no such layer.
    windows: Last inputs of their convolutions.
    tail_states: Those of the layers after the last group; None where there are none.
    tail_windows: Likewise.
  """

  lengths: Int[Array, " B"]
  keys: Float[Array, "G B M nkv d"]
  values: Float[Array, "G B M nkv d"]
  states: Float[Array, "G n B nv dk dv"] | None
  windows: Float[Array, "G n B taps-1 C"] | None
  tail_states: Float[Array, "r B nv dk dv"] | None
  tail_windows: Float[Array, "r B taps-1 C"] | None

  @property
  def max_length(self) -> int:
    """Tokens a slot can hold."""
    return self.keys.shape[2]


# Axis of the slots in each field.
_SLOT_AXIS = Cache(0, 1, 1, 2, 2, 1, 1)


def init_cache(
  config: config_lib.ModelConfig, options: config_lib.ModelOptions, batch: int, max_length: int
) -> Cache:
  """Empty slots.

  Args:
    config: The model.
    options: Gives the type of keys, values and windows.
    batch: Slots.
    max_length: Tokens a slot can hold, prompt and completion together.
  """
  dtype = jnp.dtype(options.activation_dtype)
  groups, per_group, tail = config.num_groups, config.gdn_per_group, config.num_tail_layers
  heads, dk, dv = (
    config.linear_num_value_heads,
    config.linear_key_head_dim,
    config.linear_value_head_dim,
  )
  taps = config.linear_conv_kernel_dim - 1
  keys = (groups, batch, max_length, config.num_key_value_heads, config.head_dim)
  state = lambda *lead: jnp.zeros((*lead, batch, heads, dk, dv), jnp.float32)
  window = lambda *lead: jnp.zeros((*lead, batch, taps, config.conv_dim), dtype)
  return Cache(
    lengths=jnp.zeros((batch,), jnp.int32),
    keys=jnp.zeros(keys, dtype),
    values=jnp.zeros(keys, dtype),
    states=state(groups, per_group) if per_group else None,
    windows=window(groups, per_group) if per_group else None,
    tail_states=state(tail) if tail else None,
    tail_windows=window(tail) if tail else None,
  )


def reset_slots(cache: Cache, mask: Bool[Array, " B"]) -> Cache:
  """Empties the slots where `mask` is True.

  Keys and values stay in memory: the length says which of them count.
  """

  def clear(value, axis):
    if value is None:
      return None
    shape = [1] * value.ndim
    shape[axis] = mask.shape[0]
    return jnp.where(mask.reshape(shape), 0, value).astype(value.dtype)

  cleared = Cache(*(clear(v, a) for v, a in zip(cache, _SLOT_AXIS)))
  return cleared._replace(keys=cache.keys, values=cache.values)


def insert_rows(cache: Cache, slots: Int[Array, " n"], rows: Cache) -> Cache:
  """Puts the rows of a smaller cache into slots of this one.

  Args:
    cache: Receives the rows.
    slots: Slot of each row; one at or beyond the number of slots is dropped.
    rows: Cache of n rows whose `max_length` is at most this one's.

  Raises:
    ValueError: The rows could be longer than a slot.
  """
  if rows.max_length > cache.max_length:
    raise ValueError(f"rows of {rows.max_length} tokens do not fit slots of {cache.max_length}")

  def put(into, axis, value):
    if into is None:
      return None
    index = (slice(None),) * axis + (slots,)
    if value.ndim > 2 and value.shape[axis + 1] != into.shape[axis + 1]:
      index += (slice(0, value.shape[axis + 1]),)
    return into.at[index].set(value.astype(into.dtype), mode="drop")

  return Cache(*(put(c, a, r) for c, a, r in zip(cache, _SLOT_AXIS, rows)))


def split(cache: Cache) -> tuple[qwen3_5.GroupCache, gated_delta_net.DeltaState | None]:
  """The cache as `qwen3_5.run_stack` takes it."""
  lengths = jnp.broadcast_to(cache.lengths, (cache.keys.shape[0], *cache.lengths.shape))
  gdn = tail = None
  if cache.states is not None:
    gdn = gated_delta_net.DeltaState(cache.states, cache.windows)
  if cache.tail_states is not None:
    tail = gated_delta_net.DeltaState(cache.tail_states, cache.tail_windows)
  return qwen3_5.GroupCache(gdn, attention.KeyValues(cache.keys, cache.values, lengths)), tail


def join(
  lengths: Int[Array, " B"],
  gdn: gated_delta_net.DeltaState | None,
  attn: attention.KeyValues,
  tail: gated_delta_net.DeltaState | None,
) -> Cache:
  """The opposite of `split`, with new lengths."""
  none = gated_delta_net.DeltaState(None, None)
  gdn, tail = gdn or none, tail or none
  return Cache(lengths, attn.keys, attn.values, gdn.state, gdn.window, tail.state, tail.window)


def nbytes(cache: Cache) -> int:
  """Bytes the cache takes."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
