"""Builders for the sort, gather and un-sort of kernels/moe_dispatch, which are XLA's own ops."""

from __future__ import annotations

from typing import Any

from kernels.moe_dispatch import moe_dispatch
from tools.kernel_report import public_kernels


def moved_rows(
  *, which: str, tokens: int, choices: int, experts: int, buffer_rows: int, width: int
) -> Any:
  """One step of a device's dispatch.

  Args:
    which: plan (the sort and its inverse), dispatch (tokens to rows), sum (rows to tokens),
      sum_product (the same as a grouped product), combine (weighted sum of a token's rows),
      combine_gradient (its transpose).
    tokens: Gathered tokens, whose pairs mostly belong to other devices.
    choices: Experts a token.
    experts: Experts of this device.
    buffer_rows: Rows of its buffer.
    width: Width of a row, bfloat16.
  """
  import jax
  import jax.numpy as jnp

  flat = lambda: moe_dispatch.Plan(
    ((buffer_rows,), jnp.int32),
    ((tokens, choices), jnp.int32),
    ((experts,), jnp.int32),
    ((tokens, choices), jnp.bool_),
    ((), jnp.bool_),
  )
  wide, rows = ((tokens, width), jnp.bfloat16), ((buffer_rows, width), jnp.bfloat16)
  weights = ((tokens, choices), jnp.float32)
  lower = public_kernels.lower_on_one_slice
  if which == "plan":
    make = lambda chosen: tuple(
      moe_dispatch.plan(chosen, experts, buffer_rows=buffer_rows, spread_masked=True)
    )
    return lower(make, ((tokens, choices), jnp.int32))
  run, arrays = {
    "dispatch": (lambda x, *p: moe_dispatch.dispatch(x, moe_dispatch.Plan(*p)), (wide,)),
    "sum": (lambda y, *p: moe_dispatch.sum_rows(y, moe_dispatch.Plan(*p)), (rows,)),
    "sum_product": (
      lambda y, *p: moe_dispatch.sum_rows(y, moe_dispatch.Plan(*p), "pallas"),
      (rows,),
    ),
    "combine": (
      lambda y, w, *p: moe_dispatch.combine(y, w, moe_dispatch.Plan(*p)),
      (rows, weights),
    ),
    "combine_gradient": (
      lambda y, w, d, *p: jax.vjp(
        lambda y, w: moe_dispatch.combine(y, w, moe_dispatch.Plan(*p)), y, w
      )[1](d),
      (rows, weights, wide),
    ),
  }[which]
  return lower(run, *arrays, *flat())
