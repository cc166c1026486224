"""Flash attention of this repository at a device's share of a layer.

A device has a quarter of a packed row's queries, in zig-zag order, and all its keys.  What a row
costs depends on its segments: a pair of blocks is fully visible, masked, or dead and skipped.  The
simulated part has one kind of pair; a row's cycles are the pairs of each kind times that kind's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tools.kernel_report.case import KernelCase

_HEAD_DIM = 256
_QUERIES, _KEYS = 16_384, 65_536
_FORWARD = {"block_q": 1024, "block_kv": 4096, "part": 512}
_BACKWARD = {"block_q": 2048, "block_kv": 2048, "part": 512}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Model:
  """Heads of an attention layer."""

  name: str
  heads: int
  kv_heads: int


_MODELS = (
  _Model(name="397B", heads=32, kv_heads=2),
  _Model(name="35B", heads=16, kv_heads=2),
)


_NAMES = {
  "visible": "visible blocks",
  "one segment": "masked blocks of one segment",
  "masked": "masked blocks",
}


def _case(model: _Model, which: str, kind: str) -> KernelCase:
  forward = which == "forward"
  tiles = _FORWARD if forward else _BACKWARD
  # Four pairs of blocks of one outer block.
  queries = tiles["block_q"] * (1 if forward else 4)
  keys = tiles["block_kv"] * (4 if forward else 1)
  one = {"which": which, "head_dim": _HEAD_DIM, **tiles}
  arguments: dict[str, Any] = {"queries": queries, "keys": keys, "heads": 1, "kv_heads": 1}
  whole = {"queries": _QUERIES, "keys": _KEYS, "heads": model.heads, "kv_heads": model.kv_heads}
  # Forward reads q, k, v and writes the output; backward reads the output's gradient besides, and
  # writes the three gradients, that of the queries in float32 and read as often as written.
  elements = 2 * queries + 2 * keys if forward else 2 * queries + 4 * queries + 4 * keys
  return KernelCase(
    name=f"ours: {model.name} attention {which}, {_NAMES[kind]}",
    builder="tools.kernel_report.attention_kernels:flash",
    arguments={**one, **arguments, "kind": kind},
    kernel=f"flash_attention_{which}",
    flops=(4.0 if forward else 10.0) * queries * keys * _HEAD_DIM,
    bytes=2.0 * elements * _HEAD_DIM,
    part=f"{queries:,} of 16,384 queries, {keys:,} of 65,536 keys, 1 of {model.heads} heads",
    whole={**one, **whole},
  )


CASES: tuple[KernelCase, ...] = tuple(
  _case(model, which, kind)
  for model in _MODELS
  for which, kinds in (("forward", tuple(_NAMES)), ("backward", ("visible", "masked")))
  for kind in kinds
)
