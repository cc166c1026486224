"""The trainer's whole configuration: every option dataclass, in the order --help shows them.

Tools that act on the trainer's own command line (documentation, ahead-of-time compilation, bench)
parse these same components, so that no flag means one thing here and another there.
"""

from __future__ import annotations

from model import config as model_config
from model.sharded import options as sharded_options
from rl import config, run_config

COMPONENTS = (
  run_config.RunOptions,
  model_config.ModelOptions,
  run_config.TaskOptions,
  run_config.SamplerOptions,
  run_config.WarmupOptions,
  config.LossOptions,
  config.AdvantageOptions,
  config.BatchOptions,
  config.MeshOptions,
  sharded_options.ShardedOptions,
  config.OptimizerOptions,
  run_config.EvaluationOptions,
)
