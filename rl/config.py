"""Options of the RL trainer, one frozen dataclass a component.  Imports no JAX.

The names of the loss and advantage options are the reference implementation's (NeMo-RL, as used by
MLPerf's GRPO benchmark), and the defaults are that benchmark's.  A recipe, such as the embedded
demonstration, overrides them in one place instead of changing them here.

An option whose type allows None takes its value from elsewhere when it is left empty; its help
says from where.
"""

from __future__ import annotations

import dataclasses
import re

from kernels.base import mesh, options
from kernels.base.options import option


def _is_regex(text: str) -> str | None:
  try:
    re.compile(text)
  except re.error as error:
    return f"no regular expression: {error}"
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
  """Policy loss: which loss, its clipping, its off-policy correction, which tokens take part."""

  loss: str = option(
    "grpo",
    help="Loss: grpo (clipped ratio), gspo (sequence ratio), cispo (clipped weight times log-prob), "
    "reinforce (log-prob), or sft (negative log-likelihood of the loss-masked tokens).",
    choices=("grpo", "gspo", "cispo", "reinforce", "sft"),
  )
  temperature: float = option(
    1.0,
    help="Sampling temperature.  Log-probs and entropies are those of logits / temperature, in the "
    "sampler and in the trainer alike.",
    check=lambda v: None if v > 0 else "want a number above 0",
  )
  ratio_clip_min: float = option(
    0.2, help="The ratio is clipped below at 1 - this.", minimum=0.0, maximum=1.0
  )
  ratio_clip_max: float = option(0.28, help="The ratio is clipped above at 1 + this.", minimum=0.0)
  ratio_clip_c: float | None = option(
    None,
    help="Dual clip: with a negative advantage A the loss is at most -A times this; above 1, or "
    "empty for none.",
    check=lambda v: None if v > 1 else "want a number above 1, or empty",
  )
  force_on_policy_ratio: bool = option(
    True,
    help="Old log-probs are the current ones, detached: the ratio is 1, its gradient is kept, and "
    "no extra forward pass is made.  Right when a batch is used for one update.",
  )
  old_logprobs: str = option(
    "auto",
    help="Where old log-probs come from when the ratio is not forced: batch (recorded with the "
    "trajectory), recompute (a forward pass before the first update), or auto (recorded ones where "
    "every trajectory has them, else recomputed).",
    choices=("auto", "batch", "recompute"),
  )
  use_importance_sampling_correction: bool = option(
    True, help="Weight each token by exp(old log-prob - sampler log-prob), detached."
  )
  truncated_importance_sampling_type: str = option(
    "seq-mask-tis",
    help="What is done with correction weights outside the band: none, tis (clamped into it), "
    "icepop (set to zero), seq-mask-tis (a sequence whose geometric mean lies outside gets weight "
    "zero, the others keep their raw weights).",
    choices=("none", "tis", "icepop", "seq-mask-tis"),
  )
  truncated_importance_sampling_ratio: float | None = option(
    None,
    help="Upper end of the band; empty for 1.002 with seq-mask-tis, 2 with tis, 5 with icepop.",
    check=lambda v: None if v > 0 else "want a number above 0",
  )
  truncated_importance_sampling_ratio_min: float | None = option(
    None,
    help="Lower end of the band; empty for 0.999 with seq-mask-tis, 0 with tis, 0.5 with icepop.",
    minimum=0.0,
  )
  token_level_loss: bool = option(
    True,
    help="Mean over all valid tokens of the step; false for the mean over valid sequences of each "
    "one's mean over its tokens.",
  )
  loss_aggregation: str = option(
    "auto",
    help="How token losses become one number: auto follows token_level_loss (gspo: sequences); the "
    "last divides each sequence's sum by loss_length_norm instead of by its own length.",
    choices=(
      "auto",
      "token-mean",
      "sequence-mean-token-mean",
      "sequence-mean-token-sum-norm",
    ),
  )
  loss_length_norm: float | None = option(
    None,
    help="Tokens that sequence-mean-token-sum-norm divides by; empty for row_tokens.",
    check=lambda v: None if v > 0 else "want a number above 0",
  )
  seq_logprob_error_threshold: float | None = option(
    2.0,
    help="A sequence whose mean over its tokens of exp(|sampler - old log-prob|) is above this "
    "leaves the loss and its denominator; empty for no such gate.",
    minimum=1.0,
  )
  overlong_filtering: bool = option(
    True,
    help="Truncated sequences leave the loss and its denominator; their reward stays in the group's "
    "baseline.",
  )
  reference_policy_kl_penalty: float = option(
    0.0, help="Weight of the KL divergence to the reference policy in the loss.", minimum=0.0
  )
  reference_policy_kl_type: str = option(
    "k3",
    help="Estimator of KL divergences (Schulman 2020), of the penalty and of the metrics: k1 is "
    "-x, k2 is x^2/2, k3 is exp(x)-x-1 of x = log(reference / policy).",
    choices=("k1", "k2", "k3"),
  )
  entropy_bonus: float = option(
    0.0, help="Weight of the policy's entropy per token, subtracted from the loss.", minimum=0.0
  )
  logps_chunk_size: int = option(
    512,
    help="Tokens per chunk of the log-prob head; bounds its memory. Its kernels read the table once a "
    "chunk, of at most 1,024 tokens.",
    minimum=1,
  )

  @property
  def truncation_band(self) -> tuple[float, float]:
    """Lower and upper end of the correction weights' band, defaults filled in."""
    low, high = {
      "none": (0.0, float("inf")),
      "tis": (0.0, 2.0),
      "icepop": (0.5, 5.0),
      "seq-mask-tis": (0.999, 1.002),
    }[self.truncated_importance_sampling_type]
    if self.truncated_importance_sampling_ratio_min is not None:
      low = self.truncated_importance_sampling_ratio_min
    if self.truncated_importance_sampling_ratio is not None:
      high = self.truncated_importance_sampling_ratio
    return low, high

  @property
  def aggregation(self) -> str:
    """The reduction in use: token-mean or one of the sequence means."""
    if self.loss_aggregation != "auto":
      return self.loss_aggregation
    if self.loss == "gspo" or not self.token_level_loss:
      return "sequence-mean-token-mean"
    return "token-mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
  """Advantages of the trajectories of a group."""

  advantage_estimator: str = option(
    "grpo-loo",
    help="grpo (group mean, divided by the group's spread), grpo-loo (mean and spread of the other "
    "members), rloo (mean of the others, undivided), dr-grpo (group mean, undivided), or "
    "reinforce++ (group mean, then normalised over the tokens of the batch).",
    choices=("grpo", "grpo-loo", "rloo", "dr-grpo", "reinforce++"),
  )
  use_leave_one_out_baseline: bool | None = option(
    None,
    help="Overrides whether baseline and spread leave the member itself out; empty for the "
    "estimator's own.",
  )
  normalize_rewards: bool | None = option(
    None,
    help="Overrides whether advantages are divided by the spread; empty for the estimator's own.",
  )

  @property
  def leave_one_out(self) -> bool:
    """Whether a member's baseline and spread are those of the others."""
    if self.use_leave_one_out_baseline is not None:
      return self.use_leave_one_out_baseline
    return self.advantage_estimator in ("grpo-loo", "rloo")

  @property
  def divide_by_spread(self) -> bool:
    """Whether advantages are divided by the spread."""
    if self.normalize_rewards is not None:
      return self.normalize_rewards
    return self.advantage_estimator in ("grpo", "grpo-loo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
  """How the trajectories of a step become packed rows and micro-batches."""

  row_tokens: int = option(65536, help="Tokens of a packed row.", minimum=2)
  micro_batch_rows: int = option(64, help="Rows of a micro-batch.", minimum=1)
  max_segments_per_row: int = option(16, help="Most trajectories packed in one row.", minimum=1)
  num_micro_batches: int | None = option(
    None,
    help="Micro-batches of every step, the last ones empty where the trajectories need fewer; empty "
    "for as many as they need.",
    minimum=1,
  )
  packing: bool = option(True, help="Several trajectories share a row; false for one a row.")
  padding_first: bool = option(
    False, help="The rows with the most padding come first, so that the first micro-batch has them."
  )
  generations_per_prompt: int | None = option(
    None,
    help="Trajectories of a group; every group must have exactly as many.  Empty to take the size "
    "that all groups of recorded rollouts have.",
    minimum=1,
  )
  prompts_per_step: int | None = option(
    None,
    help="Groups of a step; empty to take all that a step of recorded rollouts holds.",
    minimum=1,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshOptions:
  """Devices that a step is split over, and what they can do."""

  mesh: str | None = option(
    None,
    help="Devices as fsdp x expert x context, such as 32x2x4: parameters and optimizer state are "
    "split over fsdp, experts over expert, rows over both, a row's tokens over context.  Must name "
    "as many devices as there are; empty for one device, unsplit.",
    check=mesh.fault,
  )
  peak_tflops: float | None = option(
    None,
    help="Peak of one chip in TFLOP/s, for MFU; empty for the known peak of the chip, and no MFU on "
    "others.",
    minimum=1e-9,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
  """AdamW on float32 masters, global-norm clip, frozen parameters, skipped steps."""

  learning_rate: float | None = option(
    None,
    help="Learning rate; empty for 1e-6 * sqrt(trajectories of a step / 256).",
    minimum=0.0,
    maximum=1e6,
  )
  learning_rate_decay_steps: int | None = option(
    None,
    help="The learning rate falls linearly, to 0 after this many steps; empty for a constant one.",
    minimum=1,
  )
  adam_b1: float = option(0.9, help="Decay of the first moment.", minimum=0.0, maximum=1.0)
  adam_b2: float = option(0.999, help="Decay of the second moment.", minimum=0.0, maximum=1.0)
  adam_eps: float = option(
    1e-8,
    help="Added to the root of the second moment; above 0, or a weight without gradient is 0 / 0.",
    minimum=1e-30,
  )
  weight_decay: float = option(0.0, help="Decoupled weight decay.", minimum=0.0, maximum=1e6)
  gradient_clip: float | None = option(
    None,
    help="Largest global gradient norm of a step, 0 for no limit; empty for 0.125 * sqrt(256 / "
    "trajectories of a step).",
    minimum=0.0,
  )
  trainable_parameters_mask: str = option(
    r"^(?!.*router).*",
    help="Regular expression; a parameter is trained where it matches the start of the parameter's "
    "path, such as groups/gdn/mlp/router/kernel.  The default freezes routers.",
    check=_is_regex,
  )


def require_valid(*instances) -> None:
  """Checks option dataclasses that were built in code rather than from flags.

  Raises:
    options.OptionError: A value is not allowed.
  """
  for instance in instances:
    options.validate(instance)
