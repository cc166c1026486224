"""Where activations lie on a mesh: a hint that a trainer gives while it traces the model.

The model says where rows of activations pass (`rows`), the trainer says on which devices they lie
(`rows_over`).  Without a trainer's word the hint does nothing.  With it the partitioner gathers
weights, which are smaller, instead of splitting sums over the devices that hold them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax.sharding import NamedSharding
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
