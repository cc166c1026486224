"""Where activations lie on a mesh: a hint that a trainer gives while it traces the model.

The model says where rows of activations pass (`rows`), the trainer says on which devices they lie
(`rows_over`).  Without a trainer's word the hint does nothing.  With it the partitioner gathers
weights, which are smaller, instead of splitting sums over the devices that hold them.

Where a computation walks over its rows in a loop, sorts them or folds them into another axis, the
partitioner cannot see that each device could keep to its own.  `over_rows` says so.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

_ROWS: contextvars.ContextVar[NamedSharding | None] = contextvars.ContextVar("rows", default=None)


@contextlib.contextmanager
def rows_over(sharding: NamedSharding) -> Iterator[None]:
  """Places every `rows` of what is traced inside.

  A function traced inside must not be traced outside too: JAX would take its first trace.
  """
  token = _ROWS.set(sharding)
  try:
    yield
  finally:
    _ROWS.reset(token)


def rows(x: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
  """Activations whose first axis is packed rows, placed as the trainer asks."""
  sharding = _ROWS.get()
  return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def over_rows(
  function: Callable[..., Any],
  rows: Sequence[Array],
  weights: Sequence[Array] = (),
  split: Sequence[int] = (),
) -> Any:
  """Runs a function on each device's own rows, with whole weights.

  Each weight is gathered once, before the function, and its gradient is summed over the devices and
  cut into the weight's shards once, after it.

  Args:
    function: Takes `rows`, then `weights`; gives a tree of arrays whose first axis is that of rows,
      or a multiple of it.
    rows: Arrays whose first axis is packed rows.
    weights: Matrices of the model.
    split: Of each weight, the axis that the trainer splits: its embedding axis.

  Returns:
    What the function gives for all rows.
  """
  sharding = _ROWS.get()
  if sharding is None:
    return function(*rows, *weights)
  (axis,) = sharding.spec

  def on_own(*arguments):
    own, shards = arguments[: len(rows)], arguments[len(rows) :]
    whole = [
      jax.lax.all_gather(shard, axis, axis=place, tiled=True)
      for shard, place in zip(shards, split, strict=True)
    ]
    return function(*own, *whole)

  cut = [
    P(*(axis if i == place else None for i in range(w.ndim))) for w, place in zip(weights, split)
  ]
  mapped = jax.shard_map(
    on_own,
    mesh=sharding.mesh,
    in_specs=(*[P(axis)] * len(rows), *cut),
    out_specs=P(axis),
    check_vma=False,
  )
  return mapped(*rows, *weights)
