"""Copies of single rows between HBM and VMEM, for the kernels that gather.

Rows of sixteen bits lie in pairs, one pair in a row of 32-bit words, and a row of words is the least
that can be copied.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

COPIES = 8  # started and awaited together
TYPES = (jnp.bfloat16, jnp.float32)


def vmem_limit(profiled: bool | int) -> int:
  """Bytes of VMEM that a kernel may take.

  The compiler lays small operands into what a kernel leaves, and a static profile then looks in vain
  for their copies: one that is profiled claims everything.
  """
  return 65472 << 10 if profiled else 40 << 20


def rows_in_word(dtype) -> int:
  """Rows that share a row of words: 2 or 1.

  Raises:
    ValueError: Not one of `TYPES`.
  """
  if dtype not in TYPES:
    raise ValueError(f"the kernels of moe_dispatch take bfloat16 or float32 rows, not {dtype}")
  return 4 // dtype.itemsize


def word_type(dtype):
  """Type of a buffer of words."""
  return jnp.uint32 if rows_in_word(dtype) == 2 else dtype


def whole(x):
  """`x` in whole tiles of memory, which is all that can be copied from; model sizes are that."""
  rows = 8 * rows_in_word(x.dtype)
  return jnp.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % 128)))


def as_words(ref):
  """Rows of words of an array in HBM."""
  return ref if rows_in_word(ref.dtype) == 1 else ref.bitcast(jnp.uint32)


def _groups(count):
  return lax.div(count + COPIES - 1, COPIES)


def start(words_ref, index_ref, count, buffer_ref, semaphore):
  """Starts the copies of `count` rows of words, rounded up to `COPIES`.

  Args:
    words_ref: Rows of words in HBM.
    index_ref: Which rows, in scalar memory; legal beyond the count too.
    count: How many.
    buffer_ref: Where to, [groups, COPIES, columns].
    semaphore: Of these copies.
  """

  def several(group, carry):
    for k in range(COPIES):
      word = index_ref[group * COPIES + k]
      source, target = words_ref.at[pl.ds(word, 1)], buffer_ref.at[group, pl.ds(k, 1)]
      pltpu.make_async_copy(source, target, semaphore).start()
    return carry

  lax.fori_loop(0, _groups(count), several, 0)


def wait(count, buffer_ref, semaphore):
  """Waits for what `start` started."""

  def several(group, carry):
    block = buffer_ref.at[group]
    pltpu.make_async_copy(block, block, semaphore).wait()
    return carry

  lax.fori_loop(0, _groups(count), several, 0)


def product(lhs, rhs):
  """Matrix product with float32 sums."""
  precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else lax.Precision.DEFAULT
  return jnp.dot(lhs, rhs, precision=precision, preferred_element_type=jnp.float32)


def columns(row):
  """Whole numbers up to 256, [1, W] on lanes -> [W, 128] on sublanes, the same in every lane.

  A product with a diagonal: a transpose of a register would hold up the rest of a kernel.
  """
  size = row.shape[1]
  at = [lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1)]
  diagonal = jnp.where(at[0] == at[1], row, 0).astype(jnp.float32).astype(jnp.bfloat16)
  return product(diagonal, jnp.ones((size, 128), jnp.bfloat16)).astype(jnp.int32)


def widen(x, size: int):
  """[W, 128] repeated to [W, size]."""
  return jnp.concatenate([x] * (size // x.shape[1]), axis=1)


# Every index comes from a plan and is legal; the checks would be most of the cost of a copy.
UNCHECKED = {"disable_bounds_checks": True, "disable_semaphore_checks": True}
