"""The RMS norm, by XLA and by its kernels; XLA's grouped product.

One device's whole share of a step, 16,384 tokens.  What is XLA's is priced as a program, by the rules
of `tools.aot.timeline`.
"""

from __future__ import annotations

import dataclasses

from tools.kernel_report.case import KernelCase

_TOKENS = 16_384


def _case(name: str, builder: str, flops: float, bytes_: float, part: str, **sizes) -> KernelCase:
  return KernelCase(
    name=name,
    builder=f"tools.kernel_report.xla_kernels:{builder}",
    arguments=sizes,
    kernel="",
    flops=flops,
    bytes=bytes_,
    part=part,
    program=True,
  )


def _model(model: str, width: int) -> list[KernelCase]:
  tokens = f"all: {_TOKENS:,} tokens"
  out = []
  for which, arrays in (("forward", 2), ("backward", 3)):
    out.append(
      _case(
        f"ours: {model} RMS norm by XLA, {which}",
        "rms_norm",
        1.0,
        2.0 * arrays * _TOKENS * width,
        tokens,
        which=which,
        tokens=_TOKENS,
        width=width,
      )
    )
    out.append(
      dataclasses.replace(
        out[-1],
        name=f"ours: {model} RMS norm {which}",
        arguments={**out[-1].arguments, "implementation": "pallas"},
        program=False,
      )
    )
  return out


def _ragged_dot(model: str, embed: int, mlp: int, expert_rows: int) -> list[KernelCase]:
  """`jax.lax.ragged_dot`, whose weight gradient is dense and so left out."""
  groups = 2
  rows = groups * expert_rows
  out = []
  for name, k, n in (("wi", embed, 2 * mlp), ("wo", mlp, embed)):
    for which, title in (("forward", "forward"), ("dlhs", "input gradient")):
      out.append(
        _case(
          f"XLA ragged_dot: {model} {name} {title}",
          "ragged_dot",
          2.0 * rows * k * n,
          2.0 * (rows * (k + n) + groups * k * n),
          f"{groups} experts, {expert_rows:,} rows each",
          which=which,
          groups=groups,
          rows=rows,
          k=k,
          n=n,
        )
      )
  return out


CASES: tuple[KernelCase, ...] = (
  *_model("397B", 4096),
  *_model("35B", 2048),
  *_ragged_dot("397B", 4096, 1024, 2560),
  *_ragged_dot("35B", 2048, 512, 4096),
)
