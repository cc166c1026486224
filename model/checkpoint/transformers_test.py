"""transformers loads what is saved here and computes the same logits.

Tagged manual, for it needs an interpreter with torch and transformers, which are not pinned:

    bazel test //model/checkpoint:transformers_test --test_env=TRANSFORMERS_PYTHON=/path/to/python
"""

import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest

from model import api
from model import config as config_lib
from model.checkpoint import fixtures, hf_names, saving

_SCRIPT = pathlib.Path(__file__).with_name("transformers_logits.py")


def _params(config):
  """Random enough to matter, small enough to stay finite."""
  params = jax.tree.map(lambda x: 0.2 * x, fixtures.random_params(config))
  params["embed"]["embedding"] *= 5
  return params


@pytest.mark.parametrize("prefix", hf_names.PREFIXES)
@pytest.mark.parametrize(
  "preset, experts, limit",
  [
    ("tiny", "per_expert", 5_000_000),
    ("tiny", "per_expert", 100_000),
    ("tiny_moe", "per_expert", 100_000),
    ("tiny_moe", "fused", 5_000_000),
    ("tied, with a tail", "per_expert", 5_000_000),
  ],
)
def test_transformers_computes_the_same_logits(tmp_path, preset, experts, limit, prefix):
  python = os.environ.get("TRANSFORMERS_PYTHON")
  assert python, "give --test_env=TRANSFORMERS_PYTHON: an interpreter with torch and transformers"
  tail = preset == "tied, with a tail"
  config = fixtures.with_tail() if tail else config_lib.preset(preset)
  model_options = config_lib.ModelOptions(dtype="float32", remat_policy="none")
  params = _params(config)
  saving.save_params(
    tmp_path / "c", config, params, experts=experts, prefix=prefix, max_shard_bytes=limit
  )
  ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, 70))
  np.save(tmp_path / "ids.npy", ids)
  command = [python, str(_SCRIPT), *(str(tmp_path / n) for n in ("c", "ids.npy", "out.npz"))]
  clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
  subprocess.run(command, check=True, env=clean)
  out = np.load(tmp_path / "out.npz")
  assert list(out["problems"]) == []

  hidden = jax.jit(
    lambda params, tokens: api.forward(config, model_options, params, api.row_inputs(tokens)).hidden
  )(params, ids.astype(np.int32))
  want = np.asarray(api.unembed(params, hidden))
  distance = np.linalg.norm(out["logits"] - want) / np.linalg.norm(want)
  print(preset, experts, prefix, limit, "relative L2", distance)
  assert distance <= 1e-5
