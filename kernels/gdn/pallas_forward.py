"""Pallas TPU kernel of the chunked gated delta rule, forward.

Grid (rows, groups of key heads, chunks), chunks in order: the float32 states of the group's value
heads stay in VMEM from chunk to chunk.  q, k, v and the output are read and written as the
projections lay them out, tokens on sublanes and heads side by side on lanes.

The same body, run on values of zero from the identity, multiplies the transitions of the chunks:
that is the affine pass of context parallelism (`transition_product`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels.gdn import flops, head_groups, layout, tile_math

# Groups of heads between the update of a state and the end of its chunk: fewer do not hide the
# products' latency, more keep too much for the registers.
BEHIND = 4


class Saved(NamedTuple):
  """What the backward pass reads of the forward pass.

  Attributes:
    states: State before each chunk; the value heads of a key head side by side.
    inverses: T = (I + A)^-1 of each chunk, packed as in `tile_math`.
  """

  states: Float[Array, "B N nk dk heads*dv"]
  inverses: Float[Array, "B N nk packs C pack*C"]


def kernel_name(name: str, group: int) -> str:
  """Name of a kernel in compiled programs."""
  return f"gdn_{name}_g{group}"


def _kernel(*given, shape: layout.Shape, exact: bool, has_values, want_output, want_saved, dv):
  refs = iter(given)
  take = lambda present: next(refs) if present else None
  columns_ref, rows_ref, select_ref, block_ref, q_ref, k_ref = (next(refs) for _ in range(6))
  v_ref, start_ref = take(has_values), next(refs)
  out_ref, final_ref = take(want_output), next(refs)
  states_ref, inverses_ref, state_ref = take(want_saved), take(want_saved), next(refs)

  heads, pack, tokens = shape.heads, shape.pack, shape.chunk
  chunk = tile_math.Chunk(tokens, pack, tile_math.Products(exact))
  products, split = chunk.products, chunk.products.split
  index = pl.program_id(2)
  dk = q_ref.shape[2] // shape.group
  packs = heads // pack

  @pl.when(index == 0)
  def _():
    state_ref[...] = start_ref[0]

  gates = tile_math.read_gates(columns_ref[0, 0, 0], shape.group_heads)
  segment_row = rows_ref[0, 0, 0, shape.group_heads // pack : shape.group_heads // pack + 1]
  real = gates.real > 0
  row_at, column_at = chunk.positions()
  strict = row_at > column_at
  # Each stage runs over all heads of the group before the next: they are independent, and one
  # head's products hide the latency of another's.
  groups = range(shape.group)
  every = [(group, t) for group in groups for t in range(packs)]
  indices = [[group * heads + t * pack + i for i in range(pack)] for group, t in every]
  at = lambda n: slice(indices[n][0] * dv, (indices[n][-1] + 1) * dv)
  width = lambda t: slice(t * pack * dv, (t + 1) * pack * dv)
  numbered = list(enumerate(every))

  keys = []
  for group in groups:
    lanes = slice(group * dk, (group + 1) * dk)
    q = jnp.where(real, q_ref[0, :, lanes], 0)
    k = jnp.where(real, k_ref[0, :, lanes], 0)
    keys.append(tile_math.key_head(chunk, q, k))
  states = [state_ref[group] for group in groups]
  reads = [products(keys[group].both, split(states[group])) for group in groups]

  decays = [
    chunk.decay(gates, indices[n], rows_ref[0, 0, 0, n : n + 1], segment_row) for n, _ in numbered
  ]
  columns = tile_math.head_columns(gates, keys, heads)
  # What is needed early is spread by the matrix unit, what is needed late by the cross-lane unit:
  # each has time to spare then.
  betas, seen_scales = chunk.spread(columns[:2], select_ref[...])
  wide = lambda x, n: chunk.columns([x[:, h : h + 1] for h in indices[n]], dv)
  below = [jnp.where(strict, key.kk, 0.0) for key in keys]
  lower = [chunk.narrow(betas[:, at(n)]) * below[group] * decays[n] for n, (group, _) in numbered]
  inverses, inverse_pieces = chunk.inverses(lower, block_ref[...])

  def update(n):
    group, t = every[n]
    x = -seen_scales[:, at(n)] * reads[group][:tokens, width(t)]
    if has_values:
      x += jnp.where(real, v_ref[0, :, at(n)].astype(jnp.float32), 0.0)
    x = split(betas[:, at(n)] * x)
    return products(inverse_pieces[n], chunk.diagonal(x))

  def finish(group, updates):
    mine = [(n, t) for n, (owner, t) in numbered if owner == group]
    if want_output:
      for (n, t), u in zip(mine, updates):
        out = products(keys[group].qk * decays[n], chunk.diagonal(split(u)))
        out += wide(columns[2], n) * reads[group][tokens:, width(t)]
        out_ref[0, :, at(n)] = out.astype(out_ref.dtype)
    writing = [wide(columns[3], n) * u for (n, _), u in zip(mine, updates)]
    writing = writing[0] if packs == 1 else jnp.concatenate(writing, axis=1)
    written = products(keys[group].keys, split(writing), tile_math.COLS_COLS)
    for j in range(heads):
      whole = gates.from_start[tokens - 1 :, group * heads + j : group * heads + j + 1]
      lanes = slice(j * dv, (j + 1) * dv)
      state_ref[group, :, lanes] = whole * states[group][:, lanes] + written[:, lanes]

  # A group's results are written while later groups' updates are multiplied: fewer wait in VMEM.
  updated = []
  for group in groups:
    updated.append([update(n) for n, (owner, _) in numbered if owner == group])
    if group >= BEHIND:
      finish(group - BEHIND, updated[group - BEHIND])
  for group in groups[-BEHIND:]:
    finish(group, updated[group])

  if want_saved:
    for group in groups:
      states_ref[0, 0, group] = states[group]
    for n, (group, t) in numbered:
      inverses_ref[0, 0, group, t] = inverses[n]

  @pl.when(index == pl.num_programs(2) - 1)
  def _():
    final_ref[0] = state_ref[...]


def declared_cost(kind, shape: layout.Shape, arrays, *, tokens: int, dk: int, dv: int):
  """What a kernel tells the compiler: FLOPs by `flops.per_token`, exponentials, bytes once each."""
  heads = shape.key_heads * shape.heads
  sizes = {"chunk": shape.chunk, "key_heads": shape.key_heads, "value_heads": heads}
  return pl.CostEstimate(
    flops=round(tokens * flops.per_token(kind, **sizes, dk=dk, dv=dv)),
    transcendentals=tokens * heads * shape.chunk,
    bytes_accessed=sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays),
  )


def _run(q, k, v, gates, start, *, shape, want_output, want_saved, interpret, name):
  batch, length, width = q.shape
  dk, dv = width // shape.key_heads, start.shape[-1] // shape.heads
  chunks, group = length // shape.chunk, shape.group
  packs = shape.heads // shape.pack
  tokens = lambda lanes: pl.BlockSpec((1, shape.chunk, lanes), lambda b, h, n: (b, n, h))
  per_chunk = lambda count, *tail: pl.BlockSpec(
    (1, 1, count, *tail), lambda b, h, n: (b, n, h) + (0,) * len(tail)
  )
  state = pl.BlockSpec((1, group, dk, shape.heads * dv), lambda b, h, n: (b, h, 0, 0))
  key_tokens, value_tokens = tokens(group * dk), tokens(shape.group_heads * dv)

  select = layout.selector(shape, dv, k.dtype)
  blocks = tile_math.block_selector(shape.chunk, shape.pack, k.dtype)
  everywhere = lambda x: pl.BlockSpec(x.shape, lambda b, h, n: (0,) * x.ndim)
  operands = [gates.columns, gates.rows, select, blocks, q, k]
  in_specs = [
    per_chunk(1, shape.chunk, layout.LANES),
    per_chunk(1, shape.rows, shape.pack * shape.chunk),
    everywhere(select),
    everywhere(blocks),
    key_tokens,
    key_tokens,
  ]
  if v is not None:
    operands.append(v)
    in_specs.append(value_tokens)
  operands.append(start)
  in_specs.append(state)

  outputs = []
  if want_output:
    outputs.append((jax.ShapeDtypeStruct(v.shape, v.dtype), value_tokens))
  outputs.append((jax.ShapeDtypeStruct(start.shape, jnp.float32), state))
  if want_saved:
    for tail in ((dk, shape.heads * dv), (packs, shape.chunk, shape.pack * shape.chunk)):
      struct = jax.ShapeDtypeStruct((batch, chunks, shape.key_heads, *tail), jnp.float32)
      outputs.append((struct, per_chunk(group, *tail)))
  return pl.pallas_call(
    functools.partial(
      _kernel,
      shape=shape,
      exact=q.dtype == jnp.float32,
      has_values=v is not None,
      want_output=want_output,
      want_saved=want_saved,
      dv=dv,
    ),
    grid=(batch, shape.groups, chunks),
    in_specs=in_specs,
    out_shape=tuple(struct for struct, _ in outputs),
    out_specs=tuple(spec for _, spec in outputs),
    scratch_shapes=[pltpu.VMEM((group, dk, shape.heads * dv), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=head_groups.VMEM_BYTES,
    ),
    cost_estimate=declared_cost(
      "forward" if v is not None else "m_scan",
      shape,
      [*operands, *(struct for struct, _ in outputs)],
      tokens=batch * length,
      dk=dk,
      dv=dv,
    ),
    interpret=interpret,
    name=kernel_name(name, group),
  )(*operands)


def forward(
  q: Float[Array, "B S nk*dk"],
  k: Float[Array, "B S nk*dk"],
  v: Float[Array, "B S nv*dv"],
  gates: layout.Gates,
  start: Float[Array, "B nk dk heads*dv"],
  *,
  shape: layout.Shape,
  want_output: bool = True,
  want_saved: bool = False,
  interpret: bool,
):
  """Outputs, final state and what the backward pass reads.

  Args:
    q: Queries before the L2 norm; whole chunks.
    k: Keys before the L2 norm.
    v: Values.
    gates: From `layout.pack_gates`.
    start: State before the row, value heads of a key head side by side.
    shape: Static shape.
    want_output: False leaves the outputs out: (None, final, saved).
    want_saved: False leaves the saved arrays out: (out, final, None).
    interpret: Runs the kernel's body without a TPU.
  """
  results = list(
    _run(
      q,
      k,
      v,
      gates,
      start,
      shape=shape,
      want_output=want_output,
      want_saved=want_saved,
      interpret=interpret,
      name="forward" if want_output else "states",
    )
  )
  out = results.pop(0) if want_output else None
  return out, results[0], Saved(*results[1:]) if want_saved else None


def transition_product(
  k: Float[Array, "B S nk*dk"],
  gates: layout.Gates,
  *,
  shape: layout.Shape,
  interpret: bool,
) -> Float[Array, "B nk dk heads*dk"]:
  """M of a run of chunks: the state after it is M (state before it) + H.

  The transitions are folded in order with M in VMEM ("m scan").  M is exactly zero once a segment
  boundary lies in the run.

  Args:
    k: Keys before the L2 norm.
    gates: From `layout.pack_gates`.
    shape: Static shape.
    interpret: Runs the kernel's body without a TPU.
  """
  batch, _, width = k.shape
  dk = width // shape.key_heads
  eye = jnp.tile(jnp.eye(dk, dtype=jnp.float32), (1, shape.heads))
  start = jnp.broadcast_to(eye, (batch, shape.key_heads, *eye.shape))
  (final,) = _run(
    k,
    k,
    None,
    gates,
    start,
    shape=shape,
    want_output=False,
    want_saved=False,
    interpret=interpret,
    name="m_scan",
  )
  return final
