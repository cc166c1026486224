"""The Gated DeltaNet kernels compile for a TPU, at narrow shapes."""

import pytest

from kernels.gdn import head_groups
from tools.aot import compiler


def _rule(which, heads, group=2):
  return "delta_rule", {
    "which": which,
    "tokens": 128,
    "key_heads": group,
    "heads": heads,
    "group": group,
  }


def _convolution(which):
  tiles = {"tokens": 128, "chunk": 64, "masked_chunk": 32}
  return "convolution", {
    "which": which,
    "tokens": 200,
    "channels": 256,
    "tiles": tiles,
    "masked": True,
  }


def _norm(layout):
  return "gated_norm", {"which": "backward", "layout": layout, "tokens": 200, "heads": 2}


# One value head a key head cannot be paired; two are one pair and four are two.  The widest step of
# the largest kernel takes most of VMEM.
_SIZES = {"chunk": 64, "dk": 128, "dv": 128, "itemsize": 2}
_CASES = {
  "forward": _rule("forward_saved", 1),
  "backward": _rule("backward", 4),
  "backward, 397B": _rule("backward", 4, head_groups.widest(16, 4, **_SIZES)),
  "m scan": _rule("m_scan", 2),
  "dh scan": _rule("dh_scan", 1),
  "convolution forward": _convolution("forward"),
  "convolution backward": _convolution("backward"),
  "norm, head-minor": _norm("head_minor"),
  "norm, token-minor": _norm("token_minor"),
}


def _compile(name, arguments, directory):
  return compiler.compile_program(
    compiler.Request(
      builder=f"tools.kernel_report.delta_kernels:{name}",
      arguments=arguments,
      directory=str(directory),
      full=True,
      time_limit=200,
    )
  )


@pytest.mark.parametrize("case", _CASES)
def test_kernels_compile(case, tmp_path):
  result = _compile(*_CASES[case], tmp_path / "out")
  assert result.verdict.fits, result.verdict
  assert "tpu_custom_call" in result.hlo.read_text()


def test_planted_fault_a_kernel_that_needs_too_much_memory(tmp_path):
  """The compiler refuses a tile that VMEM cannot hold: compiling is a test."""
  arguments = _norm("head_minor")[1] | {"tokens": 65_536, "tiles": {"tokens": 65_536}}
  verdict = _compile("gated_norm", arguments, tmp_path / "out").verdict
  assert not verdict.fits and "vmem" in verdict.detail.lower(), verdict
