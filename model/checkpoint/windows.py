"""Brings a window of a sharded array to the host without gathering the array.

One process: the window is put together from the shards that meet it, each cut on its device first.
Several processes: every device contributes what it holds of the window, the rest zero, and the bits
are summed over the mesh; so the memory in use is that of the window, and the values are exact.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Window = tuple[int | slice, ...]


def needs_every_process(array: Any) -> bool:
  """Whether `fetch` of this array is a collective that all processes must join, in one order."""
  return isinstance(array, jax.Array) and not array.is_fully_addressable


def fetch(array: Any, window: Window, *, wanted: bool = True) -> np.ndarray | None:
  """The values at `window`, on the host.

  Args:
    array: A numpy array or a jax array of any sharding.  One that spans processes must have a
      NamedSharding, and all processes must call with the same windows in the same order.
    window: An integer or a slice with explicit bounds for each axis.
    wanted: False on a process that only joins in; it gets None.

  Raises:
    ValueError: An array over several processes has another kind of sharding.
  """
  if not isinstance(array, jax.Array):
    return np.asarray(array)[window]
  starts = tuple(w if isinstance(w, int) else w.start for w in window)
  sizes = tuple(1 if isinstance(w, int) else w.stop - w.start for w in window)
  if array.is_fully_addressable:
    values = _from_shards(array, starts, sizes)
  else:
    bits = _from_all_processes(array, starts, sizes)
    if not wanted:
      return None
    values = np.asarray(bits.addressable_data(0)).view(array.dtype)
  return values.reshape([n for n, w in zip(sizes, window) if not isinstance(w, int)])


def _from_shards(array: jax.Array, starts, sizes) -> np.ndarray:
  out = np.empty(sizes, array.dtype)
  for shard in array.addressable_shards:
    if shard.replica_id != 0:
      continue
    inner, outer = [], []
    for cut, size, start, count in zip(shard.index, array.shape, starts, sizes):
      low, high, _ = cut.indices(size)
      first, last = max(low, start), min(high, start + count)
      inner.append((first - low, last - first))
      outer.append(slice(first - start, last - start))
    if all(count > 0 for _, count in inner):
      out[tuple(outer)] = _cut(shard.data, inner)
  return out


def _cut(data: jax.Array, inner) -> np.ndarray:
  if _on_host(data):
    return np.asarray(data)[tuple(slice(first, first + count) for first, count in inner)]
  first = np.array([first for first, _ in inner], np.int32)
  return np.asarray(_dynamic_slice(data, first, tuple(count for _, count in inner)))


def _on_host(data: jax.Array) -> bool:
  """Whether a numpy array of it is a view: cutting that costs nothing."""
  return all(device.platform == "cpu" for device in data.devices())


@functools.partial(jax.jit, static_argnums=2)
def _dynamic_slice(data, first, sizes):
  return lax.dynamic_slice(data, tuple(first), sizes)


def _from_all_processes(array: jax.Array, starts, sizes) -> jax.Array:
  """The window's bits, on every device."""
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    raise ValueError(f"an array over several processes must have a NamedSharding, not {sharding}")
  program = _collect(sharding.mesh, sharding.spec, array.ndim, sizes)
  return program(array, np.array(starts, np.int32))


@functools.lru_cache(maxsize=512)
def _collect(mesh, spec: PartitionSpec, ndim: int, sizes: tuple[int, ...]):
  names = [n if isinstance(n, tuple) else (n,) if n else () for n in spec]
  names += [()] * (ndim - len(names))
  used = tuple(name for one in names for name in one)

  def local(block, starts):
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[block.dtype.itemsize]
    block = lax.bitcast_convert_type(block, unsigned)
    for axis, (axes, size) in enumerate(zip(names, sizes)):
      length = block.shape[axis]
      if not axes:
        block = lax.dynamic_slice_in_dim(block, starts[axis], size, axis)
        continue
      place = starts[axis] + jnp.arange(size) - lax.axis_index(axes) * length
      block = jnp.take(block, jnp.clip(place, 0, length - 1), axis=axis)
      held = (place >= 0) & (place < length)
      block = jnp.where(held.reshape([-1 if i == axis else 1 for i in range(ndim)]), block, 0)
    if used:  # Exactly one device of each replica holds an element; the others add zero.
      block = lax.psum(block.astype(jnp.uint32), used).astype(unsigned)
    return block

  mapped = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(spec, PartitionSpec()),
    out_specs=PartitionSpec(),
    check_vma=False,
  )
  return jax.jit(mapped)
