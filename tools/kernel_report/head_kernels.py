"""Builders for the log-prob head."""

from __future__ import annotations

import functools
from typing import Any

from tools.kernel_report import public_kernels

# What the cell's programs are compiled with: a kernel may use all of VMEM.
_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": "65472"}


def kernel(
  *, which: str, tokens: int, vocab: int, width: int, tile: dict[str, int] | None = None
) -> Any:
  """The kernel of a pass over the whole of a vocabulary.

  Args:
    which: forward or backward.
    tokens: N.
    vocab: V.
    width: D.
    tile: Tile sizes in place of the table's.
  """
  import jax.numpy as jnp

  from kernels.logprob_head import pallas_backward, pallas_forward, tiles

  bf16, float32 = jnp.bfloat16, jnp.float32
  operands: list[Any] = [((tokens, width), bf16), ((vocab, width), bf16), ((tokens,), jnp.int32)]
  changed = tiles.HeadTiles(**tile) if tile else None
  if which == "backward":
    operands += [((tokens,), float32)] * 4
  pass_: Any = pallas_forward.forward if which == "forward" else pallas_backward.backward
  run = functools.partial(pass_, temperature=1.0, tiles=changed)
  return public_kernels.lower_on_one_slice(run, *operands), _OPTIONS


def hidden_gradient(*, which: str, tokens: int, vocab: int, width: int) -> Any:
  """The product of a block's dz, in its parts, with the block's rows, added to the sum so far."""
  import jax.numpy as jnp

  from kernels.logprob_head import pallas_backward

  del which
  bf16, words = jnp.bfloat16, pallas_backward.MOST_WORDS
  dz = ((words, tokens), bf16)
  run = lambda dx, table, start, *dz: pallas_backward.hidden_gradient(dx, dz, table, start)
  operands = [((tokens, width), jnp.float32), ((vocab, width), bf16), ((), jnp.int32), dz, dz]
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
