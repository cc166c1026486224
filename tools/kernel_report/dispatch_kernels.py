"""Builders for the sort, gather and un-sort of kernels/moe_dispatch, XLA's own ops and kernels."""

from __future__ import annotations

import functools
from typing import Any

from kernels.moe_dispatch import gather, moe_dispatch, unsort, word_lists
from tools.kernel_report import public_kernels


def moved_rows(
  *, which: str, tokens: int, choices: int, experts: int, buffer_rows: int, width: int
) -> Any:
  """One step of a device's dispatch.

  Args:
    which: plan (the sort and its inverse), dispatch (tokens to rows), sum (rows to tokens), lists
      (what the un-sort kernel works out before it starts), combine (weighted sum of a token's rows),
      combine_gradient (its transpose).
    tokens: Gathered tokens, whose pairs mostly belong to other devices.
    choices: Experts a token.
    experts: Experts of this device.
    buffer_rows: Rows of its buffer.
    width: Width of a row, bfloat16.
  """
  import jax
  import jax.numpy as jnp

  flat = lambda: moe_dispatch.Plan(
    ((buffer_rows,), jnp.int32),
    ((tokens, choices), jnp.int32),
    ((experts,), jnp.int32),
    ((tokens, choices), jnp.bool_),
    ((), jnp.bool_),
  )
  wide, rows = ((tokens, width), jnp.bfloat16), ((buffer_rows, width), jnp.bfloat16)
  weights = ((tokens, choices), jnp.float32)
  lower = public_kernels.lower_on_one_slice
  if which == "plan":
    make = lambda chosen: tuple(
      moe_dispatch.plan(chosen, experts, buffer_rows=buffer_rows, spread_masked=True)
    )
    return lower(make, ((tokens, choices), jnp.int32))
  if which == "lists":
    shape = {"tokens": tokens, "choices": choices, "per_word": 2}
    listed = lambda pairs, sizes: tuple(word_lists.make(pairs, sizes, **shape))
    return lower(listed, ((buffer_rows,), jnp.int32), ((experts,), jnp.int32))
  run, arrays = {
    "dispatch": (lambda x, *p: moe_dispatch.dispatch(x, moe_dispatch.Plan(*p)), (wide,)),
    "sum": (lambda y, *p: moe_dispatch.sum_rows(y, moe_dispatch.Plan(*p)), (rows,)),
    "combine": (
      lambda y, w, *p: moe_dispatch.combine(y, w, moe_dispatch.Plan(*p)),
      (rows, weights),
    ),
    "combine_gradient": (
      lambda y, w, d, *p: jax.vjp(
        lambda y, w: moe_dispatch.combine(y, w, moe_dispatch.Plan(*p)), y, w
      )[1](d),
      (rows, weights, wide),
    ),
  }[which]
  return lower(run, *arrays, *flat())


def row_kernel(
  *,
  which: str,
  tokens: int,
  buffer_rows: int,
  width: int,
  words: int = 0,
  choices: int = 0,
  experts: int = 0,
) -> Any:
  """A kernel of the dispatch: a part that the compiler can follow, or a device's whole work.

  Args:
    which: gather (tokens to rows), or unsort (rows to tokens).
    tokens: Gathered tokens.
    buffer_rows: Rows of the buffer.
    width: Width of a row, bfloat16.
    words: Of an un-sort's part, words that each tile of tokens needs.
    choices: Of the whole work, experts a token.
    experts: Of the whole work, experts of the device.
  """
  import jax.numpy as jnp

  words_of, buffer = ((tokens, width // 2), jnp.uint32), ((buffer_rows, width), jnp.bfloat16)
  pairs, sizes = ((buffer_rows,), jnp.int32), ((experts,), jnp.int32)
  lower = public_kernels.lower_on_one_slice
  take = functools.partial(gather.take_words, width=width, dtype=jnp.bfloat16)
  if which == "gather" and experts:
    run = lambda words, pairs, sizes: take(words, pairs // choices, sizes.sum())
    return lower(run, words_of, pairs, sizes)
  if which == "gather":
    part = lambda words, at, total: take(words, at, total, even=True)
    return lower(part, words_of, pairs, ((), jnp.int32))
  # Of the whole work every visit that there can be; the lists have a case of their own.
  visits = tokens // (word_lists.TOKENS * word_lists.TILES)
  if experts:
    visits = word_lists.limit(buffer_rows, tokens, experts, per_word=2)
  listed = ((visits * word_lists.TILES, word_lists.WORDS), jnp.int32)
  add = lambda y, *lists: unsort.sum_listed(
    y, word_lists.WordLists(*lists), tokens=tokens, even=words
  )
  counts = ((visits * word_lists.TILES,), jnp.int32)
  one = ((1,), jnp.int32)
  return lower(add, buffer, ((visits,), jnp.int32), counts, listed, listed, one, one)
