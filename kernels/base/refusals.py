"""Refusals: one table of rules that say which options cannot stand together, and why.

A rule looks at options that differ from their defaults: a run that changes nothing breaks no
rule.  Every broken rule is reported, not the first.  Each rule carries one accepted and one
refused example, from which its test is generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kernels.base import options

_FEW = 4  # Options of a rule that are all shown with their values.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """One refusal.

  Attributes:
    name: Short unique name, in kebab case.
    keys: Options it is about.  It is evaluated only when one of them differs from its default.
    broken: Takes the settings; true where the combination is refused.
    reason: What is required and why, with what to do; one sentence.
    accepted: Example values that pass this rule although they change one of its keys.
    refused: Example values that break it.
    effective: Evaluate it over effective values even when no key differs from its default.
    detail: Takes broken settings; what they would need, in numbers, added to the reason.
  """

  name: str
  keys: tuple[str, ...]
  broken: Callable[[options.Settings], bool]
  reason: str
  accepted: Mapping[str, Any]
  refused: Mapping[str, Any]
  effective: bool = False
  detail: Callable[[options.Settings], str] | None = None


def broken_rules(settings: options.Settings, rules: Sequence[Rule]) -> list[Rule]:
  """Every rule of the table that the settings break, in table order.

  Rules whose keys the settings do not declare belong to another binary and are passed over.
  """
  changed = settings.changed
  found = []
  for rule in rules:
    if not all(key in settings.options for key in rule.keys):
      continue
    if (rule.effective or any(key in changed for key in rule.keys)) and rule.broken(settings):
      found.append(rule)
  return found


def describe(rule: Rule, settings: options.Settings) -> str:
  """One line: the values given and the reason they are refused.

  Of a rule about many options only those that differ from their defaults are named.
  """
  changed = settings.changed
  keys = [k for k in rule.keys if k in changed or len(rule.keys) <= _FEW or not changed]
  given = " ".join(f"--{key}={settings.options[key].show(getattr(settings, key))}" for key in keys)
  here = f" ({rule.detail(settings)})" if rule.detail else ""
  return f"refused [{rule.name}] {given}: {rule.reason}{here}"


def refuse(settings: options.Settings, rules: Sequence[Rule]) -> None:
  """Raises one error that lists every broken rule.

  Raises:
    options.OptionError: At least one rule is broken; one line for each.
  """
  found = broken_rules(settings, rules)
  if found:
    raise options.OptionError("\n".join(describe(rule, settings) for rule in found))
