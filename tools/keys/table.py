"""The mesh's keys: what each promises, and what the lowered program shows when it is on.

A row is checked by lowering the micro-batch (or the update) of a small sparse model over 2x2x2
devices with the key off and on, and probing the two texts.  A key that does nothing fails its row.

Classes: B values and gradients bit-identical, S another order of float32 sums, P placement or timing
alone (bit-identical), R bfloat16 rounding, L lossy.  A row's values are held to its class by
`parity`, or by the test that `held_by` names.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
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
SORT = {"custom_mesh_and_rule": "cp-as-ep", "use_ragged_sort": True}
RING = {**SORT, "use_ring_of_experts": True}
BALANCED = {"context_parallel_attention_load_balance": True}
KERNELS = {"kernel_implementation": "auto", "model_preset": "35B-A3B"}
EXPERTS = {
  **KERNELS,
  "use_tokamax_gmm": True,
  "use_gmm_v2": True,
  "use_gmm_v2_heuristic_tiling": False,
  "prefuse_moe_weights": True,
  "wo_tile_dlhs_mlp_dim": 512,
}
CUSTOM = {"remat_policy": "custom", "decoder_layer_input": "offload"}
REPLAY = {"router_replay": True}
NO_CP = {**RING, "custom_mesh_and_rule": "cp-as-ep-dense-no-cp"}


PARITY = "//tools/keys:parity_test"

# What a class allows between a step and the step without the key, in float32: relative L2 of every
# gradient (five times as much for A_log and dt_bias, heavily cancelling sums); 0 for every bit equal.
# 0.14 is what a cosine of 0.99 leaves, the gate of tools/numerics for what is lossy.
LIMITS = {"B": 0.0, "P": 0.0, "S": 1e-5, "R": 1e-5, "L": 0.14}


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


def kernel_bodies(name: str) -> Probe:
  """A check sum of each kernel of that name, in order."""
  body = re.compile(r"\\22body\\22: \\22([^\\]*)")
  return lambda text: tuple(
    zlib.crc32(found[0].encode())
    for line in text.splitlines()
    if f'kernel_name = "{name}"' in line and (found := body.findall(line))
  )


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
    held_by: The test that compares values; `PARITY` for this folder's.
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
  held_by: str = PARITY

  @property
  def layers(self) -> str:
    """The small model that shows it: one attention layer, two of them, or one layer of each kind."""
    if self.name.startswith("gdn"):
      return "each"
    return "two" if self.name == "scan_layers" else "one"

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


def _exactly(*wanted: int) -> Callable[[Any, Any], bool]:
  return lambda off, on: (off, on) == wanted


KEYS = (
  Key(
    name="remat_policy",
    value="none",
    # Placement alone by its meaning; a CPU's compiler rewrites a recomputed product in another way.
    promise="S",
    evidence="the backward pass recomputes no product",
    probe=count(r"stablehlo\.dot_general"),
    holds=lambda off, on: on < off,
    refused={"remat_policy": "custom"},
  ),
  Key(
    name="scan_layers",
    value=False,
    promise="B",
    evidence="fewer loops: layers are written out",
    probe=count(r"stablehlo\.while"),
    holds=lambda off, on: on < off,
    refused={**BALANCED, **CUSTOM, "context_parallel_attention_load_balance_hoist_ids": True},
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
    holds=_exactly(2, 8),
  ),
  Key(
    name="custom_mesh_and_rule",
    value="cp-as-ep-dense-no-cp",
    base={"use_ring_of_experts": True, "use_ragged_sort": True},
    promise="S",
    evidence="gradients of dense weights are scattered over fsdp x expert",
    probe=largest_group,
    holds=_exactly(2, 4),
  ),
  Key(
    name="use_ragged_sort",
    promise="S",
    evidence="no gradient or sum scatters rows of tokens",
    probe=count(r"tensor<64x1xi32>, tensor<64x64xf32>\) -> tensor<32x64xf32>"),
    holds=_VANISHES,
    refused={"model_preset": "tiny"},
  ),
  Key(
    name="use_ring_of_experts",
    base=SORT,
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
  *(
    Key(
      name="moe_expert_weight_prefetch",
      value=value,
      base=RING,
      promise="B",
      evidence=f"{barriers} barriers hold the gathered experts and the tokens to be routed",
      probe=count(r"optimization_barrier .*tensor<32x64xf32>.*tensor<2x64x64xf32>"),
      holds=_exactly(0, barriers),
      refused={"model_preset": "tiny"},
    )
    # Of the forward pass, its recomputation, and the backward pass.
    for value, barriers in (("forward", 2), ("forward_backward", 3))
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
    name="use_tokamax_gmm",
    platform="tpu",
    held_by="//model:kernel_keys_test",
    base=KERNELS,
    refused={"kernel_implementation": "reference"},
    promise="R",
    evidence="kernels instead of ragged products",
    probe=count(r"ragged_dot"),
    holds=_VANISHES,
  ),
  Key(
    name="use_gmm_v2",
    platform="tpu",
    held_by="//model:kernel_keys_test",
    base={**KERNELS, "use_tokamax_gmm": True},
    refused={"use_tokamax_gmm": False},
    promise="R",
    evidence="kernels of this repository",
    probe=count(r'kernel_name = "gmm_forward'),
    holds=_APPEARS,
  ),
  Key(
    name="prefuse_moe_weights",
    platform="tpu",
    held_by="//model:kernel_keys_test",
    base={**KERNELS, "use_tokamax_gmm": True, "use_gmm_v2": True},
    refused={"model_preset": "tiny"},
    promise="S",
    evidence="forward and in the replay one product less",
    probe=count(r'kernel_name = "gmm_forward'),
    holds=lambda off, on: on == off - 2,
  ),
  Key(
    name="wi_tile_fwd_mlp_dim",
    value=256,
    platform="tpu",
    held_by="//model:kernel_keys_test",
    base=EXPERTS,
    refused={"use_gmm_v2_heuristic_tiling": True},
    promise="S",
    evidence="the forward kernels, by check sum: the first product's is another one",
    probe=kernel_bodies("gmm_forward_none"),
    holds=lambda off, on: len(off) == len(on) > 0 and off != on,
  ),
  Key(
    name="moe_wi_gmm_fused_swiglu",
    platform="tpu",
    held_by="//model:kernel_keys_test",
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
    held_by="//model:kernel_keys_test",
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
    held_by="//model:kernel_keys_test",
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
    name="query_proj_kernel_gather_once",
    base=CUSTOM,
    promise="B",
    evidence="the query kernel is gathered forward and once backward, not twice",
    probe=count(r"all_gather.*-> tensor<64x256xf32>"),
    holds=_exactly(3, 2),
    refused={"remat_policy": "full"},
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
      ("moe_mlpwi_0", "all", 1, "64x32"),
      ("moe_mlpwi_1", "all", 1, "64x32"),
      ("moe_mlpwo", "all", 1, "64x64"),
      ("mlpwi", "all", 1, "32x32"),
      ("mlpwo", "all", 1, "32x64"),
    )
  ),
  *(
    Key(
      name=name,
      value="device",
      base={**CUSTOM, "kernel_implementation": "interpret"},
      # Interpreted kernels are compared with fusion on, which orders the recomputed sums otherwise.
      promise=promise,
      evidence=f"{layers} layers stack it for the backward pass",
      probe=count(rf"tensor<{stack}x{shape}xf32>"),
      holds=lambda off, on: on > off,
    )
    for name, layers, stack, shape, promise in (
      ("context", "attention", 1, "1x4x32x32", "S"),
      ("gdn_states", "Gated DeltaNet", "1x1", r"\d+x\d+x\d+x\d+", "P"),
    )
  ),
)
