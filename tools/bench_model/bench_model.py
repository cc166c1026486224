"""Speed of the model on this machine: tokens a second and compile time, forward and backward.

    ./bazelw run //tools:bench_model
    ./bazelw run //tools:bench_model -- --model_presets=tiny --rows=8 --row_tokens=1024 \\
        --dtype=bfloat16

One line for each preset and pass: seconds to trace, seconds to compile, and the median tokens a
second of the compiled program on packed rows.  `backward` is a training pass: forward, backward,
and the recomputation that the remat policy asks for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from typing import Any

from kernels.base import cli, options, outputs
from kernels.base.options import option
from model import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
  """What is measured."""

  model_presets: tuple[str, ...] = option(
    ("tiny", "tiny_moe"),
    help="Built-in models to measure, separated by commas.",
    check=lambda names: None if names else "want at least one",
  )
  rows: int = option(4, help="Rows of a batch.", minimum=1)
  row_tokens: int = option(512, help="Tokens of a row.", minimum=4)
  segments: int = option(3, help="Segments packed into a row.", minimum=1)
  repeats: int = option(5, help="Timed runs of each; the median counts.", minimum=1)
  json: str | None = option(None, help="File for the numbers as JSON.", writes=True)


def packed_rows(settings: options.Settings, vocab_size: int):
  """Random rows of unequal segments, without padding."""
  import numpy as np

  from model import api

  rng = np.random.default_rng(0)
  shape = (settings.rows, settings.row_tokens)
  tokens = rng.integers(0, vocab_size, shape).astype(np.int32)
  segments = np.zeros(shape, np.int32)
  positions = np.zeros(shape, np.int32)
  count = min(settings.segments, settings.row_tokens)
  for row in range(settings.rows):
    cuts = rng.choice(np.arange(1, settings.row_tokens), count - 1, replace=False)
    starts = [0, *sorted(int(c) for c in cuts), settings.row_tokens]
    for i, (start, end) in enumerate(zip(starts, starts[1:])):
      segments[row, start:end] = i + 1
      positions[row, start:end] = np.arange(end - start)
  return api.ModelInputs(tokens, segments, positions)


def measure(settings: options.Settings, name: str) -> list[dict[str, Any]]:
  """Forward and backward of one preset.

  Args:
    settings: What to measure.
    name: The preset.

  Returns:
    One record a pass.
  """
  import jax
  import jax.numpy as jnp

  from model import api

  config = config_lib.preset(name)
  how = settings.of(config_lib.ModelOptions)
  params = jax.jit(lambda key: api.init_params(config, how, key))(jax.random.key(0))
  inputs = packed_rows(settings, config.vocab_size)

  def loss(params, inputs):
    hidden = api.forward(config, how, params, inputs).hidden
    logits = api.unembed(params, hidden).astype(jnp.float32)
    labels = inputs.tokens[:, 1:, None]
    logprobs = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return -jnp.mean(jnp.take_along_axis(logprobs, labels, axis=-1))

  records = []
  for kind, function in (("forward", loss), ("backward", jax.value_and_grad(loss))):
    started = time.perf_counter()
    lowered = jax.jit(function).lower(params, inputs)
    traced = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    jax.block_until_ready(program(params, inputs))
    seconds = []
    for _ in range(settings.repeats):
      begin = time.perf_counter()
      jax.block_until_ready(program(params, inputs))
      seconds.append(time.perf_counter() - begin)
    records.append(
      {
        "preset": name,
        "pass": kind,
        "parameters": api.count_params(config),
        "trace_s": traced - started,
        "compile_s": compiled - traced,
        "tokens_per_s": inputs.tokens.size / statistics.median(seconds),
      }
    )
  return records


def run(settings: options.Settings) -> int:
  """Prints the table, and writes it where asked."""
  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  records = []
  print(
    f"{'preset':<12} {'pass':<9} {'parameters':>14} {'trace s':>8} {'compile s':>10} {'tok/s':>10}"
  )
  for name in settings.model_presets:
    for r in measure(settings, name):
      records.append(r)
      print(
        f"{r['preset']:<12} {r['pass']:<9} {r['parameters']:>14,} {r['trace_s']:>8.2f} "
        f"{r['compile_s']:>10.2f} {r['tokens_per_s']:>10,.0f}",
        flush=True,
      )
  if settings.json:
    outputs.write(settings.json, json.dumps(records, indent=2) + "\n")
  return 0


if __name__ == "__main__":
  cli.main(run, components=[BenchOptions, config_lib.ModelOptions], description=__doc__)
