"""Six numerics gates between two configurations of the trainer, or against a recorded reference.

./bazelw run //tools:numerics -- --recipe=none --model_preset=tiny_moe --row_tokens=128 \
  --micro_batch_rows=4 --b_flags="--dtype=bfloat16"

The command line is the reference, --b_flags come after it for the candidate.  Exits 1 where a gate
fails.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import sys

from kernels.base import cli, options, outputs
from rl import recipes, refusals, trainer_options
from tools.bench import synthetic
from tools.numerics.problem import differences


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericsOptions:
  """What is compared, on which rows, and what is written."""

  b_flags: str | None = options.option(
    None, help="Flags of the candidate, after those of the command line; empty for none."
  )
  lossy: bool = options.option(
    False, help="The candidate has an option on that trades accuracy: gradients at cosine 0.99."
  )
  numerics_steps: int = options.option(3, help="Steps of the comparison.", minimum=1)
  length_distribution: str = options.option(
    "uniform", help="Lengths of segments.", choices=synthetic.DISTRIBUTIONS
  )
  mean_length: int = options.option(64, help="Mean length, tokens.", minimum=1)
  length_file: str | None = options.option(None, help="JSON list of lengths, for file.")
  routing: str = options.option(
    "none", help="Routed experts that both replay.", choices=synthetic.ROUTINGS
  )
  routing_file: str | None = options.option(None, help=".npy file of experts, for file.")
  record: str | None = options.option(
    None,
    help="File (.npz) to write the reference's run to; the candidate may be left out.",
    writes=True,
  )
  recorded: str | None = options.option(
    None, help="A recorded reference to judge the command line's own configuration against."
  )
  json: str | None = options.option(None, help="File to write gates to as JSON.", writes=True)
  plot: str | None = options.option(
    None,
    help="File to write the plot to: .png, .pdf or .svg.",
    check=outputs.chart_fault,
    writes=True,
  )


COMPONENTS = (*trainer_options.COMPONENTS, NumericsOptions)


_SHARED = (
  *("model_preset", "checkpoint", "seed", "row_tokens", "micro_batch_rows", "num_micro_batches"),
  *("max_segments_per_row", "numerics_steps", "length_distribution", "mean_length", "routing"),
  "trainable_parameters_mask",
)
_SHARED_FILES = ("length_file", "routing_file")


def shared(settings: options.Settings, files: bool = True) -> dict[str, str]:
  """What two runs must share to be compared, by the option's name.

  Args:
    settings: Of one of the runs.
    files: Whether to read the files of lengths and routing, which stand for a hash of what is in them.

  Raises:
    options.UserError: A file cannot be read.
  """
  found = {name: str(getattr(settings, name)) for name in _SHARED}
  for name in _SHARED_FILES if files else ():
    path = getattr(settings, name)
    try:
      content = pathlib.Path(path).read_bytes() if path else b""
    except OSError as error:
      raise options.UserError(f"--{name}={path}: {error.strerror}") from None
    found[name] = hashlib.sha256(content).hexdigest()[:12] if path else "None"
  return found


def refuse_other_problem(
  reference: options.Settings, candidate: options.Settings, files: bool
) -> None:
  """Refuses a candidate that is not of the reference's rows, model and parameters.

  Raises:
    options.OptionError: With the options that differ, the reference's value and the candidate's.
  """
  a, b = shared(reference, files), shared(candidate, files)
  if changed := differences(a, b):
    raise options.OptionError(
      f"the candidate changes the problem: {changed}; give both runs the same"
    )


def candidate_settings(argv: list[str], extra: str) -> options.Settings:
  """Settings of the candidate.

  Raises:
    options.OptionError: A flag is unknown or refused.
  """
  line = cli.arm(argv, "b_flags", extra, ("json", "plot", "record", "recorded"))
  return cli.parse(recipes.expand(line), COMPONENTS, rules=refusals.RULES)


def judge(settings: options.Settings, argv: list[str]) -> None:
  """What the flags of both runs tell.

  Raises:
    options.OptionError: There is nothing to judge, or flags do not go together.
  """
  if settings.recorded and settings.b_flags:
    raise options.OptionError("--recorded judges the command line itself; leave --b_flags out")
  if not (settings.recorded or settings.b_flags or settings.record):
    raise options.OptionError("nothing to judge: give --b_flags, --recorded or --record")
  if settings.lossy and not (settings.recorded or settings.b_flags):
    raise options.OptionError("--lossy is about a candidate: give --b_flags or --recorded too")
  synthetic.judge(settings)
  if settings.b_flags:
    candidate = candidate_settings(argv, settings.b_flags)
    refuse_other_problem(settings, candidate, files=False)
    synthetic.judge(candidate, settings)


def run(settings: options.Settings, argv: list[str]) -> int:
  """Runs, judges, prints and writes."""
  from tools.numerics import gates, runs, show

  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  candidate = candidate_settings(argv, settings.b_flags) if settings.b_flags else settings
  refuse_other_problem(settings, candidate, files=True)
  key = shared(settings)
  recorded = runs.load(settings.recorded, key) if settings.recorded else None
  problem = runs.make_problem(
    settings,
    steps=settings.numerics_steps,
    lengths=synthetic.Lengths(
      distribution=settings.length_distribution,
      mean=settings.mean_length,
      file=settings.length_file,
    ),
    routing=synthetic.Routing(kind=settings.routing, file=settings.routing_file),
  )
  rows = settings.micro_batch_rows
  if recorded is not None:
    reference = recorded
    judged = runs.run(problem, settings)
    pair = runs.run(problem, settings, row_order=range(rows)[::-1])
    noise = gates.spread(judged, pair)
  else:
    reference = runs.run(problem, settings)
    pair = runs.run(problem, settings, row_order=range(rows)[::-1])
    noise = gates.spread(reference, pair)
    judged = runs.run(problem, candidate) if settings.b_flags else pair
  if settings.record:
    runs.save(settings.record, key, reference)
    print(f"recorded {settings.record}")
  answers = {"reference pair": gates.judge(reference, pair, noise)} if not settings.recorded else {}
  if settings.b_flags or settings.recorded:
    answers["candidate"] = gates.judge(
      reference, judged, noise, lossy=settings.lossy or candidate.lossy
    )
  show.show(answers)
  if settings.json:
    out = {name: gates.to_json(found) for name, found in answers.items()}
    outputs.write(settings.json, json.dumps(out, indent=1) + "\n")
  if settings.plot:
    show.plot(reference, judged, settings.plot)
  return 0 if all(g.passed for found in answers.values() for g in found) else 1


def _run(settings: options.Settings, argv: list[str]) -> int:
  from rl import memory

  with memory.exhaustion_told(settings):
    return run(settings, argv)


def main(argv: list[str] | None = None) -> None:
  """Parses the trainer's command line, its recipe first, and judges."""
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
