"""Copies of single rows between HBM and VMEM, for the kernels that gather.

Rows of sixteen bits lie in pairs, one pair in a row of 32-bit words, and a row of words is the least
that can be copied.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

COPIES = 8  # started together
_UNROLLED = 4  # times that, where there are as many
TYPES = (jnp.bfloat16, jnp.float32)


def vmem_limit(profiled: bool | int) -> int:
  """Bytes of VMEM that a kernel may take.

  The compiler lays small operands into what a kernel leaves, and a static profile then looks in vain
  for their copies: one that is profiled claims everything.
  """
  return 65472 << 10 if profiled else 40 << 20


def rows_in_word(dtype) -> int:
  """Rows that share a row of words: 2, or 1, as of words themselves.

  Raises:
    ValueError: Not one of `TYPES`.
  """
  if dtype == jnp.uint32:
    return 1
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


def pieces(x, interpret: bool):
  """The memory of an array of whole tiles, as it lies: one row of 128 lanes after the other.

  A row of words is every `sublanes`-th of these pieces, so that one number says where it begins; from
  row and column the compiler would work it out with five operations for each copy.

  Returns:
    [pieces, rows in a word, 128]; no copy where the array lies in tiles of eight rows by 128 columns.
  """
  # A copy's pieces are first cut out with those between them, which the interpreter keeps inside.
  x = jnp.pad(x, ((0, 8 if interpret else 0), (0, 0)))
  rows, columns = x.shape
  tiled = x.reshape(rows // 8, 8, columns // 128, 128).swapaxes(1, 2)
  return tiled.reshape(-1, rows_in_word(x.dtype), 128)


def first_pieces(words, dtype, columns: int):
  """First of the pieces of rows of words."""
  sublanes = 8 // rows_in_word(dtype)
  return words // sublanes * (sublanes * (columns // 128)) + words % sublanes


def as_words(ref):
  """Pieces in HBM as words."""
  return ref if rows_in_word(ref.dtype) == 1 else ref.bitcast(jnp.uint32)


def buffer_shape(words: int, columns: int) -> tuple[int, ...]:
  """Shape of a buffer of rows of words: the tiles that they are made of."""
  return words // COPIES, columns // 128, COPIES, 128


def read(buffer_ref, rows: slice, at: int):
  """Rows of words of a buffer at the 128 columns from `at` on; whole groups of rows."""
  groups = buffer_ref[rows.start // COPIES : rows.stop // COPIES, at // 128]
  return groups.reshape(-1, 128)


def _groups(count):
  return lax.div(count + COPIES - 1, COPIES)


def start(pieces_ref, sublanes: int, index_ref, count, buffer_ref, semaphore, interpret: bool):
  """Starts the copies of `count` rows of words, rounded up to `COPIES`.

  Args:
    pieces_ref: Words in HBM, `as_words` of `pieces`.
    sublanes: Rows of words in a tile of HBM.
    index_ref: Their first pieces, in scalar memory; legal beyond the count too.
    count: How many.
    buffer_ref: Where to, `buffer_shape`.
    semaphore: Of these copies.
    interpret: One copy a step: the interpreter compiles each of them for itself.
  """
  columns = buffer_ref.shape[1]

  def copy(group, k):
    piece = index_ref[group * COPIES + k]
    source = pieces_ref.at[pl.ds(piece, sublanes * columns)]
    source = source.reshape(columns, sublanes, 1, 128).at[:, 0]
    target = buffer_ref.at[group, :, pl.ds(k, 1)]
    pltpu.make_async_copy(source, target, semaphore).start()

  def loop(first, end, body):
    def step(i, carry):
      body(i)
      return carry

    lax.fori_loop(first, end, step, 0)

  def several(first, groups):
    for g in range(groups):
      for k in range(COPIES):
        copy(first + g, k)

  groups = _groups(count)
  if interpret:
    loop(0, groups * COPIES, lambda i: copy(lax.div(i, COPIES), lax.rem(i, COPIES)))
    return
  many = lax.div(groups, _UNROLLED)
  loop(0, many, lambda i: several(i * _UNROLLED, _UNROLLED))
  loop(many * _UNROLLED, groups, lambda i: several(i, 1))


def wait(count, buffer_ref, semaphore):
  """Waits for what `start` started."""

  groups, size = _groups(count), buffer_ref.shape[0]
  # In pieces of static sizes, the binary digits of the number.
  size = 1 << (size.bit_length() - 1)
  while size:
    block = buffer_ref.at[pl.ds(0, size)]
    pl.when(groups & size != 0)(pltpu.make_async_copy(block, block, semaphore).wait)
    size //= 2


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
