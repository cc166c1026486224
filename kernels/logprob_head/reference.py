"""Log-probs and entropies of given tokens from hidden states, written plainly.

The definition that `kernels.logprob_head.op` is held to.  It makes the whole [tokens, vocab]
array, so it serves small shapes only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def logprob_head(
  hidden: Float[Array, "N D"],
  table: Float[Array, "V D"],
  targets: Int[Array, " N"],
  *,
  temperature: float = 1.0,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
  """Log-prob of each target and entropy of each distribution, float32, differentiable.

  Args:
    hidden: States after the final norm.
    table: Output projection, one row a token of the vocabulary, padding rows included.
    targets: Token ids.
    temperature: Logits are divided by it.

  Returns:
    `(logprobs, entropies)`, float32, in nats.
  """
  logits = jnp.einsum(
    "nd,vd->nv",
    hidden.astype(jnp.float32),
    table.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )
  logps = jax.nn.log_softmax(logits / temperature, axis=-1)
  chosen = jnp.take_along_axis(logps, targets[:, None], axis=-1)[:, 0]
  return chosen, -jnp.sum(jnp.exp(logps) * logps, axis=-1)
