"""Scores lines of tokens with a checkpoint: log-probs, entropies, hidden states, logits.

./bazelw run //tools:score -- --checkpoint=DIR --input=FILE.jsonl --output=FILE.jsonl --dtype=float32

A line is {"tokens": [ids]} or {"text": "..."}, with whatever else is to come through unchanged.  It
is written back with "logprobs" and "entropy", float32 in nats, one for each token: the token's
log-prob given those before it, and the entropy of the distribution it was drawn from.  The first is
null.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from kernels.base import cli, options
from kernels.base.refusals import Rule
from model import config as model_config
from rl import refusals as trainer_refusals


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOptions:
  """What to score and where to write."""

  checkpoint: str | None = options.option(
    None, help="Checkpoint directory: config.json and safetensors."
  )
  input: str | None = options.option(None, help="JSON Lines file to score.")
  output: str | None = options.option(None, help="JSON Lines file to write.", writes=True)
  hidden: str | None = options.option(
    None,
    help="Also write N/tokens, N/hidden [layers + 1, tokens, h] (embedding, each layer, the last "
    "after the final norm), N/logits [tokens, vocabulary] and, of a sparse model, "
    "N/routed_experts [tokens, layers, k] for the line numbered N to this .npz file.",
    check=lambda name: None if name.endswith(".npz") else "want a name in .npz",
    writes=True,
  )
  pack: bool = options.option(
    False, help="Put several lines in a row, as segments that do not see each other."
  )
  row_tokens: int = options.option(
    4096,
    help="Tokens of a packed row; without --pack, about as many tokens of rows go in one batch.",
    minimum=128,
  )


# Of the trainer's table what is about the model's options alone: the rules that name other options
# are passed over.
RULES = (
  *trainer_refusals.RULES,
  Rule(
    name="nothing-to-rematerialise",
    keys=("remat_policy", "input"),
    broken=lambda s: "remat_policy" in s.changed,
    reason="scoring makes no backward pass; leave remat_policy alone",
    accepted={"input": "lines.jsonl"},
    refused={"remat_policy": "none"},
  ),
)


def judge(settings: options.Settings) -> None:
  """Names the flags that are needed and missing.

  Raises:
    options.OptionError: There are some.
  """
  names = ("checkpoint", "input", "output")
  if missing := [name for name in names if getattr(settings, name) is None]:
    raise options.OptionError("\n".join(f"--{name} is needed" for name in missing))


def run(settings: options.Settings) -> int:
  """Reads, scores, writes."""
  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  score(settings.of(ScoreOptions), settings.of(model_config.ModelOptions))
  return 0


def score(
  chosen: ScoreOptions,
  model_options: model_config.ModelOptions,
  devices: Sequence[Any] | None = None,
) -> None:
  """Scores a file.

  Args:
    chosen: What to score; checkpoint, input and output are there.
    model_options: How to compute the model.
    devices: JAX devices to spread the weights over; all by default.

  Raises:
    options.UserError: The checkpoint or a line is wrong, or a file cannot be written.
  """
  assert chosen.checkpoint and chosen.input and chosen.output
  # Cheap first: a wrong line is told before weights are read.
  from tools.score import layout
  from tools.score import lines as lines_lib

  checkpoint, output = pathlib.Path(chosen.checkpoint), pathlib.Path(chosen.output)
  hidden = None if chosen.hidden is None else pathlib.Path(chosen.hidden)
  lines_lib.check_writable([output] if hidden is None else [output, hidden])
  if not checkpoint.is_dir():
    raise options.UserError(f"--checkpoint={checkpoint}: no such directory")
  config = model_config.ModelConfig.from_file(checkpoint)
  model_options = model_options.for_checkpoint(checkpoint)
  lines = lines_lib.read(pathlib.Path(chosen.input), config.vocab_size, checkpoint)
  if chosen.pack:
    batches = layout.packed(lines, chosen.row_tokens, min(model_options.gdn_chunk_size, 128))
  else:
    batches = layout.alone(lines, chosen.row_tokens)

  import jax
  import tqdm

  from model.checkpoint import loading
  from tools.score import arrays, scorer

  say = lambda text: print(text, file=sys.stderr)
  quiet = not sys.stderr.isatty()
  with tqdm.tqdm(
    total=loading.total_bytes(config, model_options.weight_dtype),
    desc="weights",
    unit="B",
    unit_scale=True,
    disable=quiet,
  ) as bar:
    _, params = loading.load_params(
      checkpoint,
      config,
      shardings=scorer.spread(config, list(devices or jax.devices())),
      dtype=model_options.weight_dtype,
      say=say,
      progress=bar.update,
    )
  model = scorer.Scorer(config, model_options, params, hidden=hidden is not None)
  results = {}
  started = time.monotonic()
  total = sum(len(line.tokens) for line in lines)

  def each_batch(write_hidden):
    with tqdm.tqdm(total=total, desc="scoring", unit="token", disable=quiet) as bar:
      for batch in batches:
        found = model(batch)
        for place in batch.places:
          count = len(place.line.tokens)
          cut = (place.row, slice(place.start, place.start + count - 1))
          results[place.line.number] = lines_lib.scored(
            place.line, found.logprobs[cut], found.entropy[cut]
          )
          if write_hidden is not None:
            _write_hidden(write_hidden, model, found, place)
          bar.update(count)

  if hidden is None:
    each_batch(None)
  else:
    with arrays.NpzWriter(hidden) as writer:
      each_batch(writer)
  lines_lib.write(output, (results[line.number] for line in lines))
  seconds = time.monotonic() - started
  say(
    f"{len(lines):,} lines, {total:,} tokens in {seconds:.1f} s ({total / seconds:,.0f} tokens/s, "
    f"{model.programs} compiled shapes) -> {output}"
  )


def _write_hidden(writer, model, found, place) -> None:
  import numpy as np

  count = len(place.line.tokens)
  cut = slice(place.start, place.start + count)
  name = str(place.line.number)
  writer.add(f"{name}/tokens", (count,), np.int32, [place.line.tokens])
  last = np.asarray(found.hidden[place.row, cut])
  layers, _, _, width = found.hidden_states.shape
  states = (np.asarray(found.hidden_states[i, place.row, cut])[None] for i in range(layers))
  writer.add(f"{name}/hidden", (layers, count, width), np.float32, states)
  vocab = model.vocab_size
  writer.add(f"{name}/logits", (count, vocab), np.float32, model.logits(last))
  if found.routed_experts is not None:
    routed = np.asarray(found.routed_experts[place.row, cut])
    writer.add(f"{name}/routed_experts", routed.shape, routed.dtype, [routed])


if __name__ == "__main__":
  cli.main(
    run,
    components=[ScoreOptions, model_config.ModelOptions],
    rules=RULES,
    description=__doc__,
    judge=judge,
  )
