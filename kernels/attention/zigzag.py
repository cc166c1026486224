"""Zig-zag order of a row over the ranks of a named axis, which balances causal attention.

A row of R ranks is cut into 2 R chunks.  In sequence order rank r holds chunks (2 r, 2 r + 1); in
zig-zag order ("dual chunk swap") it holds (r, 2 R - 1 - r), an early and a late one, so that under
a causal mask every rank has the same number of visible keys.

Either way every rank sends one even and one odd chunk, and receives one of each, so the move is two
collective permutes:

  even chunk 2 i      from rank i to min(2 i, 2 R - 1 - 2 i)
  odd chunk 2 i + 1   from rank i to min(2 i + 1, 2 R - 2 - 2 i)

Both are bijections of the ranks for every R.  A pair whose source is its target ("self pair") need
not travel: the order `dual_chunk_swap_local_self` leaves it out and takes the chunk locally.  Both
orders give the same bits.

Numbers only move, so the derivative of one direction is the other direction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

ORDERS = ("dual_chunk_swap", "dual_chunk_swap_local_self")

Pairs = tuple[tuple[int, int], ...]


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
  """The two chunks, of 2 `ranks`, that a rank holds in zig-zag order, in the order it holds them."""
  return rank, 2 * ranks - 1 - rank


def permutation(length: int, ranks: int) -> Int[np.ndarray, " S"]:
  """Sequence position of each token of a row in zig-zag order, rank after rank.

  `row[permutation(length, ranks)]` is the row in zig-zag order.

  Raises:
    ValueError: The length is no multiple of twice the ranks.
  """
  if ranks < 1 or length % (2 * ranks):
    raise ValueError(f"row of {length} tokens: want a multiple of 2 x {ranks} ranks")
  chunk = length // (2 * ranks)
  order = np.array([chunks_of(r, ranks) for r in range(ranks)]).reshape(-1)
  return (order[:, None] * chunk + np.arange(chunk)).reshape(-1).astype(np.int32)


def inverse_permutation(length: int, ranks: int) -> Int[np.ndarray, " S"]:
  """Index that brings a row from zig-zag order back: `zigzag[inverse_permutation(...)]`."""
  return np.argsort(permutation(length, ranks)).astype(np.int32)


def pairs(ranks: int) -> tuple[Pairs, Pairs]:
  """(source, target) ranks of the even and of the odd chunks, from sequence to zig-zag order."""
  owner = lambda chunk: min(chunk, 2 * ranks - 1 - chunk)
  even = tuple((i, owner(2 * i)) for i in range(ranks))
  return even, tuple((i, owner(2 * i + 1)) for i in range(ranks))


def _permute(x, axis_name, moves: Pairs, local_self: bool):
  """One collective permute; where `local_self`, a rank's own chunk stays and is not sent."""
  if not local_self:
    return lax.ppermute(x, axis_name, moves)
  away = [(a, b) for a, b in moves if a != b]
  stay = [a for a, b in moves if a == b]
  if not stay:
    return lax.ppermute(x, axis_name, moves)
  if not away:
    return x
  rank = lax.axis_index(axis_name)
  stays = jnp.any(rank == jnp.array(stay))
  return jnp.where(stays, x, lax.ppermute(x, axis_name, away))


def _halves(x, axis):
  if x.shape[axis] % 2:
    raise ValueError(f"zig-zag order needs an even number of tokens a rank, got {x.shape[axis]}")
  return jnp.split(x, 2, axis)


def _swapped(swap, first, second):
  """(first, second), or (second, first) where `swap`."""
  return jnp.where(swap, second, first), jnp.where(swap, first, second)


def _validate(order):
  if order not in ORDERS:
    raise ValueError(f"order={order!r}: want one of {', '.join(ORDERS)}")


def to_zigzag(
  x: Shaped[Array, "..."],
  axis_name: str,
  *,
  axis: int = 1,
  order: str = "dual_chunk_swap",
) -> Shaped[Array, "..."]:
  """A rank's tokens in zig-zag order from its tokens in sequence order.

  Call it inside a shard_map that binds `axis_name`.  Any dtype; numbers are moved, never changed.

  Args:
    x: The rank's share; its token axis is an even number long.
    axis_name: Mesh axis over which the row is split.
    axis: Token axis.
    order: One of ORDERS.

  Raises:
    ValueError: Odd number of tokens, or an unknown order.
  """
  _validate(order)
  even, odd = _halves(x, axis)
  even_moves, odd_moves = pairs(jax.lax.axis_size(axis_name))
  local = order == "dual_chunk_swap_local_self"
  even = _permute(even, axis_name, even_moves, local)
  odd = _permute(odd, axis_name, odd_moves, local)
  # Chunk r comes first; it is an even one on even ranks.
  return jnp.concatenate(_swapped(lax.axis_index(axis_name) % 2 == 1, even, odd), axis)


def from_zigzag(
  x: Shaped[Array, "..."],
  axis_name: str,
  *,
  axis: int = 1,
  order: str = "dual_chunk_swap",
) -> Shaped[Array, "..."]:
  """A rank's tokens in sequence order from its tokens in zig-zag order; see `to_zigzag`."""
  _validate(order)
  even_moves, odd_moves = pairs(jax.lax.axis_size(axis_name))
  local = order == "dual_chunk_swap_local_self"
  even, odd = _swapped(lax.axis_index(axis_name) % 2 == 1, *_halves(x, axis))
  back = lambda moves: tuple((b, a) for a, b in moves)
  even = _permute(even, axis_name, back(even_moves), local)
  odd = _permute(odd, axis_name, back(odd_moves), local)
  return jnp.concatenate([even, odd], axis)
