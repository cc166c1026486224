"""The chip, the slice and the mesh, as far as an analytic cost model needs them.

A mesh is written fsdp x expert x context; its device order is (fsdp, context, expert), so that the
innermost axes fall on the devices of one chip first and need no wire for that part.
"""

from __future__ import annotations

import dataclasses
import math

AXES = ("fsdp", "expert", "context")  # order of the mesh string
_INNERMOST_FIRST = ("expert", "context", "fsdp")
_TORUS_LINKS = 6  # three dimensions, two directions each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """Peak figures of one accelerator chip.

  Attributes:
    name: The chip's name.
    devices: JAX devices on one chip.
    bf16_flops: FLOP/s with bfloat16 operands.
    fp8_flops: FLOP/s with float8 operands.
    hbm_bytes_per_second: HBM bandwidth.
    hbm_bytes: HBM that a program may use.
    link_bytes_per_second: One inter-chip link, one direction.
    host_bytes_per_second: Host link, one direction, with both directions in use.
  """

  name: str
  devices: int
  bf16_flops: float
  fp8_flops: float
  hbm_bytes_per_second: float
  hbm_bytes: float
  link_bytes_per_second: float
  host_bytes_per_second: float

  def peak(self, dtype: str) -> float:
    """FLOP/s for products of `dtype`: bf16 or fp8."""
    return {"bf16": self.bf16_flops, "fp8": self.fp8_flops}[dtype]


# Published peaks; the host figure is derived from a measured optimizer offload.
TPU7X = Chip(
  name="tpu7x",
  devices=2,
  bf16_flops=2307e12,
  fp8_flops=4614e12,
  hbm_bytes_per_second=7.38e12,
  hbm_bytes=2 * 94.75 * 2**30,
  link_bytes_per_second=100e9,
  host_bytes_per_second=21.3e9,
)

CHIPS = {chip.name: chip for chip in (TPU7X,)}


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices along fsdp, expert and context."""

  fsdp: int
  expert: int
  context: int

  @classmethod
  def parse(cls, text: str) -> Mesh:
    """Reads "fsdp x expert x context", such as 32x2x4.

    Raises:
      ValueError: The text is not three positive integers joined by x.
    """
    parts = text.split("x")
    if len(parts) != 3 or not all(p.isdecimal() and int(p) > 0 for p in parts):
      raise ValueError(f"mesh {text!r}: want fsdp x expert x context, such as 32x2x4")
    return cls(*map(int, parts))

  def __str__(self) -> str:
    return f"{self.fsdp}x{self.expert}x{self.context}"

  @property
  def devices(self) -> int:
    """Number of devices."""
    return self.fsdp * self.expert * self.context

  def chips(self, chip: Chip) -> int:
    """Number of chips, rounded up for a slice smaller than one chip."""
    return max(1, self.devices // chip.devices)

  def on_chip(self, chip: Chip) -> dict[str, int]:
    """How much of each axis lies inside one chip, innermost axis first.

    Raises:
      ValueError: The axes do not tile the chip's devices.
    """
    left = min(chip.devices, self.devices)
    inside = {}
    for axis in _INNERMOST_FIRST:
      part = math.gcd(left, getattr(self, axis))
      inside[axis] = part
      left //= part
    if left != 1:
      raise ValueError(f"mesh {self} does not fill chips of {chip.devices} devices")
    return inside

  def chip_extent(self, chip: Chip) -> dict[str, int]:
    """Chips along each axis: what its collectives must cross by wire."""
    inside = self.on_chip(chip)
    return {axis: getattr(self, axis) // inside[axis] for axis in AXES}

  def links(self, chip: Chip) -> dict[str, int]:
    """Incoming links of a chip that serve each axis, on a wrapped three-dimensional torus.

    The axes with more than one chip share the three dimensions: one axis has all six links, of
    two axes fsdp (else the longer) has four, three axes have two each.
    """
    extent = self.chip_extent(chip)
    spread = [axis for axis in AXES if extent[axis] > 1]
    links = dict.fromkeys(AXES, 0)
    if len(spread) == 1:
      links[spread[0]] = _TORUS_LINKS
    elif len(spread) == 2:
      wide = "fsdp" if "fsdp" in spread else max(spread, key=extent.__getitem__)
      for axis in spread:
        links[axis] = 4 if axis == wide else 2
    else:
      for axis in spread:
        links[axis] = 2
    return links

  def gathered(self, axis: str, bytes_per_device: float, chip: Chip) -> float:
    """Bytes that arrive at one chip by wire when a collective gathers along `axis`.

    Args:
      axis: Mesh axis.
      bytes_per_device: What one device contributes.
      chip: The chip.

    Returns:
      Bytes per chip.  Devices of a chip that lie along the axis share what arrives; others
      fetch separately.  A reduce-scatter of the same result size costs the same.
    """
    inside = self.on_chip(chip)[axis]
    extent = getattr(self, axis) // inside
    streams = min(chip.devices, self.devices) / inside
    return streams * (extent - 1) * inside * bytes_per_device
