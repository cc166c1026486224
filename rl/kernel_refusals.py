"""Refused combinations of the options of kernels.

A part of the one table in `refusals`.
"""

from __future__ import annotations

from kernels.attention import options as attention_options
from kernels.base.mesh import MeshShape
from kernels.base.options import Settings, declared
from kernels.base.refusals import Rule

_ATTENTION = tuple(o.name for o in declared(attention_options.AttentionOptions))
_BLOCKS = tuple(name for name in _ATTENTION if "block" in name)
_KERNELS = {"kernel_implementation": "auto"}


def _changed(settings: Settings, names: tuple[str, ...]) -> set[str]:
  return set(names) & set(settings.changed)


def _tokens(settings: Settings) -> tuple[int, int]:
  """Queries on a rank, and keys that they see."""
  ranks = MeshShape.parse(settings.mesh).context if settings.mesh else 1
  return settings.row_tokens // ranks, settings.row_tokens


def _misfits(settings: Settings) -> bool:
  changed = _changed(settings, _BLOCKS)
  given = attention_options.AttentionOptions(**{name: getattr(settings, name) for name in _BLOCKS})
  wrong = attention_options.misfits(given, *_tokens(settings))
  return any(text.partition("=")[0] in changed for text in wrong)


def _few_scores(settings: Settings) -> bool:
  queries, keys = _tokens(settings)
  return queries * keys <= attention_options.DENSE_SCORES


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
    broken=_misfits,
    reason="a block must divide the tokens it cuts (queries: the row over the context ranks, keys: "
    "the row), or a part of the last one is wasted; take a divisor",
    accepted={**_KERNELS, "sa_block_q": 2048},
    refused={**_KERNELS, "sa_block_q": 3072},
  ),
  Rule(
    name="attention-tiles-on-short-rows",
    keys=(*_ATTENTION, "row_tokens", "mesh", "kernel_implementation"),
    broken=lambda s: (
      bool(_changed(s, _ATTENTION)) and s.kernel_implementation == "auto" and _few_scores(s)
    ),
    reason="rows of up to 1,024 tokens take the whole score matrix in plain JAX, which has no "
    "blocks; leave the sa_ keys and dq_reduction_steps alone or lengthen row_tokens",
    accepted={**_KERNELS, "sa_block_q": 512, "row_tokens": 2048},
    refused={**_KERNELS, "sa_block_q": 512, "row_tokens": 1024},
  ),
  Rule(
    name="head-group-without-kernels",
    keys=("gdn_fwd_kernel_head_group_size", "kernel_implementation"),
    broken=lambda s: (
      s.gdn_fwd_kernel_head_group_size != 1 and s.kernel_implementation == "reference"
    ),
    reason="plain JAX has no grid steps; add --kernel_implementation=auto or leave the group at 1",
    accepted={"gdn_fwd_kernel_head_group_size": 4, "kernel_implementation": "auto"},
    refused={"gdn_fwd_kernel_head_group_size": 4},
  ),
)
