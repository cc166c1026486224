"""The table of refused combinations of the RL trainer's options.

Each rule says what is required, why, and what to do; `kernels.base.refusals` reports every broken
one.  A rule's two examples are its test.
"""

from __future__ import annotations

from kernels.base.refusals import Rule
from rl import known_model
from rl.kernel_refusals import KERNEL_RULES
from rl.mesh_refusals import MESH_RULES
from rl.sharded_refusals import SHARDED_RULES

LOSS_RULES = (
  Rule(
    name="truncation-band",
    keys=("truncated_importance_sampling_ratio_min", "truncated_importance_sampling_ratio"),
    broken=lambda s: (
      s.truncated_importance_sampling_ratio_min is not None
      and s.truncated_importance_sampling_ratio is not None
      and s.truncated_importance_sampling_ratio_min > s.truncated_importance_sampling_ratio
    ),
    reason="the band's lower end must not lie above its upper end",
    accepted={
      "truncated_importance_sampling_ratio_min": 0.5,
      "truncated_importance_sampling_ratio": 2.0,
    },
    refused={
      "truncated_importance_sampling_ratio_min": 3.0,
      "truncated_importance_sampling_ratio": 2.0,
    },
  ),
  Rule(
    name="truncation-band-unused",
    keys=(
      "truncated_importance_sampling_type",
      "truncated_importance_sampling_ratio",
      "truncated_importance_sampling_ratio_min",
    ),
    broken=lambda s: (
      s.truncated_importance_sampling_type == "none"
      and (
        s.truncated_importance_sampling_ratio is not None
        or s.truncated_importance_sampling_ratio_min is not None
      )
    ),
    reason="without a truncation type the band has no effect; leave its ends empty",
    accepted={"truncated_importance_sampling_type": "none"},
    refused={
      "truncated_importance_sampling_type": "none",
      "truncated_importance_sampling_ratio": 2.0,
    },
  ),
  Rule(
    name="truncation-needs-correction",
    keys=("use_importance_sampling_correction", "truncated_importance_sampling_type"),
    broken=lambda s: (
      not s.use_importance_sampling_correction and s.truncated_importance_sampling_type != "none"
    ),
    reason="truncation acts on the correction's weights; add "
    "--truncated_importance_sampling_type=none or keep the correction",
    accepted={
      "use_importance_sampling_correction": False,
      "truncated_importance_sampling_type": "none",
    },
    refused={"use_importance_sampling_correction": False},
  ),
  Rule(
    name="sequence-ratio-with-sequence-mask",
    keys=("loss", "truncated_importance_sampling_type"),
    broken=lambda s: s.loss == "gspo" and s.truncated_importance_sampling_type == "seq-mask-tis",
    reason="gspo weights whole sequences while seq-mask-tis keeps weights of tokens; use tis, icepop "
    "or none",
    accepted={"loss": "gspo", "truncated_importance_sampling_type": "tis"},
    refused={"loss": "gspo"},
  ),
  Rule(
    name="sequence-ratio-over-sequences",
    keys=("loss", "loss_aggregation"),
    broken=lambda s: s.loss == "gspo" and s.loss_aggregation == "token-mean",
    reason="gspo has one ratio a sequence and is averaged over sequences",
    accepted={
      "loss": "gspo",
      "loss_aggregation": "sequence-mean-token-mean",
      "truncated_importance_sampling_type": "none",
    },
    refused={"loss": "gspo", "loss_aggregation": "token-mean"},
  ),
  Rule(
    name="cispo-needs-ratio",
    keys=("loss", "force_on_policy_ratio"),
    broken=lambda s: s.loss == "cispo" and s.force_on_policy_ratio,
    reason="cispo optimises the clipped ratio, which a forced ratio of 1 removes; add "
    "--force_on_policy_ratio=false",
    accepted={"loss": "cispo", "force_on_policy_ratio": False},
    refused={"loss": "cispo"},
  ),
  Rule(
    name="dual-clip-needs-clipped-loss",
    keys=("loss", "ratio_clip_c"),
    broken=lambda s: s.ratio_clip_c is not None and s.loss not in ("grpo", "gspo"),
    reason="only the clipped losses grpo and gspo have a dual clip; leave ratio_clip_c empty",
    accepted={"loss": "grpo", "ratio_clip_c": 3.0, "force_on_policy_ratio": False},
    refused={"loss": "reinforce", "ratio_clip_c": 3.0},
  ),
  Rule(
    name="aggregation-agrees",
    keys=("token_level_loss", "loss_aggregation"),
    broken=lambda s: not s.token_level_loss and s.loss_aggregation == "token-mean",
    reason="token_level_loss=false means a mean over sequences; give only one of the two",
    accepted={"token_level_loss": False, "loss_aggregation": "sequence-mean-token-sum-norm"},
    refused={"token_level_loss": False, "loss_aggregation": "token-mean"},
  ),
  Rule(
    name="length-norm-unused",
    keys=("loss_length_norm", "loss_aggregation"),
    broken=lambda s: (
      s.loss_length_norm is not None and s.loss_aggregation != "sequence-mean-token-sum-norm"
    ),
    reason="only --loss_aggregation=sequence-mean-token-sum-norm divides by it",
    accepted={"loss_length_norm": 100.0, "loss_aggregation": "sequence-mean-token-sum-norm"},
    refused={"loss_length_norm": 100.0},
  ),
  Rule(
    name="ratio-clip-unused",
    keys=("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "force_on_policy_ratio"),
    broken=lambda s: (
      s.force_on_policy_ratio
      and any(name in s.changed for name in ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c"))
    ),
    reason="a forced ratio is 1, which nothing clips; add --force_on_policy_ratio=false or leave the clips "
    "alone",
    accepted={"ratio_clip_c": 3.0, "force_on_policy_ratio": False},
    refused={"ratio_clip_min": 0.1},
  ),
  Rule(
    name="old-logprobs-unused",
    keys=("old_logprobs", "force_on_policy_ratio"),
    broken=lambda s: s.force_on_policy_ratio and s.old_logprobs != "auto",
    reason="a forced ratio uses no old log-probs; add --force_on_policy_ratio=false",
    accepted={"old_logprobs": "recompute", "force_on_policy_ratio": False},
    refused={"old_logprobs": "recompute"},
  ),
)

ADVANTAGE_RULES = (
  Rule(
    name="undivided-estimator",
    keys=("advantage_estimator", "normalize_rewards"),
    broken=lambda s: (
      s.advantage_estimator in ("rloo", "dr-grpo", "reinforce++") and bool(s.normalize_rewards)
    ),
    reason="rloo, dr-grpo and reinforce++ do not divide by the group's spread; use grpo or grpo-loo",
    accepted={"advantage_estimator": "rloo", "normalize_rewards": False},
    refused={"advantage_estimator": "rloo", "normalize_rewards": True},
  ),
  Rule(
    name="baseline-of-estimator",
    keys=("advantage_estimator", "use_leave_one_out_baseline"),
    broken=lambda s: (
      (s.advantage_estimator == "rloo" and s.use_leave_one_out_baseline is False)
      or (
        s.advantage_estimator in ("dr-grpo", "reinforce++") and bool(s.use_leave_one_out_baseline)
      )
    ),
    reason="rloo leaves the member out by definition, dr-grpo and reinforce++ do not; use grpo with "
    "the two switches",
    accepted={"advantage_estimator": "grpo", "use_leave_one_out_baseline": True},
    refused={"advantage_estimator": "dr-grpo", "use_leave_one_out_baseline": True},
  ),
  Rule(
    name="group-of-one",
    keys=("generations_per_prompt", "advantage_estimator", "loss"),
    broken=lambda s: s.generations_per_prompt == 1 and s.loss != "sft",
    reason="every estimator compares a trajectory with the others of its prompt, so a group of one "
    "has advantage 0 and teaches nothing; want 2 or more",
    accepted={"generations_per_prompt": 1, "loss": "sft"},
    refused={"generations_per_prompt": 1},
  ),
)

BATCH_RULES = (
  Rule(
    name="one-segment-unpacked",
    keys=("packing", "max_segments_per_row"),
    broken=lambda s: not s.packing and s.max_segments_per_row not in (1, 16),
    reason="without packing a row holds one trajectory; add --max_segments_per_row=1, also where a recipe "
    "gave another number",
    accepted={"packing": False},
    refused={"packing": False, "max_segments_per_row": 4},
  ),
)

MODEL_RULES = (
  Rule(
    name="gate-logits-need-experts",
    keys=("float32_gate_logits", "dtype", "model_preset", "checkpoint"),
    broken=lambda s: s.float32_gate_logits and (s.dtype == "float32" or known_model.dense(s)),
    reason="a dense model has no router, and in float32 its logits are float32 anyway; leave "
    "--float32_gate_logits out",
    accepted={"float32_gate_logits": True, "model_preset": "tiny_moe", "dtype": "bfloat16"},
    refused={"float32_gate_logits": True, "model_preset": "tiny_moe", "dtype": "float32"},
  ),
  Rule(
    name="fallback-needs-replay",
    keys=("moe_fallback_topk_capacity", "router_replay"),
    broken=lambda s: s.moe_fallback_topk_capacity > 0 and not s.router_replay,
    reason="without replayed routing every token goes through top-k; add --router_replay",
    accepted={"moe_fallback_topk_capacity": 128, "router_replay": True},
    refused={"moe_fallback_topk_capacity": 128},
  ),
)


_FILE_TASKS = ("json_lines", "command", "math_verify")


OPTIMIZER_RULES = (
  Rule(
    name="adam-decay-below-one",
    keys=("adam_b1", "adam_b2"),
    broken=lambda s: s.adam_b1 >= 1 or s.adam_b2 >= 1,
    reason="the decay of a moment must be below 1",
    accepted={"adam_b2": 0.95},
    refused={"adam_b2": 1.0},
  ),
)

RUN_RULES = (
  Rule(
    name="lag-within-staleness",
    keys=("rollout_lag", "max_staleness"),
    broken=lambda s: s.rollout_lag > s.max_staleness,
    reason="sampling further behind than max_staleness would refuse every batch; raise "
    "max_staleness or lower rollout_lag",
    accepted={"rollout_lag": 2, "max_staleness": 2},
    refused={"rollout_lag": 2, "max_staleness": 1},
  ),
  Rule(
    name="lag-needs-correction",
    keys=("rollout_lag", "use_importance_sampling_correction"),
    broken=lambda s: s.rollout_lag > 0 and not s.use_importance_sampling_correction,
    reason="old log-probs are those of the current policy, not of the older one that sampled, so "
    "without the correction by the sampler's log-probs the gradient is silently biased; keep "
    "the correction or set rollout_lag=0",
    accepted={"rollout_lag": 1},
    refused={
      "rollout_lag": 1,
      "use_importance_sampling_correction": False,
      "truncated_importance_sampling_type": "none",
    },
  ),
  Rule(
    name="file-task-needs-prompts",
    keys=("task", "prompts"),
    broken=lambda s: s.task in _FILE_TASKS and not s.prompts,
    reason="this task reads its problems from a file; give --prompts",
    accepted={"task": "json_lines", "prompts": "problems.jsonl"},
    refused={"task": "json_lines"},
  ),
  Rule(
    name="prompts-need-file-task",
    keys=("prompts", "task"),
    broken=lambda s: s.prompts is not None and s.task not in _FILE_TASKS,
    reason="a built-in task reads no file; add --task=json_lines",
    accepted={"task": "json_lines", "prompts": "problems.jsonl"},
    refused={"task": "sort6", "prompts": "problems.jsonl"},
  ),
  Rule(
    name="held-out-prompts-need-file-task",
    keys=("held_out_prompts", "task"),
    broken=lambda s: s.held_out_prompts is not None and s.task not in _FILE_TASKS,
    reason="a built-in task holds out problems of its own; leave --held_out_prompts out, or add "
    "--task=json_lines",
    accepted={"task": "json_lines", "prompts": "a.jsonl", "held_out_prompts": "b.jsonl"},
    refused={"task": "sort6", "held_out_prompts": "b.jsonl"},
  ),
  Rule(
    name="system-prompt-needs-template",
    keys=("system_prompt", "checkpoint"),
    broken=lambda s: s.system_prompt is not None and s.checkpoint is None,
    reason="only a checkpoint brings the chat template that has a system turn; give --checkpoint",
    accepted={"system_prompt": "Answer briefly.", "checkpoint": "model"},
    refused={"system_prompt": "Answer briefly."},
  ),
  Rule(
    name="verifier-of-command-task",
    keys=("task", "verifier_command"),
    broken=lambda s: (s.task == "command") != (s.verifier_command is not None),
    reason="--task=command and --verifier_command go together; give both or neither",
    accepted={"task": "command", "prompts": "problems.jsonl", "verifier_command": "./judge"},
    refused={"verifier_command": "./judge"},
  ),
  Rule(
    name="recorded-rollouts-sample-nothing",
    keys=("rollouts", "rollout_lag", "save_rollouts"),
    broken=lambda s: s.rollouts is not None and (s.rollout_lag > 0 or s.save_rollouts is not None),
    reason="with --rollouts nothing is sampled, so there is nothing to lag or to save",
    accepted={"rollouts": "rollouts.jsonl"},
    refused={"rollouts": "rollouts.jsonl", "save_rollouts": "again.jsonl"},
  ),
  Rule(
    name="checkpoint-is-its-own-shape",
    keys=("checkpoint", "model_preset"),
    broken=lambda s: s.checkpoint is not None and s.model_preset != "tiny_moe",
    reason="a checkpoint's config.json says its shape; leave --model_preset out",
    accepted={"checkpoint": "model"},
    refused={"checkpoint": "model", "model_preset": "tiny"},
  ),
  Rule(
    name="resume-needs-a-directory",
    keys=("resume", "output_dir"),
    broken=lambda s: s.resume == "must" and s.output_dir is None,
    reason="without --output_dir a run gets a new directory, which holds no checkpoint",
    accepted={"resume": "must", "output_dir": "run"},
    refused={"resume": "must"},
  ),
  Rule(
    name="recorded-rollouts-have-no-warm-up",
    keys=("rollouts", "warmup_steps"),
    broken=lambda s: s.rollouts is not None and s.warmup_steps > 0,
    reason="recorded trajectories are of a policy that has begun, so there is no warm-up; add "
    "--warmup_steps=0 (the recipes sort and add set it)",
    accepted={"rollouts": "rollouts.jsonl", "warmup_steps": 0},
    refused={"rollouts": "rollouts.jsonl", "warmup_steps": 100},
  ),
  Rule(
    name="replay-needs-recorded-routing",
    keys=("router_replay", "loss"),
    broken=lambda s: s.router_replay and s.loss == "sft",
    reason="demonstrations were sampled by no model, so they carry no experts to replay",
    accepted={"router_replay": True},
    refused={"router_replay": True, "loss": "sft"},
  ),
  Rule(
    name="replay-needs-experts",
    keys=("router_replay", "model_preset", "checkpoint"),
    broken=lambda s: s.router_replay and known_model.dense(s),
    reason="a dense model routes nothing; leave --router_replay out or take a preset with experts",
    accepted={"router_replay": True, "model_preset": "tiny_moe"},
    refused={"router_replay": True, "model_preset": "tiny"},
  ),
)

RULES = (
  LOSS_RULES
  + ADVANTAGE_RULES
  + BATCH_RULES
  + SHARDED_RULES
  + MESH_RULES
  + MODEL_RULES
  + KERNEL_RULES
  + OPTIMIZER_RULES
  + RUN_RULES
)
