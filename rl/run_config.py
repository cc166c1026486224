"""Options of a run: task, sampler, warm-up, evaluation, files.  Imports no JAX.

The options of losses, advantages, batches and the optimizer are in `rl.config`.
"""

from __future__ import annotations

import dataclasses

from kernels.base.options import option
from model import config as model_config
from rl.tasks import registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
  """What is trained, from what, for how long, and where the files go."""

  recipe: str | None = option(
    None,
    help="Built-in set of flags that stand before those of the command line: sort, add, "
    "finetune, recorded or none.  Empty for sort; finetune with --checkpoint; recorded with "
    "--rollouts.",
    choices=("sort", "add", "finetune", "recorded", "none"),
  )
  model_preset: str = option(
    "tiny_moe",
    help="Shape of a model that starts from random weights; not used with --checkpoint.",
    check=model_config.check_preset,
  )
  checkpoint: str | None = option(
    None,
    help="Directory of a Hugging Face checkpoint (config.json, safetensors) to start from, with its "
    "tokenizer.json where it has one.",
  )
  rollouts: str | None = option(
    None,
    help="Recorded trajectories (.jsonl or .parquet) to train from; nothing is sampled.  Those "
    "recorded with one `step` are one step; without such numbers, the file is one step.  Read again "
    "from the start when it ends before --max_steps.",
  )
  save_rollouts: str | None = option(
    None,
    help="File to which every trajectory that is trained on is written: .jsonl, or .parquet, which "
    "a resumed run cannot continue.",
  )
  output_dir: str | None = option(
    None,
    help="Directory of metrics.jsonl, plot, logs, checkpoints and exported model; empty for a new "
    "one under runs/ where the command was given.",
  )
  max_steps: int | None = option(
    None,
    help="Updates by the policy loss (or by sft), warm-up not counted; empty for 100, or with "
    "--rollouts for one pass.",
    minimum=0,
  )
  seed: int = option(0, help="Seed of weights, problems and samples.", minimum=0, maximum=2**31 - 1)
  resume: str = option(
    "auto",
    help="What to do with checkpoints in --output_dir: auto (go on from the newest whole one, or "
    "start), must (refuse when there is none), never (refuse when there is one).",
    choices=("auto", "must", "never"),
  )
  allow_config_change: bool = option(
    False, help="Resume although options that shape the run differ from the checkpoint's."
  )
  checkpoint_every: int = option(
    50, help="Steps between checkpoints; 0 for none but the last.", minimum=0
  )
  keep_checkpoints: int = option(2, help="Checkpoints kept, the newest ones.", minimum=1)
  export: bool = option(
    True, help="Write the final weights as a Hugging Face checkpoint to OUTPUT_DIR/model."
  )
  max_staleness: int = option(
    1,
    help="Largest number of updates between the policy that sampled a trajectory and the one it "
    "trains; older ones are refused, or with recorded rollouts trained on and told of.",
    minimum=0,
  )
  rollout_lag: int = option(
    0,
    help="Updates by which sampling runs behind training: the batch of step t is sampled by the "
    "policy of t - lag.  0 is on-policy.",
    minimum=0,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
  """Problems and their verifier."""

  task: str = option(
    "sort4",
    help=f"Task: {', '.join(registry.names())}.  json_lines, command and math_verify read --prompts.",
    check=registry.check_name,
  )
  prompts: str | None = option(
    None, help="JSON Lines file of {prompt, answer}, one problem a line."
  )
  held_out_prompts: str | None = option(
    None, help="Held-out problems for --prompts; empty to hold a fifth of --prompts out."
  )
  verifier_command: str | None = option(
    None,
    help="For the task command: reads {prompt, answer, completion} as JSON, prints a reward from 0 "
    "to 1.",
  )
  system_prompt: str | None = option(
    None, help="System turn, where the checkpoint's tokenizer has a chat template."
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerOptions:
  """How completions are drawn; the temperature is the loss's."""

  sampler_slots: int = option(
    256, help="Sequences decoded side by side; a finished one is replaced at once.", minimum=1
  )
  decode_block: int = option(
    8, help="Tokens decoded per call before finished slots are refilled.", minimum=1
  )
  prefill_rows: int = option(32, help="Distinct prompts that are prefilled together.", minimum=1)
  prefill_chunk: int = option(
    512, help="Tokens of a prompt that are prefilled at a time.", minimum=1
  )
  max_prompt_tokens: int = option(64, help="Longest prompt; a longer one is refused.", minimum=1)
  max_completion_tokens: int = option(
    64, help="Longest completion; a longer one is cut and counts as truncated.", minimum=1
  )
  top_p: float = option(
    1.0,
    help="Sample from the likeliest tokens that hold this much probability.",
    maximum=1.0,
    check=lambda v: None if v > 0 else "want a number above 0",
  )
  top_k: int = option(0, help="Sample from this many likeliest tokens; 0 for all.", minimum=0)
  stop_ids: tuple[int, ...] = option(
    (), help="Token ids that end a completion; empty for the tokenizer's.", minimum=0
  )
  router_replay: bool = option(
    False,
    help="The trainer routes each sampled token to the experts that the sampler used (router "
    "replay).",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupOptions:
  """Supervised phase on the task's own demonstrations, before the policy loss."""

  warmup_steps: int = option(
    0, help="Most updates of the supervised phase; 0 for no such phase.", minimum=0
  )
  warmup_target: float = option(
    0.25,
    help="The phase ends once the policy's mean probability of the whole demonstration (its "
    "expected pass@1 where there is one right answer) reaches this.",
    minimum=0.0,
    maximum=1.0,
  )
  warmup_batch: int = option(256, help="Demonstrations of a supervised update.", minimum=1)
  warmup_learning_rate: float = option(
    2e-3, help="Learning rate of the supervised phase.", minimum=0.0, maximum=1e6
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
  """Pass@k over held-out problems."""

  eval_every: int = option(
    0, help="Steps between evaluations; 0 for the first and the last alone.", minimum=0
  )
  eval_first: int = option(0, help="First step that --eval_every counts from.", minimum=0)
  eval_problems: int = option(
    1000, help="Held-out problems of an evaluation, or as many as there are.", minimum=1
  )
  eval_samples: int = option(
    1, help="Samples a problem, the k of pass@k: passed when any has a reward above 0.", minimum=1
  )
  eval_temperature: float = option(
    1.0,
    help="Temperature of sampled evaluation.",
    check=lambda v: None if v > 0 else "want a number above 0",
  )
  eval_top_p: float = option(
    1.0,
    help="Top-p of sampled evaluation.",
    maximum=1.0,
    check=lambda v: None if v > 0 else "want a number above 0",
  )
  eval_greedy: bool = option(True, help="Evaluate greedy decoding beside it.")
  target_accuracy: float | None = option(
    None,
    help="Stop once sampled pass@k reaches this; empty to run all steps.",
    minimum=0.0,
    maximum=1.0,
  )


COMPONENTS = (RunOptions, TaskOptions, SamplerOptions, WarmupOptions, EvaluationOptions)
