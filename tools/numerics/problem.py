"""What two runs must share to be compared, as values by option name: what differs, in words."""

from __future__ import annotations

from collections.abc import Mapping


def differences(reference: Mapping[str, str], other: Mapping[str, str]) -> str:
  """The options that differ with both values; empty where none does."""
  names = [*reference, *(name for name in other if name not in reference)]
  value = lambda found, name: found.get(name, "not recorded")
  return "; ".join(
    f"--{name} is {value(reference, name)} in the reference, {value(other, name)} in the candidate"
    for name in names
    if reference.get(name) != other.get(name)
  )
