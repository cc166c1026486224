"""A layout of equal groups that the compiler can follow, for static profiles.

libtpu's static profile simulates every grid step, but not what prefetched group sizes hold: the
branches that depend on them would count as not taken.  Here the visits are arithmetic on the grid
step instead, so that they count.  Results are right only for the group sizes that they describe.
"""

from __future__ import annotations

import dataclasses

from jax import lax

from kernels.gmm import visits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Even:
  """Equal groups.

  Attributes:
    groups: G.
    group_rows: Rows of each group; a multiple of the row tile.
    tile_rows: Rows of a tile.
    offset: Rows by which every group starts late: 0 puts group borders on tile borders; another
      value below the tile gives each group two partly covered tiles.
  """

  groups: int
  group_rows: int
  tile_rows: int
  offset: int = 0

  def __post_init__(self):
    if self.group_rows % self.tile_rows or not 0 <= self.offset < self.tile_rows:
      raise ValueError(f"{self}: want whole tiles in a group and an offset below one tile")

  def refs(self):
    """Stand-ins of the three prefetched arrays of `visits.Visits`."""
    per_group = self.group_rows // self.tile_rows
    tiles = self.groups * per_group
    per_visit = per_group + (self.offset > 0)

    def pair(visit):
      group = lax.min(lax.div(visit, per_visit), self.groups - 1)
      tile = lax.min(visit - group * (per_visit - per_group), tiles - 1)
      return (group << visits.TILE_BITS) | tile

    work = self.groups * per_visit - (self.offset > 0)
    return (
      _Indexed(pair),
      _Indexed(lambda group: group * self.group_rows + self.offset),
      (work, work, tiles - 1),
    )


class _Indexed:
  def __init__(self, function):
    self._function = function

  def __getitem__(self, index):
    return self._function(index)
