"""Synthetic packed batches: lengths from a distribution, routing from a table.  Imports no JAX.

Tokens, log-probs and advantages are random; what a step costs depends on shapes, on the lengths of
segments and on where tokens are routed, and those are what is chosen here.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np

from kernels.base.options import OptionError, Settings, UserError
from rl import packing
from rl.trajectory import Trajectory

DISTRIBUTIONS = ("full", "uniform", "lognormal", "file")
ROUTINGS = ("none", "uniform", "zipf", "file")
_SHORTEST = 8  # tokens: a prompt and a few more
_LOGNORMAL_SIGMA = 0.8
_WITH_MEAN = ("uniform", "lognormal")


def judge(settings: Settings, before: Settings | None = None) -> None:
  """Holds lengths and routing to what goes together.

  Args:
    settings: With length_distribution, mean_length, length_file, routing and routing_file.
    before: For an arm, the settings that its own flags come after: a mean length that it only
      takes over is let pass.

  Raises:
    OptionError: A file without its choice or the choice without it, or a mean length that nothing
      reads.
  """
  for kind, file in (("length_distribution", "length_file"), ("routing", "routing_file")):
    if (getattr(settings, kind) == "file") != bool(getattr(settings, file)):
      raise OptionError(f"--{file} goes with --{kind}=file, and that with it")
  mean = settings.options["mean_length"].default if before is None else before.mean_length
  if settings.length_distribution not in _WITH_MEAN and settings.mean_length != mean:
    raise OptionError(
      f"--mean_length={settings.mean_length} is not read with --length_distribution="
      f"{settings.length_distribution}; give {' or '.join(_WITH_MEAN)}, or leave the mean out"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
  """Where lengths come from.

  Attributes:
    distribution: One of `DISTRIBUTIONS`; full is one segment a row.
    mean: Mean length in tokens, of uniform and lognormal.
    file: JSON list of lengths, for file; drawn from with replacement.
  """

  distribution: str = "full"
  mean: int = 1024
  file: str | None = None

  def draw(self, rng: np.random.Generator, row_tokens: int) -> int:
    """One length, at most a row.

    Raises:
      UserError: The file is missing or no list of lengths.
    """
    if self.distribution == "full":
      return row_tokens
    if self.distribution == "uniform":
      value = rng.integers(_SHORTEST, max(_SHORTEST + 1, 2 * self.mean - _SHORTEST + 1))
    elif self.distribution == "lognormal":
      mu = np.log(self.mean) - _LOGNORMAL_SIGMA**2 / 2  # so that `mean` is the mean
      value = round(rng.lognormal(mu, _LOGNORMAL_SIGMA))
    else:
      value = rng.choice(self._recorded())
    return int(np.clip(value, min(_SHORTEST, row_tokens), row_tokens))

  def _recorded(self) -> np.ndarray:
    try:
      values = np.asarray(json.loads(pathlib.Path(self.file or "").read_text()), int)
    except (OSError, ValueError, TypeError) as error:
      raise UserError(f"{self.file}: want a JSON list of lengths: {error}") from error
    if values.ndim != 1 or not len(values) or values.min() < 1:
      raise UserError(f"{self.file}: want a JSON list of lengths of at least 1")
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """Where tokens are routed.

  Attributes:
    kind: One of `ROUTINGS`; none leaves routing to the router.
    file: .npy file of experts, int [tokens, layers, top_k], for file; repeated as needed.
  """

  kind: str = "none"
  file: str | None = None

  def draw(
    self, rng: np.random.Generator, tokens: int, layers: int, experts: int, top_k: int
  ) -> np.ndarray | None:
    """Experts of every token, int16 [tokens, layers, top_k], distinct in a token.

    Raises:
      UserError: The file is missing or of other shape.
    """
    if self.kind == "none":
      return None
    if self.kind == "file":
      return self._recorded(rng, tokens, layers, experts, top_k)
    weights = np.ones(experts) if self.kind == "uniform" else 1.0 / np.arange(1, experts + 1)
    # The top k of weighted exponential races is a draw without replacement.
    races = rng.exponential(size=(tokens, layers, experts)) / weights
    return np.argpartition(races, top_k - 1, axis=-1)[..., :top_k].astype(np.int16)

  def _recorded(self, rng, tokens, layers, experts, top_k) -> np.ndarray:
    try:
      table = np.load(self.file or "")
    except (OSError, ValueError) as error:
      raise UserError(f"{self.file}: want a .npy file of experts: {error}") from error
    if table.ndim != 3 or table.shape[1:] != (layers, top_k) or not len(table):
      raise UserError(
        f"{self.file} has shape {table.shape}; want [tokens, {layers} layers, {top_k} experts]"
      )
    if table.min() < 0 or table.max() >= experts:
      raise UserError(f"{self.file} names experts outside 0 to {experts - 1}")
    start = int(rng.integers(len(table)))
    return table[(start + np.arange(tokens)) % len(table)].astype(np.int16)


@dataclasses.dataclass(frozen=True)
class Workload:
  """Micro-batches of a step, and what is in them.

  Attributes:
    batches: Numpy batches.
    tokens: Tokens of all segments.
    effective_length: sum(len^2) / sum(len).
    fill: Tokens over capacity.
  """

  batches: list[packing.PackedBatch]
  tokens: int
  effective_length: float
  fill: float


def make(
  *,
  seed: int,
  micro_batches: int,
  rows: int,
  row_tokens: int,
  max_segments: int,
  vocab_size: int,
  lengths: Lengths,
  routing: Routing,
  layers: int = 0,
  experts: int = 0,
  top_k: int = 0,
) -> Workload:
  """Fills the rows of a step with segments until the next one does not fit.

  Args:
    seed: The same seed gives the same step.
    micro_batches: Micro-batches of the step.
    rows: Rows of each.
    row_tokens: Tokens of a row.
    max_segments: Most segments of a row.
    vocab_size: Tokens are drawn below it.
    lengths: Distribution of segment lengths.
    routing: Table of routed experts.
    layers: Layers of the model, for routing.
    experts: Experts of a layer, for routing.
    top_k: Experts of a token, for routing.

  Returns:
    The step.

  Raises:
    UserError: A file is missing or malformed, or routing is asked of a dense model.
  """
  if routing.kind != "none" and not experts:
    raise UserError(f"--routing={routing.kind} needs a model with experts; use --routing=none")
  rng = np.random.default_rng(seed)
  trajectories: list[Trajectory] = []
  plan: list[tuple[tuple[int, ...], ...]] = []
  held = lengths.draw(rng, row_tokens)
  for _ in range(micro_batches):
    filled = []
    for _ in range(rows):
      space = row_tokens
      row: list[int] = []
      while held <= space and len(row) < max_segments:
        row.append(len(trajectories))
        trajectories.append(_trajectory(rng, held, vocab_size, routing, layers, experts, top_k))
        space -= held
        held = lengths.draw(rng, row_tokens)
      filled.append(tuple(row))
    plan.append(tuple(filled))
  counts = np.array([t.num_tokens for t in trajectories])
  total = int(counts.sum())
  fill = total / (micro_batches * rows * row_tokens)
  batches = packing.materialise(
    trajectories,
    rng.normal(size=len(trajectories)),
    packing.Plan(tuple(plan), row_tokens, fill, fill),
    max_segments,
    with_routed_experts=routing.kind != "none",
  )
  return Workload(batches, total, float((counts**2).sum() / total), fill)


def _trajectory(rng, length, vocab_size, routing, layers, experts, top_k) -> Trajectory:
  prompt = max(1, length // 4)
  completion = length - prompt
  ids = rng.integers(0, vocab_size, length).astype(np.int32)
  return Trajectory(
    group_id=0,
    prompt_ids=ids[:prompt],
    completion_ids=ids[prompt:],
    loss_mask=np.ones(completion, np.float32),
    sampler_logprobs=-np.log(vocab_size) * np.ones(completion, np.float32),
    reward=float(rng.random()),
    routed_experts=routing.draw(rng, length, layers, experts, top_k),
  )
