"""Times the trainer's step on synthetic packed batches; A against B in one process.

./bazelw run //tools:bench -- --recipe=none --model_preset=tiny_moe --row_tokens=512 \
  --micro_batch_rows=4 --num_micro_batches=2 --b_flags="--remat_policy=none"

Takes the trainer's flags; those of --b_flags come after them for arm B.  The same on CPU, GPU and
TPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from kernels.base import cli, options, outputs
from rl import recipes, refusals, trainer_options
from tools.bench import synthetic


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
  """What is timed, how often, on which batches."""

  b_flags: str | None = options.option(
    None, help="Flags of arm B, after those of the command line; empty for one arm."
  )
  bench_rounds: int = options.option(6, help="Least rounds; each has all arms.", minimum=1)
  bench_most_rounds: int = options.option(
    30, help="Most rounds, where the error is still above --bench_error.", minimum=1
  )
  bench_error: float = options.option(
    0.04,
    help="Relative 99 % error, of B / A or of the only arm's step, at which rounds end.",
    minimum=0.0,
  )
  bench_steps: int = options.option(4, help="Steps of an arm in a round.", minimum=1)
  length_distribution: str = options.option(
    "full",
    help="Lengths of segments: full (one a row), uniform, lognormal, or file.",
    choices=synthetic.DISTRIBUTIONS,
  )
  mean_length: int = options.option(
    1024, help="Mean length of uniform and lognormal, tokens.", minimum=1
  )
  length_file: str | None = options.option(None, help="JSON list of lengths, for file.")
  routing: str = options.option(
    "none",
    help="Routed experts: none (the router's own), uniform, zipf, or file.",
    choices=synthetic.ROUTINGS,
  )
  routing_file: str | None = options.option(
    None, help=".npy file of experts [tokens, layers, top_k], for file."
  )
  json: str | None = options.option(None, help="File to write everything to as JSON.", writes=True)


COMPONENTS = (*trainer_options.COMPONENTS, BenchOptions)
_WHOLE_RUN = ("json", "bench_rounds", "bench_most_rounds", "bench_error", "bench_steps")


def arm_settings(argv: list[str], extra: str | None) -> options.Settings:
  """Settings of an arm: the command line and the arm's own flags after it.

  Raises:
    options.OptionError: A flag is unknown or refused.
  """
  line = cli.arm(argv, "b_flags", extra or "", _WHOLE_RUN)
  return cli.parse(recipes.expand(line), COMPONENTS, rules=refusals.RULES)


def judge(settings: options.Settings, argv: list[str]) -> None:
  """What the flags of both arms tell.

  Raises:
    options.OptionError: Flags that do not go together.
  """
  if settings.bench_rounds > settings.bench_most_rounds:
    raise options.OptionError(
      f"--bench_rounds={settings.bench_rounds} are more than --bench_most_rounds="
      f"{settings.bench_most_rounds}; give at least as many most rounds"
    )
  synthetic.judge(settings)
  if settings.b_flags:
    synthetic.judge(arm_settings(argv, settings.b_flags), settings)


def run(settings: options.Settings, argv: list[str]) -> int:
  """Times, prints and writes."""
  import jax

  from tools.bench import arms, bench

  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  given = [("A", settings)]
  if settings.b_flags:
    given.append(("B", arm_settings(argv, settings.b_flags)))
  made = [
    arms.Arm(
      name,
      one,
      synthetic.Lengths(
        distribution=one.length_distribution, mean=one.mean_length, file=one.length_file
      ),
      synthetic.Routing(kind=one.routing, file=one.routing_file),
      settings.seed,
    )
    for name, one in given
  ]
  results = bench.measure(
    made,
    rounds=settings.bench_rounds,
    most_rounds=settings.bench_most_rounds,
    error=settings.bench_error,
    steps=settings.bench_steps,
    progress=lambda text: print(text, file=sys.stderr, flush=True),
  )
  kind = jax.devices()[0].device_kind
  print(header({arm.name: arm.devices for arm in made}, kind))
  print("\n".join(bench.lines(results)))
  if settings.json:
    out = bench.to_json(results) | {"device": kind, "options": settings.as_dict()}
    for written, arm in zip(out["arms"], made):
      written["devices"] = arm.devices
    outputs.write(settings.json, json.dumps(out, indent=1, allow_nan=False) + "\n")
  return 0


def header(devices: dict[str, int], kind: str) -> str:
  """The devices of every arm, by its name; once where all have as many."""
  if len(set(devices.values())) == 1:
    return f"{next(iter(devices.values()))} x {kind}"
  return ", ".join(f"{name}: {count} x {kind}" for name, count in devices.items())


def _run(settings: options.Settings, argv: list[str]) -> int:
  from rl import memory

  with memory.exhaustion_told(settings):
    return run(settings, argv)


def main(argv: list[str] | None = None) -> None:
  """Parses the trainer's command line, its recipe first, and times."""
  line = list(sys.argv if argv is None else argv)
  cli.main(
    lambda settings: _run(settings, line),
    components=COMPONENTS,
    rules=refusals.RULES,
    description=__doc__ or "",
    argv=recipes.expand(line),
    judge=lambda settings: judge(settings, line),
  )


if __name__ == "__main__":
  main()
