"""Pallas TPU kernels of the gated RMS norm, in two layouts, forward and backward.

    n = x r,  r = rsqrt(mean(x^2) + eps);   y = n w silu(z)
    a = dy w silu(z);  dx = r (a - n mean(a n));  dz = dy w n silu'(z);  dw = sum dy n silu(z)

`head_minor` reads [tokens, heads * channels], a head on 128 lanes: the mean is a product with a
constant matrix, which leaves it on every lane.  `token_minor` reads [heads, channels, tokens]: the
mean runs over sublanes and nothing moves between lanes.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

_ROWS = 16
_LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Tile sizes of the kernels.

  Attributes:
    tokens: Tokens per tile; a multiple of 16 (of 128 in the token-minor layout, or all of them).
    heads: Heads per tile; lowered to a divisor of the heads there are.
  """

  tokens: int = 256
  heads: int = 8

  def __post_init__(self):
    if self.tokens < _ROWS or self.tokens % _ROWS:
      raise ValueError(f"tokens={self.tokens}: want a positive multiple of {_ROWS}")
    if self.heads < 1:
      raise ValueError(f"heads={self.heads}: want a positive number")

  def fit(self, tokens: int, heads: int, token_minor: bool) -> tuple[int, int]:
    """Tile (tokens, heads) for an array."""
    rows = min(self.tokens, -(-tokens // _ROWS) * _ROWS)
    if token_minor:
      rows = tokens if tokens <= self.tokens else max(_LANES, self.tokens // _LANES * _LANES)
    count = min(self.heads, heads)
    while heads % count:
      count -= 1
    return rows, count


def _sigmoid(z):
  return 0.5 + 0.5 * jnp.tanh(0.5 * z)


def _lane_mean(x, exact):
  """Mean over the lanes, on every lane."""
  size = x.shape[1]
  if not exact:
    # Each square is rounded to bfloat16; the mean of many of them is far better than that.
    ones = jnp.full((size, size), 1.0 / size, jnp.bfloat16)
    if size & (size - 1) == 0:
      return lax.dot(x.astype(jnp.bfloat16), ones, preferred_element_type=jnp.float32)
  return jnp.mean(x, axis=1, keepdims=True)


def _head_forward(x, z, scale, eps, mean):
  x, z = x.astype(jnp.float32), z.astype(jnp.float32)
  normed = x * lax.rsqrt(mean(x * x) + eps)
  return normed * scale * (z * _sigmoid(z))


def _head_backward(x, z, dy, scale, eps, mean):
  x, z, dy = (v.astype(jnp.float32) for v in (x, z, dy))
  inverse = lax.rsqrt(mean(x * x) + eps)
  normed = x * inverse
  gate = _sigmoid(z)
  silu = z * gate
  dy_normed = dy * normed
  weighted = dy * (scale * silu)
  dx = inverse * (weighted - normed * mean(weighted * normed))
  dz = dy_normed * scale * (gate + silu * (1.0 - gate))
  return dx, dz, dy_normed * silu


def _over_heads(count, body):
  def step(i, carry):
    body(i)
    return carry

  lax.fori_loop(0, count, step, 0)


def _minor_forward(x_ref, z_ref, scale_ref, y_ref, *, eps, dim, exact):
  def head(i):
    at = pl.ds(pl.multiple_of(i * dim, dim), dim)
    mean = functools.partial(_lane_mean, exact=exact)
    y = _head_forward(x_ref[:, at], z_ref[:, at], scale_ref[...], eps, mean)
    y_ref[:, at] = y.astype(y_ref.dtype)

  _over_heads(x_ref.shape[1] // dim, head)


def _minor_backward(
  x_ref, z_ref, dy_ref, scale_ref, dx_ref, dz_ref, dw_ref, *, eps, dim, exact, rows
):
  @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
  def _():
    dw_ref[...] = jnp.zeros_like(dw_ref)

  tokens = x_ref.shape[0]
  limit = rows - pl.program_id(0) * tokens

  def head(i):
    at = pl.ds(pl.multiple_of(i * dim, dim), dim)
    mean = functools.partial(_lane_mean, exact=exact)
    dx, dz, dw = _head_backward(
      x_ref[:, at], z_ref[:, at], dy_ref[:, at], scale_ref[...], eps, mean
    )
    dx_ref[:, at] = dx.astype(dx_ref.dtype)
    dz_ref[:, at] = dz.astype(dz_ref.dtype)
    if rows % tokens:  # Behind the last row a tile holds anything.
      dw = jnp.where(lax.broadcasted_iota(jnp.int32, dw.shape, 0) < limit, dw, 0.0)
    dw_ref[...] += jnp.sum(dw.reshape(-1, 8, dim), axis=0)

  _over_heads(x_ref.shape[1] // dim, head)


def _sublane_mean(x):
  return jnp.mean(x, axis=0, keepdims=True)


def _major_forward(x_ref, z_ref, scale_ref, y_ref, *, eps):
  def head(i):
    y = _head_forward(x_ref[0, i], z_ref[0, i], scale_ref[...], eps, _sublane_mean)
    y_ref[0, i] = y.astype(y_ref.dtype)

  _over_heads(x_ref.shape[1], head)


def _major_backward(x_ref, z_ref, dy_ref, scale_ref, dx_ref, dz_ref, dw_ref, *, eps, length):
  @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0) & (pl.program_id(2) == 0))
  def _():
    dw_ref[...] = jnp.zeros_like(dw_ref)

  tokens = x_ref.shape[3]
  limit = length - pl.program_id(2) * tokens

  def head(i):
    dx, dz, dw = _head_backward(
      x_ref[0, i], z_ref[0, i], dy_ref[0, i], scale_ref[...], eps, _sublane_mean
    )
    dx_ref[0, i] = dx.astype(dx_ref.dtype)
    dz_ref[0, i] = dz.astype(dz_ref.dtype)
    if length % tokens:
      dw = jnp.where(lax.broadcasted_iota(jnp.int32, dw.shape, 1) < limit, dw, 0.0)
    if tokens % _LANES:
      dw_ref[:, :1] += jnp.sum(dw, axis=1, keepdims=True)
    else:
      dw_ref[...] += sum(dw[:, c : c + _LANES] for c in range(0, tokens, _LANES))

  _over_heads(x_ref.shape[1], head)


def _struct(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(body, grid, inputs, in_specs, out_shape, out_specs, name, interpret):
  return pl.pallas_call(
    body,
    grid=grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * len(grid)),
    interpret=interpret,
    name=name,
  )(*inputs)


def head_minor(
  x: Float[Array, "T H*D"],
  z: Float[Array, "T H*D"],
  scale: Float[Array, " D"],
  dy: Float[Array, "T H*D"] | None = None,
  *,
  eps: float,
  tiles: Tiles,
  interpret: bool,
):
  """Forward, or with `dy` backward: (dx, dz, dscale float32).

  Args:
    x: Tokens by heads and their channels.
    z: Gate before its SiLU.
    scale: One per channel of a head.
    dy: Gradient of the output.
    eps: Added to the mean square.
    tiles: Tile sizes.
    interpret: Runs the kernel's body without a TPU.
  """
  rows, width = x.shape
  dim = scale.shape[0]
  tokens, heads = tiles.fit(rows, width // dim, token_minor=False)
  main = pl.BlockSpec((tokens, heads * dim), lambda i, h: (i, h))
  row = pl.BlockSpec((1, dim), lambda i, h: (0, 0))
  grid = (pl.cdiv(rows, tokens), width // (heads * dim))
  shared = {"eps": eps, "dim": dim, "exact": x.dtype == jnp.float32}
  scale = scale.astype(jnp.float32)[None]
  if dy is None:
    body = functools.partial(_minor_forward, **shared)
    specs = [main, main, row]
    return _call(body, grid, (x, z, scale), specs, _struct(x), main, "gated_norm", interpret)
  body = functools.partial(_minor_backward, rows=rows, **shared)
  sums = pl.BlockSpec((8, dim), lambda i, h: (0, 0))
  dx, dz, dw = _call(
    body,
    grid,
    (x, z, dy, scale),
    [main, main, main, row],
    (_struct(x), _struct(z), jax.ShapeDtypeStruct((8, dim), jnp.float32)),
    (main, main, sums),
    "gated_norm_backward",
    interpret,
  )
  return dx, dz, jnp.sum(dw, axis=0)


def token_minor(
  x: Float[Array, "B H D S"],
  z: Float[Array, "B H D S"],
  scale: Float[Array, " D"],
  dy: Float[Array, "B H D S"] | None = None,
  *,
  eps: float,
  tiles: Tiles,
  interpret: bool,
):
  """Forward, or with `dy` backward: (dx, dz, dscale float32); arguments as `head_minor`."""
  batch, count, dim, length = x.shape
  tokens, heads = tiles.fit(length, count, token_minor=True)
  main = pl.BlockSpec((1, heads, dim, tokens), lambda b, h, i: (b, h, 0, i))
  column = pl.BlockSpec((dim, 1), lambda b, h, i: (0, 0))
  grid = (batch, count // heads, pl.cdiv(length, tokens))
  scale = scale.astype(jnp.float32)[:, None]
  if dy is None:
    body = functools.partial(_major_forward, eps=eps)
    specs = [main, main, column]
    return _call(
      body, grid, (x, z, scale), specs, _struct(x), main, "gated_norm_token_minor", interpret
    )
  body = functools.partial(_major_backward, eps=eps, length=length)
  sums = pl.BlockSpec((dim, _LANES), lambda b, h, i: (0, 0))
  dx, dz, dw = _call(
    body,
    grid,
    (x, z, dy, scale),
    [main, main, main, column],
    (_struct(x), _struct(z), jax.ShapeDtypeStruct((dim, _LANES), jnp.float32)),
    (main, main, sums),
    "gated_norm_token_minor_backward",
    interpret,
  )
  return dx, dz, jnp.sum(dw, axis=1)
