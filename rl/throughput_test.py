"""Throughput by hand."""

import math

import pytest

from kernels.base import chips
from model import config as model_config
from model import flops
from model.dims import ModelDims
from rl import throughput

DENSE = model_config.preset("27B")


def test_mfu_is_counted_flops_over_the_peak_of_the_chips_in_use():
  meter = throughput.Meter.of_devices(DENSE, 64, 8, "TPU7x", None)
  assert meter.chips == 4 and meter.peak_flops == chips.TPU7X.bf16_flops
  dims = ModelDims.from_config(DENSE)
  # Segments of 300 and 100 tokens: the mean token sits in a segment of 250.
  per_token = 6 * dims.active_params + 3 * (
    4 * 125 * dims.query_width * dims.attention_layers + flops.delta_rule(dims, 64)[0]
  )
  found = meter.metrics([300, 100], step_seconds=4.0, train_seconds=2.0)
  assert found["tokens_per_second"] == 100 and found["tokens_per_second_per_chip"] == 25
  assert found["mfu"] == pytest.approx(400 * per_token / 2.0 / 4 / 2307e12)
  # About six times the parameters a token.
  assert per_token == pytest.approx(6 * 26e9, rel=0.1)


def test_the_flag_stands_before_the_table_and_a_cpu_has_no_peak():
  given = throughput.Meter.of_devices(DENSE, 64, 2, "cpu", 1.5)
  assert given.chips == 2 and given.mfu(6e12, 2.0) == pytest.approx(1.0)
  unknown = throughput.Meter.of_devices(DENSE, 64, 1, "cpu", None)
  found = unknown.metrics([10], step_seconds=1.0, train_seconds=1.0)
  assert math.isnan(found["mfu"]) and found["tokens_per_second"] == 10
  assert unknown.mfu(1.0, 1.0) is None
  assert unknown.metrics([], step_seconds=1.0, train_seconds=1.0)["tokens_per_second"] == 0
