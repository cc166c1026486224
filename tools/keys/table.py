"""The mesh's keys: what each promises, and what the lowered program shows when it is on.

A row is checked by lowering the micro-batch (or the update) of a small sparse model over 2x2x2
devices with the key off and on, and probing the two texts.  A key that does nothing fails its row.

Classes: B values and gradients bit-identical, S another order of float32 sums, P placement or timing
alone, R bfloat16 rounding, L lossy.  Parity of values is held by //tests:mesh_step_test and //tests:cell_128_test.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from kernels.base import options, refusals
from rl import refusals as rl_refusals
from rl import trainer_options

Probe = Callable[[str], Any]

# What the programs have in common.  A device then has 32 tokens of 64 numbers, with the rule set
# cp-as-ep 4 expert ranks and 64 pairs of a token and an expert.
SMALL: dict[str, Any] = {
  "model_preset": "tiny_moe",
  "mesh": "2x2x2",
  "micro_batch_rows": 4,
  "row_tokens": 64,
  "max_segments_per_row": 4,
  "dtype": "float32",
  "gdn_chunk_size": 16,
  "logps_chunk_size": 32,
}
RING = {"custom_mesh_and_rule": "cp-as-ep", "use_ring_of_experts": True}
BALANCED = {"context_parallel_attention_load_balance": True}
EXPERTS = {
  "kernel_implementation": "auto",
  "model_preset": "35B-A3B",
  "use_tokamax_gmm": True,
  "use_gmm_v2": True,
  "use_gmm_v2_heuristic_tiling": False,
  "prefuse_moe_weights": True,
  "wo_tile_dlhs_mlp_dim": 512,
}
CUSTOM = {"remat_policy": "custom", "decoder_layer_input": "offload"}
REPLAY = {"router_replay": True}
NO_CP = {**RING, "custom_mesh_and_rule": "cp-as-ep-dense-no-cp"}


def count(pattern: str) -> Probe:
  """How often a pattern occurs."""
  return lambda text: len(re.findall(pattern, text))


def largest_group(text: str) -> int:
  """Devices of the largest group that reduces and scatters anything."""
  lines = re.findall(r'"stablehlo.reduce_scatter".*?tensor<\d+x(\d+)xi64>', text)
  return max(map(int, lines), default=0)


def self_pairs(text: str) -> int:
  """Pairs of collective permutes whose source is their target."""
  found = re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])>", text)
  return sum(len(re.findall(r"\[(\d+), \1\]", pairs)) for pairs in found)


def settings_of(values: Mapping[str, Any]) -> options.Settings:
  """The trainer's settings."""
  return options.Settings(trainer_options.COMPONENTS, values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
  """One row.

  Attributes:
    name: The key.
    value: On.
    base: What else is set, in both programs.
    promise: B, S, R, P or L.
    evidence: What the program shows, in words.
    probe: Reads it from the text.
    holds: Takes the probe's values with the key off and on.
    refused: A command line that a rule about the key refuses; None where every value works.
    program: first_micro_batch or update.
    platform: What both programs are lowered for; tpu where kernels differ.
  """

  name: str
  value: Any = True
  base: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  promise: str
  evidence: str
  probe: Probe
  holds: Callable[[Any, Any], bool]
  refused: Mapping[str, Any] | None = dataclasses.field(default_factory=lambda: {"mesh": None})
  program: str = "first_micro_batch"
  platform: str = "cpu"

  @property
  def short(self) -> bool:
    """Whether one attention layer shows it: all but what Gated DeltaNet layers do."""
    return not self.name.startswith("gdn")

  @property
  def title(self) -> str:
    """Name and value."""
    return self.name if self.value is True else f"{self.name}={self.value}"

  @property
  def off(self) -> dict[str, Any]:
    """The trainer's options without the key."""
    return {**SMALL, **self.base}

  @property
  def on(self) -> dict[str, Any]:
    """With it."""
    return {**self.off, self.name: self.value}

  def refusals(self) -> list[str]:
    """Names of the rules about the key that its refused command line breaks."""
    if self.refused is None:
      return []
    settings = settings_of({**SMALL, self.name: self.value, **self.refused})
    broken = refusals.broken_rules(settings, rl_refusals.RULES)
    return [rule.name for rule in broken if self.name in rule.keys]


_APPEARS = lambda off, on: off == 0 and on > 0
_VANISHES = lambda off, on: off > 0 and on == 0

KEYS = (
  Key(
    name="remat_policy",
    value="none",
    promise="P",
    evidence="the backward pass recomputes no product",
    probe=count(r"stablehlo\.dot_general"),
    holds=lambda off, on: on < off,
    refused={"remat_policy": "custom"},
  ),
  Key(
    name="float32_gate_logits",
    base={"dtype": "bfloat16"},
    promise="R",
    evidence="the router's product is of float32 numbers",
    probe=count(r"dot_general .*\(tensor<32x64xf32>, tensor<64x8xf32>\)"),
    holds=_APPEARS,
    refused={"model_preset": "tiny"},
  ),
  Key(
    name="logps_chunk_size",
    value=16,
    promise="S",
    evidence="the head makes the logits of 16 tokens at a time",
    probe=count(r"tensor<16x512xf32>"),
    holds=_APPEARS,
    refused=None,
  ),
  Key(
    name="router_replay",
    promise="B",
    evidence="experts are read from the batch",
    probe=count(r"xi16>"),
    holds=_APPEARS,
    refused={"model_preset": "tiny"},
  ),
  Key(
    name="moe_fallback_topk_capacity",
    value=8,
    base=REPLAY,
    promise="B",
    evidence="a top-k over 8 tokens besides the full one",
    probe=count(r"top_k.*tensor<8x8xf32>"),
    holds=_APPEARS,
    refused={},
  ),
  Key(
    name="custom_mesh_and_rule",
    value="cp-as-ep",
    promise="S",
    evidence="gradients of dense weights are scattered over all devices, not over fsdp",
    probe=largest_group,
    holds=lambda off, on: (off, on) == (2, 8),
  ),
  Key(
    name="custom_mesh_and_rule",
    value="cp-as-ep-dense-no-cp",
    base={"use_ring_of_experts": True},
    promise="S",
    evidence="gradients of dense weights are scattered over fsdp x expert",
    probe=largest_group,
    holds=lambda off, on: (off, on) == (2, 4),
  ),
  Key(
    name="use_ring_of_experts",
    base={"custom_mesh_and_rule": "cp-as-ep"},
    promise="S",
    evidence="sums of gathered tokens are reduced and scattered",
    probe=count(r"\(tensor<128x64xf32>\) -> tensor<32x64xf32>"),
    holds=_APPEARS,
  ),
  Key(
    name="num_moe_token_chunks",
    value=2,
    base=RING,
    promise="S",
    evidence="half as many tokens are gathered at a time",
    probe=count(r"\(tensor<64x64xf32>\) -> tensor<16x64xf32>"),
    holds=_APPEARS,
  ),
  Key(
    name="moe_chunk_pipeline",
    base={**RING, "num_moe_token_chunks": 2},
    promise="S",
    evidence="a sort of pairs for every chunk, in no loop over chunks",
    probe=count(r"stablehlo\.sort"),
    holds=lambda off, on: on > off,
  ),
  Key(
    name="ragged_buffer_factor",
    value=3.0,
    base=RING,
    promise="B",
    evidence="buffers of 3 x 64 rows instead of all 256 pairs",
    probe=count(r"tensor<192x64xf32>"),
    holds=_APPEARS,
  ),
  Key(
    name="retry_when_tokens_dropped",
    base={**RING, "ragged_buffer_factor": 3.0},
    promise="B",
    evidence="every sum of the step is zero where a pair was dropped",
    probe=count(r"stablehlo\.select|call @_where"),
    holds=lambda off, on: on >= off + 20,
  ),
  Key(
    name="ragged_unsort_spread_masked_indices",
    base={**RING, "ragged_buffer_factor": 3.0},
    promise="B",
    evidence="rows of pairs that go nowhere are spread by a remainder",
    probe=count(r"stablehlo\.remainder|@remainder"),
    holds=lambda off, on: on > off,
  ),
  Key(
    name="moe_wi_gmm_fused_swiglu",
    platform="tpu",
    base=EXPERTS,
    refused={"use_gmm_v2": False},
    promise="R",
    evidence="the first product's kernel has the activation in it",
    probe=count(r"gmm_forward_swiglu"),
    holds=_APPEARS,
  ),
  Key(
    name="moe_router_grad_from_wo_input",
    platform="tpu",
    base=EXPERTS,
    refused={"use_gmm_v2": False},
    promise="S",
    evidence="fewer forward products: the second is not replayed",
    probe=count(r"gmm_forward_none"),
    holds=lambda off, on: 0 < on < off,
  ),
  Key(
    name="moe_wo_gmm_fused_dswiglu",
    platform="tpu",
    base=EXPERTS,
    refused={"use_gmm_v2": False},
    promise="R",
    evidence="the second product's gradient kernel has the activation's in it",
    probe=count(r"gmm_dlhs_dswiglu"),
    holds=_APPEARS,
  ),
  Key(
    name="fp8_moe_fake_quant",
    base=RING,
    promise="L",
    evidence="weights pass through e4m3",
    probe=count(r"f8E4M3FN"),
    holds=_APPEARS,
  ),
  Key(
    name="fp8_moe_fake_quant_hoist",
    base={**RING, "fp8_moe_fake_quant": True},
    promise="B",
    evidence="a micro-batch rounds no weight",
    probe=count(r"f8E4M3FN"),
    holds=_VANISHES,
  ),
  Key(
    name="moe_fp8_token_all_gather",
    base={**RING, "fp8_moe_fake_quant": True},
    promise="L",
    evidence="tokens are gathered as e4m3",
    probe=count(r"\(tensor<32x64xf8E4M3FN>\) -> tensor<128x64xf8E4M3FN>"),
    holds=_APPEARS,
  ),
  Key(
    name="moe_fp8_bwd_dispatch",
    base={**RING, "fp8_moe_fake_quant": True},
    promise="L",
    evidence="gradients are gathered as e5m2",
    probe=count(r"\(tensor<32x64xf8E5M2>\) -> tensor<128x64xf8E5M2>"),
    holds=_APPEARS,
  ),
  Key(
    name="context_parallel_attention_load_balance",
    promise="S",
    evidence="collective permutes around attention",
    probe=count(r"collective_permute"),
    holds=lambda off, on: on >= off + 8,
  ),
  Key(
    name="context_parallel_attention_load_balance_hoist_ids",
    base={**BALANCED, **CUSTOM},
    promise="B",
    evidence="rotary angles are made once, in no layer",
    probe=count(r"stablehlo\.cosine"),
    holds=lambda off, on: on == 1 and off > 1,
  ),
  Key(
    name="context_parallel_attention_load_balance_order",
    value="dual_chunk_swap_local_self",
    base=BALANCED,
    promise="B",
    evidence="no permute sends a chunk to its own rank",
    probe=self_pairs,
    holds=_VANISHES,
  ),
  Key(
    name="gdn_cp_mode",
    value="seq",
    promise="S",
    evidence="no all-to-all",
    probe=count(r"all_to_all"),
    holds=_VANISHES,
  ),
  Key(
    name="dense_grad_reduce",
    value="all_reduce",
    base=NO_CP,
    promise="S",
    evidence="the update all-reduces gradients over context instead of scattering them",
    probe=count(r"reduce_scatter"),
    holds=_VANISHES,
    program="update",
  ),
  Key(
    name="decoder_layer_input",
    value="offload",
    base={"remat_policy": "custom", "key_proj": "device"},
    promise="P",
    platform="tpu",
    evidence="tensors are sent to host memory",
    probe=count(r"pinned_host"),
    holds=_APPEARS,
  ),
  *(
    Key(
      name=name,
      value="device",
      base=CUSTOM,
      promise="P",
      evidence=f"{layers} layers stack it for the backward pass",
      probe=count(rf"tensor<{stack}x{shape}xf32>"),
      holds=lambda off, on: on > off,
    )
    for name, layers, stack, shape in (
      ("query_proj", "attention", 1, "1x32x256"),
      ("key_proj", "attention", 1, "1x32x64"),
      ("value_proj", "attention", 1, "1x32x64"),
      ("attention_out", "attention", 1, "1x32x128"),
      ("out_proj", "attention", 1, "1x32x64"),
      ("gdn_conv", "Gated DeltaNet", "1x1", "1x32x128"),
      ("gdn", "Gated DeltaNet", "1x1", "1x32x4x16"),
      ("moe_x_sorted", "all", 1, "64x64"),
      ("mlpwi", "all", 1, "32x32"),
      ("mlpwo", "all", 1, "32x64"),
    )
  ),
  *(
    Key(
      name=name,
      value="device",
      base={**CUSTOM, "kernel_implementation": "interpret"},
      promise="P",
      evidence=f"{layers} layers stack it for the backward pass",
      probe=count(rf"tensor<{stack}x{shape}xf32>"),
      holds=lambda off, on: on > off,
    )
    for name, layers, stack, shape in (
      ("context", "attention", 1, "1x4x32x32"),
      ("gdn_states", "Gated DeltaNet", "1x1", r"\d+x\d+x\d+x\d+"),
    )
  ),
)
