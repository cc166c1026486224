"""Which weights hold a NaN or an infinity."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rl.optimizer import path_name


def broken(params: Any) -> list[str]:
  """Paths of the parameters that are not finite everywhere, such as "embed/embedding".

  Args:
    params: Parameters, on one device or sharded.
  """
  finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree))(params)
  found = jax.tree_util.tree_leaves_with_path(jax.device_get(finite))
  return [path_name(path) for path, whole in found if not whole]
