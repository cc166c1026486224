"""Public op of causal softmax attention over packed rows, with grouped queries."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.attention import blockwise, flash, reference
from kernels.attention import options as options_lib
from kernels.base import implementation as implementation_lib
from kernels.base import shapes

# Queries and keys of a block of the loop in plain JAX.
_BLOCK = 512
# Channels of a head fill a TPU's lanes in the kernels.
_LANES = 128


def split_scale(scale: float) -> tuple[float, float]:
  """(factor, rest) whose product is `scale`, where scores times `rest` need no factor to base 2.

  Queries that were multiplied by `factor` in a wide type take `rest` as their scale.
  """
  rest = math.log(2.0) * 2.0 ** math.floor(math.log2(scale / math.log(2.0)))
  return scale / rest, rest


def attention(
  q: Float[Array, "B S nq d"],
  k: Float[Array, "B T nkv d"],
  v: Float[Array, "B T nkv d"],
  *,
  q_segment_ids: Int[Array, "B S"],
  kv_segment_ids: Int[Array, "B T"],
  q_positions: Int[Array, "B S"],
  kv_positions: Int[Array, "B T"],
  scale: float,
  implementation: str = "reference",
  given: options_lib.AttentionOptions | None = None,
) -> Float[Array, "B S nq d"]:
  """Attention in which a query sees the keys of its segment at no later position.

  The mask comes from ids and positions alone, never from the order of the rows, so tokens may be
  permuted, and the queries may be a part of the row of the keys.  Padding (segment 0) sees nothing,
  is seen by nothing, and gives zeros, whatever stands in its place.

  Where the flash kernels run, their output and log-sum-exp are named `flash.SAVED_NAME` for remat
  policies.

  Args:
    q: Queries; query head h reads key/value head h // (nq / nkv).
    k: Keys.
    v: Values.
    q_segment_ids: Segments of the queries.
    kv_segment_ids: Segments of the keys.
    q_positions: Positions of the queries in their segments.
    kv_positions: Positions of the keys in their segments.
    scale: Factor of the scores, above 0.
    implementation: `auto`, `pallas`, `interpret` or `reference`; see `implementation.dispatch`.  A
      whole matrix of few scores (`options.DENSE_SCORES`), as in decoding, is plain JAX under `auto`
      too, and so are heads that do not fill a TPU's lanes.
    given: Tiles and arithmetic of the kernels.

  Raises:
    ValueError: Shapes or types do not fit, query heads are no multiple of key/value heads, or `scale` is not above 0.
  """
  implementation_lib.validate(implementation)
  shapes.check(
    "attention",
    q=(q, ("B", "S", "nq", "d")),
    k=(k, ("B", "T", "nkv", "d")),
    v=(v, ("B", "T", "nkv", "d")),
    q_segment_ids=(q_segment_ids, ("B", "S")),
    kv_segment_ids=(kv_segment_ids, ("B", "T")),
    q_positions=(q_positions, ("B", "S")),
    kv_positions=(kv_positions, ("B", "T")),
  )
  positions = {"q_positions": q_positions, "kv_positions": kv_positions}
  segments = {"q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids}
  shapes.check_types(
    "attention",
    kernels=implementation != "reference",
    values={"q": q, "k": k, "v": v},
    ids=positions | segments,
  )
  if q.shape[2] % k.shape[2]:
    raise ValueError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} key/value heads")
  if not scale > 0:
    raise ValueError(f"scale must be above 0, got {scale}")
  ids = blockwise.Ids(q_segment_ids, kv_segment_ids, q_positions, kv_positions)
  real = lambda x, segments: jnp.where((segments > 0)[:, :, None, None], x, 0)
  q = real(q, q_segment_ids)
  k, v = (real(x, kv_segment_ids) for x in (k, v))
  if implementation == "auto" and q.shape[3] % _LANES:
    implementation = "reference"
  few = q.shape[1] * k.shape[1] <= options_lib.DENSE_SCORES
  if few and implementation in ("auto", "reference"):
    return reference.attention(q, k, v, reference.visible(*ids), scale)
  if implementation == "reference":
    return blockwise.attention(q, k, v, ids, scale, _BLOCK, _BLOCK)
  heads_first = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
  out, _ = flash.attention(
    *heads_first, ids, scale, implementation, given or options_lib.AttentionOptions()
  )
  return jnp.swapaxes(out, 1, 2)
