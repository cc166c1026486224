"""An arm of a bench: one configuration of the trainer, compiled, with its state and batches."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax

from kernels.base import options
from model import api
from model import config as model_config
from model.sharded.options import ShardedOptions
from rl import config as rl_config
from rl import optimizer, placed, throughput, train_step
from tools.bench import synthetic


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """Seconds of one step: its micro-batches, its update, all of it."""

  micro_batches: tuple[float, ...]
  update: float
  whole: float


class Arm:
  """Runs steps of one configuration."""

  def __init__(
    self,
    name: str,
    settings: options.Settings,
    lengths: synthetic.Lengths,
    routing: synthetic.Routing,
    seed: int,
  ):
    """Makes programs, parameters and batches; nothing is compiled before the first step.

    Raises:
      options.UserError: The settings do not describe a step on these devices.
    """
    self.name = name
    if settings.checkpoint:
      config = model_config.ModelConfig.from_file(settings.checkpoint)
    else:
      config = model_config.preset(settings.model_preset)
    batch = settings.of(rl_config.BatchOptions)
    model_options = settings.of(model_config.ModelOptions)
    optimizer_options = settings.of(rl_config.OptimizerOptions)
    self._micro_batches = batch.num_micro_batches or 1
    self.workload = synthetic.make(
      seed=seed,
      micro_batches=self._micro_batches,
      rows=batch.micro_batch_rows,
      row_tokens=batch.row_tokens,
      max_segments=batch.max_segments_per_row,
      vocab_size=config.vocab_size,
      lengths=lengths,
      routing=routing,
      layers=config.num_hidden_layers,
      experts=config.num_experts,
      top_k=config.num_experts_per_tok,
    )
    layout = placed.layout_of(config, model_options, settings.mesh, settings.of(ShardedOptions))
    params = jax.jit(
      lambda key: api.init_params(config, model_options, key),
      out_shardings=None if layout is None else layout.parameters,
    )(jax.random.key(seed))
    self._batches: list[Any]
    self._state = placed.init_state(params, optimizer_options, layout)
    self._batches = [placed.place_batch(b, layout) for b in self.workload.batches]
    loss_options = settings.of(rl_config.LossOptions)
    self._programs = placed.compile_programs(
      config, model_options, loss_options, optimizer_options, layout
    )
    self._hyper = optimizer.hyper_parameters(
      optimizer_options, 1, batch.micro_batch_rows * self._micro_batches
    )
    self.metrics: dict[str, float] = {}
    self.devices = 1 if layout is None else layout.mesh.size
    meter = throughput.Meter.of_devices(
      config,
      model_options.gdn_chunk_size,
      self.devices,
      jax.devices()[0].device_kind,
      settings.peak_tflops,
    )
    self.chips, self.peak_flops = meter.chips, meter.peak_flops
    self.model_flops = meter.model_flops(self.workload.tokens, self.workload.effective_length)

  def step(self) -> StepTimes:
    """Runs one step, each program timed to its end."""
    start = time.perf_counter()
    sums, times = None, []
    weights = train_step.step_weights(self._programs, self._state.weights)
    for batch in self._batches:
      begun = time.perf_counter()
      if sums is None:
        sums = self._programs.first_micro_batch(weights, batch)
      else:
        sums = self._programs.accumulate(weights, sums, batch)
      jax.block_until_ready(sums)
      times.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    self._state, metrics = self._programs.update(self._state, sums, self._hyper)
    jax.block_until_ready(self._state)
    end = time.perf_counter()
    self.metrics = train_step.host_metrics(metrics)
    return StepTimes(tuple(times), end - begun, end - start)
