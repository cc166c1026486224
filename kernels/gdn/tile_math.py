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
# Rows of a weight tile of the matrix unit.
_DEPTH = 256
L2_EPS = 1e-6
# Its exponential is exactly zero.
_NEVER = -1e30

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

    The pieces lie side by side along the contraction, so that one product adds them up inside the
    matrix unit and fills its depth.  Where two right pieces fill it, the left pieces lie one above
    the other: each right piece is loaded once.
    """
    a = a if isinstance(a, tuple) else self.split(a)
    b = b if isinstance(b, tuple) else self.split(b)
    ((contract_a,), (contract_b,)), _ = dims
    stack = lambda parts, axis: parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
    above = len(a) == len(b) == 2 and 2 * a[0].shape[contract_a] == _DEPTH
    if above:
      left = stack([stack(a, 1 - contract_a)] * 2, contract_a)
      right = stack(b, contract_b)
    else:  # low x low is left out.
      order = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < 2]
      left = stack([a[i] for i, _ in order], contract_a)
      right = stack([b[j] for _, j in order], contract_b)
    out = lax.dot_general(
      left,
      right,
      dims,
      precision=lax.Precision.HIGHEST if self.exact else None,
      preferred_element_type=jnp.float32,
    )
    rows = out.shape[0] // 2
    return out[rows:] + out[:rows] if above else out


def over(a, b):
  """Pieces of [a; b]: what is exact in one piece has a second of zero."""
  count = max(len(a), len(b))
  full = lambda pieces: (*pieces, *[jnp.zeros_like(pieces[0])] * (count - len(pieces)))
  return tuple(jnp.concatenate(pair, axis=0) for pair in zip(full(a), full(b)))


def block_selector(tokens: int, pack: int, dtype):
  """Ones at (lane, j * lanes + l) where `lane` is column j of the block that lane l lies in.

  Args:
    tokens: Tokens per chunk.
    pack: Heads side by side.
    dtype: bfloat16, or float32 for exact products.

  Returns:
    [lanes, (base - 1) * lanes] for the 128 lanes of a register, or all there are.
  """
  base, lanes = min(_BASE, tokens), min(128, pack * tokens)
  row = jnp.arange(lanes)[:, None]
  column = jnp.arange((base - 1) * lanes)
  return (row == ((column % lanes) & ~(base - 1)) + column // lanes).astype(dtype)


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

  def spread(self, columns, select):
    """Columns over the lanes of their heads: [C, 128] each -> [C, heads * n] each.

    A product with a matrix of ones and zeros, which leaves the cross-lane unit free.

    Args:
      columns: Arrays [C, 128], head h on lane h; other lanes must be finite.
      select: From `layout.selector`.
    """
    out = self.products(jnp.concatenate(columns, axis=0), (select,))
    return [out[i * self.tokens : (i + 1) * self.tokens] for i in range(len(columns))]

  def narrow(self, wide):
    """[C, pack * n] that is constant over each head's lanes -> [C, pack * C]."""
    width = wide.shape[1] // self.pack
    if width < self.tokens:
      return self.columns([half[:, :1] for half in self.halves(wide)], self.tokens)
    if self.pack == 1:
      return wide[:, : self.tokens]
    if width % 128:
      return jnp.concatenate([half[:, : self.tokens] for half in self.halves(wide)], axis=1)
    first, second = (half[:, : 2 * self.tokens] for half in self.halves(wide))
    return jnp.where(self._lane(first.shape) < self.tokens, first, second)

  def diagonal(self, x):
    """[C, pack * n] -> [pack * C, pack * n] with the heads' blocks on the diagonal."""
    if isinstance(x, tuple):
      return tuple(self.diagonal(piece) for piece in x)
    if self.pack == 1:
      return x
    width = x.shape[1] // 2
    if width % 128 == 0:
      zero = jnp.zeros((x.shape[0], width), x.dtype)
      return jnp.concatenate(
        [
          jnp.concatenate([x[:, :width], zero], axis=1),
          jnp.concatenate([zero, x[:, width:]], axis=1),
        ],
        axis=0,
      )
    first = self._lane(x.shape) < width
    zero = jnp.zeros_like(x)
    return jnp.concatenate([jnp.where(first, x, zero), jnp.where(first, zero, x)], axis=0)

  def transposed(self, a, b):
    """a^T b head by head: pieces [C, pack * C] and [C, pack * n] -> [C, pack * n]."""
    out = self.products(a, b, COLS_COLS)
    if self.pack == 1:
      return out
    # The product has all pairs of heads: those of a head with itself are kept.
    width = out.shape[1] // 2
    return jnp.concatenate([out[: self.tokens, :width], out[self.tokens :, width:]], axis=1)

  def halves(self, x):
    """The heads' parts of [C, pack * n]."""
    width = x.shape[1] // self.pack
    return [x[:, i * width : (i + 1) * width] for i in range(self.pack)]

  def head_sum(self, x, square, head: int, last=None):
    """Sum over the lanes of one head: [C, 1].

    Args:
      x: [C, pack * n].
      square: [C, pack * C], added.
      head: Which head of the pack.
      last: [1, n] added to the last row of x, or None.
    """
    x = self.halves(x)[head]
    if last is not None:
      row = self._lane((8, x.shape[1]), 0)
      tail = x[self.tokens - 8 :] + jnp.where(row == 7, last, 0.0)
      x = jnp.concatenate([x[: self.tokens - 8], tail], axis=0)
    if self.pack == 1 or x.shape[1] != square.shape[1]:
      square = self.halves(square)[head]
      return jnp.sum(x, axis=1, keepdims=True) + jnp.sum(square, axis=1, keepdims=True)
    mine = self._lane(square.shape) >> _log2(self.tokens) == head
    return jnp.sum(x + jnp.where(mine, square, 0.0), axis=1, keepdims=True)

  def decay(self, gates: Gates, heads, b_row, segment_row):
    """exp(b_i - b_j) for i >= j in one segment, else 0: packed [C, pack * C].

    The difference is masked before it is exponentiated: it is never positive where it counts.
    """
    row, column = self.positions()
    allowed = (row >= column) & (gates.segment == segment_row)
    b = self.columns([gates.b[:, h : h + 1] for h in heads], self.tokens)
    return jnp.exp(jnp.where(allowed, b - b_row, _NEVER))

  def _block_columns(self, diagonals, select):
    """Column j of every block over its lanes, for every j: [matrix][j], [base, pack * C] each."""
    base, width = diagonals[0].shape
    lanes = select.shape[0]
    slices = [d[:, i : i + lanes] for d in diagonals for i in range(0, width, lanes)]
    out = self.products(jnp.concatenate(slices, axis=0), (select,))
    of = lambda n, j: out[n * base : (n + 1) * base, j * lanes : (j + 1) * lanes]
    count = width // lanes
    join = lambda parts: parts[0] if count == 1 else jnp.concatenate(parts, axis=1)
    return [
      [join([of(i * count + part, j) for part in range(count)]) for j in range(base - 1)]
      for i in range(len(diagonals))
    ]

  def _corners(self, pieces, size: int):
    """The blocks of `size` rows that a merge multiplies, as `diagonal` arranges them.

    Block i of an odd number keeps the columns of block i - 1, the others nothing; then one head's
    rows stand below the other's.
    """
    lane = self._lane((size, self.pack * self.tokens)) >> _log2(size)
    count = self.tokens // size
    none = jnp.zeros(lane.shape, pieces[0].dtype)

    def block(piece, head, i):
      if i % 2 == 0:
        return none
      return jnp.where(lane == head * count + i - 1, piece[i * size : (i + 1) * size], none)

    return tuple(
      jnp.concatenate(
        [block(piece, head, i) for head in range(self.pack) for i in range(count)], axis=0
      )
      for piece in pieces
    )

  def inverses(self, matrices, select):
    """(I + a)^-1 of each of some packed strictly lower triangular matrices.

    Substitution inside diagonal blocks of 16 rows, all blocks of a pack at once, one block beside
    the other on the lanes (`select` is `block_selector`'s); then pairs of blocks are merged: [[T1, 0], [-T2 A21 T1, T2]].  The
    matrices advance in step, so that the chain of one hides behind the others'.

    Returns:
      The inverses, and their pieces: rows are split once, when they are final.
    """
    split = self.products.split
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
    weights = self._block_columns(diagonals, select)
    for j in range(base - 1):
      # Rows up to j have weight zero; row j is finished.
      solved = [t - w[j] * t[j : j + 1] for t, w in zip(solved, weights)]

    def apart(t):
      zero = jnp.zeros_like(t)
      return jnp.concatenate([jnp.where(owner == block, t, zero) for block in blocks], axis=0)

    inverses = [apart(t) for t in solved]
    pieces = [tuple(apart(piece) for piece in split(t)) for t in solved]
    factors = [split(a) for a in matrices] if base < self.tokens else []
    size = base
    while size < self.tokens:
      odd = [slice(i, i + size) for i in range(size, self.tokens, 2 * size)]
      below = [self._corners(a, size) for a in factors]
      rows = [tuple(jnp.concatenate([x[i] for i in odd], axis=0) for x in p) for p in pieces]
      steps = [self.products(t, a) for t, a in zip(rows, below)]
      steps = [self.products(x, self.diagonal(t)) for x, t in zip(steps, pieces)]

      def merged(whole, new, size=size):
        """`whole` with its odd blocks replaced by the rows of `new`."""
        parts = [whole[i : i + size] for i in range(0, self.tokens, size)]
        parts[1::2] = [new[i : i + size] for i in range(0, self.tokens // 2, size)]
        return jnp.concatenate(parts, axis=0)

      new = [
        jnp.concatenate([t[i] for i in odd], axis=0) - x  # noqa: B023 (called in this round)
        for t, x in zip(inverses, steps)
      ]
      inverses = [merged(t, x) for t, x in zip(inverses, new)]
      pieces = [tuple(map(merged, p, split(x))) for p, x in zip(pieces, new)]
      size *= 2
    return inverses, pieces


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


def head_columns(gates: Gates, keys, heads: int):
  """What scales the rows of each value head, as columns for `Chunk.spread`.

  Args:
    gates: Of the grid step.
    keys: `KeyHead` of each key head.
    heads: Value heads per key head.

  Returns:
    beta, from_start / |k|, from_start scale / |q| and to_end / |k|: [C, 128] each.
  """
  lane = lax.broadcasted_iota(jnp.int32, gates.b.shape, 1)
  k_norm = q_norm = jnp.zeros_like(gates.b)
  for index, key in reversed(list(enumerate(keys))):
    mine = lane < (index + 1) * heads
    k_norm = jnp.where(mine, key.k_norm, k_norm)
    q_norm = jnp.where(mine, key.q_norm * key.scale, q_norm)
  parts = gates.beta, gates.from_start * k_norm, gates.from_start * q_norm, gates.to_end * k_norm
  # Lanes without a head hold anything.
  return [jnp.where(lane < heads * len(keys), x, 0.0) for x in parts]
