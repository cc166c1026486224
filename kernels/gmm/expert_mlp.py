"""The routed experts' MLP as one op: y = weight * (silu(x Wi_gate) * (x Wi_up)) Wo, row by row.

One derivative rule over both products lets their epilogues do what would otherwise be passes over
memory.  Nothing but the inputs is kept for the backward, and gate and up are computed again there,
unless `saved` names them: they then are residuals under those names, for a remat policy to keep.

  fused_swiglu                  forward: silu(gate) * up on the first product's float32 sums.
  router_grad_from_wo_input     the gradient of a row's weight as <d_y Wo^T, h>, so that the
                                backward does not run the second product again.
  fused_dswiglu                 backward: d_y Wo^T becomes the gradient of [gate | up] in the
                                product's epilogue, with the gradient of the weight.

Each may be off: the op then runs the plain product and the elementwise pass.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.base import implementation as implementation_lib
from kernels.gmm import gmm, reference, row_kernel
from kernels.gmm import tiles as tiles_lib

GATE, UP, OUT = SAVED_NAMES = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
  """How the op is computed; the values do not depend on it beyond rounding.

  Attributes:
    fused_swiglu: See the module's text.
    router_grad_from_wo_input: See the module's text.
    fused_dswiglu: See the module's text.
    saved: Names of SAVED_NAMES that the derivative takes from the forward pass; each is written to
      memory there, so neither fusion goes with gate or up, and the second product is weighted after
      its rounding where its result is kept.
    prefused: Gate and up are one product; else two, of the halves of the matrices.
    implementation: One of `kernels.base.implementation.IMPLEMENTATIONS`.
    wi_tiles: Tiles of the first product, n counting gate and up columns together where it is one;
      from the table by default.
    wo_tiles: Tiles of the second product.
  """

  fused_swiglu: bool = True
  router_grad_from_wo_input: bool = True
  fused_dswiglu: bool = True
  saved: tuple[str, ...] = ()
  prefused: bool = True
  implementation: str = "auto"
  wi_tiles: tiles_lib.PassTiles | None = None
  wo_tiles: tiles_lib.PassTiles | None = None


def _activation(gate_up):
  gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
  return jax.nn.silu(gate) * up


def _d_activation(gate_up, grad):
  gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
  sig = jax.nn.sigmoid(gate)
  act = gate * sig
  return jnp.concatenate([grad * up * (sig + act * (1.0 - sig)), grad * act], axis=1)


def _halves(x, form, axis):
  """Operands of the first product, or of the two that stand in its place."""
  return [x] if form.prefused else jnp.split(x, 2, axis=axis)


def _gate_up(x, wi, sizes, form):
  one = functools.partial(
    gmm.multiply, tile=form.wi_tiles.forward, implementation=form.implementation
  )
  return _joined([one(x, half, sizes) for half in _halves(wi, form, 2)], axis=1)


def _joined(parts, axis):
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _hidden(x, wi, sizes, form):
  def plain(x, wi, sizes):
    return _activation(_gate_up(x, wi, sizes, form)).astype(x.dtype)

  if not form.fused_swiglu:
    return plain(x, wi, sizes)
  tile = form.wi_tiles.forward
  tile = dataclasses.replace(tile, n=max(128, tile.n // 2))

  def kernel(x, wi, sizes, *, interpret):
    return row_kernel.grouped(x, wi, sizes, tile=tile, epilogue="swiglu", interpret=interpret)

  return implementation_lib.dispatch(form.implementation, kernel, plain, x, wi, sizes)


def _product_out(h, wo, sizes, form):
  return gmm.multiply(h, wo, sizes, tile=form.wo_tiles.forward, implementation=form.implementation)


def _weighted(out, weights, sizes):
  return reference.owned(out.astype(jnp.float32) * weights[:, None], sizes).astype(out.dtype)


def _second(h, wo, sizes, weights, form):
  """weight * (h Wo), weighted on the float32 sums."""

  def plain(h, wo, sizes, weights):
    return _weighted(_product_out(h, wo, sizes, form), weights, sizes)

  def kernel(h, wo, sizes, weights, *, interpret):
    return row_kernel.grouped(
      h, wo, sizes, tile=form.wo_tiles.forward, lhs_scale=weights, interpret=interpret
    )

  return implementation_lib.dispatch(form.implementation, kernel, plain, h, wo, sizes, weights)


def _d_gate_up(grad, wo, sizes, gate_up, weights, form):
  """Gradients of [gate | up], and <grad Wo^T, h> of each row."""

  def plain(grad, wo, sizes, gate_up, weights):
    a = gmm.multiply(
      grad,
      wo,
      sizes,
      tile=form.wo_tiles.dlhs,
      implementation=form.implementation,
      transpose_rhs=True,
    ).astype(jnp.float32)
    d_weights = jnp.sum(a * _activation(gate_up), axis=1)
    return _d_activation(gate_up, a * weights[:, None]).astype(grad.dtype), d_weights

  if not form.fused_dswiglu:
    return plain(grad, wo, sizes, gate_up, weights)

  def kernel(grad, wo, sizes, gate_up, weights, *, interpret):
    return row_kernel.grouped(
      grad,
      wo,
      sizes,
      tile=form.wo_tiles.dlhs,
      transpose_rhs=True,
      epilogue="dswiglu",
      gate_up=gate_up,
      weights=weights,
      interpret=interpret,
    )

  return implementation_lib.dispatch(
    form.implementation, kernel, plain, grad, wo, sizes, gate_up, weights
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _mlp(x, wi, wo, weights, sizes, form):
  return _second(_hidden(x, wi, sizes, form), wo, sizes, weights, form)


def _forward(x, wi, wo, weights, sizes, form):
  inputs = (x, wi, wo, weights, sizes)
  if not form.saved:
    return _mlp(*inputs, form), (inputs, {})
  kept = {}
  if GATE in form.saved or UP in form.saved:
    gate_up = _gate_up(x, wi, sizes, form)
    kept = dict(zip((GATE, UP), jnp.split(gate_up, 2, axis=1), strict=True))
    hidden = _activation(gate_up).astype(x.dtype)
  else:
    hidden = _hidden(x, wi, sizes, form)
  if OUT in form.saved:
    kept[OUT] = _product_out(hidden, wo, sizes, form)
    y = _weighted(kept[OUT], weights, sizes)
  else:
    y = _second(hidden, wo, sizes, weights, form)
  return y, (inputs, {name: checkpoint_name(kept[name], name) for name in form.saved})


def _replayed(x, wi, sizes, kept, form):
  """Gate and up, of which what was kept is not computed again."""
  halves = [kept.get(name) for name in (GATE, UP)]
  if all(half is None for half in halves):
    return _gate_up(x, wi, sizes, form)
  matrices = jnp.split(wi, 2, axis=2)
  one = functools.partial(
    gmm.multiply, tile=form.wi_tiles.forward, implementation=form.implementation
  )
  found = [
    one(x, m, sizes) if half is None else half for half, m in zip(halves, matrices, strict=True)
  ]
  return jnp.concatenate(found, axis=1)


def _backward(form, residuals, grad):
  (x, wi, wo, weights, sizes), kept = residuals
  gate_up = _replayed(x, wi, sizes, kept, form)
  d_gate_up, d_weights = _d_gate_up(grad, wo, sizes, gate_up, weights, form)
  hidden = _activation(gate_up)
  if not form.router_grad_from_wo_input:
    out = kept[OUT] if OUT in kept else _product_out(hidden.astype(x.dtype), wo, sizes, form)
    d_weights = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=1)
  d_weights = jnp.where(jnp.arange(x.shape[0]) < jnp.sum(sizes), d_weights, 0.0)
  weight_gradient = functools.partial(gmm.weight_gradient, implementation=form.implementation)
  weighted = (hidden * weights[:, None]).astype(x.dtype)
  d_wo = weight_gradient(weighted, grad, sizes, tile=form.wo_tiles.drhs, out_dtype=wo.dtype)
  halves = _halves(d_gate_up, form, 1)
  d_wi = _joined(
    [
      weight_gradient(x, half, sizes, tile=form.wi_tiles.drhs, out_dtype=wi.dtype)
      for half in halves
    ],
    axis=2,
  )
  d_x = [
    gmm.multiply(
      half,
      matrix,
      sizes,
      tile=form.wi_tiles.dlhs,
      implementation=form.implementation,
      transpose_rhs=True,
    )
    for half, matrix in zip(halves, _halves(wi, form, 2), strict=True)
  ]
  d_x = d_x[0] if form.prefused else d_x[0].astype(jnp.float32) + d_x[1].astype(jnp.float32)
  return d_x.astype(x.dtype), d_wi, d_wo, d_weights, None


_mlp.defvjp(_forward, _backward)


def expert_mlp(
  x: Float[Array, "M h"],
  wi: Float[Array, "G h 2F"],
  wo: Float[Array, "G F h"],
  weights: Float[Array, " M"],
  group_sizes: Int[Array, " G"],
  *,
  form: Form | None = None,
) -> Float[Array, "M h"]:
  """The routed experts on rows sorted by expert.

  Args:
    x: Rows.
    wi: First matrices, gate columns then up columns.
    wo: Second matrices.
    weights: Router weight of each row, float32.
    group_sizes: Rows of each expert, int32, sum <= M.
    form: How to compute it.

  Returns:
    weight * MLP(x) in the type of `x`; rows beyond sum(group_sizes) are zero, and nothing in them,
    weights included, enters a result or a gradient.

  Raises:
    ValueError: Shapes do not agree, `weights` is not float32, `fused_dswiglu` is asked for with a
      tile that does not hold the whole of F, a fusion without `prefused` or with gate or up saved,
      or a saved name that is none or that the derivative has no use for.
  """
  form = form or Form()
  gmm.check(x, wi, group_sizes)
  if wo.shape != (wi.shape[0], wi.shape[2] // 2, wi.shape[1]) or wi.shape[2] % 2:
    raise ValueError(f"want wi [G, h, 2 F] and wo [G, F, h], got {wi.shape} and {wo.shape}")
  if weights.shape != x.shape[:1] or weights.dtype != jnp.float32:
    raise ValueError(f"want float32 weights [{x.shape[0]}], got {weights.dtype} {weights.shape}")
  if not form.prefused and (form.fused_swiglu or form.fused_dswiglu):
    raise ValueError(
      "fused_swiglu and fused_dswiglu want gate and up of one product: prefused=True"
    )
  if unknown := set(form.saved) - set(SAVED_NAMES):
    raise ValueError(f"saved={sorted(unknown)}: want names of {', '.join(SAVED_NAMES)}")
  fused = form.fused_swiglu or form.fused_dswiglu
  if fused and not {GATE, UP}.isdisjoint(form.saved):
    raise ValueError("fused_swiglu and fused_dswiglu write no gate or up that could be saved")
  if form.router_grad_from_wo_input and OUT in form.saved:
    raise ValueError("router_grad_from_wo_input reads no second product that could be saved")
  columns = wi.shape[2] if form.prefused else wo.shape[1]
  form = dataclasses.replace(
    form,
    wi_tiles=form.wi_tiles or tiles_lib.good(wi.shape[1], columns),
    wo_tiles=form.wo_tiles or tiles_lib.good(*wo.shape[1:]),
  )
  if form.fused_dswiglu and form.wo_tiles.dlhs.n < wo.shape[1]:
    raise ValueError(
      f"fused_dswiglu wants one n tile: wo's dlhs tile has n={form.wo_tiles.dlhs.n}, F={wo.shape[1]}"
    )
  return _mlp(x, wi, wo, weights, group_sizes.astype(jnp.int32), form)
