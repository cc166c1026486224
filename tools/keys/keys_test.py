"""Every key of the mesh acts, is in the table, is accepted as shown and refused where it cannot work."""

import os
import pathlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=8"
)

import pytest  # noqa: E402

from kernels.base import options, refusals  # noqa: E402
from model.sharded.options import ShardedOptions  # noqa: E402
from rl import refusals as rl_refusals  # noqa: E402
from tools.keys import key as key_lib  # noqa: E402
from tools.keys import main, programs, table  # noqa: E402

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


def test_a_name_that_is_none_is_told_with_the_nearest():
  with pytest.raises(
    options.OptionError, match="use_raged_sort is none, the nearest is use_ragged_"
  ):
    options.Settings([main.KeysOptions], {"keys": ("use_raged_sort",)})
  options.Settings([main.KeysOptions], {"keys": ("use_ragged_sort", "query_proj")})


def test_every_class_is_explained():
  assert {key.promise for key in table.KEYS} <= set(key_lib.CLASSES) == set(key_lib.LIMITS)
  text = "\n".join(main.legend())
  readme = pathlib.Path("tools/keys/README.md").read_text()
  for letter, what in key_lib.CLASSES.items():
    assert f"class {letter}: {what}" in text and f"| {letter} | {what} |" in readme


def test_the_table_is_whole():
  names = {option.name for option in options.declared(ShardedOptions)}
  assert names <= {key.name for key in table.KEYS}
