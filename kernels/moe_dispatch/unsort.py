"""Sum of each token's rows where most pairs belong to other devices, as one grouped product.

Gathering a row for every (token, choice) pair moves K rows a token; a device of an expert group owns
one or two of them.  Here the rows that exist are gathered in the order of their tokens, and a
grouped product adds them: tokens in tiles of 128 are the groups, and the left side is one where a
row belongs to the tile's token.  Live rows are moved three times and tokens once, whatever K is.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.gmm import tiles as tiles_lib
from kernels.gmm import weight_kernel

TOKENS = 128  # of a tile: the width of a one-hot row


class TokenOrder(NamedTuple):
  """Live rows in the order of their tokens.

  Attributes:
    rows: Row of the buffer; any legal one past the live rows.
    places: Its token's place in the tile of `TOKENS` tokens; -1 past the live rows.
    sizes: Live rows of each tile of tokens.
  """

  rows: Int[Array, " M"]
  places: Int[Array, " M"]
  sizes: Int[Array, " tiles"]


def token_order(rows: Int[Array, "T K"], sent: Bool[Array, "T K"], count: int) -> TokenOrder:
  """Orders the rows of the pairs that were sent by token; `count` is the buffer's length."""
  tokens, choices = sent.shape
  flat = sent.reshape(-1)
  slot = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, count)
  index = jnp.arange(tokens * choices, dtype=jnp.int32)
  pairs = jnp.zeros((count,), jnp.int32).at[slot].set(index, mode="drop")
  live = jnp.arange(count) < jnp.sum(flat, dtype=jnp.int32)
  places = jnp.where(live, pairs // choices % TOKENS, -1)
  of_token = jnp.pad(jnp.sum(sent, axis=1, dtype=jnp.int32), (0, -tokens % TOKENS))
  return TokenOrder(
    jnp.where(live, rows.reshape(-1)[pairs], 0), places, of_token.reshape(-1, TOKENS).sum(1)
  )


def sum_rows(
  y: Float[Array, "M N"],
  rows: Int[Array, "T K"],
  sent: Bool[Array, "T K"],
  *,
  interpret: bool = False,
) -> Float[Array, "T N"]:
  """Sum of each token's rows in float32, in the type of `y`.

  Args:
    y: Rows; those of no pair are not read.  A value that is not finite reaches the 128 tokens of
      its tile.
    rows: Row of each pair.
    sent: Whether the pair has a row.
    interpret: Run the kernel in the Pallas interpreter, on any device.
  """
  order = token_order(rows, sent, y.shape[0])
  live = (order.places >= 0)[:, None]
  ours = jnp.where(live, y[order.rows], 0)
  lanes = lax.broadcasted_iota(jnp.int32, (1, TOKENS), 1)
  one_hot = (order.places[:, None] == lanes).astype(y.dtype)
  tile = tiles_lib.Tiles(rows=512, k=TOKENS, n=4096, part=128, columns=128)
  out = weight_kernel.transposed(
    one_hot, ours, order.sizes, tile=tile, out_dtype=y.dtype, interpret=interpret
  )
  return out.reshape(-1, y.shape[1])[: sent.shape[0]]
