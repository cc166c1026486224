"""The page names every option and rule once, with its default."""

import dataclasses
import re

from kernels.base import options
from rl import refusals as trainer_rules
from rl import trainer_options
from tools.flags_doc import flags_doc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piped:
  """A component whose help holds a table's own separator."""

  kind: str = options.option("a|b", help="One | two.", env="KIND")


def test_every_option_and_rule_has_one_row():
  page = flags_doc.render(trainer_options.COMPONENTS, trainer_rules.RULES)
  rows = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
  declared = [o.name for c in trainer_options.COMPONENTS for o in options.declared(c)]
  assert rows == declared
  for rule in trainer_rules.RULES:
    assert f"\n| {rule.name} |" in page


def test_separators_inside_a_cell_are_escaped():
  page = flags_doc.render([Piped], [])
  row = next(line for line in page.splitlines() if line.startswith("| `kind`"))
  cells = re.split(r"(?<!\\)\|", row)
  assert [c.strip() for c in cells[1:-1]] == [
    "`kind`",
    "`a\\|b`",
    "a string",
    "One \\| two. Environment: `KIND`.",
  ]
