"""How fast a step was: tokens a second, per chip, and model FLOP utilisation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kernels.base import chips
from model import flops
from model.config import ModelConfig
from model.dims import ModelDims


@dataclasses.dataclass(frozen=True)
class Meter:
  """What throughput is measured against.

  Attributes:
    dims: The model.
    chunk: Tokens in a chunk of the delta rule.
    chips: Chips in use; a part of one where only some of its devices are.
    peak_flops: Peak of a chip, FLOP/s; None where it is not known, as on a CPU.
  """

  dims: ModelDims
  chunk: int
  chips: float
  peak_flops: float | None

  @classmethod
  def of_devices(
    cls, model: ModelConfig, chunk: int, devices: int, kind: str, peak_tflops: float | None
  ) -> Meter:
    """The meter of a run.

    Args:
      model: The model.
      chunk: Tokens in a chunk of the delta rule.
      devices: Devices in use.
      kind: Their JAX `device_kind`; its chip gives the peak, with bfloat16 operands.
      peak_tflops: Peak of a chip instead of the table's.
    """
    chip = chips.of_device(kind)
    peak = None if chip is None else chip.bf16_flops
    return cls(
      dims=ModelDims.from_config(model),
      chunk=chunk,
      chips=devices / (1 if chip is None else chip.devices),
      peak_flops=peak if peak_tflops is None else peak_tflops * 1e12,
    )

  def model_flops(self, tokens: int, effective_length: float) -> float:
    """FLOPs of training on so many tokens that count for utilisation.

    Args:
      tokens: Tokens of segments; padding does not count.
      effective_length: sum(len^2) / sum(len) over the segments.
    """
    return tokens * flops.per_trained_token(self.dims, effective_length, self.chunk)

  def mfu(self, model_flops: float, seconds: float) -> float | None:
    """Model FLOPs in these seconds over the peak; None where the peak is not known."""
    if self.peak_flops is None:
      return None
    return model_flops / seconds / self.chips / self.peak_flops

  def metrics(
    self, lengths: Sequence[int], *, step_seconds: float, train_seconds: float
  ) -> dict[str, float]:
    """Metrics of a step.

    Args:
      lengths: Tokens of each trajectory.
      step_seconds: Of sampling and training.
      train_seconds: Of training alone, which utilisation is taken over.

    Returns:
      tokens_per_second, tokens_per_second_per_chip, and mfu, NaN where the peak is not known.
    """
    tokens = sum(lengths)
    effective_length = sum(n * n for n in lengths) / max(tokens, 1)
    speed = tokens / step_seconds
    mfu = self.mfu(self.model_flops(tokens, effective_length), train_seconds)
    return {
      "tokens_per_second": speed,
      "tokens_per_second_per_chip": speed / self.chips,
      "mfu": math.nan if mfu is None else mfu,
    }
