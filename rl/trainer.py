"""The trainer: `./bazelw run //rl:trainer` teaches a small Qwen3.5 to sort digits.

Every flag has a default and `--help` lists them; `--recipe` names the built-in sets of flags.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings

from kernels.base import cli, options
from rl import recipes, refusals, trainer_options

DESCRIPTION = """
Trains a Qwen3.5 by reinforcement learning (GRPO): samples answers to a task's problems, scores
them, and makes good answers likelier.  Without flags: a tiny model starts from random weights,
is warmed up on a few demonstrations, and learns to sort four digits by reward alone.

  trainer                                    the built-in demonstration
  trainer --recipe=add                       two-digit addition with carry
  trainer --model_preset=tiny                a dense model instead of a mixture of experts
  trainer --checkpoint=DIR --task=json_lines --prompts=FILE
                                             your model (Hugging Face format) on your problems
  trainer --rollouts=FILE --checkpoint=DIR   from recorded trajectories alone

A recipe's flags stand before the given ones, so any of them can be given again.
"""


def run(settings: options.Settings) -> int:
  """Trains, exports, checks the export, and says where everything is."""
  # The runtime reads this when JAX is imported: its notes are about itself, not about the run.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  # A donated buffer that no result can take over is freed all the same.
  warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
  # A failed save is told in one line of ours; the threads that wrote for it would add their stack
  # traces, by Orbax's log and as errors of writes whose event loop is gone.
  # asyncio's log tells of the tasks among them that failed with nobody waiting.
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  _forget_late_writes()
  from rl import memory, report

  with memory.exhaustion_told(settings):
    return report.train_and_report(settings, started=time.monotonic())


def _forget_late_writes() -> None:
  """Keeps quiet about errors of writes that nobody waits for any more; shows all others."""
  excepthook, unraisablehook = sys.excepthook, sys.unraisablehook
  late = lambda error: isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
  sys.excepthook = lambda kind, error, trace: late(error) or excepthook(kind, error, trace)
  sys.unraisablehook = lambda args: late(args.exc_value) or unraisablehook(args)


def main(argv: list[str] | None = None) -> None:
  """Parses the command line, its recipe first, and trains."""
  cli.main(
    run,
    components=trainer_options.COMPONENTS,
    rules=refusals.RULES,
    description=DESCRIPTION,
    argv=recipes.expand(sys.argv if argv is None else argv),
  )


if __name__ == "__main__":
  main()
