"""Refusals: over changed values, all at once, and only for declared keys."""

import dataclasses

import pytest

from kernels.base import options, refusals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gamma:
  """Gamma."""

  scan: bool = options.option(False, help="Scan.")
  mode: str = options.option("head", help="Mode.", choices=("head", "seq"))
  size: int = options.option(3, help="Size.")


RULES = (
  refusals.Rule(
    name="scan-needs-seq",
    keys=("scan", "mode"),
    broken=lambda s: s.scan and s.mode != "seq",
    reason="a scan needs --mode=seq",
    accepted={"scan": True, "mode": "seq"},
    refused={"scan": True},
  ),
  refusals.Rule(
    name="size-even",
    keys=("size",),
    broken=lambda s: s.size % 2 == 1,
    reason="size must be even",
    accepted={"size": 4},
    refused={"size": 5},
  ),
  refusals.Rule(
    name="elsewhere",
    keys=("not_declared_here",),
    broken=lambda s: True,
    reason="never",
    accepted={},
    refused={},
  ),
)


def test_defaults_break_no_rule():
  # size=3 is odd, but it is the default: it changes nothing.
  assert refusals.broken_rules(options.Settings([Gamma]), RULES) == []


def test_effective_rules_look_at_defaults_too():
  rule = dataclasses.replace(RULES[1], effective=True)
  assert refusals.broken_rules(options.Settings([Gamma]), [rule]) == [rule]


@pytest.mark.parametrize("rule", RULES[:2], ids=lambda r: r.name)
def test_examples(rule):
  assert rule not in refusals.broken_rules(options.Settings([Gamma], rule.accepted), RULES)
  assert rule in refusals.broken_rules(options.Settings([Gamma], rule.refused), RULES)


def test_a_rule_may_say_what_would_do():
  settings = options.Settings([Gamma], {"size": 5})
  rule = dataclasses.replace(RULES[1], detail=lambda s: f"{s.size - 1} or {s.size + 1}")
  assert refusals.describe(rule, settings).endswith("--size=5: size must be even (4 or 6)")


def test_every_broken_rule_is_listed_at_once():
  settings = options.Settings([Gamma], {"scan": True, "size": 7})
  with pytest.raises(options.OptionError) as error:
    refusals.refuse(settings, RULES)
  lines = str(error.value).splitlines()
  assert len(lines) == 2
  assert lines[0] == ("refused [scan-needs-seq] --scan=true --mode=head: a scan needs --mode=seq")
