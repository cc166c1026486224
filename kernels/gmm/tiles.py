"""Tile sizes of the grouped matrix products: one validated record, and a table of good ones.

A grouped product has three passes, and each has its own best tile:

  forward   [M, K] x [G, K, N] -> [M, N]
  dlhs      [M, N] x [G, K, N]^T -> [M, K]
  drhs      [M, K]^T x [M, N] -> [G, K, N]

`rows` always cuts M.  `k` cuts the contraction of forward and dlhs, and `n` their output columns;
in drhs, whose contraction is over the rows, `k` and `n` cut the two sides of the result.
"""

from __future__ import annotations

import dataclasses

# Rows that the array contracts over at a time: fewer rows of a weight gradient cost as many.
_DEPTH = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Tile of one pass.

  Attributes:
    rows: Rows of a tile; a multiple of 8 (32 for fp8 operands).
    k: Contraction columns (left side of the result in drhs).
    n: Result columns (right side of the result in drhs).
    part: Rows that are multiplied at a time where a group covers only part of a tile: a group
      costs its rows rounded up to this, not to `rows`.  Divides `rows`.
    columns: Result columns that are multiplied between two runs of the epilogue, so that the
      epilogue of one strip overlaps the product of the next.  In drhs, result rows of a piece of
      the left side: one is turned while the one before is multiplied.

  Raises:
    ValueError: A size is not what the hardware takes.
  """

  rows: int = 512
  k: int = 4096
  n: int = 2048
  part: int = 128
  columns: int = 512

  def __post_init__(self):
    for name, step in (("rows", 8), ("part", 8), ("k", 128), ("n", 128), ("columns", 128)):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value % step:
        raise ValueError(f"tile {name}={value!r}: want a positive multiple of {step}")
    if self.rows % self.part:
      raise ValueError(f"tile rows={self.rows} is not a multiple of part={self.part}")

  def fit(self, *, m: int, k: int, n: int) -> Tiles:
    """The same tile, no larger than the operands."""
    if m < self.rows:
      rows = _round_up(m, self.part)
      return dataclasses.replace(self, rows=rows).fit(m=rows, k=k, n=n)
    n_tile = min(self.n, _round_up(n, 128))
    return dataclasses.replace(
      self, k=min(self.k, _round_up(k, 128)), n=n_tile, columns=min(self.columns, n_tile)
    )


def _round_up(value: int, step: int) -> int:
  return -(-value // step) * step


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTiles:
  """Tiles of the three passes of one grouped product."""

  forward: Tiles
  dlhs: Tiles
  drhs: Tiles

  @classmethod
  def from_dims(
    cls,
    which: str,
    *,
    fwd: tuple[int, int, int],
    dlhs: tuple[int, int, int],
    drhs: tuple[int, int, int],
  ) -> PassTiles:
    """From (batch_seq, embed_dim, mlp_dim) of each pass, as the tile flags name them.

    Args:
      which: "wi", [embed, 2 mlp], whose mlp_dim tile counts gate and up columns together; or "wo",
        [mlp, embed].
      fwd: Forward tile.
      dlhs: Input-gradient tile.
      drhs: Weight-gradient tile.

    Raises:
      ValueError: `which` is another name, or a size is not legal.
    """
    if which not in ("wi", "wo"):
      raise ValueError(f"{which=}: want wi or wo")

    def tile(dims, left_is_embed, part=128):
      rows, embed, mlp = dims
      k, n = (embed, mlp) if left_is_embed else (mlp, embed)
      return Tiles(rows=rows, k=k, n=n, part=min(rows, part))

    wi = which == "wi"
    part = 128 if drhs[0] % _DEPTH else _DEPTH
    return cls(forward=tile(fwd, wi), dlhs=tile(dlhs, not wi), drhs=tile(drhs, wi, part))


def _whole(k: int, n: int, *, rows: int = 512, part: int = 128) -> Tiles:
  return Tiles(rows=rows, k=k, n=n, part=part, columns=512)


# Keyed (K, N): routed experts of Qwen3.5-397B-A17B and 35B-A3B.  One k tile and one n tile: the
# group's matrix stays in VMEM while its rows pass, rows are streamed once, nothing is summed twice.
# The matrices of 35B-A3B are a quarter as large: a visit of twice the rows hides its start and end.
_TABLE = {
  (4096, 2048): PassTiles(
    forward=_whole(4096, 2048),
    dlhs=_whole(2048, 4096),
    drhs=Tiles(rows=512, k=2048, n=2048, part=_DEPTH, columns=512),
  ),
  (1024, 4096): PassTiles(
    forward=_whole(1024, 4096),
    dlhs=_whole(4096, 1024),
    drhs=Tiles(rows=512, k=1024, n=4096, part=_DEPTH, columns=512),
  ),
  (2048, 1024): PassTiles(
    forward=_whole(2048, 1024, rows=1024, part=256),
    dlhs=_whole(1024, 2048, rows=1024, part=256),
    drhs=Tiles(rows=1024, k=2048, n=1024, part=_DEPTH, columns=512),
  ),
  (512, 2048): PassTiles(
    forward=_whole(512, 2048, rows=1024, part=256),
    dlhs=_whole(2048, 512, rows=1024, part=256),
    drhs=Tiles(rows=1024, k=512, n=2048, part=_DEPTH, columns=512),
  ),
}


def _largest(length: int, limit: int) -> int:
  """Largest multiple of 128 up to `limit` that divides `length` rounded up to 128."""
  length = _round_up(length, 128)
  return next(t for t in range(min(limit, length) // 128 * 128, 0, -128) if length % t == 0)


def good(k: int, n: int) -> PassTiles:
  """Tiles for a product [M, k] x [G, k, n]: from the table, or of the same shape as its entries."""
  if (k, n) in _TABLE:
    return _TABLE[k, n]

  def rows_pass(left, right):
    right = _largest(right, 4096)
    left = _largest(left, max(128, (8 << 20) // right))
    return Tiles(rows=512, k=left, n=right, part=128, columns=min(512, right))

  right = _largest(n, 2048)
  return PassTiles(
    forward=rows_pass(k, n),
    dlhs=rows_pass(n, k),
    drhs=Tiles(rows=512, k=_largest(k, 2048), n=right, part=_DEPTH, columns=512),
  )
