"""Kills a training run at random instants and checks that resuming it loses nothing.

A run that nothing disturbs is made first.  Then, `--trials` times, the same run is started in a
fresh directory, killed with SIGKILL at a random instant (every second time while a checkpoint is
being written), and started again until it reaches its end.  Its final weights must equal the
undisturbed run's bit for bit, and its metrics must have every step once.

    ./bazelw run //tools:kill_resume
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from kernels.base import cli, options
from kernels.base.options import option

# Checkpoints are frequent, so that many kills fall into a save.
_RUN = (
  "--recipe=sort --warmup_steps=8 --warmup_target=1.0 --max_steps=16 --checkpoint_every=2 "
  "--prompts_per_step=4 --generations_per_prompt=4 --warmup_batch=16 --micro_batch_rows=4 "
  "--sampler_slots=16 --prefill_rows=4 --eval_problems=16 --eval_every=0"
).split()
_UPDATES = 8 + 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class KillOptions:
  """How many runs are killed, and when."""

  trials: int = option(10, help="Runs that are killed.", minimum=1)
  kills: int = option(2, help="Kills of each before it may end.", minimum=1)
  kill_seed: int = option(0, help="Seed of the instants.")
  work_dir: str | None = option(None, help="Where to work; empty for a temporary directory.")


def start(output_dir: pathlib.Path, cache: pathlib.Path) -> subprocess.Popen:
  """Starts the trainer; programs compiled once are read back, so that a start is short."""
  env = {
    **os.environ,
    "PYTHONPATH": ":".join(p for p in sys.path if p),
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
  }
  log = open(output_dir.with_suffix(".log"), "ab")
  return subprocess.Popen(
    [sys.executable, "-m", "rl.trainer", *_RUN, f"--output_dir={output_dir}"],
    stdout=log,
    stderr=log,
    env=env,
  )


def weights(output_dir: pathlib.Path) -> str:
  """Digest of the exported weights."""
  files = sorted((output_dir / "model").glob("*.safetensors"))
  return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest() if files else "none"


def wait_for(run: subprocess.Popen, seen, limit: float = 600.0) -> bool:
  """Waits until `seen()` is true; false when the run ended before."""
  until = time.monotonic() + limit
  while run.poll() is None and time.monotonic() < until:
    if seen():
      return True
    time.sleep(0.002)
  return False


def kill_once(output_dir: pathlib.Path, cache: pathlib.Path, rng: random.Random, saving: bool):
  """Starts the run and kills it; what it was doing, or None when it reached its end before."""
  started = time.monotonic()
  run = start(output_dir, cache)
  checkpoints = output_dir / "checkpoints"
  lines = lambda: sum(
    len((output_dir / name).read_bytes().splitlines())
    for name in ("warmup.jsonl", "metrics.jsonl")
    if (output_dir / name).exists()
  )
  # Anywhere in what is left: in the warm-up, in the policy's steps, or in the export at the end.
  until = lines() + rng.randint(1, max(1, _UPDATES - lines()))
  alive = wait_for(run, lambda: lines() >= until)
  if saving:
    # In the middle of a save: a partial folder is there, and a little time has passed.
    partial = lambda: checkpoints.exists() and any(checkpoints.glob(".*.partial"))
    alive = alive and wait_for(run, partial)
    time.sleep(rng.uniform(0.0, 0.05))
  else:
    time.sleep(rng.uniform(0.0, 0.5))
  if run.poll() is None:
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    if alive:
      return f"killed {'while saving' if saving else 'while training'} after {lines()} updates"
    return f"killed after {time.monotonic() - started:.0f} s"
  if run.returncode != 0:
    raise options.UserError(f"the run failed by itself: see {output_dir.with_suffix('.log')}")
  return None


def finish(output_dir: pathlib.Path, cache: pathlib.Path) -> None:
  """Runs to the end."""
  run = start(output_dir, cache)
  if run.wait() != 0:
    raise options.UserError(f"the run failed: see {output_dir.with_suffix('.log')}")


def check(output_dir: pathlib.Path, want: str) -> list[str]:
  """What is wrong with a resumed run that has ended."""
  wrong = []
  if weights(output_dir) != want:
    wrong.append("its weights differ from the undisturbed run's")
  for name, count in (("warmup.jsonl", 8), ("metrics.jsonl", 16)):
    found = [json.loads(x)["step"] for x in (output_dir / name).read_text().splitlines()]
    if found != list(range(1, count + 1)):
      wrong.append(f"{name} has the steps {found}")
  return wrong


def work_directory(given: str | None) -> pathlib.Path:
  """Makes the directory given, seen from where the command was typed, or a temporary one.

  Its path is absolute: the runs that are started have a working directory of their own.
  """
  if given is None:
    return pathlib.Path(tempfile.mkdtemp(prefix="kill_resume-"))
  root = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), given).absolute()
  root.mkdir(parents=True, exist_ok=True)
  return root


def run(settings: options.Settings) -> int:
  """Makes the undisturbed run, then kills and resumes."""
  rng = random.Random(settings.kill_seed)
  root = work_directory(settings.work_dir)
  cache = root / "compiled"
  print(f"working in {root}", flush=True)
  finish(root / "undisturbed", cache)
  want = weights(root / "undisturbed")
  if want == "none":  # or runs that lost their export would equal it
    raise options.UserError(f"the undisturbed run exported no weights to {root}")
  print(f"undisturbed run: weights {want[:16]}", flush=True)
  failures = 0
  for trial in range(settings.trials):
    output_dir = root / f"trial-{trial}"
    shutil.rmtree(output_dir, ignore_errors=True)
    told = []
    for number in range(settings.kills):
      what = kill_once(output_dir, cache, rng, saving=(trial + number) % 2 == 1)
      if what is None:
        break
      told.append(what)
    finish(output_dir, cache)
    wrong = check(output_dir, want)
    failures += bool(wrong)
    print(f"trial {trial}: {'; '.join(told)}: {'; '.join(wrong) or 'same weights'}", flush=True)
  print(f"{settings.trials - failures} of {settings.trials} ended with the undisturbed weights")
  return 1 if failures else 0


if __name__ == "__main__":
  cli.main(run, components=[KillOptions], description=__doc__)
