"""The log-prob head: its Pallas kernels, the product that follows them, and its plain JAX form.

One device's share of a step is 16,384 tokens and the whole vocabulary.  The backward pass is a loop
over blocks of 8,192 words: the kernel, then the product of dz with the block for the hidden
states' gradient, which is XLA's and priced as a program by the rules of `tools.aot.timeline`.
"""

from __future__ import annotations

from typing import Any

from tools.kernel_report.case import KernelCase

_TOKENS, _VOCAB, _BLOCK = 16_384, 248_320, 8192
_BUILDER = "tools.kernel_report.head_kernels:"


def _kernel(
  model: str, width: int, which: str, tokens: int, words: int, suffix: str = "", **changes: Any
) -> KernelCase:
  # The backward kernel's two products: logits and the table's gradient.  It writes dz besides.
  products = 1 if which == "forward" else 2
  arrays = (tokens + products * words) * width
  written = 0 if which == "forward" else tokens * words
  return KernelCase(
    name=f"ours: {model} log-prob head {which} kernel{suffix}",
    builder=f"{_BUILDER}kernel",
    arguments={"which": which, "tokens": tokens, "vocab": words, "width": width, **changes},
    kernel=f"logprob_head_{which}",
    flops=products * 2.0 * tokens * words * width,
    bytes=2.0 * (arrays + written),
    part=f"{tokens:,} of {_TOKENS:,} tokens, {words:,} of {_VOCAB:,} words",
    # A block is what one call of the backward kernel has.
    whole={
      "which": which,
      "tokens": _TOKENS,
      "vocab": _VOCAB if which == "forward" else _BLOCK,
      "width": width,
      **changes,
    },
  )


def _program(name: str, which: str, width: int, products: int, words: int, **changes) -> KernelCase:
  operands = 2.0 * (_TOKENS + words) * width
  values: dict[str, Any] = {
    "name": name,
    "builder": f"{_BUILDER}{'hidden_gradient' if which == 'block' else 'plain'}",
    "arguments": {"which": which, "tokens": _TOKENS, "vocab": _VOCAB, "width": width},
    "kernel": "",
    "flops": products * 2.0 * _TOKENS * words * width,
    "bytes": operands * (1 if which == "forward" else 2),
    "part": f"all: {_TOKENS:,} tokens, {words:,} words",
    "program": True,
  }
  return KernelCase(**(values | changes))


def _model(model: str, width: int) -> list[KernelCase]:
  name = f"ours: {model} log-prob head"
  return [
    _kernel(model, width, "forward", 2048, 16_384),
    _kernel(model, width, "backward", 4096, 1024),
    # What a float32 table takes.  The simulation of schedules aborts on casts to eight bits, which the
    # one above has; this one multiplies half a product more.
    _kernel(model, width, "backward", 4096, 1024, ", low part of dz in bfloat16", low="bfloat16"),
    _program(
      f"{name} hidden gradient of a block",
      "block",
      width,
      1,
      _BLOCK,
      # dz, the block, and the float32 sum read and written.
      bytes=2.0 * _TOKENS * _BLOCK + 2.0 * _BLOCK * width + 8.0 * _TOKENS * width,
      part=f"{_TOKENS:,} tokens, {_BLOCK:,} of {_VOCAB:,} words",
    ),
    _program(f"{name} in plain JAX, forward", "forward", width, 1, _VOCAB),
    _program(f"{name} in plain JAX, forward and backward", "training", width, 4, _VOCAB),
  ]


CASES: tuple[KernelCase, ...] = (*_model("397B", 4096), *_model("35B", 2048))
