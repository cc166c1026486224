"""Peak figures of accelerator chips.  Imports no JAX."""

from __future__ import annotations

import dataclasses


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


def of_device(kind: str) -> Chip | None:
  """The chip that a JAX device of this `device_kind` is part of; None where it is not in the table."""
  plain = kind.lower().replace(" ", "")
  return next((chip for chip in CHIPS.values() if chip.name in plain), None)
