"""Pallas TPU kernel of the head's forward pass.

Grid (token tiles, word tiles).  A tile of hidden states stays in VMEM while the table passes, and a
strip of logits [words, tokens] is all that ever exists of them.  Words lie on sublanes and tokens
on lanes, so every sum over the vocabulary is a sum of whole registers: each of the 8 sublanes keeps
an online maximum, sum of exponentials and sum of z times exponentials of its own words (Milakov and
Gimelshein 2018), and the 8 are joined when the last tile is done.

A tile of words is two strips with a buffer each.  What a strip adds to the sums stands beside the
next strip's product, the second strip's beside the first product of the next grid step: the vector
units work while the matrix units do.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.logprob_head import tiles as tiles_lib

VMEM_LIMIT = 65472 << 10
# Below every logit, and finite: a maximum that starts here needs no test for infinities.
LOW = -1e30
_MOST_TOKENS = 1024


def logits(words: jax.Array, x: jax.Array) -> jax.Array:
  """Float32 [words, tokens] of rows of the table and hidden states, both as they lie."""
  return lax.dot_general(
    words,
    x,
    (((1,), (1,)), ((), ())),
    precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT,
    preferred_element_type=jnp.float32,
  )


def behind(value: jax.Array) -> jax.Array:
  """Zero, but known only when `value` is.

  Added to what a piece of vector work begins with, it puts the piece behind another.  Pieces that were all
  free to start would fill the vector units at once and keep the matrix units' operands waiting.
  """
  return jnp.minimum(jnp.abs(value), 0.0)


def token_rows(values: jax.Array, tile: int) -> jax.Array:
  """[N] to [tiles, 1, tile]: tokens on lanes, zeros at the end."""
  count = -(-values.shape[0] // tile)
  return jnp.pad(values, (0, count * tile - values.shape[0])).reshape(count, 1, tile)


def _accumulate(z_ref, y_ref, start, top, total, weighted, chosen, *, base):
  """Adds a strip's words, the first of which is `start`, to the sums of each sublane."""
  rows, tokens = z_ref.shape
  registers = rows // tiles_lib.SUBLANES
  piece = (tiles_lib.SUBLANES, tiles_lib.LANES)
  sublane = lax.broadcasted_iota(jnp.int32, piece, 0)
  wait = jnp.zeros(piece, jnp.float32)
  for at in range(0, tokens, tiles_lib.LANES):
    columns = slice(at, at + tiles_lib.LANES)
    z = z_ref[:, columns].reshape(registers, *piece)
    old = top[:, columns] + wait
    new = jnp.maximum(old, jnp.max(z, axis=0))
    top[:, columns] = new
    shifted = z - new[None]
    mass = jnp.exp2(shifted * base)
    step = old - new
    scale = jnp.exp2(step * base)
    sum_ = total[:, columns]
    # `weighted` is the sum of exp(z - top) (z - top): shifting the maximum shifts both factors.
    shifted_sum = jnp.sum(mass * shifted, axis=0)
    weighted[:, columns] = scale * (weighted[:, columns] + step * sum_) + shifted_sum
    sum_ = scale * sum_ + jnp.sum(mass, axis=0)
    total[:, columns] = sum_
    wait = behind(sum_)
    row = y_ref[0, :, columns] - start - sublane
    found = chosen[:, columns]
    for register in range(registers):
      found = jnp.where(row == register * tiles_lib.SUBLANES, z[register], found)
    chosen[:, columns] = found


def _kernel(
  y_ref,
  x_ref,
  w_ref,
  logp_ref,
  entropy_ref,
  lse_ref,
  first,
  second,
  top,
  total,
  weighted,
  chosen,
  *,
  vocab,
  temperature,
):
  tile, tiles = pl.program_id(1), pl.num_programs(1)
  rows = first.shape[0]
  start = tile * (2 * rows)
  base = math.log2(math.e) / temperature
  ragged = vocab % (2 * rows) != 0

  @pl.when(tile == 0)
  def _():
    second[...] = jnp.full_like(second, LOW)
    top[...] = jnp.full_like(top, LOW)
    for ref in (total, weighted, chosen):
      ref[...] = jnp.zeros_like(ref)

  def product(into, at):
    z = logits(w_ref[at : at + rows, :], x_ref[...])
    if ragged:
      # Behind the last word anything may lie.
      word = start + at + lax.broadcasted_iota(jnp.int32, z.shape, 0)
      z = jnp.where(word < vocab, z, LOW)
    into[...] = z

  add = functools.partial(
    _accumulate, top=top, total=total, weighted=weighted, chosen=chosen, base=base
  )
  product(first, 0)
  # At the first tile this is the strip of LOW, whose sums the first real maximum scales to zero.
  add(second, y_ref, start - rows)
  product(second, rows)
  add(first, y_ref, start)

  @pl.when(tile == tiles - 1)
  def _():
    add(second, y_ref, start + rows)
    tops = top[...]
    peak = jnp.max(tops, axis=0, keepdims=True)
    step = tops - peak
    scale = jnp.exp2(step * base)
    masses = jnp.sum(scale * total[...], axis=0, keepdims=True)
    moved = jnp.sum(scale * (weighted[...] + step * total[...]), axis=0, keepdims=True)
    lse = peak / temperature + jnp.log(masses)
    # One sublane has met the target; the others hold zeros.
    target = jnp.sum(chosen[...], axis=0, keepdims=True)
    logp_ref[0] = target / temperature - lse
    entropy_ref[0] = jnp.log(masses) - moved / masses / temperature
    lse_ref[0] = lse


def forward(
  hidden: Float[Array, "N D"],
  table: Float[Array, "V D"],
  targets: Int[Array, " N"],
  *,
  temperature: float,
  most_tokens: int = _MOST_TOKENS,
  tiles: tiles_lib.HeadTiles | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
  """Log-prob of each target, entropy, and log-sum-exp of the logits over the temperature.

  Args:
    hidden: float32 or bfloat16; D a multiple of 128.
    table: In the dtype of `hidden`.
    targets: int32 in [0, V).
    temperature: Above 0.
    most_tokens: Tokens of a tile at most, if at least 128: the table is read once a tile.
    tiles: None for good ones.
    interpret: Run the body in the Pallas interpreter, on any device.

  Returns:
    Three float32 [N].
  """
  (tokens, width), vocab = hidden.shape, table.shape[0]
  tiles = tiles or tiles_lib.good(
    tokens,
    vocab,
    width,
    most_tokens=min(most_tokens, _MOST_TOKENS),
    itemsize=hidden.dtype.itemsize,
  )
  y = token_rows(targets, tiles.tokens)
  strip = pltpu.VMEM((tiles.words // 2, tiles.tokens), jnp.float32)
  sums = pltpu.VMEM((tiles_lib.SUBLANES, tiles.tokens), jnp.float32)
  per_token = pl.BlockSpec((1, 1, tiles.tokens), lambda t, v: (t, 0, 0))
  found = pl.pallas_call(
    functools.partial(_kernel, vocab=vocab, temperature=temperature),
    grid=(y.shape[0], -(-vocab // tiles.words)),
    in_specs=[
      per_token,
      pl.BlockSpec((tiles.tokens, width), lambda t, v: (t, 0)),
      pl.BlockSpec((tiles.words, width), lambda t, v: (v, 0)),
    ],
    out_specs=[per_token] * 3,
    out_shape=[jax.ShapeDtypeStruct(y.shape, jnp.float32)] * 3,
    scratch_shapes=[strip, strip, sums, sums, sums, sums],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * tokens * vocab * width,
      transcendentals=tokens * vocab,
      bytes_accessed=hidden.nbytes + y.shape[0] * table.nbytes,
    ),
    interpret=interpret,
    name="logprob_head_forward",
  )(y, hidden, table)
  return tuple(a.reshape(-1)[:tokens] for a in found)
