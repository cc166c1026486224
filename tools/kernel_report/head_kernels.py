"""Builders for the log-prob head."""

from __future__ import annotations

import functools
from typing import Any

from tools.kernel_report import public_kernels

# What the cell's programs are compiled with: a kernel may use all of VMEM.
_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": "65472"}


def kernel(
  *,
  which: str,
  tokens: int,
  vocab: int,
  width: int,
  low: str = "",
  tile: dict[str, int] | None = None,
) -> Any:
  """The kernel of a pass; of the backward pass for one block, which is the whole of `vocab`.

  Args:
    which: forward or backward.
    tokens: N.
    vocab: V.
    width: D.
    low: Type of the low part of dz; empty for that of a bfloat16 table.
    tile: Tile sizes in place of the table's.
  """
  import jax.numpy as jnp

  from kernels.logprob_head import pallas_backward, pallas_forward
  from kernels.logprob_head import tiles as tiles_lib

  bf16, float32, int32 = jnp.bfloat16, jnp.float32, jnp.int32
  hidden, table = ((tokens, width), bf16), ((vocab, width), bf16)
  lower = public_kernels.lower_on_one_slice
  if which == "forward":
    tiles = tiles_lib.HeadTiles(**tile) if tile else None
    run = functools.partial(pallas_forward.forward, temperature=1.0, tiles=tiles)
    return lower(run, hidden, table, ((tokens,), int32)), _OPTIONS
  most = pallas_backward.MOST_TOKENS
  tiles = (
    tiles_lib.HeadTiles(**tile) if tile else tiles_lib.good(tokens, vocab, width, most_tokens=most)
  )
  rows = tokens // tiles.tokens

  def block(where, y, stats, table, dtable, *x):
    return pallas_backward.block(
      where,
      y,
      stats,
      x,
      table,
      dtable,
      vocab=vocab,
      temperature=1.0,
      tiles=tiles,
      count=vocab // tiles.words,
      interpret=False,
    )

  per_token = [((rows, 1, tiles.tokens), int32), ((rows, 5, tiles.tokens), float32)]
  coarse = ((tokens, width), low or pallas_backward.LOW_PART)
  return lower(block, ((2,), int32), *per_token, table, table, hidden, coarse), _OPTIONS


def hidden_gradient(*, which: str, tokens: int, vocab: int, width: int) -> Any:
  """The product of a block's dz, in its parts, with the block's rows, added to the sum so far."""
  import jax.numpy as jnp

  from kernels.logprob_head import pallas_backward

  del which
  bf16, low, words = jnp.bfloat16, pallas_backward.LOW_PART, pallas_backward.MOST_WORDS
  operands: list[Any] = [((tokens, width), jnp.float32), ((vocab, width), bf16), ((), jnp.int32)]
  operands += [((words, tokens), bf16), ((words, tokens), low), ((words, width), low)]

  def run(dx, table, start, high, low, rounded):
    return pallas_backward.hidden_gradient(dx, [high, low], table, start, [rounded])

  return public_kernels.lower_on_one_slice(run, *operands), _OPTIONS


def plain(*, which: str, tokens: int, vocab: int, width: int) -> Any:
  """Log-probs and entropies in plain JAX; with `training` their gradients too."""
  import jax
  import jax.numpy as jnp

  from kernels.logprob_head import op

  bf16, float32 = jnp.bfloat16, jnp.float32
  operands = [((tokens, width), bf16), ((vocab, width), bf16), ((tokens,), jnp.int32)]
  lower = public_kernels.lower_on_one_slice
  if which == "forward":
    return lower(lambda x, w, y: op.logprob_head(x, w, y), *operands)

  def training(x, w, y, *cotangents):
    return jax.vjp(lambda x, w: op.logprob_head(x, w, y), x, w)[1](cotangents)

  return lower(training, *operands, *[((tokens,), float32)] * 2)
