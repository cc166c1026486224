"""Builders for the Pallas kernels that come with JAX: megablox and splash attention."""

from __future__ import annotations

import importlib
from typing import Any

from tools.aot import programs

_MEGABLOX = "jax.experimental.pallas.ops.tpu.megablox.gmm"
_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention."


def lower_on_one_slice(function: Any, *structs: tuple[tuple[int, ...], Any]) -> Any:
  """Lowers a function of replicated arrays for a slice of eight devices.

  Args:
    function: Takes arrays of the shapes and dtypes of `structs`.
    structs: (shape, dtype) each.

  Returns:
    The lowered program.
  """
  import jax
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  devices = programs.mesh_of("tpu7x:2x2x1", (8,), ("device",))
  mapped = jax.shard_map(function, mesh=devices, in_specs=P(), out_specs=P(), check_vma=False)
  placed = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(devices, P())) for s, d in structs]
  return jax.jit(mapped).trace(*placed).lower(lowering_platforms=("tpu",))


def balanced_metadata(experts: int, expert_rows: int, tile_rows: int):
  """What megablox computes from group sizes, for balanced groups, with a fixed number of tiles.

  The grid of these kernels has the number of live tiles as a dimension, which is data; the
  simulation of a schedule needs a number.  Balanced groups that start on a tile have this one.

  Returns:
    Group offsets, group of each tile, row tile of each tile; the number of tiles.
  """
  import jax.numpy as jnp
  import numpy as np

  if expert_rows % tile_rows:
    raise ValueError(f"{expert_rows} rows an expert are no multiple of the tile's {tile_rows}")
  tiles = experts * expert_rows // tile_rows
  offsets = np.arange(experts + 1, dtype=np.int32) * expert_rows
  groups = np.repeat(np.arange(experts, dtype=np.int32), expert_rows // tile_rows)
  pad = np.full(experts - 1, experts - 1, np.int32)
  arrays = (offsets, np.append(groups, pad), np.append(np.arange(tiles, dtype=np.int32), pad))
  return tuple(jnp.asarray(a) for a in arrays), tiles


def grouped_product(
  *, kind: str, experts: int, expert_rows: int, k: int, n: int, tiles: list[int]
) -> Any:
  """megablox: gmm, gmm with transposed weights, or tgmm."""
  import jax.numpy as jnp

  megablox = importlib.import_module(_MEGABLOX)
  fixed = balanced_metadata(experts, expert_rows, tiles[0])
  megablox.__dict__["make_group_metadata"] = lambda **_: fixed
  rows, bf16 = experts * expert_rows, jnp.bfloat16
  sizes = ((experts,), jnp.int32)
  if kind == "tgmm":
    run = lambda x, dy, s: megablox.tgmm(x, dy, s, bf16, tuple(tiles))
    return lower_on_one_slice(run, ((k, rows), bf16), ((rows, n), bf16), sizes)
  flipped = kind == "gmm_transposed"
  weight = (experts, n, k) if flipped else (experts, k, n)
  run = lambda x, w, s: megablox.gmm(x, w, s, bf16, tuple(tiles), transpose_rhs=flipped)
  return lower_on_one_slice(run, ((rows, k), bf16), (weight, bf16), sizes)


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
  """Splash attention, queries of several heads against one key head, forward or backward."""
  import jax
  import jax.numpy as jnp

  splash = importlib.import_module(_SPLASH + "splash_attention_kernel")
  masks = importlib.import_module(_SPLASH + "splash_attention_mask")
  sizes = dict(blocks, use_fused_bwd_kernel=fused)
  if not fused:
    sizes.update(block_q_dq=blocks["block_q_dkv"], block_kv_dq=blocks["block_kv_dkv"])
  mask = masks.MultiHeadMask([masks.FullMask((queries, keys)) for _ in range(heads)])
  kernel = splash.make_splash_mqa_single_device(mask, block_sizes=splash.BlockSizes(**sizes))

  def backward(q, k, v, d):
    return jax.vjp(kernel, q, k, v)[1](d)

  bf16 = jnp.bfloat16
  q, kv = ((heads, queries, head_dim), bf16), ((keys, head_dim), bf16)
  if which == "forward":
    return lower_on_one_slice(kernel, q, kv, kv)
  return lower_on_one_slice(backward, q, kv, kv, q)
