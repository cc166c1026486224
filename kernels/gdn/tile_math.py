"""Arithmetic on one chunk inside the Pallas kernels of the gated delta rule.

Matrices of C x C numbers use half of a register's lanes at C = 64, so the matrices of `pack` value
heads that share a key head lie side by side: [C, pack * C].  Multiplying such a row of matrices by
the block-diagonal arrangement of another (`Chunk.diagonal`) multiplies them head by head.

Products take operands from `Products.split`.  A bfloat16 operand is exact in one piece; a float32
operand is two bfloat16 pieces, and a product of two such is three bfloat16 products ("3-pass").
The gate gradient sums differences that cancel, and one pass would lose it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

# Rows solved by substitution; larger blocks are merged by products.
_BASE = 16
L2_EPS = 1e-6

ROWS_COLS = (((1,), (0,)), ((), ()))  # a b
ROWS_ROWS = (((1,), (1,)), ((), ()))  # a b^T
COLS_COLS = (((0,), (0,)), ((), ()))  # a^T b


def _log2(n: int) -> int:
  return n.bit_length() - 1


@dataclasses.dataclass(frozen=True)
class Products:
  """Matrix products of one run.

  Attributes:
    exact: float32 products instead of bfloat16 pieces.
  """

  exact: bool

  def split(self, x):
    """Pieces of an operand, most significant first."""
    if self.exact:
      return (x.astype(jnp.float32),)
    if x.dtype == jnp.bfloat16:
      return (x,)
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)

  def __call__(self, a, b, dims=ROWS_COLS):
    """Product of arrays or of their pieces, in float32.

    All products of pieces are one product of the stacked pieces, which loads each right side
    once; the quadrants are added from the least significant up.
    """
    a = a if isinstance(a, tuple) else self.split(a)
    b = b if isinstance(b, tuple) else self.split(b)
    ((contract_a,), (contract_b,)), _ = dims
    stack = lambda pieces, axis: pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)
    precision = lax.Precision.HIGHEST if self.exact else None
    out = lax.dot_general(
      stack(a, 1 - contract_a),
      stack(b, 1 - contract_b),
      dims,
      precision=precision,
      preferred_element_type=jnp.float32,
    )
    rows, columns = out.shape[0] // len(a), out.shape[1] // len(b)
    part = lambda i, j: out[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
    order = sorted(((i, j) for i in range(len(a)) for j in range(len(b))), key=sum, reverse=True)
    total = part(*order[0])
    for i, j in order[1:]:
      total = total + part(i, j)
    return total


class Gates(NamedTuple):
  """Decays of a chunk, tokens on sublanes, heads of the grid step on lanes.

  Attributes:
    b: Sum of the log decays from the chunk's start up to each token.
    beta: Writing strength.
    from_start: exp(b) where the token still sees the incoming state.
    to_end: exp(b_last - b) where the token still reaches the outgoing state.
    segment: [C, 1] segment of each token.
    real: [C, 1] is 1 on real tokens.
  """

  b: jnp.ndarray
  beta: jnp.ndarray
  from_start: jnp.ndarray
  to_end: jnp.ndarray
  segment: jnp.ndarray
  real: jnp.ndarray


def read_gates(columns, heads: int) -> Gates:
  """Unpacks what `layout.pack_gates` packed; see there for the lanes."""
  flag = lambda i: columns[:, 2 * heads + i : 2 * heads + i + 1]
  b = columns
  beta = pltpu.roll(columns, columns.shape[1] - heads, 1)
  from_start = jnp.exp(b) * flag(2)
  to_end = jnp.exp(b[-1:] - b) * flag(3)
  return Gates(b, beta, from_start, to_end, flag(0), flag(1))


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Shapes of a chunk and the arrangement of several heads side by side.

  Attributes:
    tokens: Tokens per chunk, C.
    pack: Heads side by side, 1 or 2.
    products: How operands are multiplied.
  """

  tokens: int
  pack: int
  products: Products

  def _lane(self, shape, dim=1):
    return lax.broadcasted_iota(jnp.int32, shape, dim)

  def positions(self):
    """Row and column of each entry of the packed matrices."""
    shape = (self.tokens, self.pack * self.tokens)
    return self._lane(shape, 0), self._lane(shape) & (self.tokens - 1)

  def columns(self, parts, width: int):
    """[C, 1] per head -> [C, pack * width], each on its head's lanes."""
    total = (self.tokens, self.pack * width)
    out = jnp.broadcast_to(parts[0], total)
    if self.pack == 2:
      out = jnp.where(self._lane(total) < width, out, parts[1])
    return out

  def diagonal(self, x):
    """[C, pack * n] -> [pack * C, pack * n] with the heads' blocks on the diagonal."""
    if isinstance(x, tuple):
      return tuple(self.diagonal(piece) for piece in x)
    if self.pack == 1:
      return x
    width = x.shape[1] // 2
    first = self._lane(x.shape) < width
    zero = jnp.zeros_like(x)
    return jnp.concatenate([jnp.where(first, x, zero), jnp.where(first, zero, x)], axis=0)

  def transpose(self, x):
    """Transposes each head's C x C matrix."""
    turned = x.T
    if self.pack == 1:
      return turned
    return jnp.concatenate([turned[: self.tokens], turned[self.tokens :]], axis=1)

  def halves(self, x):
    """The heads' parts of [C, pack * n]."""
    width = x.shape[1] // self.pack
    return [x[:, i * width : (i + 1) * width] for i in range(self.pack)]

  def head_sums(self, x):
    """Sum over the lanes of each head: a list of [C, 1]."""
    if self.pack == 1:
      return [jnp.sum(x, axis=1, keepdims=True)]
    width = x.shape[1] // 2
    if width % 128 == 0:
      return [jnp.sum(part, axis=1, keepdims=True) for part in self.halves(x)]
    first = jnp.sum(jnp.where(self._lane(x.shape) < width, x, 0.0), axis=1, keepdims=True)
    second = jnp.sum(jnp.where(self._lane(x.shape) < width, 0.0, x), axis=1, keepdims=True)
    return [first, second]

  def decay(self, gates: Gates, heads, b_row, segment_row):
    """exp(b_i - b_j) for i >= j in one segment, else 0: packed [C, pack * C].

    The difference is masked before it is exponentiated: it is never positive where it counts.
    """
    row, column = self.positions()
    allowed = (row >= column) & (gates.segment == segment_row)
    b = self.columns([gates.b[:, h : h + 1] for h in heads], self.tokens)
    return jnp.where(allowed, jnp.exp(jnp.where(allowed, b - b_row, 0.0)), 0.0)

  def inverses(self, matrices):
    """(I + a)^-1 of each of some packed strictly lower triangular matrices.

    Substitution inside diagonal blocks of 16 rows, all blocks of a pack at once, one block beside
    the other on the lanes; then pairs of blocks are merged: [[T1, 0], [-T2 A21 T1, T2]].  The
    matrices advance in step, so that the chain of one hides behind the others'.
    """
    row, column = self.positions()
    base = min(_BASE, self.tokens)
    lanes = (base, self.pack * self.tokens)
    lane, in_block = self._lane(lanes), self._lane(lanes, 0)
    owner = (lane & (self.tokens - 1)) >> _log2(base)
    blocks = range(self.tokens // base)
    diagonals = []
    for a in matrices:
      diagonal = a[:base]
      for block in blocks[1:]:
        diagonal = jnp.where(owner == block, a[block * base : (block + 1) * base], diagonal)
      diagonals.append(diagonal)
    eye = jnp.where(in_block == (lane & (base - 1)), 1.0, 0.0)
    solved = [eye] * len(matrices)
    start = lane & ~(base - 1)
    for j in range(base - 1):
      # Rows up to j have weight zero; row j is finished.
      weights = [jnp.take_along_axis(diagonal, start + j, axis=1) for diagonal in diagonals]
      solved = [t - w * t[j : j + 1] for t, w in zip(solved, weights)]
    inverses = [
      jnp.concatenate([jnp.where(owner == block, t, 0.0) for block in blocks], axis=0)
      for t in solved
    ]
    size = base
    while size < self.tokens:
      shift = _log2(size)
      corner = ((row >> shift) & 1 == 1) & (column >> shift == (row >> shift) - 1)
      below = [self.products.split(jnp.where(corner, a, 0.0)) for a in matrices]
      pieces = [self.products.split(t) for t in inverses]
      steps = [self.products(t, self.diagonal(a)) for t, a in zip(pieces, below)]
      steps = [self.products(x, self.diagonal(t)) for x, t in zip(steps, pieces)]
      inverses = [t - x for t, x in zip(inverses, steps)]
      size *= 2
    return inverses


class KeyHead(NamedTuple):
  """Queries and keys of one key head in a chunk, and their products.

  Attributes:
    both: Pieces of keys over queries, [2 C, dk], as they came.
    keys: Pieces of the keys.
    queries: Pieces of the queries.
    k_norm: [C, 1] factor that normalises keys.
    q_norm: [C, 1] factor that normalises queries, without the scale.
    k_norm_row: [1, pack * C] the keys' factor along the lanes.
    kk: k_i . k_j of normalised keys, packed.
    qk: q_i . k_j of normalised and scaled queries, packed.
    scale: dk^-1/2.
  """

  both: tuple
  keys: tuple
  queries: tuple
  k_norm: jnp.ndarray
  q_norm: jnp.ndarray
  k_norm_row: jnp.ndarray
  kk: jnp.ndarray
  qk: jnp.ndarray
  scale: float


def key_head(chunk: Chunk, q, k) -> KeyHead:
  """Normalises after the products, which keeps bfloat16 operands exact."""
  products, tokens = chunk.products, chunk.tokens
  both = products.split(jnp.concatenate([k, q], axis=0))
  keys = tuple(piece[:tokens] for piece in both)
  queries = tuple(piece[tokens:] for piece in both)
  repeated = keys
  if chunk.pack == 2:
    repeated = tuple(jnp.concatenate([piece, piece], axis=0) for piece in keys)
  gram = products(both, repeated, ROWS_ROWS)
  kk, qk = gram[:tokens], gram[tokens:]
  row, column = chunk.positions()
  on_diagonal = jnp.where(row == column, kk, 0.0)
  k_norm_row = lax.rsqrt(jnp.sum(on_diagonal, axis=0, keepdims=True) + L2_EPS)
  k_norm = lax.rsqrt(jnp.sum(on_diagonal, axis=1, keepdims=True) / chunk.pack + L2_EPS)
  wide = q.astype(jnp.float32)
  q_norm = lax.rsqrt(jnp.sum(wide * wide, axis=1, keepdims=True) + L2_EPS)
  scale = q.shape[1] ** -0.5
  return KeyHead(
    both,
    keys,
    queries,
    k_norm,
    q_norm,
    k_norm_row,
    kk * k_norm * k_norm_row,
    qk * (q_norm * scale) * k_norm_row,
    scale,
  )
