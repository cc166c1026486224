"""The chip, the slice and the mesh, as far as an analytic cost model needs them.

The innermost axes of a mesh fall on the devices of one chip first and need no wire for that part.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from kernels.base.chips import CHIPS as CHIPS
from kernels.base.chips import TPU7X as TPU7X
from kernels.base.chips import Chip as Chip
from kernels.base.mesh import MeshShape

_TORUS_LINKS = 6  # three dimensions, two directions each


@dataclasses.dataclass(frozen=True)
class Grid:
  """Devices along named mesh axes, and the wire that serves each axis.

  Attributes:
    sizes: Devices along each axis, outermost first: the order of device numbers.
    chip: The chip.
  """

  sizes: dict[str, int]
  chip: Chip

  @property
  def devices(self) -> int:
    """Number of devices."""
    return math.prod(self.sizes.values())

  @property
  def devices_per_chip(self) -> int:
    """Devices of the grid on one chip."""
    return min(self.chip.devices, self.devices)

  @functools.cached_property
  def on_chip(self) -> dict[str, int]:
    """How much of each axis lies inside one chip, innermost axis first.

    Raises:
      ValueError: The axes do not tile the chip's devices.
    """
    left = self.devices_per_chip
    inside = {}
    for axis, size in reversed(self.sizes.items()):
      inside[axis] = math.gcd(left, size)
      left //= inside[axis]
    if left != 1:
      mesh = " x ".join(f"{name} {size}" for name, size in self.sizes.items())
      raise ValueError(
        f"a mesh of {mesh} does not fill chips of {self.chip.devices} devices; make one axis even"
      )
    return inside

  @functools.cached_property
  def chip_extent(self) -> dict[str, int]:
    """Chips along each axis: what its collectives must cross by wire."""
    return {axis: size // self.on_chip[axis] for axis, size in self.sizes.items()}

  @functools.cached_property
  def links(self) -> dict[str, int]:
    """Incoming links of a chip that serve each axis, on a wrapped three-dimensional torus.

    The axes with more than one chip share the three dimensions: one axis has all six links, of
    two axes the longer (the outer of equals) has four, three and more have two each.
    """
    spread = [axis for axis, extent in self.chip_extent.items() if extent > 1]
    links = dict.fromkeys(self.sizes, 0)
    for axis in spread:
      links[axis] = 2
    if len(spread) == 1:
      links[spread[0]] = _TORUS_LINKS
    elif len(spread) == 2:
      links[max(spread, key=self.chip_extent.__getitem__)] = 4
    return links

  def gathered(self, axis: str, bytes_per_device: float) -> float:
    """Bytes that arrive at one chip by wire when a collective gathers along `axis`.

    Args:
      axis: Mesh axis.
      bytes_per_device: What one device contributes.

    Returns:
      Bytes per chip.  Devices of a chip that lie along the axis share what arrives; others
      fetch separately.  A reduce-scatter of the same result size costs the same.
    """
    inside = self.on_chip[axis]
    streams = self.devices_per_chip / inside
    return streams * (self.chip_extent[axis] - 1) * inside * bytes_per_device


class Mesh(MeshShape):
  """A mesh's shape on chips."""

  def chips(self, chip: Chip) -> int:
    """Number of chips; one for a slice smaller than a chip."""
    return max(1, self.devices // chip.devices)

  def grid(self, chip: Chip) -> Grid:
    """The mesh as named axes in device order."""
    return Grid(self.in_device_order, chip)
