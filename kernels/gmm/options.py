"""Which grouped matrix product the experts use, its tiles and its fusions, as options."""

from __future__ import annotations

import dataclasses
from typing import Any

from kernels.base import options
from kernels.gmm import tiles as tiles_lib

_DEFAULTS = {"batch_seq": 256, "embed_dim": 4096, "mlp_dim": 1024}
_PASSES = {"fwd": "forward", "dlhs": "input gradient", "drhs": "weight gradient"}
_PRODUCTS = {"wi": "first", "wo": "second"}
_DIMS = {"batch_seq": "rows", "embed_dim": "embedding columns", "mlp_dim": "columns of the experts"}
# The keys of all tiles, in order of product, pass and dimension.
TILE_KEYS = tuple(f"{w}_tile_{p}_{d}" for w in _PRODUCTS for p in _PASSES for d in _DIMS)


def _row_tile(value: int) -> str | None:
  legal = value % 128 == 0 or (value < 128 and value % 8 == 0)
  return None if legal else "want a multiple of 128, or of 8 below 128"


def _lane_tile(value: int) -> str | None:
  return None if value % 128 == 0 else "want a multiple of 128"


def _tile(name: str) -> Any:
  product, _, which, dim = name.split("_", 3)
  both = " (gate and up together)" if (product, dim) == ("wi", "mlp_dim") else ""
  legal = "a multiple of 128, or of 8 below 128" if dim == "batch_seq" else "a multiple of 128"
  return options.option(
    _DEFAULTS[dim],
    help=f"Tile of the experts' {_PRODUCTS[product]} product, {_PASSES[which]}: {_DIMS[dim]}{both}, "
    f"{legal}.",
    minimum=8,
    check=_row_tile if dim == "batch_seq" else _lane_tile,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GmmOptions:
  """Grouped matrix products of the routed experts."""

  use_tokamax_gmm: bool = options.option(
    False,
    help="The experts' grouped products are a Pallas kernel instead of jax.lax.ragged_dot: alone, "
    "the one that comes with JAX.",
  )
  use_gmm_v2: bool = options.option(
    False,
    help="With use_tokamax_gmm, the kernel is this repository's, which has tiles and fusions.",
  )
  use_gmm_v2_heuristic_tiling: bool = options.option(
    True,
    help="Tiles of that kernel come from a table; false for those of the wi_tile_ and wo_tile_ keys.",
  )
  prefuse_moe_weights: bool = options.option(
    False,
    help="The experts' gate and up projections, which are stored side by side, are one product; "
    "false for two.",
  )
  moe_wi_gmm_fused_swiglu: bool = options.option(
    False,
    help="The experts' first product applies silu(gate) * up to its float32 sums; the backward pass "
    "computes gate and up again.",
  )
  moe_router_grad_from_wo_input: bool = options.option(
    False,
    help="The gradient of a row's router weight from the gradient of the second product's input, "
    "so that the backward pass does not run that product again.",
  )
  moe_wo_gmm_fused_dswiglu: bool = options.option(
    False,
    help="The second product's input gradient becomes that of gate and up in its own kernel.",
  )
  wi_tile_fwd_batch_seq: int = _tile("wi_tile_fwd_batch_seq")
  wi_tile_fwd_embed_dim: int = _tile("wi_tile_fwd_embed_dim")
  wi_tile_fwd_mlp_dim: int = _tile("wi_tile_fwd_mlp_dim")
  wi_tile_dlhs_batch_seq: int = _tile("wi_tile_dlhs_batch_seq")
  wi_tile_dlhs_embed_dim: int = _tile("wi_tile_dlhs_embed_dim")
  wi_tile_dlhs_mlp_dim: int = _tile("wi_tile_dlhs_mlp_dim")
  wi_tile_drhs_batch_seq: int = _tile("wi_tile_drhs_batch_seq")
  wi_tile_drhs_embed_dim: int = _tile("wi_tile_drhs_embed_dim")
  wi_tile_drhs_mlp_dim: int = _tile("wi_tile_drhs_mlp_dim")
  wo_tile_fwd_batch_seq: int = _tile("wo_tile_fwd_batch_seq")
  wo_tile_fwd_embed_dim: int = _tile("wo_tile_fwd_embed_dim")
  wo_tile_fwd_mlp_dim: int = _tile("wo_tile_fwd_mlp_dim")
  wo_tile_dlhs_batch_seq: int = _tile("wo_tile_dlhs_batch_seq")
  wo_tile_dlhs_embed_dim: int = _tile("wo_tile_dlhs_embed_dim")
  wo_tile_dlhs_mlp_dim: int = _tile("wo_tile_dlhs_mlp_dim")
  wo_tile_drhs_batch_seq: int = _tile("wo_tile_drhs_batch_seq")
  wo_tile_drhs_embed_dim: int = _tile("wo_tile_drhs_embed_dim")
  wo_tile_drhs_mlp_dim: int = _tile("wo_tile_drhs_mlp_dim")

  def tiles(self, which: str) -> tiles_lib.PassTiles | None:
    """Tiles of the `wi` or the `wo` product; None where the table gives them."""
    if self.use_gmm_v2_heuristic_tiling:
      return None
    sizes: dict[str, Any] = {
      name: tuple(getattr(self, f"{which}_tile_{name}_{dim}") for dim in _DIMS) for name in _PASSES
    }
    return tiles_lib.PassTiles.from_dims(which, **sizes)


def misfits(given: GmmOptions, expert_dim: int) -> list[str]:
  """What of the fusions' tiles does not fit experts of `expert_dim`: one text each."""
  out = []
  half = given.wi_tile_fwd_mlp_dim // 2
  if given.moe_wi_gmm_fused_swiglu and (expert_dim % half or (half % 128 and half != expert_dim)):
    out.append(
      f"wi_tile_fwd_mlp_dim={given.wi_tile_fwd_mlp_dim} with moe_wi_gmm_fused_swiglu: want twice the"
      f" experts' {expert_dim}, or twice a multiple of 128 that divides it"
    )
  if given.moe_wo_gmm_fused_dswiglu and given.wo_tile_dlhs_mlp_dim != expert_dim:
    out.append(
      f"wo_tile_dlhs_mlp_dim={given.wo_tile_dlhs_mlp_dim} with moe_wo_gmm_fused_dswiglu: want one"
      f" tile, the experts' {expert_dim}"
    )
  return out
