"""The sort, gathers and un-sort of a MoE layer's dispatch: XLA's own operations.

One device's whole share: 131,072 gathered tokens, of whose (token, choice) pairs every eighth is of
its experts, and a buffer of twice the balanced rows (ragged_buffer_factor 2.0).  Their floor is
bandwidth: each live pair's row once, results once.
"""

from __future__ import annotations

from tools.kernel_report.case import KernelCase

_TOKENS, _RANKS, _FACTOR = 131_072, 8, 2


def _cases(model: str, choices: int, experts: int, width: int) -> list[KernelCase]:
  pairs = _TOKENS * choices
  live = pairs // _RANKS
  rows = _FACTOR * live
  row = 2.0 * width
  common = {
    "tokens": _TOKENS,
    "choices": choices,
    "experts": experts,
    "buffer_rows": rows,
    "width": width,
  }
  make = lambda name, which, bytes_: KernelCase(
    name=f"ours: {model} {name}",
    builder="tools.kernel_report.dispatch_kernels:moved_rows",
    arguments={"which": which, **common},
    kernel="",
    flops=1.0,
    bytes=bytes_,
    part=f"all: {_TOKENS:,} tokens, {live:,} of {pairs:,} pairs, {rows:,} rows",
    program=True,
  )
  return [
    make("dispatch plan (sort)", "plan", 4.0 * (2 * pairs + rows) + pairs),
    make("dispatch (tokens to rows)", "dispatch", row * (live + rows)),
    make("un-sort (rows to tokens)", "sum", row * (live + _TOKENS)),
    make("un-sort as a grouped product", "sum_product", row * (live + _TOKENS)),
    make("weighted un-sort", "combine", row * (live + _TOKENS) + 4.0 * pairs),
    make("weighted un-sort, gradient", "combine_gradient", row * (2 * live + rows) + 8.0 * pairs),
  ]


CASES: tuple[KernelCase, ...] = (
  *_cases("397B", choices=10, experts=64, width=4096),
  *_cases("35B", choices=8, experts=32, width=2048),
)
