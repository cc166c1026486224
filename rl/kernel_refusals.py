"""Refused combinations of the options of kernels.

A part of the one table in `refusals`.
"""

from __future__ import annotations

from kernels.attention import options as attention_options
from kernels.base.mesh import MeshShape
from kernels.base.options import Settings, declared
from kernels.base.refusals import Rule
from kernels.gdn import head_groups
from kernels.gmm import options as gmm_options
from model import config as model_config
from rl import known_model

_ATTENTION = tuple(o.name for o in declared(attention_options.AttentionOptions))
_BLOCKS = tuple(name for name in _ATTENTION if "block" in name)
_KERNELS = {"kernel_implementation": "auto"}
_MOST_CHUNK = 128
_GMM = tuple(o.name for o in declared(gmm_options.GmmOptions))
_MOE = {"model_preset": "35B-A3B", **_KERNELS}
_V2 = {**_MOE, "use_tokamax_gmm": True, "use_gmm_v2": True}
_TILED = {**_V2, "use_gmm_v2_heuristic_tiling": False}
_FUSIBLE = {**_TILED, "prefuse_moe_weights": True}
_FUSED = ("moe_wi_gmm_fused_swiglu", "moe_wo_gmm_fused_dswiglu")


def _changed(settings: Settings, names: tuple[str, ...]) -> set[str]:
  return set(names) & set(settings.changed)


def _tokens(settings: Settings) -> tuple[int, int]:
  """Queries on a rank, and keys that they see."""
  ranks = MeshShape.parse(settings.mesh).context if settings.mesh else 1
  return settings.row_tokens // ranks, settings.row_tokens


def _misfits(settings: Settings) -> list[str]:
  changed = _changed(settings, _BLOCKS)
  given = attention_options.AttentionOptions(**{name: getattr(settings, name) for name in _BLOCKS})
  wrong = attention_options.misfits(given, *_tokens(settings))
  return [text for text in wrong if text.partition("=")[0] in changed]


def _few_scores(settings: Settings) -> bool:
  queries, keys = _tokens(settings)
  return queries * keys <= attention_options.DENSE_SCORES


def _fused_misfits(settings: Settings) -> list[str]:
  model = known_model.of(settings)
  if model is None or not model.is_moe:
    return []
  given = settings.of(model_config.ModelOptions)
  return gmm_options.misfits(given, model.moe_intermediate_size)


def _divisors(settings: Settings) -> str:
  model = known_model.of(settings)
  assert model is not None
  heads = model.linear_num_key_heads
  return f"of {heads}: " + ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)


def _wide_group(settings: Settings) -> bool:
  model = known_model.of(settings)
  if model is None:
    return False
  heads = model.linear_num_value_heads // model.linear_num_key_heads
  group = settings.gdn_fwd_kernel_head_group_size
  return group > head_groups.most_key_heads(heads) and model.linear_num_key_heads % group == 0


KERNEL_RULES = (
  Rule(
    name="attention-tiles-without-kernels",
    keys=(*_ATTENTION, "kernel_implementation"),
    broken=lambda s: bool(_changed(s, _ATTENTION)) and s.kernel_implementation == "reference",
    reason="plain JAX has no flash kernel to shape; add --kernel_implementation=auto or leave the "
    "sa_ keys and dq_reduction_steps alone",
    accepted={**_KERNELS, "sa_block_q": 2048},
    refused={"sa_block_q": 2048},
  ),
  Rule(
    name="attention-tiles-divide",
    keys=(*_BLOCKS, "row_tokens", "mesh"),
    broken=lambda s: bool(_misfits(s)),
    detail=lambda s: "; ".join(_misfits(s)),
    reason="a block must divide the tokens it cuts (queries: the row over the context ranks, keys: "
    "the row), or a part of the last one is wasted",
    accepted={**_KERNELS, "sa_block_q": 2048},
    refused={**_KERNELS, "sa_block_q": 3072},
  ),
  Rule(
    name="attention-tiles-on-short-rows",
    keys=(*_ATTENTION, "row_tokens", "mesh", "kernel_implementation"),
    broken=lambda s: (
      bool(_changed(s, _ATTENTION)) and s.kernel_implementation == "auto" and _few_scores(s)
    ),
    reason="up to 1,024 x 1,024 scores of a rank's queries and the row's keys are one matrix in plain "
    "JAX, which has no blocks; leave the sa_ keys and dq_reduction_steps alone or lengthen row_tokens",
    accepted={**_KERNELS, "sa_block_q": 512, "row_tokens": 2048},
    refused={**_KERNELS, "sa_block_q": 512, "row_tokens": 1024},
  ),
  Rule(
    name="chunk-fits-kernels",
    keys=("gdn_chunk_size", "kernel_implementation"),
    broken=lambda s: (
      s.kernel_implementation != "reference" and not 16 <= s.gdn_chunk_size <= _MOST_CHUNK
    ),
    reason=f"the delta rule's kernels take chunks of 16 to {_MOST_CHUNK} tokens: shorter ones leave rows of the "
    "inverse's first blocks empty, longer ones do not fit beside eight heads in VMEM",
    accepted={**_KERNELS, "gdn_chunk_size": 128},
    refused={**_KERNELS, "gdn_chunk_size": 8},
  ),
  Rule(
    name="head-group-without-kernels",
    keys=("gdn_fwd_kernel_head_group_size", "kernel_implementation"),
    broken=lambda s: (
      s.gdn_fwd_kernel_head_group_size != 1 and s.kernel_implementation == "reference"
    ),
    reason="plain JAX has no grid steps; add --kernel_implementation=auto or leave the group at 1",
    accepted={**_KERNELS, "model_preset": "35B-A3B", "gdn_fwd_kernel_head_group_size": 4},
    refused={"gdn_fwd_kernel_head_group_size": 4},
  ),
  Rule(
    name="head-group-divides",
    keys=("gdn_fwd_kernel_head_group_size", "model_preset", "checkpoint"),
    broken=lambda s: (
      (model := known_model.of(s)) is not None
      and model.linear_num_key_heads % s.gdn_fwd_kernel_head_group_size != 0
    ),
    reason="a grid step takes whole groups of the model's key heads; take a divisor of their number",
    detail=_divisors,
    accepted={**_KERNELS, "model_preset": "397B-A17B", "gdn_fwd_kernel_head_group_size": 8},
    refused={**_KERNELS, "model_preset": "397B-A17B", "gdn_fwd_kernel_head_group_size": 3},
  ),
  Rule(
    name="head-group-fits-lanes",
    keys=("gdn_fwd_kernel_head_group_size", "model_preset", "checkpoint"),
    broken=_wide_group,
    reason="a grid step of the delta rule keeps two gates of each value head and four flags on 128 lanes: "
    "at most 15 key heads of 397B-A17B's four value heads each, 31 of 35B-A3B's two; lower the group",
    accepted={**_KERNELS, "model_preset": "35B-A3B", "gdn_fwd_kernel_head_group_size": 16},
    refused={**_KERNELS, "model_preset": "397B-A17B", "gdn_fwd_kernel_head_group_size": 16},
  ),
  Rule(
    name="grouped-products-need-experts",
    keys=(*_GMM, "model_preset", "checkpoint"),
    broken=lambda s: bool(_changed(s, _GMM)) and known_model.dense(s),
    reason="a dense model has no experts, so no grouped products; leave these keys out or take a "
    "preset with experts",
    accepted={"model_preset": "tiny_moe", "prefuse_moe_weights": True},
    refused={"model_preset": "tiny", "prefuse_moe_weights": True},
  ),
  Rule(
    name="grouped-kernel-without-kernels",
    keys=("use_tokamax_gmm", "kernel_implementation"),
    broken=lambda s: s.use_tokamax_gmm and s.kernel_implementation == "reference",
    reason="the grouped product would be plain JAX all the same; add --kernel_implementation=auto",
    accepted={**_MOE, "use_tokamax_gmm": True},
    refused={"model_preset": "35B-A3B", "use_tokamax_gmm": True},
  ),
  Rule(
    name="gmm-v2-needs-gmm",
    keys=("use_gmm_v2", "use_tokamax_gmm"),
    broken=lambda s: s.use_gmm_v2 and not s.use_tokamax_gmm,
    reason="it says which kernel use_tokamax_gmm takes; add --use_tokamax_gmm",
    accepted=_V2,
    refused={**_MOE, "use_gmm_v2": True},
  ),
  Rule(
    name="explicit-tiling-needs-gmm-v2",
    keys=("use_gmm_v2_heuristic_tiling", "use_gmm_v2"),
    broken=lambda s: not s.use_gmm_v2_heuristic_tiling and not s.use_gmm_v2,
    reason="only that kernel takes explicit tiles; add --use_gmm_v2 and --use_tokamax_gmm",
    accepted=_TILED,
    refused={**_MOE, "use_tokamax_gmm": True, "use_gmm_v2_heuristic_tiling": False},
  ),
  Rule(
    name="tiles-under-heuristic-tiling",
    keys=(*gmm_options.TILE_KEYS, "use_gmm_v2_heuristic_tiling"),
    broken=lambda s: s.use_gmm_v2_heuristic_tiling and bool(_changed(s, gmm_options.TILE_KEYS)),
    reason="tiles come from a table then and these keys would be inert; add "
    "--use_gmm_v2_heuristic_tiling=false",
    accepted={**_TILED, "wi_tile_fwd_mlp_dim": 2048},
    refused={**_V2, "wi_tile_fwd_mlp_dim": 2048},
  ),
  Rule(
    name="fused-epilogues-need-explicit-tiles",
    keys=(*_FUSED, "use_gmm_v2", "prefuse_moe_weights", "use_gmm_v2_heuristic_tiling"),
    broken=lambda s: (
      any(getattr(s, name) for name in _FUSED)
      and not (s.use_gmm_v2 and s.prefuse_moe_weights and not s.use_gmm_v2_heuristic_tiling)
    ),
    reason="an epilogue belongs to this repository's kernel, on gate and up side by side, with tiles "
    "that are known; add --use_tokamax_gmm, --use_gmm_v2, --prefuse_moe_weights and "
    "--use_gmm_v2_heuristic_tiling=false",
    accepted={**_FUSIBLE, "moe_wi_gmm_fused_swiglu": True},
    refused={**_TILED, "moe_wi_gmm_fused_swiglu": True},
  ),
  Rule(
    name="fused-tiles-fit-experts",
    keys=(*_FUSED, "wi_tile_fwd_mlp_dim", "wo_tile_dlhs_mlp_dim", "model_preset", "checkpoint"),
    broken=lambda s: bool(_fused_misfits(s)),
    detail=lambda s: "; ".join(_fused_misfits(s)),
    reason="half of wi_tile_fwd_mlp_dim holds whole gate columns (the experts' size, or a multiple "
    "of 128 that divides it), and a router-weight gradient wants the whole row: "
    "wo_tile_dlhs_mlp_dim is the experts' size",
    accepted={**_FUSIBLE, "moe_wo_gmm_fused_dswiglu": True, "wo_tile_dlhs_mlp_dim": 512},
    refused={**_FUSIBLE, "moe_wo_gmm_fused_dswiglu": True},
  ),
  Rule(
    name="router-gradient-needs-gmm-v2",
    keys=("moe_router_grad_from_wo_input", "use_gmm_v2", "use_tokamax_gmm"),
    broken=lambda s: s.moe_router_grad_from_wo_input and not (s.use_gmm_v2 and s.use_tokamax_gmm),
    reason="it is a part of the experts' op that these two choose; add --use_tokamax_gmm and "
    "--use_gmm_v2",
    accepted={**_V2, "moe_router_grad_from_wo_input": True},
    refused={**_MOE, "moe_router_grad_from_wo_input": True},
  ),
)
