"""Pallas TPU kernel of flash attention, backward: all three gradients from one set of scores.

With P = exp(S - lse) and di = sum(out * d_out) of a query (Dao, "FlashAttention-2",
arXiv:2307.08691):

  dV = P^T dO,   dS = P (dO V^T - di),   dK = dS^T Q,   dQ = dS K

Five products a pair of blocks; kernels for dQ and for dK, dV apart would take seven.  Grid (key
heads, items, query heads of the key head): a key block and its float32 gradients stay in VMEM while
every query that sees it passes by.  A query's gradient gets a part from each of its key blocks:
those are added up in float32 in HBM, by copies that run beside the products.  A copy is read only
after every earlier one was written, so two items in a row may name the same queries.

Scores are held transposed, keys on sublanes: log-sum-exp and di are then rows, and only dQ contracts
over sublanes.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.attention import schedule as schedule_lib
from kernels.attention import tile_math

NAME = "flash_attention_backward"


def _kernel(
  blocks_ref,
  parts_ref,
  q_ref,
  d_out_ref,
  lse_ref,
  inner_ref,
  q_ids_ref,
  k_ref,
  v_ref,
  kv_ids_ref,
  zeros_ref,
  dk_ref,
  dv_ref,
  dq_ref,
  dk_acc_ref,
  dv_acc_ref,
  kv_columns_ref,
  dq_part_ref,
  dq_old_ref,
  read_semaphore,
  write_semaphore,
  *,
  part: int,
  exponential: tile_math.Exponential,
  known: schedule_lib.Known | None,
):
  del zeros_ref  # where dq_ref begins
  key_head, index, member = (pl.program_id(i) for i in range(3))
  items, group = pl.num_programs(1), pl.num_programs(2)
  number = (key_head * items + index) * group + member
  item = schedule_lib.read(parts_ref, index, known)
  row, key_block, query_block = schedule_lib.where(blocks_ref, index, known)
  size, count = q_ref.shape[0], k_ref.shape[0] // part

  slot = number % 2
  part_ref = dq_part_ref.at[slot]
  home = dq_ref.at[
    key_block % dq_ref.shape[0],
    row,
    key_head * group + member,
    pl.ds(pl.multiple_of(query_block * size, size), size),
  ]
  read = pltpu.make_async_copy(home, dq_old_ref, read_semaphore)
  write = pltpu.make_async_copy(part_ref, home, write_semaphore)
  # Any write has the same size, so this waits for the one of the step before.
  written = pltpu.make_async_copy(dq_part_ref.at[1 - slot], home, write_semaphore)

  @pl.when(item.first & (member == 0))
  def _():
    dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
    dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)
    for i in range(2):
      kv_columns_ref[i] = tile_math.column(kv_ids_ref[i : i + 1])

  @pl.when(number == 0)
  def _():
    # Home holds zeros still: a write of zeros for the first wait to wait for.
    dq_part_ref[1] = jnp.zeros_like(part_ref)
    written.start()

  part_ref[...] = jnp.zeros_like(part_ref)

  def step(keys, masked: bool):
    q, k, d_out = q_ref[...], k_ref[keys], d_out_ref[...]
    scores = exponential.exponent(tile_math.dot(k, q, tile_math.NT))
    if masked:
      segment, position = (tile_math.tiled(kv_columns_ref[i, keys], size) for i in range(2))
      sees = (segment == q_ids_ref[0:1]) & (position <= q_ids_ref[1:2])
      scores = jnp.where(sees, scores, tile_math.MASKED)
    weights = exponential.power(scores - lse_ref[...])
    d_weights = tile_math.dot(v_ref[keys], d_out, tile_math.NT)
    dv_acc_ref[keys] += tile_math.dot(weights.astype(q.dtype), d_out, tile_math.NN)
    d_scores = (weights * (d_weights - inner_ref[...])).astype(q.dtype)
    dk_acc_ref[keys] += tile_math.dot(d_scores, q, tile_math.NN)
    part_ref[...] += tile_math.dot(d_scores, k, tile_math.TN)

  # Parts go by twos: the products of one hide the exponentials of the other.
  some = 2 - count % 2
  full = schedule_lib.all_full(some)

  def several(start, masked: bool):
    for i in range(some):
      step(pl.ds(pl.multiple_of((start + i) * part, part), part), masked)

  def one(i, carry):
    kinds = item.kind_of(i * some, some)
    tile_math.when(kinds == full)(lambda: several(i * some, False))
    tile_math.when((kinds != full) & (kinds != 0))(lambda: several(i * some, True))

    @pl.when(i == 0)
    def _():
      # By now the last step's gradient is written; the rest of this step hides the read.
      written.wait()
      read.start()

    return carry

  lax.fori_loop(0, count // some, one, 0)
  read.wait()
  part_ref[...] += dq_old_ref[...]
  write.start()

  @pl.when(item.last & (member == group - 1))
  def _():
    dk_ref[...] = (dk_acc_ref[...] * exponential.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)

  @pl.when((key_head == pl.num_programs(0) - 1) & (index == items - 1) & (member == group - 1))
  def _():
    write.wait()


def backward(
  q: Float[Array, "B nq S d"],
  k: Float[Array, "B nkv T d"],
  v: Float[Array, "B nkv T d"],
  d_out: Float[Array, "B nq S d"],
  lse: Float[Array, "B nq S"],
  inner: Float[Array, "B nq S"],
  q_ids: Int[Array, "B 2 S"],
  kv_ids: Int[Array, "B 2 T"],
  items: schedule_lib.Schedule,
  *,
  exponential: tile_math.Exponential,
  block_q: int,
  block_kv: int,
  part: int,
  buffers: int,
  interpret: bool = False,
  known: schedule_lib.Known | None = None,
) -> tuple[Float[Array, "n B nq S d"], Float[Array, "B nkv T d"], Float[Array, "B nkv T d"]]:
  """Gradients of queries, keys and values.

  Args:
    q: Queries, as the forward kernel took them.
    k: Keys.
    v: Values.
    d_out: Gradient of the output.
    lse: Log-sum-exp, natural.
    inner: sum(out * d_out) over channels.
    q_ids: Segment ids and positions of the queries.
    kv_ids: Of the keys.
    items: Blocks of keys outside, blocks of queries inside.
    exponential: Of a score.
    block_q: Queries per block; divides S.
    block_kv: Keys per block; divides T.
    part: Keys per product; divides `block_kv`.
    buffers: Partial sums of the queries' gradient; key block j adds to buffer j mod `buffers`.
    interpret: Run the body without a TPU.
    known: The items, if the compiler is to know them.

  Returns:
    The queries' gradient in float32, to be summed over `buffers` and multiplied by the scale; the
    keys' and values' gradients in their dtype.
  """
  batch, heads, length, dim = q.shape
  kv_heads = k.shape[1]
  group = heads // kv_heads

  def place(which):
    def index(key_head, w, member, blocks_ref, _):
      row, outer, inner = schedule_lib.where(blocks_ref, w, known)
      head = key_head * group + member
      return {
        "q": (row, head, inner, 0),
        "q_row": (row, head, 0, inner),
        "q_ids": (row, 0, inner),
        "kv": (row, key_head, outer, 0),
        "kv_ids": (row, 0, outer),
      }[which]

    return index

  q_spec = pl.BlockSpec((None, None, block_q, dim), place("q"))
  row_spec = pl.BlockSpec((None, None, 1, block_q), place("q_row"))
  kv_spec = pl.BlockSpec((None, None, block_kv, dim), place("kv"))
  in_place = pl.BlockSpec(memory_space=pltpu.HBM)
  dq_shape = (buffers, *q.shape)
  call = pl.pallas_call(
    functools.partial(_kernel, part=part, exponential=exponential, known=known),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(kv_heads, items.count if known is None else known.outer * known.inner, group),
      in_specs=[
        q_spec,
        q_spec,
        row_spec,
        row_spec,
        pl.BlockSpec((None, 2, block_q), place("q_ids")),
        kv_spec,
        kv_spec,
        pl.BlockSpec((None, 2, block_kv), place("kv_ids")),
        in_place,
      ],
      out_specs=[kv_spec, kv_spec, in_place],
      scratch_shapes=[
        pltpu.VMEM((block_kv, dim), jnp.float32),
        pltpu.VMEM((block_kv, dim), jnp.float32),
        pltpu.VMEM((2, block_kv, tile_math.LANES), jnp.int32),
        pltpu.VMEM((2, block_q, dim), jnp.float32),
        pltpu.VMEM((block_q, dim), jnp.float32),
        pltpu.SemaphoreType.DMA(()),
        pltpu.SemaphoreType.DMA(()),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct(k.shape, k.dtype),
      jax.ShapeDtypeStruct(v.shape, v.dtype),
      jax.ShapeDtypeStruct(dq_shape, jnp.float32),
    ],
    input_output_aliases={10: 2},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=tile_math.VMEM_BYTES
    ),
    cost_estimate=tile_math.declared_cost(
      5, q, k, 2 * (q.nbytes + k.nbytes + v.nbytes) + 2 * 4 * math.prod(dq_shape)
    ),
    interpret=interpret,
    name=NAME,
  )
  lse = exponential.from_natural(lse)
  operands = (q, d_out, lse[:, :, None], inner[:, :, None], q_ids, k, v, kv_ids)
  dk, dv, dq = call(items.blocks, items.parts, *operands, jnp.zeros(dq_shape, jnp.float32))
  return dq, dk, dv
