"""Every builder that a case names lowers, once for each pass that it knows."""

import importlib
import importlib.util

import jax
import numpy as np
import pytest

from tools.kernel_report import cases, public_kernels


def _smallest():
  """For each builder and pass the case with the least work, whose trace is shortest."""
  found = {}
  for case in sorted(cases.CASES, key=lambda c: -c.flops * c.bytes):
    which = case.arguments.get("which", case.arguments.get("kind"))
    found[case.builder.rpartition(".")[2], which, case.arguments.get("epilogue")] = case
  return found


@pytest.mark.parametrize("key", _smallest(), ids=lambda key: "-".join(str(k) for k in key if k))
def test_builder_lowers(key, monkeypatch):
  if "tokamax" in key[0] and importlib.util.find_spec("tokamax") is None:
    pytest.skip("tokamax is installed for the report alone")
  one = lambda topology, shape, names: jax.sharding.Mesh(np.array(jax.devices()[:1]), names)
  monkeypatch.setattr(public_kernels.programs, "mesh_of", one)
  case = _smallest()[key]
  module, _, function = case.builder.partition(":")
  built = getattr(importlib.import_module(module), function)(**case.arguments)
  text = (built[0] if isinstance(built, tuple) else built).as_text()
  assert ("tpu_custom_call" in text) or case.program
