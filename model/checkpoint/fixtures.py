"""Small checkpoints for this package's tests."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np

from model import api
from model import config as config_lib


def random_params(
  config: config_lib.ModelConfig, dtype: str = "float32", seed: int = 0
) -> dict[str, Any]:
  """Parameters whose every element is another, in numpy."""
  rng = np.random.default_rng(seed)
  shapes = api.abstract_params(config, config_lib.ModelOptions(weight_dtype=dtype))
  draw = lambda leaf: rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)
  return jax.tree.map(draw, shapes)


def same_bits(first: Any, second: Any) -> bool:
  """Whether two trees are of one structure, type and value, to the bit."""
  if jax.tree.structure(first) != jax.tree.structure(second):
    return False
  pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second))
  return all(a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def with_tail() -> config_lib.ModelConfig:
  """Two groups of a short interval and a layer after them, tied, sparse."""
  given = config_lib.preset("tiny_moe").to_hf()
  given.pop("layer_types")
  given |= {"num_hidden_layers": 7, "full_attention_interval": 3, "tie_word_embeddings": True}
  return config_lib.ModelConfig.from_hf(given)


def files(directory: pathlib.Path) -> dict[str, bytes]:
  """Every file of a directory, hidden ones too."""
  return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}
