"""Public kernels that do the same work as this repository's, at the same shapes.

Shapes are one device's share of a step of Qwen3.5-397B-A17B on the mesh 32x2x4, rows of 65,536
tokens: 16,384 tokens, 64 experts of 2,560 balanced rows, one quarter of a row against the keys of
the whole row.  Every grid step is simulated, so a case takes a part of that work with the same
blocks; `part` says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tools.kernel_report.case import KernelCase

D, EXPERT_DIM, VOCAB = 4096, 1024, 248_320
HEAD_DIM = 256
# Rows of one of the 64 experts: the grid of one repeats.  The simulation of a schedule whose
# contraction is one tile grows with the square of its steps, so those take half the rows.
_ROWS, _ROWS_OF_ONE_TILE = 2560, 1280


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Experts:
  """Routed experts of a model, and balanced rows of one of a device's."""

  model: str
  embed: int
  mlp: int
  local: int
  rows: int


_EXPERTS = (
  _Experts(model="397B", embed=D, mlp=EXPERT_DIM, local=64, rows=_ROWS),
  _Experts(model="35B", embed=2048, mlp=512, local=32, rows=4096),
)


def _grouped(
  library: str, module: str, tiles: tuple[int, int, int], experts: _Experts
) -> list[KernelCase]:
  """The six grouped products of a MoE layer: two forward, two input and two weight gradients."""
  embed, mlp, wide = experts.embed, experts.mlp, 2 * experts.mlp
  out = []
  for name, kind, k, n in (
    ("wi forward", "gmm", embed, wide),
    ("wo forward", "gmm", mlp, embed),
    ("wo input gradient", "gmm_transposed", embed, mlp),
    ("wi input gradient", "gmm_transposed", wide, embed),
    ("wi weight gradient", "tgmm", embed, wide),
    ("wo weight gradient", "tgmm", mlp, embed),
  ):
    tile_k, tile_n = min(tiles[1], k), min(tiles[2], n)
    # Their weight gradients want the rows' transpose, which is a pass over memory before the kernel.
    turned = ", left side turned beforehand" if kind == "tgmm" else ""
    rows = _ROWS_OF_ONE_TILE if kind != "tgmm" and tile_k == k else experts.rows
    out.append(
      KernelCase(
        name=f"{library}: {experts.model} {name}, tiles {tiles[0]}x{tile_k}x{tile_n}",
        builder=f"tools.kernel_report.{module}:grouped_product",
        arguments={
          "kind": kind,
          "experts": 1,
          "expert_rows": rows,
          "k": k,
          "n": n,
          "tiles": [tiles[0], tile_k, tile_n],
        },
        kernel="tgmm" if kind == "tgmm" else "gmm",
        flops=2.0 * rows * k * n,
        bytes=2.0 * (rows * (k + n) + k * n),
        part=f"{rows:,} of {experts.rows:,} rows of 1 of {experts.local} experts{turned}",
      )
    )
  return out


def _attention(
  library: str, module: str, fused: bool, blocks: Mapping[str, int]
) -> list[KernelCase]:
  """Flash attention of some queries and heads against some keys, no mask: every block is live."""
  queries, keys, heads = 2048, 8192, 2
  scores = 2.0 * heads * queries * keys * HEAD_DIM
  read = 2.0 * (2 * heads * queries + 2 * keys) * HEAD_DIM
  part = "2,048 of 16,384 queries, 8,192 of 65,536 keys, 2 of 32 heads"
  common = {"queries": queries, "keys": keys, "heads": heads, "head_dim": HEAD_DIM}
  make = lambda which, kernel, products, bytes_: KernelCase(
    name=f"{library}: attention {which}",
    builder=f"tools.kernel_report.{module}:attention",
    arguments={**common, "fused": fused, "which": which, "blocks": dict(blocks)},
    kernel=kernel,
    flops=products * scores,
    bytes=bytes_,
    part=part,
  )
  out = [make("forward", "splash_mqa_fwd", 2, read)]
  if fused:
    out.append(make("backward", "splash_mqa_dkv", 5, 2.5 * read))
  else:
    out.append(make("backward dkv", "splash_mqa_dkv", 4, 2 * read))
    out.append(make("backward dq", "splash_mqa_dq", 3, 1.5 * read))
  return out


def _head() -> list[KernelCase]:
  """Log-probabilities over a part of the vocabulary, forward and backward."""
  tokens, vocab = 2048, 8192
  product = 2.0 * tokens * vocab * D
  operands = 2.0 * (tokens + vocab) * D
  part = f"{tokens:,} of 16,384 tokens, {vocab:,} of {VOCAB:,} words"
  out = []
  for which, products, bytes_ in (("forward", 1, operands), ("backward", 3, 3 * operands)):
    out.append(
      KernelCase(
        name=f"tokamax: linear cross-entropy {which}",
        builder="tools.kernel_report.tokamax_kernels:linear_cross_entropy",
        arguments={"tokens": tokens, "vocab": vocab, "width": D, "which": which},
        kernel="",
        flops=products * product,
        bytes=bytes_,
        part=part,
      )
    )
  return out


_BLOCKS = {
  "block_q": 1024,
  "block_kv": 4096,
  "block_kv_compute": 512,
  "block_q_dkv": 2048,
  "block_kv_dkv": 2048,
  "block_kv_dkv_compute": 512,
}

CASES: tuple[KernelCase, ...] = (
  *(
    case
    for experts in _EXPERTS
    for library, module in (("megablox", "public_kernels"), ("tokamax", "tokamax_kernels"))
    for case in _grouped(library, module, (256, 1024, 1024), experts)
  ),
  *_attention("splash", "public_kernels", True, _BLOCKS),
  *_attention("tokamax splash", "tokamax_kernels", True, _BLOCKS),
  *_head(),
)
