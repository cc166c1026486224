"""The sort, gathers and un-sort of a MoE layer's dispatch: XLA's own operations, and our kernels.

One device's whole share: 131,072 gathered tokens, of whose (token, choice) pairs every eighth is of
its experts, and a buffer of twice the balanced rows (ragged_buffer_factor 2.0).  Their floor is
bandwidth: each live pair's row once, results once.
"""

from __future__ import annotations

import math

from tools.kernel_report.case import KernelCase

_TOKENS, _RANKS, _FACTOR = 131_072, 8, 2


def words_of(rows: float) -> float:
  """Mean words of a run whose length is a Poisson number with this mean.

  r rows that begin anywhere touch (r + 1) / 2 words if r is odd, and (r + 1) / 2 in the mean if it is even
  and not zero.
  """
  return (rows + 1 - math.exp(-rows)) / 2


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
  # Whole strips of tokens, whole tiles of rows; a run is the rows of an expert in 128 tokens.
  tokens_part, rows_part = 8192, 16_384
  run_rows = live / _TOKENS * 128 / experts
  words = 8 * math.ceil(experts * words_of(run_rows) / 8)
  kernel = lambda name, which, part, bytes_, said: KernelCase(
    name=f"ours: {model} {name}",
    builder="tools.kernel_report.dispatch_kernels:row_kernel",
    arguments={"which": which, "width": width, **part},
    kernel=f"moe_{which}",
    flops=1.0,
    bytes=bytes_,
    part=said,
    whole={"which": which, **common},
  )
  return [
    kernel(
      "un-sort (rows to tokens)",
      "unsort",
      {"tokens": tokens_part, "buffer_rows": rows_part, "words": words},
      row * tokens_part * (1 + live / _TOKENS),
      f"{tokens_part:,} of {_TOKENS:,} tokens, {words} words for each 128, lists apart",
    ),
    kernel(
      "dispatch (tokens to rows)",
      "gather",
      {"tokens": _TOKENS, "buffer_rows": rows_part},
      row * 2 * rows_part,
      f"{rows_part:,} of {live:,} rows that are somebody's",
    ),
    make("dispatch plan (sort)", "plan", 4.0 * (2 * pairs + rows) + pairs),
    make("lists of the un-sort kernel", "lists", 4.0 * (3 * rows)),
    make("dispatch by XLA (tokens to rows)", "dispatch", row * (live + rows)),
    make("un-sort by XLA (rows to tokens)", "sum", row * (live + _TOKENS)),
    make("weighted un-sort by XLA", "combine", row * (live + _TOKENS) + 4.0 * pairs),
    make(
      "weighted un-sort by XLA, gradient", "combine_gradient", row * (2 * live + rows) + 8.0 * pairs
    ),
  ]


CASES: tuple[KernelCase, ...] = (
  *_cases("397B", choices=10, experts=64, width=4096),
  *_cases("35B", choices=8, experts=32, width=2048),
)
