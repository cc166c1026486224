"""Decode throughput of the local sampler, and its growth with the context.

    ./bazelw run //tools:bench_decode -- --model_preset=tiny_moe

Two tables: tokens a second for several batch sizes, end to end through `LocalSampler`; and the time
of a decoding step after contexts of several lengths, of the whole model and of one Gated DeltaNet
recurrence.  Neither grows with the context: a Gated DeltaNet layer remembers it in a state of fixed
size, and an attention layer reads its slot's whole capacity, which the second table keeps fixed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time

from kernels.base import cli, options, outputs
from kernels.base.options import option
from model import config as model_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
  """What is measured."""

  model_preset: str = option("tiny_moe", help="Model preset.", check=model_config.check_preset)
  dtype: str = option("float32", help="Type of activations.", choices=("float32", "bfloat16"))
  batches: tuple[int, ...] = option(
    (1, 16, 64),
    help="Batch sizes.",
    minimum=1,
    check=lambda sizes: None if sizes else "want at least one",
  )
  new_tokens: int = option(128, help="Tokens each request completes.", minimum=2)
  prompt_tokens: int = option(32, help="Tokens of a prompt.", minimum=1)
  contexts: tuple[int, ...] = option(
    (64, 512, 2048), help="Context lengths of the second table.", minimum=1
  )
  repeats: int = option(3, help="Runs of each; the median is shown.", minimum=1)
  json: str | None = option(None, help="File for the numbers as JSON.", writes=True)


def throughput(settings: options.Settings, batch: int) -> float:
  """Tokens a second of `batch` requests side by side, without the compilation."""
  import numpy as np

  from rl import run_config, sampler

  config = model_config.preset(settings.model_preset)
  how = model_config.ModelOptions(dtype=settings.dtype)
  weights = random_weights(settings)
  local = sampler.LocalSampler(
    config,
    how,
    run_config.SamplerOptions(
      sampler_slots=batch,
      prefill_rows=batch,
      decode_block=32,
      max_prompt_tokens=settings.prompt_tokens,
      max_completion_tokens=settings.new_tokens,
    ),
    stop_ids=(),
  )
  rng = np.random.default_rng(0)
  requests = [
    sampler.Request(tuple(int(t) for t in rng.integers(0, 256, settings.prompt_tokens)), i)
    for i in range(batch)
  ]
  local.sample(weights, requests, sampler.Distribution())
  found = []
  for _ in range(settings.repeats):
    started = time.perf_counter()
    done = local.sample(weights, requests, sampler.Distribution())
    found.append(sum(len(c.ids) for c in done) / (time.perf_counter() - started))
  return sorted(found)[len(found) // 2]


def random_weights(settings: options.Settings):
  """Weights of no meaning: speed does not depend on them."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from model import api

  rng = np.random.default_rng(0)
  shapes = api.abstract_params(
    model_config.preset(settings.model_preset), model_config.ModelOptions(dtype=settings.dtype)
  )
  draw = lambda a: jnp.asarray(0.02 * rng.standard_normal(a.shape, np.float32), a.dtype)
  return jax.tree.map(draw, shapes)


def step_times(settings: options.Settings) -> dict[int, tuple[float, float]]:
  """Seconds of a decoding step after each context: the whole model's, one recurrence's.

  Args:
    settings: What to measure.

  Returns:
    By context length.
  """
  import jax
  import jax.numpy as jnp

  from kernels.gdn import gdn
  from model import api

  config = model_config.preset(settings.model_preset)
  how = model_config.ModelOptions(dtype=settings.dtype)
  weights = random_weights(settings)
  batch, capacity, steps = 16, max(settings.contexts) + 72, 64
  fill = jax.jit(lambda w, inputs, cache: api.prefill(config, how, w, inputs, cache)[1])

  @jax.jit
  def decode(w, cache):
    def one(carry, _):
      cache, token = carry
      hidden, cache, _ = api.decode_step(config, how, w, cache, token)
      return (cache, jnp.argmax(api.unembed(w, hidden), -1).astype(jnp.int32)), None

    return jax.lax.scan(one, (cache, jnp.zeros(batch, jnp.int32)), None, length=steps)[0]

  heads, dk, dv = (
    config.linear_num_value_heads,
    config.linear_key_head_dim,
    config.linear_value_head_dim,
  )
  keys = config.linear_num_key_heads

  @jax.jit
  def recur(state):
    q = jnp.ones((batch, keys, dk))
    v = jnp.ones((batch, heads, dv))
    gates = jnp.full((batch, heads), -0.1), jnp.full((batch, heads), 0.5)

    def one(state, _):
      _, state = gdn.gated_delta_step(q, q, v, *gates, state)
      return state, None

    return jax.lax.scan(one, state, None, length=steps)[0]

  found = {}
  for context in settings.contexts:
    cache = api.init_cache(config, how, batch, capacity)
    cache = fill(weights, api.row_inputs(jnp.ones((batch, context), jnp.int32)), cache)
    state = cache.states[0, 0]
    times = []
    for program, arguments in ((decode, (weights, cache)), (recur, (state,))):
      jax.block_until_ready(program(*arguments))
      runs = []
      for _ in range(settings.repeats):
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        runs.append((time.perf_counter() - started) / steps)
      times.append(sorted(runs)[len(runs) // 2])
    found[context] = (times[0], times[1])
  return found


def run(settings: options.Settings) -> int:
  """Prints both tables, and writes their numbers where asked."""
  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  numbers: dict[str, dict[int, float]] = {"tokens_per_second": {}, "step_ms": {}, "gdn_step_ms": {}}
  print(f"{settings.model_preset}, {settings.dtype}, {settings.new_tokens} new tokens a request")
  print(f"{'batch':>8}{'tokens/s':>12}{'ms a token':>12}")
  for batch in settings.batches:
    rate = throughput(settings, batch)
    numbers["tokens_per_second"][batch] = rate
    print(f"{batch:>8}{rate:>12.0f}{1e3 * batch / rate:>12.3f}", flush=True)
  print(f"\n{'context':>8}{'ms a step':>12}{'GDN recurrence, ms a layer':>28}   (batch 16)")
  for context, (whole, mixer) in step_times(settings).items():
    numbers["step_ms"][context], numbers["gdn_step_ms"][context] = 1e3 * whole, 1e3 * mixer
    print(f"{context:>8}{1e3 * whole:>12.3f}{1e3 * mixer:>28.4f}", flush=True)
  if settings.json is not None:
    outputs.write(settings.json, json.dumps(numbers, indent=1) + "\n")
  return 0


if __name__ == "__main__":
  cli.main(run, components=[BenchOptions], description=__doc__)
