"""Pallas TPU kernels of the gated RMS norm, in two layouts, forward and backward.

    n = x r,  r = rsqrt(mean(x^2) + eps);   y = n w silu(z)
    a = dy w silu(z);  dx = r (a - n mean(a n));  dz = dy w n silu'(z);  dw = sum dy n silu(z)

`head_minor` reads [tokens, heads * channels], a head per tile: the mean runs over lanes.
`token_minor` reads [heads, channels, tokens], a lane tile of tokens: the mean runs over sublanes and
nothing moves between lanes.  Both work on `kernels.base.words`, a register of words at a time in
straight-line code, so that the latency of one register's mean hides behind others'.

With h = z / 2, t = tanh h and u = 1 + t:  s = silu(z) = h u  and  silu'(z) = (u + s (1 - t)) / 2.
Sums stand for means: with r' = rsqrt(sum(x^2) + D eps), n' = x r' and w' = w sqrt(D), all of the
above holds with sum(a n') for mean(a n), and dw = sqrt(D) sum dy n' silu(z).

The backward pass has a phase for what stands before, between and after its two means, each for all
rows of a loop step: what a phase leaves waits in VMEM, since values that waited for a mean in
registers would spill.  dx = r' (a - x r' sum(a n')).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels.base import words

_STEP = words.REGISTER_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Tile sizes of the kernels.

  Attributes:
    tokens: Tokens per tile of the head-minor layout, a multiple of `chunk`; a tile is one head.
    chunk: Tokens per loop step of the head-minor layout, a multiple of 16.
    heads: Heads per tile of the token-minor layout, lowered to a divisor of the heads there are; a
      tile is 128 tokens.
  """

  tokens: int = 4096
  chunk: int = 1024
  heads: int = 64

  def __post_init__(self):
    if self.chunk < _STEP or self.chunk % _STEP:
      raise ValueError(f"chunk={self.chunk}: want a positive multiple of {_STEP}")
    if self.tokens < 1 or self.tokens % self.chunk:
      raise ValueError(f"tokens={self.tokens}: want a multiple of chunk={self.chunk}")
    if self.heads < 1:
      raise ValueError(f"heads={self.heads}: want a positive number")

  def fit_rows(self, rows: int) -> tuple[int, int]:
    """Tokens per tile and per loop step for an array of `rows` tokens."""
    chunk = min(self.chunk, -(-rows // _STEP) * _STEP)
    return chunk * min(self.tokens // self.chunk, -(-rows // chunk)), chunk

  def fit_heads(self, heads: int) -> int:
    """Heads per tile for an array of `heads`."""
    return math.gcd(heads, self.heads) if heads % self.heads else self.heads


def _gate(z):
  """h, tanh h and 1 + tanh h."""
  half = 0.5 * z
  tanh = jnp.tanh(half)
  return half, tanh, 1.0 + tanh


def _inverse(square_sums, count: int, eps: float):
  """r'."""
  return lax.rsqrt(square_sums + count * eps)


def _forward(x, z, scale, inverse):
  half, _, u = _gate(z)
  return (x * inverse) * scale * (half * u)


def _backward(x, z, dy, scale, inverse):
  """n', dy n' silu(z), a and dz."""
  half, tanh, u = _gate(z)
  n, silu = x * inverse, half * u
  dy_silu = dy * silu
  dz = dy * n * (0.5 * scale) * (u + silu * (1.0 - tanh))
  return n, dy_silu * n, dy_silu * scale, dz


def _sublane_sum(x):
  """[rows, C] -> [8, C], adding whole registers."""
  return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0)


def _loop(count, body):
  def step(i, carry):
    body(i)
    return carry

  lax.fori_loop(0, count, step, 0)


def _minor_forward(x_ref, z_ref, scale_ref, y_ref, *, eps, chunk, interpret):
  parts, dim = words.parts_of(x_ref.dtype), x_ref.shape[1]
  step, count = _STEP // parts, chunk // parts
  scale = scale_ref[...]

  def body(i):
    for offset in range(0, count, step):
      at = pl.multiple_of(i * count + offset, step)
      read = lambda ref, at=at: words.floats(words.load(ref, at, step, interpret), parts)
      y = []
      for x, z in zip(read(x_ref), read(z_ref)):
        inverse = _inverse(jnp.sum(x * x, axis=1, keepdims=True), dim, eps)
        y.append(_forward(x, z, scale, inverse))
      words.store(y_ref, at, y, interpret)

  _loop(x_ref.shape[0] // chunk, body)


def _minor_backward(
  x_ref, z_ref, dy_ref, scale_ref, dx_ref, dz_ref, dw_ref, a_ref, inverse_ref, total_ref,
  *, eps, chunk, rows, interpret
):  # fmt: skip
  parts, (tokens, dim) = words.parts_of(x_ref.dtype), x_ref.shape
  step, count = _STEP // parts, chunk // parts
  scale = scale_ref[...]
  limit = rows - pl.program_id(0) * tokens

  @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
  def _():
    dw_ref[...] = jnp.zeros_like(dw_ref)

  read = lambda ref, at: words.floats(words.load(ref, at, step, interpret), parts)
  wide = lambda column: jnp.broadcast_to(column, (step, dim))

  def body(i):
    steps = [
      (slice(offset, offset + step), pl.multiple_of(i * count + offset, step))
      for offset in range(0, count, step)
    ]
    for own, at in steps:
      for part, x in enumerate(read(x_ref, at)):
        squares = jnp.sum(x * x, axis=1, keepdims=True)
        inverse_ref[part, own] = wide(_inverse(squares, dim, eps))
    sums = jnp.zeros((8, dim), jnp.float32)
    for own, at in steps:
      dzs = []
      for part, (x, z, dy) in enumerate(zip(read(x_ref, at), read(z_ref, at), read(dy_ref, at))):
        inverse = inverse_ref[part, own]
        n, dw, a, dz = _backward(x, z, dy, scale, inverse)
        dzs.append(dz)
        a_ref[part, own] = a
        total_ref[part, own] = inverse * jnp.sum(a * n, axis=1, keepdims=True)
        if rows % tokens:  # Behind the last row a tile holds anything.
          row = parts * (at + lax.broadcasted_iota(jnp.int32, dw.shape, 0)) + part
          dw = jnp.where(row < limit, dw, 0.0)
        sums += _sublane_sum(dw)
      words.store(dz_ref, at, dzs, interpret)
    dw_ref[...] += sums
    for own, at in steps:
      dx = [
        inverse_ref[part, own] * (a_ref[part, own] - x * total_ref[part, own])
        for part, x in enumerate(read(x_ref, at))
      ]
      words.store(dx_ref, at, dx, interpret)

  _loop(tokens // chunk, body)


def _major_sum(x):
  """Sum over the sublanes of parts."""
  return jnp.sum(sum(_sublane_sum(part) for part in x), axis=0, keepdims=True)


def _major_parts(ref, i, interpret):
  parts = words.parts_of(ref.dtype)
  return words.floats(words.load(ref.at[0, i], 0, ref.shape[2] // parts, interpret), parts)


def _heads_at_once(count):
  """Heads in one loop step: enough to hide the latency of a mean, few enough for registers."""
  return math.gcd(count, 4)


def _major_forward(x_ref, z_ref, scale_ref, y_ref, *, eps, interpret):
  unroll = _heads_at_once(x_ref.shape[1])

  def body(i):
    for head in range(unroll):
      head += i * unroll
      read = lambda ref, head=head: _major_parts(ref, head, interpret)
      x, z = read(x_ref), read(z_ref)
      inverse = _inverse(_major_sum([part * part for part in x]), x_ref.shape[2], eps)
      y = [_forward(*pair, scale_ref[part], inverse) for part, pair in enumerate(zip(x, z))]
      words.store(y_ref.at[0, head], 0, y, interpret)

  _loop(x_ref.shape[1] // unroll, body)


def _major_backward(
  x_ref, z_ref, dy_ref, scale_ref, dx_ref, dz_ref, dw_ref, a_ref, *, eps, length, interpret
):
  tokens, dim = x_ref.shape[3], x_ref.shape[2]
  first = pl.program_id(2) * tokens
  unroll, parts = a_ref.shape[0], words.parts_of(x_ref.dtype)
  step = min(_STEP // parts, dim // parts)
  steps = [slice(at, at + step) for at in range(0, dim // parts, step)]

  @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0) & (pl.program_id(2) == 0))
  def _():
    dw_ref[...] = jnp.zeros_like(dw_ref)

  def body(i):
    heads = [i * unroll + lane for lane in range(unroll)]

    def read(ref, head, own):
      return words.floats(words.load(ref.at[0, head], own.start, step, interpret), parts)

    inverses, totals = [], []
    for head in heads:
      squares = [x * x for own in steps for x in read(x_ref, head, own)]
      inverses.append(_inverse(_major_sum(squares), dim, eps))
    for lane, head in enumerate(heads):
      total = []
      for own in steps:
        given = [read(ref, head, own) for ref in (x_ref, z_ref, dy_ref)]
        dzs = []
        for part, (x, z, dy) in enumerate(zip(*given)):
          n, dw, a, dz = _backward(x, z, dy, scale_ref[part, own], inverses[lane])
          a_ref[lane, part, own] = a
          total.append(a * n)
          dzs.append(dz)
          if length % tokens:
            token = first + lax.broadcasted_iota(jnp.int32, dw.shape, 1)
            dw = jnp.where(token < length, dw, 0.0)
          dw_ref[part, own] += dw
        words.store(dz_ref.at[0, head], own.start, dzs, interpret)
      totals.append(inverses[lane] * _major_sum(total))
    for lane, head in enumerate(heads):
      for own in steps:
        dx = [
          inverses[lane] * (a_ref[lane, part, own] - x * totals[lane])
          for part, x in enumerate(read(x_ref, head, own))
        ]
        words.store(dx_ref.at[0, head], own.start, dx, interpret)

  _loop(x_ref.shape[1] // unroll, body)


def _struct(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(body, grid, inputs, in_specs, out_shape, out_specs, name, interpret, scratch=()):
  return pl.pallas_call(
    functools.partial(body, interpret=interpret),
    grid=grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * len(grid)),
    cost_estimate=pl.CostEstimate(
      flops=12 * inputs[0].size,
      transcendentals=inputs[0].size,
      bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*inputs, *jax.tree.leaves(out_shape))),
    ),
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
  tokens, chunk = tiles.fit_rows(rows)
  main = pl.BlockSpec((tokens, dim), lambda i, h: (i, h))
  row = pl.BlockSpec((1, dim), lambda i, h: (0, 0))
  grid = (pl.cdiv(rows, tokens), width // dim)
  shared = {"eps": eps, "chunk": chunk}
  scale = dim**0.5 * scale.astype(jnp.float32)[None]
  if dy is None:
    body = functools.partial(_minor_forward, **shared)
    specs = [main, main, row]
    return _call(body, grid, (x, z, scale), specs, _struct(x), main, "gated_norm", interpret)
  parts = words.parts_of(x.dtype)
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
    scratch=[(parts, chunk // parts, dim)] * 3,
  )
  return dx, dz, dim**0.5 * jnp.sum(dw, axis=0)


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
  tokens, heads = min(length, words.LANES), tiles.fit_heads(count)
  parts = words.parts_of(x.dtype)
  main = pl.BlockSpec((1, heads, dim, tokens), lambda b, h, i: (b, h, 0, i))
  spread = pl.BlockSpec((parts, dim // parts, tokens), lambda b, h, i: (0, 0, 0))
  grid = (batch, count // heads, pl.cdiv(length, tokens))
  shape = (parts, dim // parts, tokens)
  by_part = dim**0.5 * scale.astype(jnp.float32).reshape(dim // parts, parts).T
  scale = jnp.broadcast_to(by_part[:, :, None], shape)
  if dy is None:
    body = functools.partial(_major_forward, eps=eps)
    specs = [main, main, spread]
    return _call(
      body, grid, (x, z, scale), specs, _struct(x), main, "gated_norm_token_minor", interpret
    )
  body = functools.partial(_major_backward, eps=eps, length=length)
  dx, dz, dw = _call(
    body,
    grid,
    (x, z, dy, scale),
    [main, main, main, spread],
    (_struct(x), _struct(z), jax.ShapeDtypeStruct(shape, jnp.float32)),
    (main, main, spread),
    "gated_norm_token_minor_backward",
    interpret,
    scratch=[(math.gcd(heads, 2), *shape)],
  )
  return dx, dz, dim**0.5 * jnp.sum(dw, axis=2).T.reshape(dim)
