"""Pallas TPU kernel of the chunked gated delta rule, backward.

Grid (rows, groups of key heads, chunks), chunks from last to first: the gradient of the states
stays in VMEM.  The states before each chunk and the inverses come from the forward pass.  With
S and dS' the states' values and gradients around a chunk, per value head:

    X = B (V - D K S);  U = T X;  P = (Q K^T) o Gam
    dU = P^T dO + K~ dS';  dX = T^T dU;  dA = -strictly lower (dX U^T);  dP = lower (dO U^T)
    dS = exp(b_C) dS' + (D Q)^T dO - (B D K)^T dX;  dV = B dX
    E = dA o Gam, F = dP o Gam
    dQ = F K + D dO S^T
    dK = F^T Q + B E K + (B E)^T K - B D dX S^T + exp(b_C - b) U dS'^T
    dbeta = rowsum(dX o (V - D K S)) + rowsum(E o K K^T)
    Y = dA o A + dP o P;  z = rowsum(U o K~ dS')
    db = rowsum(Y) - colsum(Y) + rowsum(dO o D Q S) - rowsum(dX o B D K S) - z
    db_C += sum z + exp(b_C) <S, dS'>

A = strictly lower (B K K^T o Gam), T = (I + A)^-1, B = diag(beta), D = diag(exp(b)),
K~ = diag(exp(b_C - b)) K, all masked by segment.  Terms that several heads of a key head share are
added before they are multiplied.  With the states left out, the same body carries dS alone: the
backward affine pass of context parallelism (`state_gradient`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels.gdn import head_groups, layout, pallas_forward, tile_math


def _l2_gradient(x, norm, d):
  """Gradient of x from `norm` times that of its normalised value; norm is 1 / sqrt(x.x + eps)."""
  unit = x.astype(jnp.float32) * norm
  return d - unit * jnp.sum(unit * d, axis=1, keepdims=True)


def _joined(parts, axis=1):
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _kernel(*given, shape: layout.Shape, exact: bool, full: bool, dv):
  refs = iter(given)
  take = lambda present: next(refs) if present else None
  columns_ref, rows_ref, select_ref, q_ref, k_ref = (next(refs) for _ in range(5))
  v_ref, d_out_ref, states_ref = take(full), next(refs), take(full)
  inverses_ref, d_final_ref = next(refs), next(refs)
  dq_ref, dk_ref, dv_ref, d_columns_ref, d_rows_ref = (take(full) for _ in range(5))
  d_start_ref, d_state_ref = next(refs), next(refs)

  heads, pack, tokens = shape.heads, shape.pack, shape.chunk
  chunk = tile_math.Chunk(tokens, pack, tile_math.Products(exact))
  products, split = chunk.products, chunk.products.split
  dk = q_ref.shape[2] // shape.group
  packs = heads // pack

  @pl.when(pl.program_id(2) == 0)
  def _():
    d_state_ref[...] = d_final_ref[0]

  gates = tile_math.read_gates(columns_ref[0, 0, 0], shape.group_heads)
  segment_at = shape.group_heads // pack
  segment_row = rows_ref[0, 0, 0, segment_at : segment_at + 1]
  real = gates.real > 0
  row_at, column_at = chunk.positions()
  strict = row_at > column_at
  # Each stage runs over all heads of the group before the next, as in the forward kernel.
  groups = range(shape.group)
  every = [(group, t) for group in groups for t in range(packs)]
  numbered = list(enumerate(every))
  indices = [[group * heads + t * pack + i for i in range(pack)] for group, t in every]
  at = lambda n: slice(indices[n][0] * dv, (indices[n][-1] + 1) * dv)
  width = lambda t: slice(t * pack * dv, (t + 1) * pack * dv)
  of_group = lambda parts, group: _joined(parts[group * packs : (group + 1) * packs])
  whole = lambda h: gates.from_start[tokens - 1 :, h : h + 1]

  keys, q_norms, queries = [], [], []
  for group in groups:
    lanes = slice(group * dk, (group + 1) * dk)
    q = jnp.where(real, q_ref[0, :, lanes], 0)
    k = jnp.where(real, k_ref[0, :, lanes], 0)
    keys.append(tile_math.key_head(chunk, q, k))
    queries.append((q, k))
    q_norms.append(keys[-1].q_norm * keys[-1].scale)
  d_states = [d_state_ref[group] for group in groups]
  d_state_pieces = [split(d) for d in d_states]
  d_written = [products(keys[group].keys, d_state_pieces[group]) for group in groups]
  if full:
    states = [states_ref[0, 0, group] for group in groups]
    state_pieces = [split(state) for state in states]
    reads = [products(keys[group].both, state_pieces[group]) for group in groups]

  decays = [
    chunk.decay(gates, indices[n], rows_ref[0, 0, 0, n : n + 1], segment_row) for n, _ in numbered
  ]
  d_outs = [jnp.where(real, d_out_ref[0, :, at(n)], 0) for n, _ in numbered]
  inverses = [split(inverses_ref[0, 0, group, t]) for group, t in every]
  columns = tile_math.head_columns(gates, keys, heads)
  scales = [[x[:, at(n)] for n, _ in numbered] for x in chunk.spread(columns, select_ref[...])]
  betas, seen_scales, out_scales, end_scales = scales
  d_written = [end_scales[n] * d_written[group][:, width(t)] for n, (group, t) in numbered]
  du = [
    chunk.transposed(split(keys[group].qk * decays[n]), split(d_outs[n])) + d_written[n]
    for n, (group, _) in numbered
  ]
  dx = [chunk.transposed(inverses[n], split(du[n])) for n, _ in numbered]

  beta_dx = [betas[n] * dx[n] for n, _ in numbered]
  d_reads = [out_scales[n] * d_outs[n].astype(jnp.float32) for n, _ in numbered]
  d_seen = [-seen_scales[n] * beta_dx[n] for n, _ in numbered]
  d_both = [
    split(jnp.concatenate([of_group(d_seen, group), of_group(d_reads, group)], axis=0))
    for group in groups
  ]
  d_before = [products(keys[group].both, d_both[group], tile_math.COLS_COLS) for group in groups]
  for group in groups:
    for j in range(heads):
      lanes = slice(j * dv, (j + 1) * dv)
      kept = whole(group * heads + j) * d_states[group][:, lanes]
      d_state_ref[group, :, lanes] = kept + d_before[group][:, lanes]

  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    d_start_ref[0] = d_state_ref[...]

  if not full:
    return

  for n, _ in numbered:
    dv_ref[0, :, at(n)] = beta_dx[n].astype(dv_ref.dtype)
  seen = [seen_scales[n] * reads[group][:tokens, width(t)] for n, (group, t) in numbered]
  residuals = [
    jnp.where(real, v_ref[0, :, at(n)].astype(jnp.float32), 0.0) - seen[n] for n, _ in numbered
  ]
  updates = [
    products(inverses[n], chunk.diagonal(split(betas[n] * residuals[n]))) for n, _ in numbered
  ]
  # Gradients of A and P: one product, as both have the updates on the right.
  between = [
    products(
      tile_math.over(split(-dx[n]), split(d_outs[n])),
      chunk.diagonal(split(updates[n])),
      tile_math.ROWS_ROWS,
    )
    for n, _ in numbered
  ]
  e = [jnp.where(strict, between[n][:tokens], 0.0) * decays[n] for n, _ in numbered]
  f = [between[n][tokens:] * decays[n] for n, _ in numbered]
  narrow_betas = [chunk.narrow(betas[n]) for n, _ in numbered]
  beta_e = [narrow_betas[n] * e[n] for n, _ in numbered]
  y = [beta_e[n] * keys[g].kk + f[n] * keys[g].qk for n, (g, _) in numbered]
  e_kk = [e[n] * keys[group].kk for n, (group, _) in numbered]
  z = [updates[n] * d_written[n] for n, _ in numbered]
  through = [
    d_reads[n] * reads[group][tokens:, width(t)] - beta_dx[n] * seen[n] - z[n]
    for n, (group, t) in numbered
  ]
  d_beta = [dx[n] * residuals[n] for n, _ in numbered]

  lane = jax.lax.broadcasted_iota(jnp.int32, (tokens, layout.LANES), 1)
  d_columns = jnp.zeros((tokens, layout.LANES), jnp.float32)
  for n, (group, _) in numbered:
    for i, h in enumerate(indices[n]):
      lanes = slice((h - group * heads) * dv, (h - group * heads + 1) * dv)
      kept = whole(h) * jnp.sum(
        states[group][:, lanes] * d_states[group][:, lanes], 0, keepdims=True
      )
      last = jnp.sum(chunk.halves(z[n])[i], axis=0, keepdims=True) + kept
      of_b = chunk.head_sum(through[n], y[n], i, last)
      of_beta = chunk.head_sum(d_beta[n], e_kk[n], i)
      d_columns = jnp.where(lane == h, of_b, d_columns)
      d_columns = jnp.where(lane == shape.group_heads + h, of_beta, d_columns)
  d_columns_ref[0, 0, 0] = d_columns
  d_rows = [-jnp.sum(y[n], axis=0, keepdims=True) for n, _ in numbered]
  d_rows.append(jnp.zeros((shape.rows - len(d_rows), d_rows[0].shape[1]), jnp.float32))
  d_rows_ref[0, 0, 0] = jnp.concatenate(d_rows, axis=0)

  fold = lambda parts, group: sum(
    half for x in parts[group * packs : (group + 1) * packs] for half in chunk.halves(x)
  )

  def towards_keys(group):
    ends = split(of_group([end_scales[n] * updates[n] for n, _ in numbered], group))
    by_states = products(d_both[group], state_pieces[group], tile_math.ROWS_ROWS)
    return by_states, products(ends, d_state_pieces[group], tile_math.ROWS_ROWS)

  def finish(group, by_states, through_u):
    head, (q, k) = keys[group], queries[group]
    square = jnp.concatenate([fold(beta_e, group), fold(f, group)], axis=0)
    k_row = head.k_norm_row[:, :tokens]
    norms = jnp.concatenate([head.k_norm, q_norms[group]], axis=0)
    forward = norms * products(square * k_row, head.keys)
    back = head.k_norm * products(square * norms, head.both, tile_math.COLS_COLS)
    d_query = forward[tokens:] + by_states[tokens:]
    d_key = forward[:tokens] + back + by_states[:tokens] + through_u
    lanes = slice(group * dk, (group + 1) * dk)
    dq_ref[0, :, lanes] = _l2_gradient(q, head.q_norm, d_query).astype(dq_ref.dtype)
    dk_ref[0, :, lanes] = _l2_gradient(k, head.k_norm, d_key).astype(dk_ref.dtype)

  waiting = []
  for group in groups:
    waiting.append(towards_keys(group))
    if group >= pallas_forward.BEHIND:
      finish(group - pallas_forward.BEHIND, *waiting[group - pallas_forward.BEHIND])
  for group in groups[-pallas_forward.BEHIND :]:
    finish(group, *waiting[group])


def _run(q, k, v, gates, d_out, states, inverses, d_final, *, shape, interpret):
  full = v is not None
  batch, length, width = q.shape
  dk, dv = width // shape.key_heads, d_final.shape[-1] // shape.heads
  chunks, group = length // shape.chunk, shape.group
  at = lambda n: chunks - 1 - n
  tokens = lambda lanes: pl.BlockSpec((1, shape.chunk, lanes), lambda b, h, n: (b, at(n), h))

  def per_chunk(count, *tail):
    return pl.BlockSpec((1, 1, count, *tail), lambda b, h, n: (b, at(n), h) + (0,) * len(tail))

  state = pl.BlockSpec((1, group, dk, shape.heads * dv), lambda b, h, n: (b, h, 0, 0))
  key_tokens, value_tokens = tokens(group * dk), tokens(shape.group_heads * dv)
  columns = per_chunk(1, shape.chunk, layout.LANES)
  rows = per_chunk(1, shape.rows, shape.pack * shape.chunk)

  select = layout.selector(shape, dv, k.dtype)
  everywhere = pl.BlockSpec(select.shape, lambda b, h, n: (0, 0))
  operands = [(gates.columns, columns), (gates.rows, rows), (select, everywhere)]
  operands += [(q, key_tokens), (k, key_tokens)]
  if full:
    operands.append((v, value_tokens))
  operands.append((d_out, value_tokens))
  if full:
    operands.append((states, per_chunk(group, *states.shape[3:])))
  operands += [(inverses, per_chunk(group, *inverses.shape[3:])), (d_final, state)]
  outputs = []
  if full:
    outputs = [
      (jax.ShapeDtypeStruct(q.shape, q.dtype), key_tokens),
      (jax.ShapeDtypeStruct(k.shape, k.dtype), key_tokens),
      (jax.ShapeDtypeStruct(v.shape, v.dtype), value_tokens),
      (jax.ShapeDtypeStruct(gates.columns.shape, jnp.float32), columns),
      (jax.ShapeDtypeStruct(gates.rows.shape, jnp.float32), rows),
    ]
  outputs.append((jax.ShapeDtypeStruct(d_final.shape, jnp.float32), state))
  return pl.pallas_call(
    functools.partial(_kernel, shape=shape, exact=q.dtype == jnp.float32, full=full, dv=dv),
    grid=(batch, shape.groups, chunks),
    in_specs=[spec for _, spec in operands],
    out_shape=tuple(struct for struct, _ in outputs),
    out_specs=tuple(spec for _, spec in outputs),
    scratch_shapes=[pltpu.VMEM((group, dk, shape.heads * dv), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=head_groups.VMEM_BYTES,
    ),
    cost_estimate=pallas_forward.declared_cost(
      "backward" if full else "dh_scan",
      shape,
      [array for array, _ in (*operands, *outputs)],
      tokens=batch * length,
      dk=dk,
      dv=dv,
    ),
    interpret=interpret,
    name=pallas_forward.kernel_name("backward" if full else "dh_scan", group),
  )(*(operand for operand, _ in operands))


def backward(
  q: Float[Array, "B S nk*dk"],
  k: Float[Array, "B S nk*dk"],
  v: Float[Array, "B S nv*dv"],
  gates: layout.Gates,
  saved: pallas_forward.Saved,
  d_out: Float[Array, "B S nv*dv"],
  d_final: Float[Array, "B nk dk heads*dv"],
  *,
  shape: layout.Shape,
  interpret: bool,
):
  """Gradients (dq, dk, dv, d gates.columns, d gates.rows, d start).

  Args:
    q: Queries before the L2 norm; whole chunks.
    k: Keys before the L2 norm.
    v: Values.
    gates: From `layout.pack_gates`.
    saved: From the forward kernel.
    d_out: Gradient of the outputs; ignored on padding.
    d_final: Gradient of the final state.
    shape: Static shape.
    interpret: Runs the kernel's body without a TPU.
  """
  return _run(q, k, v, gates, d_out, *saved, d_final, shape=shape, interpret=interpret)


def state_gradient(
  q: Float[Array, "B S nk*dk"],
  k: Float[Array, "B S nk*dk"],
  gates: layout.Gates,
  inverses: Float[Array, "B N nk packs C pack*C"],
  d_out: Float[Array, "B S nv*dv"],
  d_final: Float[Array, "B nk dk heads*dv"],
  *,
  shape: layout.Shape,
  interpret: bool,
) -> Float[Array, "B nk dk heads*dv"]:
  """Gradient of the state before a run of chunks; from a zero `d_final` it is the rank's G.

  Args:
    q: Queries before the L2 norm.
    k: Keys before the L2 norm.
    gates: From `layout.pack_gates`.
    inverses: From the forward kernel.
    d_out: Gradient of the outputs.
    d_final: Gradient of the state after the run.
    shape: Static shape.
    interpret: Runs the kernel's body without a TPU.
  """
  (d_start,) = _run(
    q, k, None, gates, d_out, None, inverses, d_final, shape=shape, interpret=interpret
  )
  return d_start
