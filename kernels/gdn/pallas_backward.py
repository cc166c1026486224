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

from kernels.gdn import layout, pallas_forward, tile_math


def _l2_gradient(x, norm, d):
  """Gradient of x from that of its normalised value; `norm` is 1 / sqrt(sum x^2 + eps)."""
  unit = x.astype(jnp.float32) * norm
  return norm * (d - unit * jnp.sum(unit * d, axis=1, keepdims=True))


def _kernel(*given, shape: layout.Shape, exact: bool, full: bool, dv):
  refs = iter(given)
  take = lambda present: next(refs) if present else None
  columns_ref, rows_ref, q_ref, k_ref = (next(refs) for _ in range(4))
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
  lane = jax.lax.broadcasted_iota(jnp.int32, (tokens, layout.LANES), 1)
  last_token = jax.lax.broadcasted_iota(jnp.int32, (tokens, 1), 0) == tokens - 1
  d_columns = jnp.zeros((tokens, layout.LANES), jnp.float32)
  d_rows = []

  for group in range(shape.group):
    key = slice(group * dk, (group + 1) * dk)
    q = jnp.where(real, q_ref[0, :, key], 0)
    k = jnp.where(real, k_ref[0, :, key], 0)
    head = tile_math.key_head(chunk, q, k)
    q_norm = head.q_norm * head.scale
    d_state = d_state_ref[group]
    d_state_pieces = split(d_state)
    if full:
      state = states_ref[0, 0, group]
      state_pieces = split(state)
      read = products(head.both, state_pieces)
    d_written = products(head.keys, d_state_pieces)
    d_reads, d_seen, scaled_out, scaled_x, scaled_u = [], [], [], [], []
    sum_f = sum_e = None

    for t in range(packs):
      first = group * heads + t * pack
      index_of = [first + i for i in range(pack)]
      column = lambda x, of: [x[:, h : h + 1] for h in of]
      row = group * packs + t
      beta = column(gates.beta, index_of)
      from_start = column(gates.from_start, index_of)
      to_end = column(gates.to_end, index_of)
      decay = chunk.decay(gates, index_of, rows_ref[0, 0, 0, row : row + 1], segment_row)
      p = head.qk * decay
      inverse = inverses_ref[0, 0, group, t]
      width = slice(t * pack * dv, (t + 1) * pack * dv)
      at = slice(first * dv, (first + pack) * dv)
      beta_wide = chunk.columns(beta, dv)
      seen_scale = chunk.columns([f * head.k_norm for f in from_start], dv)
      out_scale = chunk.columns([f * q_norm for f in from_start], dv)
      d_out = jnp.where(real, d_out_ref[0, :, at], 0)
      d_out_pieces = split(d_out)
      d_written_t = chunk.columns([e * head.k_norm for e in to_end], dv) * d_written[:, width]
      du = products(chunk.transpose(p), chunk.diagonal(d_out_pieces)) + d_written_t
      dx = products(chunk.transpose(inverse), chunk.diagonal(split(du)))
      d_out_wide = d_out.astype(jnp.float32)
      d_reads.append(out_scale * d_out_wide)
      d_seen.append(-beta_wide * seen_scale * dx)
      if not full:
        continue

      seen = seen_scale * read[:tokens, width]
      residual = jnp.where(real, v_ref[0, :, at].astype(jnp.float32), 0.0) - seen
      u = products(inverse, chunk.diagonal(split(beta_wide * residual)))
      u_diagonal = chunk.diagonal(split(u))
      da = jnp.where(strict, -products(dx, u_diagonal, tile_math.ROWS_ROWS), 0.0)
      dp = products(d_out_pieces, u_diagonal, tile_math.ROWS_ROWS)
      dv_ref[0, :, at] = (beta_wide * dx).astype(dv_ref.dtype)

      e, f = da * decay, dp * decay
      beta_e = chunk.columns(beta, tokens) * e
      sum_f = f if sum_f is None else sum_f + f
      sum_e = beta_e if sum_e is None else sum_e + beta_e
      e_kk = e * head.kk
      y = chunk.columns(beta, tokens) * e_kk + f * head.qk
      z = chunk.head_sums(u * d_written_t)
      d_beta = chunk.head_sums(dx * residual)
      d_beta_e = chunk.head_sums(e_kk)
      d_b = chunk.head_sums(y)
      through = d_out_wide * (out_scale * read[tokens:, width]) - beta_wide * dx * seen
      d_b_state = chunk.head_sums(through)
      d_rows.append(-jnp.sum(y, axis=0, keepdims=True))
      scaled_out.append(chunk.columns(from_start, dv) * d_out_wide)
      scaled_x.append(-beta_wide * chunk.columns(from_start, dv) * dx)
      scaled_u.append(chunk.columns(to_end, dv) * u)
      for i, h in enumerate(index_of):
        lanes = slice((t * pack + i) * dv, (t * pack + i + 1) * dv)
        whole = gates.from_start[tokens - 1 :, h : h + 1]
        kept = whole * jnp.sum(state[:, lanes] * d_state[:, lanes], keepdims=True)
        total = d_b[i] + d_b_state[i] - z[i]
        total += jnp.where(last_token, jnp.sum(z[i], keepdims=True) + kept, 0.0)
        d_columns = jnp.where(lane == h, total, d_columns)
        of_beta = d_beta[i] + d_beta_e[i]
        d_columns = jnp.where(lane == shape.group_heads + h, of_beta, d_columns)

    concatenate = lambda parts: parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    if full:
      by_states = products(concatenate(scaled_out), state_pieces, tile_math.ROWS_ROWS)
      through_x = products(concatenate(scaled_x), state_pieces, tile_math.ROWS_ROWS)
      through_u = products(concatenate(scaled_u), d_state_pieces, tile_math.ROWS_ROWS)
      fold = lambda x: sum(chunk.halves(x))
      between = jnp.concatenate([fold(sum_e), fold(sum_f)], axis=0)
      k_row = head.k_norm_row[:, :tokens]
      forward = products(between * k_row, head.keys)
      norms = jnp.concatenate([head.k_norm, q_norm], axis=0)
      back = products(between * norms, head.both, tile_math.COLS_COLS)
      dq = forward[tokens:] + by_states
      d_key = forward[:tokens] + back + through_x + through_u
      dq_ref[0, :, key] = _l2_gradient(q, head.q_norm, head.scale * dq).astype(dq_ref.dtype)
      dk_ref[0, :, key] = _l2_gradient(k, head.k_norm, d_key).astype(dk_ref.dtype)

    d_both = jnp.concatenate([concatenate(d_seen), concatenate(d_reads)], axis=0)
    d_before = products(head.both, split(d_both), tile_math.COLS_COLS)
    for j in range(heads):
      lanes = slice(j * dv, (j + 1) * dv)
      h = group * heads + j
      whole = gates.from_start[tokens - 1 :, h : h + 1]
      d_state_ref[group, :, lanes] = whole * d_state[:, lanes] + d_before[:, lanes]

  if full:
    d_columns_ref[0, 0, 0] = d_columns
    padding = shape.rows - len(d_rows)
    d_rows.append(jnp.zeros((padding, d_rows[0].shape[1]), jnp.float32))
    d_rows_ref[0, 0, 0] = jnp.concatenate(d_rows, axis=0)

  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    d_start_ref[0] = d_state_ref[...]


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

  operands = [(gates.columns, columns), (gates.rows, rows), (q, key_tokens), (k, key_tokens)]
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
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
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
