"""Pallas TPU kernel of flash attention, forward: output and log-sum-exp.

Dao, "FlashAttention-2" (arXiv:2307.08691), over the live block pairs that `schedule` lists.  Grid
(query heads, items): the queries of an outer block stay in VMEM with a running maximum, sum and
weighted values, while its key blocks pass by.

A key block whose every part is fully visible runs as one straight piece of code without a mask, in
which the products of one part hide the exponentials of another.  Any other block goes by two parts at
a time and skips what is dead.  Too short for their parts to hide each other, twos go by strips of
queries, which do.  Queries of one segment are told from the keys' positions alone what they see.

The running sum is kept for each of 128 lanes apart and added up once, at the end.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.attention import schedule as schedule_lib
from kernels.attention import tile_math

NAME = "flash_attention_forward"
# Queries of a strip.
_STRIP = 256


def _kernel(
  blocks_ref,
  parts_ref,
  q_ref,
  q_ids_ref,
  k_ref,
  v_ref,
  kv_ids_ref,
  out_ref,
  lse_ref,
  top_ref,
  total_ref,
  acc_ref,
  q_columns_ref,
  own_ref,
  *,
  part: int,
  exponential: tile_math.Exponential,
  known: schedule_lib.Known | None,
):
  del blocks_ref  # the index maps read it
  item = schedule_lib.read(parts_ref, pl.program_id(1), known)
  size, dim = q_ref.shape
  count = k_ref.shape[0] // part
  kinds, full = item.kind_of(0, count), schedule_lib.all_full(count)

  @pl.when(item.first)
  def _():
    top_ref[...] = jnp.full_like(top_ref, tile_math.MASKED)
    total_ref[...] = jnp.zeros_like(total_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    for i in range(2):
      q_columns_ref[i] = tile_math.column(q_ids_ref[i : i + 1])

  def step(rows, keys, kind: int):
    scores = tile_math.dot(q_ref[rows], k_ref[keys], tile_math.NT)
    if kind != schedule_lib.FULL:
      segment, position = (tile_math.tiled(q_columns_ref[i, rows], part) for i in range(2))
      if kind == schedule_lib.ONE:
        sees = position >= own_ref[:, keys]
      else:
        sees = (segment == kv_ids_ref[0:1, keys]) & (position >= kv_ids_ref[1:2, keys])
      scores = jnp.where(sees, scores, tile_math.MASKED)
    old = top_ref[rows]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    weights = exponential(scores - tile_math.tiled(new, part))
    shrink = exponential(old - new)
    lanes = [weights[:, i : i + tile_math.LANES] for i in range(0, part, tile_math.LANES)]
    total_ref[rows] = total_ref[rows] * shrink + sum(lanes[1:], lanes[0])
    top_ref[rows] = new
    add = tile_math.dot(weights.astype(v_ref.dtype), v_ref[keys], tile_math.NN)
    acc_ref[rows] = acc_ref[rows] * tile_math.tiled(shrink, dim) + add

  @tile_math.when(kinds == full)
  def _():
    for i in range(count):
      step(slice(None), slice(i * part, (i + 1) * part), schedule_lib.FULL)

  @tile_math.when((kinds != full) & (kinds != 0))
  def _():
    # Keys of other segments lie behind every query.
    own = kv_ids_ref[0:1] == q_ids_ref[0:1, 0:1]
    own_ref[...] = jnp.where(own, kv_ids_ref[1:2], jnp.iinfo(jnp.int32).max)
    some = 2 - count % 2
    strip = _STRIP if size % _STRIP == 0 else size

    def several(start, kind: int):
      for j in range(some):
        keys = pl.ds(pl.multiple_of((start + j) * part, part), part)
        for row in range(0, size, strip):
          step(slice(row, row + strip), keys, kind)

    def one(i, carry):
      here = item.kind_of(i * some, some)
      one = schedule_lib.of_one_segment(here, some)
      tile_math.when(one != 0)(lambda: several(i * some, schedule_lib.ONE))
      tile_math.when((here != 0) & (one == 0))(lambda: several(i * some, schedule_lib.PARTIAL))
      return carry

    lax.fori_loop(0, count // some, one, 0)

  @pl.when(item.last)
  def _():
    top = top_ref[...]
    # A query that saw nothing added only masked scores, each as if it were the greatest.
    seen = top > tile_math.MASKED / 2
    total = jnp.broadcast_to(
      jnp.sum(total_ref[...], axis=1, keepdims=True), (size, tile_math.LANES)
    )
    inverse = jnp.where(seen, 1.0 / total, 0.0)
    out_ref[...] = (acc_ref[...] * tile_math.tiled(inverse, dim)).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(seen, top * exponential.scale + jnp.log(total), 0.0).T[:1]


def forward(
  q: Float[Array, "B nq S d"],
  k: Float[Array, "B nkv T d"],
  v: Float[Array, "B nkv T d"],
  q_ids: Int[Array, "B 2 S"],
  kv_ids: Int[Array, "B 2 T"],
  items: schedule_lib.Schedule,
  *,
  exponential: tile_math.Exponential,
  block_q: int,
  block_kv: int,
  part: int,
  interpret: bool = False,
  known: schedule_lib.Known | None = None,
) -> tuple[Float[Array, "B nq S d"], Float[Array, "B nq S"]]:
  """softmax(scale q k^T) v over visible keys, and the natural log of the sum of exponentials.

  Args:
    q: Queries; a head reads key head h // (nq / nkv).
    k: Keys.
    v: Values.
    q_ids: Segment ids and positions of the queries.
    kv_ids: Of the keys.
    items: Blocks of queries outside, blocks of keys inside, of `block_q` and `block_kv`.
    exponential: Of a score.
    block_q: Queries per block; divides S.
    block_kv: Keys per block; divides T.
    part: Keys per product; divides `block_kv`.
    interpret: Run the body without a TPU.
    known: The items, if the compiler is to know them.

  Returns:
    Output in q's dtype, log-sum-exp in float32; both 0 for a query that sees nothing.
  """
  batch, heads, length, dim = q.shape
  group = heads // k.shape[1]

  def place(which):
    def index(h, w, blocks_ref, _):
      row, outer, inner = schedule_lib.where(blocks_ref, w, known)
      return {
        "q": (row, h, outer, 0),
        # `//` would ask for the device that the program is lowered on.
        "kv": (row, lax.div(h, group), inner, 0),
        "q_ids": (row, 0, outer),
        "kv_ids": (row, 0, inner),
        "lse": (row, h, 0, outer),
      }[which]

    return index

  q_spec = pl.BlockSpec((None, None, block_q, dim), place("q"))
  kv_spec = pl.BlockSpec((None, None, block_kv, dim), place("kv"))
  call = pl.pallas_call(
    functools.partial(_kernel, part=part, exponential=exponential, known=known),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(heads, items.count if known is None else known.outer * known.inner),
      in_specs=[
        q_spec,
        pl.BlockSpec((None, 2, block_q), place("q_ids")),
        kv_spec,
        kv_spec,
        pl.BlockSpec((None, 2, block_kv), place("kv_ids")),
      ],
      out_specs=[q_spec, pl.BlockSpec((None, None, 1, block_q), place("lse"))],
      scratch_shapes=[
        pltpu.VMEM((block_q, tile_math.LANES), jnp.float32),
        pltpu.VMEM((block_q, tile_math.LANES), jnp.float32),
        pltpu.VMEM((block_q, dim), jnp.float32),
        pltpu.VMEM((2, block_q, tile_math.LANES), jnp.int32),
        pltpu.VMEM((1, block_kv), jnp.int32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=tile_math.VMEM_BYTES
    ),
    cost_estimate=tile_math.declared_cost(2, q, k, 2 * q.nbytes + k.nbytes + v.nbytes),
    interpret=interpret,
    name=NAME,
  )
  out, lse = call(items.blocks, items.parts, q, q_ids, k, v, kv_ids)
  return out, lse[:, :, 0]
