"""The cell's mesh, 32x2x4 on 256 mocked devices, in bfloat16 with every key on, lossy ones too.

Judged against one device by the gates of tools/numerics: three steps of two micro-batches, routing
replayed, the noise floor from the reference with its rows in another order.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=256"
  " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
  " --xla_allow_excess_precision=false"
  " --xla_cpu_collective_call_warn_stuck_timeout_seconds=240"
  " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

from kernels.base import options, refusals  # noqa: E402
from rl import refusals as rl_refusals  # noqa: E402
from rl import trainer_options  # noqa: E402
from tests import cell_128  # noqa: E402
from tools.bench import synthetic  # noqa: E402
from tools.numerics import gates, runs  # noqa: E402

REFERENCE = {
  "model_preset": "35B-A3B",  # for the refusals; `CONFIG` is the model
  "row_tokens": cell_128.TOKENS,
  "micro_batch_rows": cell_128.ROWS,
  "num_micro_batches": 2,
  "max_segments_per_row": 4,
  "dtype": "bfloat16",
  "gdn_chunk_size": 16,
  "logps_chunk_size": 32,
  "learning_rate": 1e-5,
  "trainable_parameters_mask": "^(?!.*router).*",
}


def settings_of(**values) -> options.Settings:
  made = options.Settings(trainer_options.COMPONENTS, {**REFERENCE, **values})
  assert not refusals.broken_rules(made, rl_refusals.RULES)
  return made


def test_the_gates_pass():
  reference, candidate = settings_of(), settings_of(**cell_128.everything())
  problem = runs.make_problem(
    reference,
    steps=3,
    lengths=synthetic.Lengths(distribution="uniform", mean=24),
    routing=synthetic.Routing(kind="uniform"),
    config=cell_128.CONFIG,
  )
  wanted = runs.run(problem, reference)
  pair = runs.run(problem, reference, row_order=range(cell_128.ROWS)[::-1])
  found = runs.run(problem, candidate)
  answers = gates.judge(wanted, found, gates.spread(wanted, pair), lossy=True)
  print("\n".join(str(gate) for gate in answers))
  assert all(gate.passed for gate in answers), answers
