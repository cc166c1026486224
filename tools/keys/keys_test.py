"""Every key of the mesh acts, is in the table, is accepted as shown and refused where it cannot work."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=8"
)

import pytest  # noqa: E402

from kernels.base import options, refusals  # noqa: E402
from model.sharded.options import ShardedOptions  # noqa: E402
from rl import refusals as rl_refusals  # noqa: E402
from tools.keys import key as key_lib  # noqa: E402
from tools.keys import programs, table  # noqa: E402

BY_TITLE = pytest.mark.parametrize("key", table.KEYS, ids=lambda key: key.title)


@BY_TITLE
def test_a_key_acts(key):
  off, on = programs.probe(key)
  assert key.holds(off, on), f"{key.evidence}: {off} -> {on}"
  # A row that an inert key would pass as well proves nothing.
  assert not key.holds(off, off) and not key.holds(on, on)


@BY_TITLE
def test_a_key_is_accepted_as_shown_and_refused_where_it_cannot_work(key):
  for values in (key.off, key.on):
    broken = refusals.broken_rules(key_lib.settings_of(values), rl_refusals.RULES)
    assert not broken, [rule.name for rule in broken]
  assert (key.refused is None) == (not key.refusals())


def test_the_table_is_whole():
  names = {option.name for option in options.declared(ShardedOptions)}
  assert names <= {key.name for key in table.KEYS}
