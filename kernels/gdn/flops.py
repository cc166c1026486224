"""FLOPs of the chunked rule's kernels: what they declare to the compiler, and what reports divide by.

Products alone, two FLOPs a multiplication: masked halves of C x C matrices count as the MXU works on
them, except the inverse, whose substitution is a third of a product.
"""

from __future__ import annotations

KINDS = ("forward", "backward", "m_scan", "dh_scan")


def per_token(
  kind: str, *, chunk: int, key_heads: int, value_heads: int, dk: int, dv: int
) -> float:
  """FLOPs of one token in one pass over a row.

  Args:
    kind: One of `KINDS`; the forward pass without outputs counts as `forward`.
    chunk: Tokens per chunk.
    key_heads: Key heads.
    value_heads: Value heads, of all key heads.
    dk: Channels of a key head.
    dv: Channels of a value head.

  Returns:
    FLOPs; those shared by the value heads of a key head once.

  Raises:
    KeyError: Another kind.
  """
  state, both = dk * dv, chunk * (dk + dv)
  shared = 4.0 * chunk * dk * key_heads
  return {
    "forward": shared
    + value_heads * (2 * chunk**2 / 3 + 2 * both + 6.0 * state + 2.0 * chunk * dv),
    "backward": shared + value_heads * (14.0 * state + 9.0 * both),
    "m_scan": value_heads * (2.0 * state + 2.0 * dk * state / chunk),
    "dh_scan": value_heads * (2.0 * both + 6.0 * state),
  }[kind]
