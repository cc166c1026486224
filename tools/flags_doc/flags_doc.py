"""Writes the trainer's options and refusals as one Markdown page.

./bazelw run //tools:flags_doc                    to the terminal
./bazelw run //tools:flags_doc -- --output=FILE   to a file
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from kernels.base import cli, options, refusals
from rl import refusals as trainer_rules
from rl import trainer_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocOptions:
  """Where the page goes."""

  output: str | None = options.option(None, help="File to write; empty for the terminal.")


def _cell(text: str) -> str:
  return text.replace("|", "\\|").replace("\n", " ")


def render(components: Sequence[type], rules: Sequence[refusals.Rule]) -> str:
  """The page: a table of options for each component, then the table of refusals.

  Args:
    components: Option dataclasses, in the order of the page.
    rules: The refusal table.

  Returns:
    Markdown text ending in a newline.
  """
  lines = ["# Options of the trainer", ""]
  made = "Made by `./bazelw run //tools:flags_doc`."
  lines += [f"{made} Every option is a flag of the same name.", ""]
  for component in components:
    title = (component.__doc__ or component.__name__).strip().splitlines()[0]
    lines += [f"## {component.__name__}", "", title, ""]
    lines += ["| flag | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for opt in options.declared(component):
      shown = f"`{opt.show(opt.default)}`" if opt.show(opt.default) else "empty"
      env = f" Environment: `{opt.env}`." if opt.env else ""
      lines.append(
        f"| `{opt.name}` | {_cell(shown)} | {_cell(opt.allowed)} | {_cell(opt.help)}{env} |"
      )
    lines.append("")
  lines += ["## Refusals", "", "| rule | options | reason |", "| --- | --- | --- |"]
  for rule in rules:
    keys = ", ".join(f"`{key}`" for key in rule.keys)
    lines.append(f"| {rule.name} | {keys} | {_cell(rule.reason)} |")
  return "\n".join(lines) + "\n"


def run(settings: options.Settings) -> int:
  """Prints or writes the page."""
  text = render(trainer_options.COMPONENTS, trainer_rules.RULES)
  if settings.output is None:
    print(text, end="")
    return 0
  path = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), settings.output)
  try:
    path.write_text(text)
  except OSError as error:
    raise options.UserError(f"--output={settings.output}: {error.strerror}") from None
  print(f"wrote {path}")
  return 0


if __name__ == "__main__":
  cli.main(run, components=[DocOptions], description=__doc__)
