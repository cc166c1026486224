"""Pallas TPU kernels of the RMS norm over whole rows, forward and backward.

    r = rsqrt(mean(x^2) + eps);  y = x r w
    g = dy w;  dx = r g - x r^3 mean(g x);  dw = sum over rows of dy x r

A tile of rows is read once.  Its sums come first, a register of columns at a time, for all of its rows,
so that the latency of one row's sum hides behind others'; then the results.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

ROWS = 128  # of a tile
_STEP = 16  # rows of a register of bfloat16
_LANES = 128


def _steps(ref):
  return [slice(r, r + _STEP) for r in range(0, ref.shape[0], _STEP)]


def _columns(ref):
  return [slice(c, c + _LANES) for c in range(0, ref.shape[1], _LANES)]


def _wide(ref, rows, columns):
  return ref[rows, columns].astype(jnp.float32)


def _row_sums(terms):
  return jnp.sum(functools.reduce(jnp.add, terms), axis=1, keepdims=True)


def _forward_kernel(x_ref, w_ref, y_ref, *, eps):
  columns, scale = _columns(x_ref), 1.0 / x_ref.shape[1]
  inverse = []
  for rows in _steps(x_ref):
    squares = _row_sums(jnp.square(_wide(x_ref, rows, c)) for c in columns)
    inverse.append(lax.rsqrt(squares * scale + eps))
  for rows, r in zip(_steps(x_ref), inverse, strict=True):
    for c in columns:
      y_ref[rows, c] = (_wide(x_ref, rows, c) * r * w_ref[:, c]).astype(y_ref.dtype)


def _backward_kernel(x_ref, dy_ref, w_ref, dx_ref, dw_ref, *, eps, rows_in_all):
  tile = pl.program_id(0)
  columns, scale = _columns(x_ref), 1.0 / x_ref.shape[1]
  steps = _steps(x_ref)

  @pl.when(tile == 0)
  def _():
    dw_ref[...] = jnp.zeros_like(dw_ref)

  factors = []
  for rows in steps:
    squares, cross = [], []
    for c in columns:
      x = _wide(x_ref, rows, c)
      squares.append(x * x)
      cross.append(x * (_wide(dy_ref, rows, c) * w_ref[:, c]))
    r = lax.rsqrt(_row_sums(squares) * scale + eps)
    factors.append((r, r * r * r * (_row_sums(cross) * scale)))
  ragged = rows_in_all % x_ref.shape[0] != 0
  row = lax.broadcasted_iota(jnp.int32, (_STEP, 1), 0) + tile * x_ref.shape[0]
  for c in columns:
    w, total = w_ref[:, c], jnp.zeros((_STEP, _LANES), jnp.float32)
    for rows, (r, back) in zip(steps, factors, strict=True):
      x, dy = _wide(x_ref, rows, c), _wide(dy_ref, rows, c)
      scaled = dy * r
      dx_ref[rows, c] = (scaled * w - x * back).astype(dx_ref.dtype)
      part = scaled * x
      # Behind the last row anything may lie.
      total += jnp.where(row + rows.start < rows_in_all, part, 0.0) if ragged else part
    dw_ref[:, c] += total


def _call(kernel, arrays, w, out_shape, out_specs, name, interpret):
  rows, width = arrays[0].shape
  tile_rows = min(ROWS, -(-rows // _STEP) * _STEP)
  tile = pl.BlockSpec((tile_rows, width), lambda i: (i, 0))
  return pl.pallas_call(
    kernel,
    grid=(-(-rows // tile_rows),),
    in_specs=[tile] * len(arrays) + [pl.BlockSpec((1, width), lambda i: (0, 0))],
    out_specs=[tile, *out_specs],
    out_shape=[jax.ShapeDtypeStruct((rows, width), arrays[0].dtype), *out_shape],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
    cost_estimate=pl.CostEstimate(
      flops=4 * len(arrays) ** 2 * rows * width,
      transcendentals=rows,
      bytes_accessed=(len(arrays) + 1) * arrays[0].nbytes,
    ),
    interpret=interpret,
    name=name,
  )(*arrays, w)


def forward(
  x: Float[Array, "M D"], w: Float[Array, "1 D"], *, eps: float, interpret: bool
) -> Float[Array, "M D"]:
  """x r w in the type of `x`; `w` is float32, D a multiple of 128."""
  kernel = functools.partial(_forward_kernel, eps=eps)
  return _call(kernel, [x], w, [], [], "rms_norm", interpret)[0]


def backward(
  x: Float[Array, "M D"],
  dy: Float[Array, "M D"],
  w: Float[Array, "1 D"],
  *,
  eps: float,
  interpret: bool,
) -> tuple[Float[Array, "M D"], Float[Array, " D"]]:
  """Gradients of `x` and, float32, of `w`."""
  width = x.shape[1]
  dx, dw = _call(
    functools.partial(_backward_kernel, eps=eps, rows_in_all=x.shape[0]),
    [x, dy],
    w,
    [jax.ShapeDtypeStruct((_STEP, width), jnp.float32)],
    [pl.BlockSpec((_STEP, width), lambda i: (0, 0))],
    "rms_norm_backward",
    interpret,
  )
  return dx, jnp.sum(dw, axis=0)
