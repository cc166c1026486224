"""A row of the table of the mesh's keys: what a key promises, what is probed, and what a class allows.

A row is checked by lowering the micro-batch (or the update) of a small sparse model over 2x2x2
devices with the key off and on, and probing the two texts.  A key that does nothing fails its row.

`CLASSES` are what keys promise.  A row's values are held to its class by `parity`, or by the test
that `held_by` names.
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

CLASSES = {
  "B": "values and gradients are bit-identical",
  "S": "float32 sums are taken in another order",
  "P": "placement or timing alone changes; values are bit-identical",
  "R": "values are rounded to bfloat16 elsewhere; in float32 as S",
  "L": "lossy: values are meant to differ, as with float8 operands",
}

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
    promise: Its class, of `CLASSES`.
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
