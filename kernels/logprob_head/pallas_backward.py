"""Pallas TPU kernel of the head's backward pass, and the product that follows it.

Vocabulary-major: for one block of the table after another, a kernel of grid (word tiles, token
tiles) computes the logits of a tile again, forms

  dz = c (1[v = y] - p) - e p (z - m),   p = exp(z - lse)

in VMEM with each token's own cotangents, adds the tile's share of the table's gradient, dz^T x, to a
float32 sum that stays in VMEM while the tokens pass, and writes dz of the block, [words, tokens].
The gradient of the hidden states is then one product of dz with the block, summed in float32 over
blocks.  Four products of the size of the logits in all, one of them the forward's.

With z over the temperature T, raw logits z' = z T, d = z' - lse T and C = c / T, B = e / T^2:

  dz / T = C 1[v = y] - p (C + B T (lse - m) + B d)

where lse - m is the token's entropy; no two large numbers are subtracted but z' and lse T.

Arithmetic: with bfloat16 operands, dz goes into its two products as a high part of bfloat16 and a low
part.  One rounding to bfloat16 alone would cost a gradient 1.3e-3 to 2.8e-3 of relative error (peaked and flat
distributions, cotangents of mixed sign and size), beside 1.65e-3 of the gradient's own rounding: 2.1e-3
to 3.1e-3 in all, more than the 2e-3 that the head is held to.  The low part need only be coarse: in e5m2, times
operands in e5m2, it leaves 1e-4 to 2e-4 for half the matrix units' time of a second bfloat16 part.  So that it keeps
its range, cotangents are scaled by a power of two, which is taken back exactly in float32.  A
float32 gradient of the table, which is not rounded, has a low part of bfloat16 (2e-6).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.logprob_head import pallas_forward
from kernels.logprob_head import tiles as tiles_lib

# Bytes of dz that one block may hold in HBM.
_DZ_BYTES = 512 << 20
MOST_WORDS = 8192
MOST_TOKENS = 512
# Of the low part of dz, which so may be coarse, where the table's gradient is rounded to bfloat16.
LOW_PART = jnp.float8_e5m2
# Binary exponent that dz is scaled to: that of its low part is smaller by 8, and 15 is the largest.
_LOW_EXPONENT = 15
_ROWS = 32  # of a register of eight-bit values
_PIECE = 4  # registers: rows of dz formed at once
_COLUMNS = 512  # of the table's gradient summed at once


def _by_rows(into, values):
  """`into` from `values(rows)` in a loop: a few registers of rows at once, little code."""

  def one(step, carry):
    rows = pl.ds(pl.multiple_of(step * _ROWS, _ROWS), _ROWS)
    into[rows, :] = values(rows)
    return carry

  lax.fori_loop(0, into.shape[0] // _ROWS, one, 0)


def _zero(into):
  _by_rows(into, lambda rows: jnp.zeros((_ROWS, into.shape[1]), into.dtype))


def _parts(dz, dtypes):
  """`dz` as a sum of arrays of these dtypes, in all of which but the first it is small."""
  high = dz.astype(dtypes[0])
  return [high, *((dz - high.astype(jnp.float32)).astype(dtype) for dtype in dtypes[1:])]


def _form(z_ref, y_ref, stats_ref, dz_refs, start, at, *, base):
  """dz of a strip, whose first word is `start`, to rows `at` and on of the block written."""
  rows, tokens = z_ref.shape
  wait = jnp.zeros((tiles_lib.SUBLANES, tiles_lib.LANES), jnp.float32)
  for column in range(0, tokens, tiles_lib.LANES):
    columns = slice(column, column + tiles_lib.LANES)
    lse, gain, bend, reward = (stats_ref[0, i : i + 1, columns] for i in range(4))
    target = y_ref[0, :, columns] - start
    for row in range(0, rows, _PIECE * tiles_lib.SUBLANES):
      z = z_ref[row : min(row + _PIECE * tiles_lib.SUBLANES, rows), columns]
      shifted = (z.reshape(-1, *wait.shape) - (lse + wait)).reshape(z.shape)
      loss = jnp.exp2(shifted * base) * (gain + bend * shifted)
      wait = pallas_forward.behind(loss[: tiles_lib.SUBLANES])
      word = lax.broadcasted_iota(jnp.int32, z.shape, 0)
      dz = jnp.where(word == target - row, reward, 0.0) - loss
      for ref, part in zip(dz_refs, _parts(dz, [ref.dtype for ref in dz_refs]), strict=True):
        ref[at + row : at + row + z.shape[0], columns] = part


def _kernel(
  where,
  y_ref,
  stats_ref,
  w_ref,
  before_ref,
  *refs,
  parts,
  vocab,
  temperature,
):
  del before_ref  # what `dw_ref` is aliased with
  x_refs, dw_ref, outputs = refs[:parts], refs[parts], refs[parts + 1 :]
  dz_refs, rounded = outputs[:parts], outputs[parts : 2 * parts - 1]
  first, second, *scratch = outputs[2 * parts - 1 :]
  x_ref = x_refs[0]
  token_tile, token_tiles = pl.program_id(1), pl.num_programs(1)
  tile = where[0] + pl.program_id(0)
  live = tile >= where[1]
  rows = first.shape[0]
  start = tile * (2 * rows)
  base = math.log2(math.e) / temperature
  ragged = vocab % (2 * rows) != 0
  precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else lax.Precision.DEFAULT
  # A float32 gradient is summed where it lies.
  sums = scratch[0] if scratch else dw_ref

  @pl.when(jnp.logical_not(live))
  def _():
    # An earlier block has had this tile.
    for ref in dz_refs:
      _zero(ref)

  for ref in rounded:

    @pl.when(token_tile == 0)
    def _(ref=ref):
      _by_rows(ref, lambda rows: narrow(w_ref[rows, :], ref.dtype))

  @pl.when(live & (token_tile == 0))
  def _():
    _zero(sums)

  def product(into, at):
    z = pallas_forward.logits(w_ref[at : at + rows, :], x_ref[...])
    if ragged:
      # Behind the last word anything may lie; exp of this is zero.
      word = start + at + lax.broadcasted_iota(jnp.int32, z.shape, 0)
      z = jnp.where(word < vocab, z, pallas_forward.LOW)
    into[...] = z

  def add(at):
    for column in range(0, x_ref.shape[1], _COLUMNS):
      columns = slice(column, column + _COLUMNS)
      for dz_ref, right in zip(dz_refs, x_refs, strict=True):
        sums[at : at + rows, columns] += lax.dot_general(
          dz_ref[at : at + rows, :],
          right[:, columns],
          (((1,), (0,)), ((), ())),
          precision=precision,
          preferred_element_type=jnp.float32,
        )

  form = functools.partial(_form, y_ref=y_ref, stats_ref=stats_ref, dz_refs=dz_refs, base=base)

  @pl.when(live)
  def _():
    product(first, 0)
    product(second, rows)
    form(first, start=start, at=0)
    add(0)
    form(second, start=start + rows, at=rows)
    add(rows)

  if scratch:

    @pl.when(live & (token_tile == token_tiles - 1))
    def _():
      # By the inverse of what the cotangents were multiplied with.
      inverse = stats_ref[0, 4:5, :1]
      _by_rows(dw_ref, lambda rows: (sums[rows, :] * inverse).astype(dw_ref.dtype))


def narrow(x: jax.Array, dtype) -> jax.Array:
  """A cast that saturates."""
  if jnp.dtype(dtype).itemsize > 1:
    return x.astype(dtype)
  most = float(jnp.finfo(dtype).max)
  return jnp.clip(x.astype(jnp.float32), -most, most).astype(dtype)


def block(
  where: Int[Array, " 2"],
  y: Int[Array, "n 1 t"],
  stats: Float[Array, "n 5 t"],
  x: Sequence[Float[Array, "N D"]],
  table: Float[Array, "V D"],
  dtable: Float[Array, "V D"],
  *,
  vocab: int,
  temperature: float,
  tiles: tiles_lib.HeadTiles,
  count: int,
  interpret: bool,
) -> tuple[Float[Array, "V D"], list[Float[Array, "words N"]], list[Float[Array, "words D"]]]:
  """`dtable` with the rows of `count` word tiles from `where[0]` on, and the parts of their dz.

  `x` has the hidden states in the dtype of each part; the table's rows come in those of all
  parts but the first, of rows that are dead anything finite.
  Tiles before `where[1]` are dead: their dz is zero and their rows are left alone.
  """
  tokens, width = x[0].shape
  parts = len(x)
  words = count * tiles.words
  strip = pltpu.VMEM((tiles.words // 2, tiles.tokens), jnp.float32)
  scratch = [strip, strip]
  if table.dtype != jnp.float32 or dtable.dtype != jnp.float32:
    scratch.append(pltpu.VMEM((tiles.words, width), jnp.float32))
  table_tile = lambda v, t, where: (jnp.maximum(where[0] + v, where[1]), 0)
  per_token = lambda v, t, where: (t, 0, 0)
  dz = [jax.ShapeDtypeStruct((words, tokens), a.dtype) for a in x]
  rounded = [jax.ShapeDtypeStruct((words, width), a.dtype) for a in x[1:]]
  dtable, *rest = pl.pallas_call(
    functools.partial(_kernel, parts=parts, vocab=vocab, temperature=temperature),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(count, y.shape[0]),
      in_specs=[
        pl.BlockSpec((1, 1, tiles.tokens), per_token),
        pl.BlockSpec((1, stats.shape[1], tiles.tokens), per_token),
        pl.BlockSpec((tiles.words, width), table_tile),
        pl.BlockSpec(memory_space=pl.ANY),
        *[pl.BlockSpec((tiles.tokens, width), lambda v, t, where: (t, 0))] * parts,
      ],
      out_specs=[
        pl.BlockSpec((tiles.words, width), table_tile),
        *[pl.BlockSpec((tiles.words, tiles.tokens), lambda v, t, where: (v, t))] * parts,
        *[pl.BlockSpec((tiles.words, width), lambda v, t, where: (v, 0))] * (parts - 1),
      ],
      scratch_shapes=scratch,
    ),
    out_shape=[jax.ShapeDtypeStruct(dtable.shape, dtable.dtype), *dz, *rounded],
    input_output_aliases={4: 0},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=pallas_forward.VMEM_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      # At the rate of the first part: eight-bit products take half the time.
      flops=int(
        2 * (1 + sum(a.dtype.itemsize for a in x) / x[0].dtype.itemsize) * tokens * words * width
      ),
      transcendentals=tokens * words,
      bytes_accessed=count * sum(a.nbytes for a in x)
      + words * width * (table.dtype.itemsize + dtable.dtype.itemsize)
      + sum(a.size * a.dtype.itemsize for a in (*dz, *rounded)),
    ),
    interpret=interpret,
    name="logprob_head_backward",
  )(where, y, stats, table, dtable, *x)
  return dtable, rest[:parts], rest[parts:]


def hidden_gradient(
  dx: Float[Array, "N D"],
  parts: Sequence[Float[Array, "words N"]],
  table: Float[Array, "V D"],
  start: Int[Array, ""],
  rounded: Sequence[Float[Array, "words D"]],
) -> Float[Array, "N D"]:
  """`dx` plus the product of dz, a sum of parts, with as many rows of the table from `start` on.

  `rounded` has these rows for all parts but the first.
  """
  rows = lax.dynamic_slice_in_dim(table, start, parts[0].shape[0])
  for part, right in zip(parts, (rows, *rounded), strict=True):
    dx += lax.dot_general(
      part,
      right,
      (((0,), (0,)), ((), ())),
      precision=lax.Precision.HIGHEST if part.dtype == jnp.float32 else None,
      preferred_element_type=jnp.float32,
    )
  return dx


def backward(
  hidden: Float[Array, "N D"],
  table: Float[Array, "V D"],
  targets: Int[Array, " N"],
  lse: Float[Array, " N"],
  entropies: Float[Array, " N"],
  dlogprobs: Float[Array, " N"],
  dentropies: Float[Array, " N"],
  *,
  temperature: float,
  table_dtype=None,
  tiles: tiles_lib.HeadTiles | None = None,
  most_words: int = MOST_WORDS,
  interpret: bool = False,
) -> tuple[Float[Array, "N D"], Float[Array, "V D"]]:
  """Gradients of the hidden states and of the table.

  Args:
    hidden: float32 or bfloat16; D a multiple of 128.
    table: In the dtype of `hidden`.
    targets: int32 in [0, V).
    lse: Log-sum-exp of the logits over the temperature, float32.
    entropies: What the forward gave.
    dlogprobs: Cotangents, float32.
    dentropies: Cotangents, float32.
    temperature: Above 0.
    table_dtype: Of the table's gradient, rounded once; the dtype of `table` by default.
    tiles: None for good ones.
    most_words: Words of a block; fewer where dz of a block would exceed 512 MiB.
    interpret: Run the body in the Pallas interpreter, on any device.

  Returns:
    The gradient of `hidden` in its dtype, and that of `table`.
  """
  (tokens, width), vocab = hidden.shape, table.shape[0]
  tiles = tiles or tiles_lib.good(
    tokens, vocab, width, most_tokens=MOST_TOKENS, itemsize=hidden.dtype.itemsize
  )
  table_dtype = jnp.dtype(table_dtype or table.dtype)
  y = pallas_forward.token_rows(targets, tiles.tokens)
  bend, reward = dentropies / temperature**2, dlogprobs / temperature
  gain = reward + bend * temperature * entropies
  low = [LOW_PART if table_dtype == jnp.bfloat16 else hidden.dtype]
  low = [] if hidden.dtype == jnp.float32 else low
  scale = jnp.float32(1.0)
  if low == [LOW_PART]:
    # p |d| is at most T / e.
    most = jnp.max(jnp.abs(reward) + jnp.abs(gain) + jnp.abs(bend) * temperature, initial=0.0)
    exponent = jnp.clip(jnp.frexp(most)[1], -100, 100)
    scale = jnp.ldexp(jnp.float32(1.0), _LOW_EXPONENT - exponent)
  inverse = jnp.broadcast_to(1.0 / scale, lse.shape)
  per_token = (lse * temperature, gain * scale, bend * scale, reward * scale, inverse)
  stats = jnp.concatenate([pallas_forward.token_rows(a, tiles.tokens) for a in per_token], axis=1)
  # A product reads whole tiles, so what they hold behind the last token and word must be zero: dz
  # is zero there, and zero times nothing in particular may be no number.
  x = jnp.pad(hidden, ((0, y.size - tokens), (0, 0)))
  x = [x, *(narrow(x, dtype) for dtype in low)]
  word_tiles = -(-vocab // tiles.words)
  rows = jnp.pad(table, ((0, word_tiles * tiles.words - vocab), (0, 0)))
  words = min(most_words, _DZ_BYTES // (y.size * 4))
  count = max(1, min(words // tiles.words, word_tiles))

  def one_block(carry, live_from):
    dx, dtable = carry
    # The last block starts early, to be whole.
    start = jnp.minimum(live_from, word_tiles - count)
    dtable, dz, rounded = block(
      jnp.stack([start, live_from]),
      y,
      stats,
      x,
      rows,
      dtable,
      vocab=vocab,
      temperature=temperature,
      tiles=tiles,
      count=count,
      interpret=interpret,
    )
    return (hidden_gradient(dx, dz, rows, start * tiles.words, rounded), dtable), None

  zeros = jnp.zeros(x[0].shape, jnp.float32), jnp.zeros(rows.shape, table_dtype)
  (dx, dtable), _ = lax.scan(one_block, zeros, jnp.arange(0, word_tiles, count, dtype=jnp.int32))
  return (dx[:tokens] / scale).astype(hidden.dtype), dtable[:vocab]
