"""Builders for the TPU kernels of tokamax 0.0.12, where that package is installed."""

from __future__ import annotations

import importlib
from typing import Any

from tools.kernel_report import public_kernels

_OPS = "tokamax._src.ops."


def grouped_product(
  *, kind: str, experts: int, expert_rows: int, k: int, n: int, tiles: list[int]
) -> Any:
  """tokamax's grouped products; see `public_kernels.grouped_product`."""
  import jax
  import jax.numpy as jnp

  kernels = importlib.import_module(_OPS + "ragged_dot.pallas_mosaic_tpu_kernel")
  fixed = public_kernels.balanced_metadata(experts, expert_rows, tiles[0])
  kernels.__dict__["make_group_metadata"] = lambda **_: fixed
  precision, bf16 = (jax.lax.Precision.DEFAULT,) * 2, jnp.bfloat16
  rows, sizes = experts * expert_rows, ((experts,), jnp.int32)
  if kind == "tgmm":
    run = lambda x, dy, s: kernels.tgmm(x, dy, s, precision, bf16, tuple(tiles))
    return public_kernels.lower_on_one_slice(run, ((k, rows), bf16), ((rows, n), bf16), sizes)
  flipped = kind == "gmm_transposed"
  weight = (experts, n, k) if flipped else (experts, k, n)
  run = lambda x, w, s: kernels.gmm(x, w, s, precision, bf16, tuple(tiles), transpose_rhs=flipped)
  return public_kernels.lower_on_one_slice(run, ((rows, k), bf16), (weight, bf16), sizes)


def attention(
  *,
  queries: int,
  keys: int,
  heads: int,
  head_dim: int,
  fused: bool,
  which: str,
  blocks: dict[str, int],
) -> Any:
  """tokamax's splash attention, base-2 exponentials; see `public_kernels.attention`."""
  import jax
  import jax.numpy as jnp

  package = _OPS + "experimental.tpu.splash_attention."
  splash = importlib.import_module(package + "splash_attention_kernel")
  masks = importlib.import_module(package + "splash_attention_mask")
  config = splash.SplashConfig(**blocks, use_fused_bwd_kernel=fused)
  mask = masks.FullMask((queries, keys))
  kernel = splash.make_splash_mqa_single_device(mask, config=config)

  def backward(q, k, v, d):
    return jax.vjp(kernel, q, k, v)[1](d)

  bf16 = jnp.bfloat16
  q, kv = ((heads, queries, head_dim), bf16), ((keys, head_dim), bf16)
  lower = public_kernels.lower_on_one_slice
  return lower(kernel, q, kv, kv) if which == "forward" else lower(backward, q, kv, kv, q)


def linear_cross_entropy(*, tokens: int, vocab: int, width: int, which: str) -> Any:
  """Cross-entropy of a linear head without its logits, forward or backward."""
  import jax.numpy as jnp

  kernels = importlib.import_module(
    _OPS + "linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel"
  )
  bf16 = jnp.bfloat16
  x, labels, w = ((tokens, width), bf16), ((tokens,), jnp.int32), ((width, vocab), bf16)
  lower = public_kernels.lower_on_one_slice
  if which == "forward":
    run = kernels.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu
    return lower(lambda x, t, w: run(x, t, w), x, labels, w)
  run = kernels.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu
  lse = ((tokens,), jnp.float32)
  return lower(lambda d, s, x, t, w: run(d, s, x, t, w), ((), jnp.float32), lse, x, labels, w)
