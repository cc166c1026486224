"""The cell's mesh, 32x2x4 on 256 mocked devices, against one device: narrow widths, true structure.

A group of three Gated DeltaNet layers and one attention layer, 64 experts over eight ranks, 64 packed
rows with segments across the shards' edges, two micro-batches and the update, in float32 and with
every key of the mesh that loses nothing.  Keys that choose a kernel are those of the kernels' own
tests: on a CPU they are plain JAX.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=256"
  " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
  " --xla_cpu_collective_call_warn_stuck_timeout_seconds=240"
  " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import dataclasses  # noqa: E402
import functools  # noqa: E402

import jax  # noqa: E402

from model import api  # noqa: E402
from model import config as model_config  # noqa: E402
from rl import mesh_step  # noqa: E402
from tests import cell_128, mesh_parity  # noqa: E402

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


def test_the_cell_is_one_device():
  make = functools.partial(api.init_params, cell_128.CONFIG, PLAIN)
  params = jax.jit(make)(jax.random.key(0))
  batches = cell_128.batches()
  ids = batches[0].segment_ids
  edges = [cell_128.TOKENS // 4 * rank for rank in (1, 2, 3)]
  assert all((ids[:, at - 1] == ids[:, at])[ids[:, at] > 0].any() for at in edges)
  wanted = mesh_parity.alone(cell_128.CONFIG, PLAIN, params, batches)
  found = mesh_parity.on_mesh(
    cell_128.CONFIG, TUNED, cell_128.LOSSLESS, cell_128.SHAPE, params, batches
  )
  assert found.metrics[mesh_step.DROPPED] == 0
  mesh_parity.check(wanted, found)
