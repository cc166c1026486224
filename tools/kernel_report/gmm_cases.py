"""The grouped matrix products of a MoE layer, all passes, types and epilogues.

One device's share of a layer: the rows of its local experts.  The whole work, which is compiled but
not simulated, is a buffer of twice the balanced rows (ragged_buffer_factor 2.0) for all its experts.
"""

from __future__ import annotations

import dataclasses

from tools.kernel_report.case import KernelCase

_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Model:
  """Shapes of the routed experts, and a device's balanced rows.

  A part is `simulated` experts, so that the change of matrix is in the schedule and the start of the
  kernel, which a device's whole work has once, is a small part of it.
  """

  name: str
  embed: int
  mlp: int
  experts: int
  expert_rows: int
  simulated: int


# Experts over (context, expert) = 8 devices, 131,072 gathered tokens.
_MODELS = (
  _Model(name="397B", embed=4096, mlp=1024, experts=64, expert_rows=2560, simulated=4),
  _Model(name="35B", embed=2048, mlp=512, experts=32, expert_rows=4096, simulated=8),
)


def _case(
  model: _Model, name: str, which: str, k: int, n: int, *, local: int | None = None, **changes
) -> KernelCase:
  left, right = changes.get("left", "bfloat16"), changes.get("right", "bfloat16")
  epilogue = changes.get("epilogue", "none")
  local = local or model.experts
  # The simulation of an eight-bit weight gradient takes gigabytes for some experts.
  groups = model.simulated // (4 if which == "drhs" and left != "bfloat16" else 1)
  rows = groups * model.expert_rows
  common = {"which": which, "k": k, "n": n, **changes}
  if which == "drhs":
    elements = rows * k * _BYTES[left] + rows * n * _BYTES[right] + 2 * groups * k * n
  else:
    result = {"none": n, "swiglu": n // 2, "dswiglu": 4 * n}[epilogue]  # with what dswiglu reads
    matrices = groups * k * n * _BYTES[right]
    elements = rows * k * _BYTES[left] + matrices + 2 * rows * result
  kernel = "drhs" if which == "drhs" else f"{which}_{epilogue}"
  return KernelCase(
    name=f"ours: {model.name} {name}",
    builder="tools.kernel_report.gmm_kernels:product",
    arguments={**common, "groups": groups, "rows": rows, "group_rows": model.expert_rows},
    kernel=f"gmm_{kernel}",
    flops=2.0 * rows * k * n,
    bytes=float(elements),
    part=f"{groups} of {local} experts, {model.expert_rows:,} rows each",
    dtype="bf16" if left == "bfloat16" else "fp8",
    whole={
      **common,
      "groups": local,
      "rows": 2 * model.experts * model.expert_rows,
      "group_rows": 0,
    },
  )


def _cases(model: _Model) -> list[KernelCase]:
  d, wide, f = model.embed, 2 * model.mlp, model.mlp
  forward, gradient = {"left": _E4M3, "right": _E4M3}, {"left": _E5M2, "right": _E4M3}
  out = []
  for suffix, fwd, dlhs, drhs in (
    ("", {}, {}, {}),
    (", e4m3", forward, forward, forward),
    (", gradient e5m2", None, gradient, {"left": _E4M3, "right": _E5M2}),
  ):
    make = lambda name, *args, **kwargs: out.append(
      _case(model, name + suffix, *args, **kwargs)  # noqa: B023 (called in this round)
    )
    if fwd is not None:
      make("wi forward", "forward", d, wide, **fwd)
      make("wi forward with SwiGLU", "forward", d, wide, epilogue="swiglu", **fwd)
      make("wo forward", "forward", f, d, **fwd)
    make("wo input gradient", "dlhs", d, f, **dlhs)
    make("wo input gradient with d-SwiGLU", "dlhs", d, f, epilogue="dswiglu", weighted=True, **dlhs)
    make("wi input gradient", "dlhs", wide, d, **dlhs)
    make("wi weight gradient", "drhs", d, wide, **drhs)
    make("wo weight gradient", "drhs", f, d, **drhs)
  return out


def _all_experts(model: _Model) -> list[KernelCase]:
  """All the experts of the model on one device: the list of visits must fit in scalar memory."""
  d, f = model.embed, model.mlp
  return [
    _case(model, "wi forward, 512 local experts", "forward", d, 2 * f, local=512),
    _case(model, "wi weight gradient, 512 local experts", "drhs", d, 2 * f, local=512),
  ]


CASES: tuple[KernelCase, ...] = (
  *(case for model in _MODELS for case in _cases(model)),
  *_all_experts(_MODELS[0]),
)
