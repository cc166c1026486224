"""The Pallas kernels, interpreted, against float32 references."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.gmm import epilogues, expert_mlp, gmm, reference, row_kernel, visits, weight_kernel
from kernels.gmm import tiles as tiles_lib

_K, _N = 256, 384
_ROWS = 101
# Rows of each group: empty groups at either end and inside, groups below one part of
# a tile, one that spans several tiles, sizes that are no multiple of anything, and nobody at all.
_LAYOUTS = {
  "ragged": (0, 37, 3, 0, 21),
  "whole": (32, 0, 32, 32, 0),
  "tiny": (1, 1, 1, 1, 1),
  "empty": (0, 0, 0, 0, 0),
}
_TILE = tiles_lib.Tiles(rows=32, k=256, n=256, part=8, columns=128)
_CUT = tiles_lib.Tiles(rows=16, k=128, n=128, part=16, columns=128)
_LIMIT = {jnp.float32: 2e-6, jnp.bfloat16: 2e-3}


def _relative(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  assert got.shape == want.shape and np.isfinite(got).all()
  norm = np.linalg.norm(want)
  return np.linalg.norm(got - want) / norm if norm else np.linalg.norm(got)


def _close(got, want, dtype):
  assert _relative(got, want) <= _LIMIT[dtype]


def _problem(layout, dtype, *columns, seed=0):
  """Arrays [M, c] with NaN in the rows of nobody, and the group sizes."""
  sizes = _LAYOUTS[layout]
  rng = np.random.default_rng(seed)
  arrays = rng.normal(size=(_ROWS, sum(columns))).astype(np.float32)
  arrays[sum(sizes) :] = np.nan
  cuts = np.split(arrays, np.cumsum(columns)[:-1], axis=1)
  return [jnp.asarray(a, dtype) for a in cuts], jnp.asarray(sizes, jnp.int32)


def _matrices(shape, dtype, seed=1):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _wide(x):
  return x.astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="tile")
def _kernels(x, grad, w, sizes, tile):
  # The result's type of the weight gradient decides whether it is summed in place.
  out_dtype = jnp.bfloat16 if tile == _CUT else jnp.float32
  return (
    row_kernel.grouped(x, w, sizes, tile=tile, interpret=True),
    row_kernel.grouped(grad, w, sizes, tile=tile, transpose_rhs=True, interpret=True),
    weight_kernel.transposed(x, grad, sizes, tile=tile, out_dtype=out_dtype, interpret=True),
  )


@jax.jit
def _references(x, grad, w, sizes):
  return (
    reference.gmm(x, w, sizes),
    reference.gmm(grad, jnp.swapaxes(w, 1, 2), sizes),
    reference.tgmm(x, grad, sizes),
  )


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize(
  ("dtype", "tile"), [(jnp.float32, _TILE), (jnp.bfloat16, _TILE), (jnp.bfloat16, _CUT)]
)
def test_three_passes(layout, dtype, tile):
  (x, grad), sizes = _problem(layout, dtype, _K, _N)
  w = _matrices((5, _K, _N), dtype)
  got = _kernels(x, grad, w, sizes, tile)
  want = _references(_wide(x), _wide(grad), _wide(w), sizes)
  for a, b in zip(got, want):
    _close(a, b, dtype)
  owned = int(jnp.sum(sizes))
  assert not np.asarray(got[0][owned:]).any() and not np.asarray(got[1][owned:]).any()
  assert not np.asarray(got[2], np.float32)[np.asarray(sizes) == 0].any()


def test_sizes_no_multiple_of_a_tile():
  sizes = jnp.asarray([13, 0, 24], jnp.int32)
  x, w = _matrices((45, 200), jnp.float32), _matrices((3, 200, 300), jnp.float32)
  grad = _matrices((45, 300), jnp.float32, seed=2)
  tile = tiles_lib.Tiles(rows=16, k=128, n=256, part=8, columns=128)
  _close(
    row_kernel.grouped(x, w, sizes, tile=tile, interpret=True),
    reference.gmm(x, w, sizes),
    jnp.float32,
  )
  _close(
    weight_kernel.transposed(x, grad, sizes, tile=tile, interpret=True),
    reference.tgmm(x, grad, sizes),
    jnp.float32,
  )


@pytest.mark.parametrize("implementation", ["interpret", "reference", "auto"])
def test_public_op(implementation):
  (x,), sizes = _problem("ragged", jnp.float32, _K)
  w = _matrices((5, _K, _N), jnp.float32)
  tiles = tiles_lib.PassTiles(forward=_TILE, dlhs=_TILE, drhs=_TILE)
  grad = jnp.where(jnp.arange(101)[:, None] < 61, _matrices((101, _N), jnp.float32, 3), jnp.nan)

  @jax.jit
  def run(x, w, grad):
    op = lambda x, w: gmm.grouped_matmul(x, w, sizes, implementation=implementation, tiles=tiles)
    out, vjp = jax.vjp(op, x, w)
    return out, *vjp(grad)

  out, d_x, d_w = run(x, w, grad)
  _close(out, reference.gmm(x, w, sizes), jnp.float32)
  _close(d_x, reference.gmm(grad, jnp.swapaxes(w, 1, 2), sizes), jnp.float32)
  _close(d_w, reference.tgmm(x, grad, sizes), jnp.float32)


def _quantised(x, axis, dtype):
  absmax = jnp.max(jnp.where(jnp.isnan(x), 0, jnp.abs(x)), axis=axis, keepdims=True)
  scale = jnp.maximum(absmax, 1e-30) / float(jnp.finfo(dtype).max)
  return (x / scale).astype(dtype), jnp.squeeze(scale, axis)


def test_fp8_on_the_same_quantised_operands():
  e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
  (x, grad), sizes = _problem("ragged", jnp.float32, _K, _N)
  w = _matrices((5, _K, _N), jnp.float32)
  xq, xs = _quantised(x, 1, e4m3)
  wq, ws = _quantised(w, 1, e4m3)
  out = row_kernel.grouped(
    xq, wq, sizes, tile=_TILE, lhs_scale=xs, rhs_scale=ws, out_dtype=jnp.bfloat16, interpret=True
  )
  dequantised = _wide(xq) * xs[:, None], _wide(wq) * ws[:, None]
  _close(out, reference.gmm(*dequantised, sizes), jnp.bfloat16)
  # Quantisation itself is told apart from the kernel's error.
  assert 2e-2 < _relative(out, reference.gmm(x, w, sizes)) < 6e-2

  gq, gs = _quantised(grad, 1, e5m2)
  wq, ws = _quantised(w, 2, e4m3)
  out = row_kernel.grouped(
    gq,
    wq,
    sizes,
    tile=_CUT,
    transpose_rhs=True,
    lhs_scale=gs,
    rhs_scale=ws,
    out_dtype=jnp.bfloat16,
    interpret=True,
  )
  right = jnp.swapaxes(_wide(wq) * ws[..., None], 1, 2)
  _close(out, reference.gmm(_wide(gq) * gs[:, None], right, sizes), jnp.bfloat16)

  gate_up, weights = (
    _matrices((_ROWS, 2 * _K), jnp.bfloat16, 3),
    _matrices((_ROWS,), jnp.float32, 4),
  )
  tile = dataclasses.replace(_TILE, k=512)
  out, d_weights = row_kernel.grouped(
    gq, wq, sizes, tile=tile, transpose_rhs=True, epilogue="dswiglu", lhs_scale=gs, rhs_scale=ws,
    gate_up=gate_up, weights=weights, out_dtype=jnp.bfloat16, interpret=True,
  )  # fmt: skip
  a = reference.gmm(_wide(gq) * gs[:, None], right, sizes)
  h, pull = jax.vjp(lambda gu: jax.nn.silu(gu[:, :_K]) * gu[:, _K:], _wide(gate_up))
  _close(out, pull(weights[:, None] * a)[0], jnp.bfloat16)
  _close(d_weights, jnp.sum(a * h, axis=1), jnp.bfloat16)

  xq, xs = _quantised(x, 0, e4m3)
  gq, gs = _quantised(grad, 0, e5m2)
  out = weight_kernel.transposed(
    xq, gq, sizes, tile=_TILE, lhs_scale=xs, rhs_scale=gs, interpret=True
  )
  _close(out, reference.tgmm(_wide(xq) * xs, _wide(gq) * gs, sizes), jnp.float32)


_H, _F = 128, 256
_FORMS = {
  "plain": (False, False, False),
  "swiglu": (True, False, False),
  "router": (False, True, False),
  "dswiglu": (False, False, True),
  "all": (True, True, True),
}


def _mlp_reference(x, wi, wo, weights, sizes):
  x, weights = (
    reference.owned(x, sizes),
    jnp.where(jnp.arange(x.shape[0]) < sizes.sum(), weights, 0),
  )
  gate, up = jnp.split(gmm.grouped_matmul(x, wi, sizes), 2, axis=1)
  return weights[:, None] * gmm.grouped_matmul(jax.nn.silu(gate) * up, wo, sizes)


def _mlp(x, wi, wo, weights, grad, sizes, form):
  op = lambda *args: expert_mlp.expert_mlp(*args, sizes, form=form)
  out, vjp = jax.vjp(op, x, wi, wo, weights)
  return out, *vjp(grad)


_run_mlp = jax.jit(_mlp, static_argnums=6)


@jax.jit
def _expect_mlp(x, wi, wo, weights, grad, sizes):
  out, vjp = jax.vjp(lambda *args: _mlp_reference(*args, sizes), x, wi, wo, weights)
  return out, *vjp(reference.owned(grad, sizes))


@jax.jit
def _expect_rounded(x, wi, wo, weights, grad, sizes):
  """In float32, with the values that pass from product to product rounded to bfloat16."""
  rounded = lambda value: _wide(value.astype(jnp.bfloat16))
  activation = lambda gu: jax.nn.silu(gu[:, :_F]) * gu[:, _F:]
  flipped = lambda w: jnp.swapaxes(w, 1, 2)
  owned = jnp.arange(x.shape[0]) < sizes.sum()
  weights = jnp.where(owned, weights, 0)[:, None]
  gate_up = reference.gmm(x, wi, sizes)
  out = weights * reference.gmm(rounded(activation(gate_up)), wo, sizes)
  h, pull = jax.vjp(activation, rounded(gate_up))
  a = reference.gmm(grad, flipped(wo), sizes)
  d_gate_up = rounded(pull(weights * a)[0])
  d_wi = reference.tgmm(x, d_gate_up, sizes)
  d_wo = reference.tgmm(rounded(weights * h), grad, sizes)
  return out, reference.gmm(d_gate_up, flipped(wi), sizes), d_wi, d_wo, jnp.sum(a * h, axis=1)


@pytest.mark.parametrize("implementation", ["interpret", "reference"])
@pytest.mark.parametrize("form", _FORMS)
def test_expert_mlp(form, implementation, dtype=jnp.float32):
  _check_mlp(form, implementation, dtype, "ragged", _TILE)


@pytest.mark.parametrize("implementation", ["interpret", "reference"])
@pytest.mark.parametrize(
  "saved", [(expert_mlp.GATE,), (expert_mlp.UP, expert_mlp.OUT), expert_mlp.SAVED_NAMES]
)
def test_expert_mlp_of_saved_tensors(saved, implementation):
  _check_mlp("plain", implementation, jnp.float32, "ragged", _TILE, saved)


def test_tensors_that_nothing_writes_or_reads_are_not_saved():
  x, wi, wo = jnp.ones((8, _H)), jnp.ones((1, _H, 2 * _F)), jnp.ones((1, _F, _H))
  for name in expert_mlp.SAVED_NAMES:
    form = expert_mlp.Form(saved=(name,), fused_swiglu=name != expert_mlp.OUT, fused_dswiglu=False)
    with pytest.raises(ValueError, match="could be saved"):
      expert_mlp.expert_mlp(x, wi, wo, jnp.ones(8), jnp.asarray([8]), form=form)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_expert_mlp_in_bfloat16(layout):
  _check_mlp("all", "interpret", jnp.bfloat16, layout, _TILE)


def test_expert_mlp_with_cut_contraction():
  tile = tiles_lib.Tiles(rows=16, k=128, n=256, part=8, columns=128)
  _check_mlp("all", "interpret", jnp.float32, "ragged", tile)


def _check_mlp(form, implementation, dtype, layout, tile, saved=()):
  (x, grad, weights), sizes = _problem(layout, jnp.float32, _H, _H, 1)
  weights = weights[:, 0]
  x, grad = x.astype(dtype), grad.astype(dtype)
  wi, wo = _matrices((5, _H, 2 * _F), dtype) / 8, _matrices((5, _F, _H), dtype, 2) / 8
  fused_swiglu, router, fused_dswiglu = _FORMS[form]
  tiles = tiles_lib.PassTiles(forward=tile, dlhs=tile, drhs=tile)
  record = expert_mlp.Form(
    fused_swiglu=fused_swiglu,
    router_grad_from_wo_input=router,
    fused_dswiglu=fused_dswiglu,
    saved=saved,
    implementation=implementation,
    wi_tiles=tiles,
    wo_tiles=tiles,
  )

  got = _run_mlp(x, wi, wo, weights, grad, sizes, record)
  want = _expect_mlp(*(_wide(a) for a in (x, wi, wo)), weights, _wide(grad), sizes)
  if dtype == jnp.bfloat16:
    want = _expect_rounded(*(_wide(a) for a in (x, wi, wo)), weights, _wide(grad), sizes)
  for a, b in zip(got, want):
    _close(a, b, dtype)
  owned = int(jnp.sum(sizes))
  for rows in (got[0], got[1], got[4]):
    assert not np.asarray(rows[owned:], np.float32).any()
  for d_w in got[2:4]:
    assert not np.asarray(d_w, np.float32)[np.asarray(sizes) == 0].any()


def test_epilogues_in_bfloat16_against_float32_on_the_same_operands():
  (grad, gate_up, weights), sizes = _problem("ragged", jnp.bfloat16, _H, 2 * _F, 1)
  wo = _matrices((5, _F, _H), jnp.bfloat16)
  weights = _wide(weights[:, 0])
  out, d_weights = row_kernel.grouped(
    grad,
    wo,
    sizes,
    tile=_TILE,
    transpose_rhs=True,
    epilogue="dswiglu",
    gate_up=gate_up,
    weights=weights,
    interpret=True,
  )
  a = reference.gmm(_wide(grad), jnp.swapaxes(_wide(wo), 1, 2), sizes)
  activation = lambda gu: jax.nn.silu(gu[:, :_F]) * gu[:, _F:]
  gate_up = reference.owned(_wide(gate_up), sizes)
  h, vjp = jax.vjp(activation, gate_up)
  weights = jnp.nan_to_num(weights)
  _close(out, vjp(weights[:, None] * a)[0], jnp.bfloat16)
  assert _relative(d_weights, jnp.sum(a * h, axis=1)) < 2e-6

  (x,), sizes = _problem("ragged", jnp.bfloat16, _H)
  wi = _matrices((5, _H, 2 * _F), jnp.bfloat16)
  out = row_kernel.grouped(x, wi, sizes, tile=_TILE, epilogue="swiglu", interpret=True)
  _close(out, activation(reference.gmm(_wide(x), _wide(wi), sizes)), jnp.bfloat16)


# Planted faults: each breaks one line of the layout that the kernels trust, and the checks above
# must see it.
def _without_masks(monkeypatch):
  original = visits.make

  def wrong(group_sizes, rows, tile_rows, *, visit_empty):
    list_ = original(group_sizes, rows, tile_rows, visit_empty=visit_empty)
    # Every group seems to begin on a tile border, so its first tile's other rows are taken in.
    bounds = list_.bounds // 8 * 8
    return list_._replace(bounds=bounds)

  monkeypatch.setattr(visits, "make", wrong)


def _without_tail_visits(monkeypatch):
  original = visits.make

  def wrong(group_sizes, rows, tile_rows, *, visit_empty):
    list_ = original(group_sizes, rows, tile_rows, visit_empty=visit_empty)
    counts = list_.counts.at[0].set(list_.counts[1])
    pairs = list_.pairs
    if visit_empty:
      counts = counts.at[0].add(-1)
    return list_._replace(counts=counts, pairs=pairs)

  monkeypatch.setattr(visits, "make", wrong)


def _assert_seen(kernel):
  """The check of a kernel fails: for kernels that were made wrong."""
  columns = (_N, 2 * _K) if kernel == "dswiglu" else (_K, _N)
  (x, grad), sizes = _problem("ragged", jnp.float32, *columns)
  w = _matrices((5, _K, _N), jnp.float32)
  if kernel == "row":
    got = row_kernel.grouped(x, w, sizes, tile=_TILE, interpret=True)
    want = reference.gmm(x, w, sizes)
  elif kernel == "weight":
    got = weight_kernel.transposed(x, grad, sizes, tile=_TILE, interpret=True)
    want = reference.tgmm(x, grad, sizes)
  else:
    got = row_kernel.grouped(
      x, w, sizes, tile=dataclasses.replace(_TILE, k=512), transpose_rhs=True, epilogue="dswiglu",
      gate_up=grad, interpret=True,
    )  # fmt: skip
    gate_up = reference.owned(grad, sizes)
    _, pull = jax.vjp(lambda gu: jax.nn.silu(gu[:, :_K]) * gu[:, _K:], gate_up)
    want = pull(reference.gmm(x, jnp.swapaxes(w, 1, 2), sizes))[0]
  with pytest.raises(AssertionError):
    _close(got, want, jnp.float32)


@pytest.mark.parametrize("fault", [_without_masks, _without_tail_visits])
@pytest.mark.parametrize("kernel", ["row", "weight", "dswiglu"])
def test_planted_faults_of_the_layout_are_caught(monkeypatch, fault, kernel):
  fault(monkeypatch)
  _assert_seen(kernel)


def test_planted_fault_of_the_weight_kernels_mask_is_caught(monkeypatch):
  monkeypatch.setattr(weight_kernel, "_owned", lambda value, first, lo, hi: value)
  _assert_seen("weight")


@pytest.mark.parametrize("fault", ["sigmoid", "weight"])
def test_planted_faults_of_the_epilogues_are_caught(monkeypatch, fault):
  if fault == "sigmoid":
    monkeypatch.setattr(epilogues, "tanh_half", lambda x: (0.5 * x, jnp.tanh(0.505 * x)))
  else:
    monkeypatch.setattr(epilogues, "column", lambda row: jnp.ones((row.shape[1], 1), row.dtype))
  monkeypatch.setitem(globals(), "_run_mlp", jax.jit(_mlp, static_argnums=6))
  jax.clear_caches()
  with pytest.raises(AssertionError):
    _check_mlp("all", "interpret", jnp.float32, "ragged", _TILE)


def _no_weights_in_dswiglu(grouped):
  def wrong(*arguments, weights=None, **keywords):
    ones = None if weights is None else jnp.ones_like(weights)
    return grouped(*arguments, weights=ones, **keywords)

  return wrong


def _no_weights_in_the_second_product(grouped):
  def wrong(*arguments, lhs_scale=None, **keywords):
    ones = None if lhs_scale is None else jnp.ones_like(lhs_scale)
    return grouped(*arguments, lhs_scale=ones, **keywords)

  return wrong


def _up_before_gate(grouped):
  def wrong(x, w, *arguments, epilogue="none", **keywords):
    w = jnp.roll(w, w.shape[2] // 2, axis=2) if epilogue == "swiglu" else w
    return grouped(x, w, *arguments, epilogue=epilogue, **keywords)

  return wrong


def _no_router_gradient(grouped):
  def wrong(*arguments, epilogue="none", **keywords):
    out = grouped(*arguments, epilogue=epilogue, **keywords)
    return (out[0], jnp.zeros_like(out[1])) if epilogue == "dswiglu" else out

  return wrong


@pytest.mark.parametrize(
  "fault",
  [_no_weights_in_dswiglu, _no_weights_in_the_second_product, _up_before_gate, _no_router_gradient],
)
def test_planted_faults_of_the_fusions_wiring_are_caught(monkeypatch, fault):
  """The kernels are right and the op calls them wrongly."""
  monkeypatch.setattr(row_kernel, "grouped", fault(row_kernel.grouped))
  monkeypatch.setitem(globals(), "_run_mlp", jax.jit(_mlp, static_argnums=6))
  with pytest.raises(AssertionError):
    _check_mlp("all", "interpret", jnp.float32, "ragged", _TILE)


def test_visits_of_many_groups_stay_bounded():
  rng = np.random.default_rng(0)
  rows, tile = 1 << 21, 512
  sizes = jnp.asarray(rng.multinomial(rows - 1000, np.ones(512) / 512), jnp.int32)
  for visit_empty in (False, True):
    list_ = jax.jit(lambda s, e=visit_empty: visits.make(s, rows, tile, visit_empty=e))(sizes)
    assert list_.pairs.nbytes + list_.bounds.nbytes < 32 << 10
    pairs = np.asarray(list_.pairs)
    group, at = pairs >> visits.TILE_BITS, pairs & (visits.MAX_TILES - 1)
    real = slice(0, int(list_.counts[1]))
    bounds = np.asarray(list_.bounds)
    covered = np.minimum(bounds[group + 1], (at + 1) * tile) - np.maximum(bounds[group], at * tile)
    assert (covered[real] > 0).all() and covered[real].sum() == rows - 1000
  with pytest.raises(ValueError, match="larger row tile"):
    visits.limit(1 << 21, 512, 8)


def test_refusals():
  x, w, sizes = jnp.ones((8, 128)), jnp.ones((2, 128, 256)), jnp.asarray([4, 4], jnp.int32)
  with pytest.raises(ValueError, match="want lhs"):
    gmm.grouped_matmul(x, w[:, :64], sizes)
  with pytest.raises(ValueError, match="one n tile"):
    row_kernel.grouped(
      x, jnp.swapaxes(w, 1, 2), sizes, tile=_CUT, transpose_rhs=True, epilogue="dswiglu",
      gate_up=jnp.ones((8, 512)),
    )  # fmt: skip
  with pytest.raises(ValueError, match="go together"):
    weight_kernel.transposed(x, x, sizes, tile=_TILE, lhs_scale=jnp.ones(128))
  with pytest.raises(ValueError, match="float32 weights"):
    expert_mlp.expert_mlp(x, w, jnp.ones((2, 128, 128)), jnp.ones(8, jnp.bfloat16), sizes)
