"""The one way in: flags and environment -> checked settings -> a binary's `run`.

Every binary of the repository ends in `cli.main(run, components=[...], rules=TABLE)`.  Exit
status: 0 done, 1 the user's error at run time, 2 flags refused, 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from kernels.base import options, outputs, refusals

# absl's own special flag that lets unknown names pass would make a key silently inert.
_FORBIDDEN = "undefok"
_CHECK = "check"


class _Parser(flags.ArgumentParser):
  """An absl parser that follows an option's declaration and keeps what is wrong for later."""

  def __init__(self, opt: options.Option, faults: list[str]):
    super().__init__()
    self._option = opt
    self._faults = faults
    self.syntactic_help = opt.allowed

  def parse(self, argument: Any) -> Any:
    if not isinstance(argument, str):
      self._option.validate(argument)
      return argument
    try:
      return self._option.parse(argument)
    except options.OptionError as error:
      self._faults.append(str(error))
      return self._option.default

  def flag_type(self) -> str:
    return self._option.kind.__name__


class _Serializer(flags.ArgumentSerializer):
  """Writes a value as its command-line text."""

  def __init__(self, opt: options.Option):
    self._option = opt

  def serialize(self, value: Any) -> str:
    return f"--{self._option.name}={self._option.show(value)}"


def _define_flags(
  components: Sequence[type], flag_values: flags.FlagValues, faults: list[str]
) -> list[options.Option]:
  """Defines an absl flag for every option; values that are not allowed add their text to `faults`."""
  found = []
  for component in components:
    for opt in options.declared(component):
      flag: flags.Flag
      if opt.kind is bool and not opt.many:
        flag = flags.BooleanFlag(opt.name, opt.default, opt.help)
        flag.parser = _Parser(opt, faults)
      else:
        flag = flags.Flag(_Parser(opt, faults), _Serializer(opt), opt.name, opt.default, opt.help)
      flags.DEFINE_flag(flag, flag_values, module_name=opt.component)
      found.append(opt)
  return found


def expand_flag_files(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
  """The command line with the contents of its `--flagfile=FILE` in their place.

  A relative path is taken from where the command was typed: Bazel starts a program elsewhere and
  says so in BUILD_WORKING_DIRECTORY.

  Raises:
    flags.Error: A file cannot be opened.
    options.OptionError: It is no text.
  """
  environ = os.environ if environ is None else environ
  base = environ.get("BUILD_WORKING_DIRECTORY", "")
  placed, is_path = [], False
  for argument in argv[1:]:
    name, equals, path = argument.partition("=")
    flag = name in ("--flagfile", "-flagfile")
    if flag and equals:
      argument = f"{name}={os.path.join(base, os.path.expanduser(path))}"
    elif is_path:
      argument = os.path.join(base, os.path.expanduser(argument))
    is_path = flag and not equals
    placed.append(argument)
  try:
    return [argv[0], *flags.FlagValues().read_flags_from_files(placed, force_gnu=False)]
  except (UnicodeDecodeError, OSError) as error:
    why = getattr(error, "strerror", None) or "no UTF-8 text"
    given = [a for a in placed if "flagfile" in a]
    raise options.OptionError(f"{', '.join(given)}: {why}; give a text file of flags") from None


def parse(
  argv: Sequence[str],
  components: Sequence[type],
  *,
  rules: Sequence[refusals.Rule] = (),
  positionals: Sequence[str] = (),
  environ: Mapping[str, str] | None = None,
  flag_values: flags.FlagValues | None = None,
) -> options.Settings:
  """Parses a command line into checked settings.

  Args:
    argv: Program name and arguments; `--flagfile=FILE` is honoured.
    components: Option dataclasses.
    rules: The refusal table.
    positionals: Names of the arguments that are no flags; their number is exact.
    environ: Environment for options that declare a variable; a flag on the command line wins.
    flag_values: Registry to use; a fresh one by default, so that calls do not meet.

  Raises:
    options.OptionError: Unknown flags (with the nearest names) and values not allowed, all of them;
      or else arguments left over or missing; or else broken rules, all of them.

  Returns:
    The settings; `check_only` is set where `--check` was given.
  """
  registry = flags.FlagValues() if flag_values is None else flag_values
  faults: list[str] = []
  declared = {opt.name: opt for opt in _define_flags(components, registry, faults)}
  flags.DEFINE_boolean(_CHECK, False, "Judge the flags and exit.", flag_values=registry)
  try:
    expanded = expand_flag_files(argv, environ)[1:]
    for argument in expanded:
      if argument.startswith("-") and argument.lstrip("-").split("=")[0] == _FORBIDDEN:
        raise options.OptionError(f"--{_FORBIDDEN} is refused: it would make unknown flags inert")
    rest = registry([argv[0], *expanded], known_only=True)[1:]
  except (flags.Error, ValueError) as error:
    raise options.OptionError("\n".join([*faults, str(error).removeprefix("ERROR:: ")])) from None
  end = rest.index("--") if "--" in rest else len(rest)
  known = (*declared, _CHECK, "flagfile", "help")
  unknown = [a.lstrip("-").split("=")[0] for a in rest[:end] if a.startswith("-") and a != "-"]
  faults = [*(options.unknown_name(name, known) for name in dict.fromkeys(unknown)), *faults]
  rest = [*rest[:end], *rest[end + 1 :]]
  environ = os.environ if environ is None else environ
  values = {}
  for name, opt in declared.items():
    flag = registry[name]
    if not flag.present and opt.env and opt.env in environ:
      try:
        values[name] = opt.parse(environ[opt.env])
      except options.OptionError as error:
        faults.append(f"environment variable {opt.env}: {error}")
    else:
      values[name] = flag.value
  if faults:
    raise options.OptionError("\n".join(faults))
  if len(rest) != len(positionals):
    want = " ".join(positionals) or "none"
    got = " ".join(rest) or "none"
    raise options.OptionError(
      f"arguments that are no flags: got {got}, want {want}; a flag is written --name=value"
    )
  settings = options.Settings(components, values, rest, check_only=registry[_CHECK].value)
  refusals.refuse(settings, rules)
  return settings


def arm(argv: Sequence[str], name: str, extra: str, own: Sequence[str]) -> list[str]:
  """A command line with the flags of one arm after it.

  Args:
    argv: The command line.
    name: The flag that holds the arm's flags.
    extra: Its value.
    own: Flags that belong to the command line alone.

  Raises:
    options.OptionError: A quotation does not end, or a flag of the command line's is in it.
  """
  try:
    words = shlex.split(extra)
  except ValueError as error:
    raise options.OptionError(f"--{name}={extra}: {error}") from None
  for word in words:
    flag = word.lstrip("-").split("=")[0]
    if word.startswith("-") and flag in (*own, "help", _CHECK, name):
      raise options.OptionError(
        f"--{name}: {word} has no place in it; want the trainer's flags as --key=value"
      )
  return [*argv, *words]


def help_text(description: str, components: Sequence[type], positionals: Sequence[str] = ()) -> str:
  """The text of --help: every flag by component, with default and allowed values."""
  lines = [textwrap.dedent(description).strip(), ""]
  if positionals:
    lines += ["Arguments: " + " ".join(positionals), ""]
  for component in components:
    lines.append((component.__doc__ or component.__name__).strip().splitlines()[0])
    for opt in options.declared(component):
      lines.append(f"  --{opt.name}={opt.show(opt.default)}")
      extra = f" ({opt.allowed}" + (f"; environment {opt.env}" if opt.env else "") + ")"
      lines += textwrap.wrap(
        opt.help + extra, 96, initial_indent="      ", subsequent_indent="      "
      )
    lines.append("")
  lines.append("--check judges the flags and exits; --flagfile=FILE reads flags from a file.")
  return "\n".join(lines)


def main(
  run: Callable[[options.Settings], int | None],
  *,
  components: Sequence[type],
  rules: Sequence[refusals.Rule] = (),
  positionals: Sequence[str] = (),
  description: str = "",
  argv: Sequence[str] | None = None,
  judge: Callable[[options.Settings], object] = lambda settings: None,
) -> None:
  """Runs a binary: parse, refuse, then `run(settings)`; exits the process.

  `--help` and `--check` are answered here.  `run` imports what is heavy inside, so that neither
  of the two waits for it.  `judge` raises on what the flags alone tell and no rule can say.
  """
  argv = list(sys.argv if argv is None else argv)
  if any(a in ("--help", "-h", "-help", "--helpfull") for a in argv[1:]):
    print(help_text(description, components, positionals))
    sys.exit(0)
  try:
    settings = parse(argv, components, rules=rules, positionals=positionals)
    judge(settings)
    if settings.check_only:
      changed = settings.changed
      print(
        f"accepted: {len(changed)} of {len(settings.options)} options differ from the default; files, "
        "devices and memory are judged when it starts"
      )
      sys.exit(0)
    outputs.refuse_unwritable(settings, os.environ.get("BUILD_WORKING_DIRECTORY", ""))
    status = run(settings)
  except options.OptionError as error:
    print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
    sys.exit(2)
  except options.UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
  except OSError as error:
    if error.filename is None:  # No file that the user could have named.
      raise
    print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    sys.exit(1)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
  sys.exit(status or 0)
