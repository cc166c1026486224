"""The cell's mesh, 32x2x4 on 256 mocked devices, against one device: narrow widths, true structure.

A group of three Gated DeltaNet layers and one attention layer, 64 experts over eight ranks, 64 packed
rows with segments across the shards' edges, two micro-batches and the update.

(a) float32, every key of the mesh that loses nothing: one step, loss, norm and every gradient.
(b) bfloat16, every key on, lossy ones too: the gates of tools/numerics over two steps, routing
    replayed, one micro-batch overflowing its experts' buffers and run again.

On a CPU some keys are on and change nothing, because plain JAX stands in for the kernels that they
choose or whose results they keep: use_tokamax_gmm, use_gmm_v2, context and gdn_states.  Those kernels
are held in interpret mode by //model:kernel_keys_test.  Not on: gdn_cp_mode=seq (head is this
mesh's first form; mesh_step_test holds seq), the fused epilogues, explicit tiles and head groups
(whole lanes of 128 and several key heads a rank: more than these widths have; kernel_keys_test).
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=256"
  # 256 devices run what is compiled: the first level of optimisation is worth its time.
  " --xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
  " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=2"
  " --xla_cpu_multi_thread_eigen=false --xla_allow_excess_precision=false"
  " --xla_cpu_collective_call_warn_stuck_timeout_seconds=240"
  " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import dataclasses  # noqa: E402
import functools  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from kernels.base import options, refusals  # noqa: E402
from model import api  # noqa: E402
from model import config as model_config  # noqa: E402
from rl import refusals as rl_refusals  # noqa: E402
from rl import trainer_options  # noqa: E402
from tests import cell_128, mesh_parity  # noqa: E402
from tools.bench import synthetic  # noqa: E402
from tools.numerics import gates, runs  # noqa: E402

PLAIN = model_config.ModelOptions(dtype="float32", gdn_chunk_size=16)
TUNED = dataclasses.replace(
  PLAIN,
  moe_fallback_topk_capacity=8,
  remat_policy="custom",
  use_tokamax_gmm=True,
  use_gmm_v2=True,
  prefuse_moe_weights=True,
  moe_router_grad_from_wo_input=True,
)

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


@pytest.fixture(scope="module")
def params():
  make = functools.partial(api.init_params, cell_128.CONFIG, PLAIN)
  return jax.device_get(jax.jit(make)(jax.random.key(0)))


def test_the_cell_is_one_device(params):
  batches = cell_128.batches()
  ids = batches[0].segment_ids
  edges = [cell_128.TOKENS // 4 * rank for rank in (1, 2, 3)]
  assert all((ids[:, at - 1] == ids[:, at])[ids[:, at] > 0].any() for at in edges)
  wanted = mesh_parity.alone(cell_128.CONFIG, PLAIN, params, batches)
  found = mesh_parity.on_mesh(
    cell_128.CONFIG, TUNED, cell_128.LOSSLESS, cell_128.SHAPE, params, batches
  )
  assert found.dropped == 0
  mesh_parity.check(wanted, found)


def settings_of(**values) -> options.Settings:
  made = options.Settings(trainer_options.COMPONENTS, {**REFERENCE, **values})
  assert not refusals.broken_rules(made, rl_refusals.RULES)
  return made


def crowded(problem: runs.Problem) -> runs.Problem:
  """The problem with a shard of the first micro-batch, whose every token wants the same experts."""
  (first, *others), *steps = problem.steps
  routed = np.array(first.routed_experts)
  one = routed[:2, :16]  # two rows of one context rank
  one[one[..., 0] >= 0] = np.arange(one.shape[-1])
  first = first._replace(routed_experts=routed)
  return dataclasses.replace(problem, steps=((first, *others), *steps))


def planted(steps: list[gates.Step], **changes) -> list[gates.Step]:
  """The run with something changed in its last step."""
  values = {name: change(getattr(steps[-1], name)) for name, change in changes.items()}
  return [*steps[:-1], dataclasses.replace(steps[-1], **values)]


def test_the_gates_pass_and_each_can_fail(params):
  reference, candidate = settings_of(), settings_of(**cell_128.everything())
  problem = runs.make_problem(
    reference,
    steps=2,
    lengths=synthetic.Lengths(distribution="uniform", mean=24),
    routing=synthetic.Routing(kind="uniform"),
    config=cell_128.CONFIG,
    params=params,
  )
  problem = crowded(problem)
  wanted = runs.run(problem, reference)
  pair = runs.run(problem, reference, row_order=range(cell_128.ROWS)[::-1])
  found = runs.run(problem, candidate)
  noise = gates.spread(wanted, pair)
  answers = gates.judge(wanted, found, noise, lossy=True)
  print("\n".join(str(gate) for gate in answers))
  assert all(gate.passed for gate in answers), answers
  # One micro-batch was discarded and run again, and no token is missing.
  assert [step.counters[gates.REPLAYED] for step in found] == [1, 0]

  gradient = max(found[-1].gradients, key=lambda name: found[-1].gradients[name].size)
  with_gradient = lambda change: lambda g: {**g, gradient: change(g[gradient])}
  faults = {
    "N1": planted(found, gradients=with_gradient(lambda g: g * np.where(g == g.max(), np.nan, 1))),
    "N2": planted(found, loss=lambda x: x * 1.01),
    "N3": planted(found, grad_norm=lambda x: x * 0.99),
    "N4": planted(found, logprobs=lambda x: x - np.float32(0.1)),
    "N5": planted(found, gradients=with_gradient(lambda g: -g)),
    "N6": planted(found, counters=lambda c: {**c, gates.LOST: 1.0}),
  }
  for name, run in faults.items():
    answers = gates.judge(wanted, run, noise, lossy=True)
    assert [gate.name for gate in answers if not gate.passed] == [name]
