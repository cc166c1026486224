"""The kernels of the Gated DeltaNet mixer: the rule, its convolution and its norm.

One device's share of a layer: 16,384 tokens of one row.
"""

from __future__ import annotations

from kernels.gdn import flops, head_groups
from tools.kernel_report.case import KernelCase

_TOKENS = 16_384


def _delta_net(model: str, key_heads: int, heads: int) -> list[KernelCase]:
  """The gated delta rule at a model's heads: forward four key heads a step and as many as fit.

  Args:
    model: Name of the model.
    key_heads: Key heads, of which a case takes a step's.
    heads: Value heads per key head.
  """
  dim, chunk, few = 128, 64, 4
  wide = head_groups.widest(key_heads, heads, chunk=chunk, dk=dim, dv=dim, itemsize=2)

  def case(which: str, kind: str, group: int, name: str) -> KernelCase:
    tokens = 512
    value_heads = group * heads
    kept = 4.0 * (dim * dim + chunk * chunk) * value_heads / chunk  # bytes a token
    token, gate = 2.0 * dim * (2 * group + value_heads), 12.0 * value_heads
    values = 2.0 * dim * value_heads
    bytes_ = {
      "forward": token + values + gate,
      "forward_saved": token + values + gate + kept,
      "backward": 2 * token + values + 2 * gate + kept,
    }.get(which, token + gate)
    sizes = {"chunk": chunk, "key_heads": group, "value_heads": value_heads, "dk": dim, "dv": dim}
    common = {"which": which, "heads": heads, "group": group}
    return KernelCase(
      name=f"ours: {model} gdn {name}",
      builder="tools.kernel_report.delta_kernels:delta_rule",
      arguments={**common, "tokens": tokens, "key_heads": group},
      whole={**common, "tokens": _TOKENS, "key_heads": key_heads},
      kernel=f"gdn_{kind}",
      flops=tokens * flops.per_token(kind, **sizes),
      bytes=tokens * bytes_,
      part=f"{tokens} of {_TOKENS:,} tokens, {group} of {key_heads} key heads with {heads} value"
      " heads each",
    )

  return [
    case("forward", "forward", few, "forward"),
    case("forward", "forward", wide, f"forward, {wide} key heads a step"),
    case("forward_saved", "forward", wide, "forward, states kept"),
    case("backward", "backward", wide, "backward"),
    case("m_scan", "m_scan", wide, "m scan"),
    case("dh_scan", "dh_scan", wide, "dh scan"),
  ]


def _elementwise(model: str, all_channels: int, all_heads: int) -> list[KernelCase]:
  """The convolution and the gated norm: bandwidth is their floor."""
  out = []
  # The backward pass's simulation takes minutes for each tile of 128 channels.
  for which, arrays, tokens, channels in (("forward", 2, 8192, 2048), ("backward", 3, 8192, 512)):
    out.append(
      KernelCase(
        name=f"ours: {model} conv1d {which}",
        builder="tools.kernel_report.delta_kernels:convolution",
        arguments={"which": which, "tokens": tokens, "channels": channels},
        whole={"which": which, "tokens": _TOKENS, "channels": all_channels, "masked": True},
        kernel="causal_conv1d_silu",
        flops=1.0,
        bytes=2.0 * arrays * tokens * channels,
        part=f"{tokens:,} of 16,384 tokens, {channels:,} of {all_channels:,} channels, "
        "no boundary in a tile",
      )
    )
  # Several steps of the grid, and the tile of the whole work: all heads of 128 tokens token-minor.
  for layout, tokens, heads in (("head_minor", 4096, 32), ("token_minor", 1024, all_heads)):
    for which, arrays in (("forward", 3), ("backward", 5)):
      out.append(
        KernelCase(
          name=f"ours: {model} gated norm {layout} {which}",
          builder="tools.kernel_report.delta_kernels:gated_norm",
          arguments={"which": which, "layout": layout, "tokens": tokens, "heads": heads},
          whole={"which": which, "layout": layout, "tokens": _TOKENS, "heads": all_heads},
          kernel="gated_norm",
          flops=1.0,
          bytes=2.0 * arrays * tokens * heads * 128,
          part=f"{tokens:,} of 16,384 tokens, {heads} of {all_heads} heads",
        )
      )
  return out


CASES: tuple[KernelCase, ...] = (
  *_delta_net("397B", 16, 4),
  *_delta_net("35B", 16, 2),
  *_elementwise("397B", 12_288, 64),
  *_elementwise("35B", 8192, 32),
)
