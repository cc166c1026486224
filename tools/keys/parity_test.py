"""Every key keeps the promise of its class: a step with it against the same step without it."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=8"
  # What compiles fastest; nothing here is timed.
  " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
  " --xla_cpu_use_fusion_emitters=false"
)

import dataclasses  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from tools.keys import key as key_lib  # noqa: E402
from tools.keys import parity, table  # noqa: E402

UNIONS = parity.unions(table.KEYS)


@pytest.mark.parametrize("union", UNIONS, ids=lambda union: union.title)
def test_keys_keep_the_promise_of_their_class(union):
  found = union.parity()
  assert found.keeps(union.keys[0].promise), found


def test_every_row_is_compared_somewhere():
  here = [key.title for union in UNIONS for key in union.keys]
  elsewhere = [key.title for key in table.KEYS if key.held_by != key_lib.PARITY]
  assert sorted(here + elsewhere) == sorted(key.title for key in table.KEYS)


def test_a_planted_error_breaks_a_promise():
  wanted = {"gradient of a": np.ones(4, np.float32), "gradient of A_log": np.ones(4, np.float32)}
  last_bit = {**wanted, "gradient of a": np.nextafter(wanted["gradient of a"], 2, dtype=np.float32)}
  found = parity.compare(wanted, last_bit)
  assert found.keeps("S") and found.keeps("R") and not found.keeps("B") and not found.keeps("P")
  for name, error, kept in (("a", 2e-5, False), ("A_log", 4e-5, True), ("A_log", 6e-5, False)):
    off = {**wanted, f"gradient of {name}": wanted[f"gradient of {name}"] * np.float32(1 + error)}
    assert parity.compare(wanted, off).keeps("S") == kept
  broken = {**wanted, "gradient of a": np.full(4, np.nan, np.float32)}
  assert not any(parity.compare(wanted, broken).keeps(promise) for promise in key_lib.LIMITS)
  assert not dataclasses.replace(found, equal=False).keeps("B")
