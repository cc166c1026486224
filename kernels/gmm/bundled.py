"""The grouped matrix product that comes with JAX (megablox), behind the same contract as `gmm`.

Gale et al., MegaBlocks (arXiv:2211.15841); `jax.experimental.pallas.ops.tpu.megablox`.  It wants
whole tiles of rows and leaves rows of no group as memory happened to be; both are put right here.
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.base import implementation as implementation_lib
from kernels.gmm import gmm, reference
from kernels.gmm import tiles as tiles_lib

# The package's own attribute of this name is a function with another derivative.
megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
# Rows, contraction, columns; the library's own 128 x 128 x 128 reaches a fiftieth of the peak.
_TILES = (256, 1024, 1024)
# The plain form has none.
_UNUSED = tiles_lib.Tiles()


def _padded(x):
  return jnp.pad(x, ((0, -x.shape[0] % _TILES[0]), (0, 0)))


def _tiles(k, n):
  return _TILES[0], min(_TILES[1], k), min(_TILES[2], n)


def _multiply(lhs, rhs, sizes, implementation, transpose_rhs=False):
  def kernel(lhs, rhs, sizes, *, interpret):
    k, n = rhs.shape[1:][::-1] if transpose_rhs else rhs.shape[1:]
    out = megablox.gmm(
      _padded(lhs),
      rhs,
      sizes,
      lhs.dtype,
      _tiles(k, n),
      transpose_rhs=transpose_rhs,
      interpret=interpret,
    )
    return reference.owned(out[: lhs.shape[0]], sizes)

  def plain(lhs, rhs, sizes):
    return gmm.multiply(
      lhs, rhs, sizes, tile=_UNUSED, implementation="reference", transpose_rhs=transpose_rhs
    )

  return implementation_lib.dispatch(implementation, kernel, plain, lhs, rhs, sizes)


def _weight_gradient(lhs, grad, sizes, implementation, dtype):
  def kernel(lhs, grad, sizes, *, interpret):
    tiles = _tiles(lhs.shape[1], grad.shape[1])
    left, right = _padded(lhs).swapaxes(0, 1), _padded(grad)
    return megablox.tgmm(left, right, sizes, dtype, tiles, interpret=interpret)

  def plain(lhs, grad, sizes):
    return gmm.weight_gradient(
      lhs, grad, sizes, tile=_UNUSED, implementation="reference", out_dtype=dtype
    )

  return implementation_lib.dispatch(implementation, kernel, plain, lhs, grad, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(lhs, rhs, sizes, implementation):
  return _multiply(lhs, rhs, sizes, implementation)


def _forward(lhs, rhs, sizes, implementation):
  return _grouped(lhs, rhs, sizes, implementation), (lhs, rhs, sizes)


def _backward(implementation, residuals, grad):
  lhs, rhs, sizes = residuals
  d_lhs = _multiply(grad, rhs, sizes, implementation, transpose_rhs=True)
  return d_lhs, _weight_gradient(lhs, grad, sizes, implementation, rhs.dtype), None


_grouped.defvjp(_forward, _backward)


def grouped_matmul(
  lhs: Float[Array, "M K"],
  rhs: Float[Array, "G K N"],
  group_sizes: Int[Array, " G"],
  *,
  implementation: str = "auto",
) -> Float[Array, "M N"]:
  """Same arguments, results and guarantees as `gmm.grouped_matmul`, without its tiles."""
  gmm.check(lhs, rhs, group_sizes)
  return _grouped(lhs, rhs, group_sizes.astype(jnp.int32), implementation)
