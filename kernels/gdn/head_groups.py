"""How many key heads a grid step of the Pallas kernels takes.

Heads of a step hide each other's latency, so more are faster; the lanes of the gates and VMEM bound
them.  The forward kernel's group is a choice of the caller, the other kernels take the widest.
Imports no JAX: the table of refusals reads it.
"""

from __future__ import annotations

LANES = 128
# Lanes of the gates that belong to no head: segment, real, reads the state, reaches the next.
FLAGS = 4
# Scoped VMEM of a kernel: what the trainer's compiler flags allow.
VMEM_BYTES = 65_472 * 1024
# The backward kernel at chunk 64 takes 21 float32 states a value head, spilled registers included
# (libtpu 0.0.52: 40.2 MiB for 32 value heads of 128 x 128 on 8 key heads, 43.3 MiB on 16).
_STATES, _CHUNK, _BUDGET = 24, 64, 48 << 20


def most_key_heads(heads: int) -> int:
  """Key heads of a step, of `heads` value heads each, whose decays and strengths fit on the lanes."""
  return (LANES - FLAGS) // (2 * heads)


def widest(key_heads: int, heads: int, *, chunk: int, dk: int, dv: int, itemsize: int) -> int:
  """Most key heads a step of the backward kernel, m scan and dh scan that divide and fit.

  Args:
    key_heads: Key heads of the call.
    heads: Value heads per key head.
    chunk: Tokens per chunk.
    dk: Channels of a key head.
    dv: Channels of a value head.
    itemsize: Bytes of a number of q, k and v.
  """
  # Wider operands and longer chunks take more of everything but the states.
  per_head = _STATES * 4 * dk * dv * max(1, chunk // _CHUNK) * max(1, itemsize // 2)
  most = min(most_key_heads(heads), _BUDGET // (heads * per_head))
  return max(n for n in range(1, key_heads + 1) if key_heads % n == 0 and n <= max(1, most))
