"""Builders for the repository's kernels of the Gated DeltaNet mixer: rule, convolution, norm."""

from __future__ import annotations

from typing import Any

from tools.kernel_report import public_kernels

_DIM, _CHUNK = 128, 64


# What the cell's programs are compiled with: a kernel may use all of VMEM.
_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": "65472"}


def _lower(function, *structs) -> Any:
  """Lowers with large operands that stay in HBM, where those of a whole layer lie."""
  import jax.numpy as jnp
  from jax.experimental.pallas import tpu as pltpu

  def place(x):
    large = x.size > 2**16 and jnp.issubdtype(x.dtype, jnp.floating)
    return pltpu.with_memory_space_constraint(x, pltpu.HBM) if large else x

  def run(*operands):
    return function(*(place(x) for x in operands))

  return public_kernels.lower_on_one_slice(run, *structs)


def delta_rule(*, which: str, tokens: int, key_heads: int, heads: int, group: int) -> Any:
  """A kernel of the gated delta rule on one row, and compiler options.

  Args:
    which: forward, forward_saved (keeps what the backward reads), states (the same without
      outputs), backward, m_scan or dh_scan.
    tokens: Tokens of the row, whole chunks.
    key_heads: Key heads.
    heads: Value heads per key head.
    group: Key heads per grid step.
  """
  import jax.numpy as jnp

  from kernels.gdn import layout, pallas_backward, pallas_forward

  shape = layout.Shape(chunk=_CHUNK, key_heads=key_heads, heads=heads, group=group)
  chunks, packs, f32 = tokens // _CHUNK, heads // shape.pack, jnp.float32
  key = ((1, tokens, key_heads * _DIM), jnp.bfloat16)
  value = ((1, tokens, key_heads * heads * _DIM), jnp.bfloat16)
  columns = ((1, chunks, shape.groups, _CHUNK, layout.LANES), f32)
  rows = ((1, chunks, shape.groups, shape.rows, shape.pack * _CHUNK), f32)
  state = ((1, key_heads, _DIM, heads * _DIM), f32)
  states = ((1, chunks, key_heads, _DIM, heads * _DIM), f32)
  inverses = ((1, chunks, key_heads, packs, _CHUNK, shape.pack * _CHUNK), f32)
  gates = layout.Gates
  common: dict[str, Any] = {"shape": shape, "interpret": False}

  def forward(q, k, v, c, r, start):
    options: dict[str, Any] = {"want_output": which != "states", "want_saved": which != "forward"}
    out = pallas_forward.forward(q, k, v, gates(c, r), start, **options, **common)
    return [x for x in out if x is not None]

  def m_scan(k, c, r):
    return pallas_forward.transition_product(k, gates(c, r), **common)

  def dh_scan(q, k, c, r, t, d_out, d_final):
    return pallas_backward.state_gradient(q, k, gates(c, r), t, d_out, d_final, **common)

  def backward(q, k, v, c, r, s, t, d_out, d_final):
    saved = pallas_forward.Saved(s, t)
    return pallas_backward.backward(q, k, v, gates(c, r), saved, d_out, d_final, **common)

  if which == "m_scan":
    return _lower(m_scan, key, columns, rows), _OPTIONS
  if which == "dh_scan":
    return _lower(dh_scan, key, key, columns, rows, inverses, value, state), _OPTIONS
  if which == "backward":
    kept = (states, inverses)
    operands = (key, key, value, columns, rows, *kept, value, state)
    return _lower(backward, *operands), _OPTIONS
  return _lower(forward, key, key, value, columns, rows, state), _OPTIONS


def convolution(
  *,
  which: str,
  tokens: int,
  channels: int,
  tiles: dict[str, int] | None = None,
  masked: bool = False,
) -> Any:
  """The causal convolution with SiLU on one row, forward or backward.

  Which branch a tile takes is data, and the simulation adds both.  `masked` keeps both; otherwise
  every tile takes the one without masks, as all do but those with a segment's boundary.
  """
  import jax.numpy as jnp

  from kernels.conv1d import pallas_backward, pallas_forward, tiling

  if not masked:
    tiling.__dict__["either"] = lambda full, plain, masked: plain()
  sizes = tiling.Tiles(**(tiles or {}))
  options: dict[str, Any] = {"tiles": sizes, "interpret": False}
  x, bits = ((1, tokens, channels), jnp.bfloat16), ((1, tokens), jnp.int32)
  kernel, window = ((4, channels), jnp.float32), ((1, 3, channels), jnp.bfloat16)
  if which == "forward":
    run = lambda *operands: pallas_forward.forward(*operands, **options)
    return _lower(run, x, kernel, bits, window)
  run = lambda *operands: pallas_backward.backward(*operands, **options)
  return _lower(run, x, kernel, bits, window, x)


def gated_norm(
  *, which: str, layout: str, tokens: int, heads: int, tiles: dict[str, int] | None = None
) -> Any:
  """The gated RMS norm, forward or backward, in one of its layouts."""
  import jax.numpy as jnp

  from kernels.gated_norm import pallas_tpu

  sizes = pallas_tpu.Tiles(**(tiles or {}))
  minor = layout == "head_minor"
  kernel = pallas_tpu.head_minor if minor else pallas_tpu.token_minor
  shape = (tokens, heads * _DIM) if minor else (1, heads, _DIM, tokens)
  x, scale = (shape, jnp.bfloat16), ((_DIM,), jnp.float32)
  count = 2 if which == "forward" else 3

  def run(scale, *operands):
    x, z, *dy = operands
    return kernel(x, z, scale, *dy, eps=1e-6, tiles=sizes, interpret=False)

  return _lower(run, scale, *[x] * count)
