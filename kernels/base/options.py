"""Options: declared once in a frozen dataclass, read from flags, checked, documented.

A component writes a frozen dataclass whose fields are made by `option`.  From that one
declaration come the absl flag of the same name, its help text, its line in the documentation
table, the check of its value, and the error that names the nearest flag when a name is wrong.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class LossOptions:
      "Policy loss."
      ratio_clip_min: float = option(0.2, help="...", minimum=0.0)

    if __name__ == "__main__":
      cli.main(run, components=[LossOptions], rules=TABLE)

Nothing here imports JAX: a configuration is judged in milliseconds on any machine.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_METADATA_KEY = "option"


class UserError(Exception):
  """A mistake of the user's: printed as one line, exit status 1, no traceback.

  The text says what was given, what is allowed, and what to do.
  """


class OptionError(UserError):
  """A mistake in the flags: printed like a `UserError`, exit status 2."""


@dataclasses.dataclass(frozen=True)
class Option:
  """One declared option.

  Attributes:
    name: Field name, which is the flag's name.
    kind: Element type: bool, int, float or str.
    optional: Whether None is a value (an empty string on the command line).
    many: Whether the value is a tuple (comma-separated on the command line).
    default: Value that changes nothing.
    help: One sentence for the flag and the table.
    choices: Allowed values, or None.
    minimum: Least allowed value, or None.
    maximum: Greatest allowed value, or None.
    check: Further test of a value; returns what is wrong, or None.
    env: Environment variable that gives the value when the flag is absent.
    component: Name of the declaring dataclass.
    writes: Whether the value names a file that the tool writes.
  """

  name: str
  kind: type
  optional: bool
  many: bool
  default: Any
  help: str
  choices: tuple[Any, ...] | None
  minimum: float | None
  maximum: float | None
  check: Callable[[Any], str | None] | None
  env: str | None
  component: str
  writes: bool = False

  @property
  def allowed(self) -> str:
    """What values are allowed, in words."""
    if self.kind is bool:
      text = "true or false"
    elif self.choices is not None:
      text = "one of " + ", ".join(str(c) for c in self.choices)
    else:
      noun = {int: "an integer", float: "a finite number", str: "a string"}[self.kind]
      bounds = []
      if self.minimum is not None:
        bounds.append(f">= {self.minimum:g}")
      if self.maximum is not None:
        bounds.append(f"<= {self.maximum:g}")
      text = " ".join([noun, " and ".join(bounds)]).strip()
    if self.many:
      text = f"a comma-separated list, each {text}"
    return text + (", or empty" if self.optional else "")

  def parse(self, text: str) -> Any:
    """Turns command-line text into a value.

    Raises:
      OptionError: The text is no allowed value.
    """
    if self.optional and text == "":
      return None
    if self.many:
      parts = [p.strip() for p in text.split(",")] if text.strip() else []
      value: Any = tuple(self._parse_one(p, text) for p in parts)
    else:
      value = self._parse_one(text, text)
    self.validate(value)
    return value

  def _parse_one(self, text: str, given: str) -> Any:
    try:
      if self.kind is bool:
        return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
      return self.kind(text)
    except (ValueError, KeyError):
      raise self._error(given) from None

  def validate(self, value: Any) -> None:
    """Checks a value of this option.

    Raises:
      OptionError: The value has the wrong type or is out of range.
    """
    if value is None:
      if not self.optional:
        raise self._error(value)
      return
    if self.many and not isinstance(value, tuple):
      raise self._error(value)
    for one in value if self.many else (value,):
      right = isinstance(one, self.kind) or (self.kind is float and isinstance(one, int))
      if not right or (isinstance(one, bool) and self.kind is not bool):
        raise self._error(value)
      if self.kind is float and not math.isfinite(one):
        raise self._error(value)
      if self.choices is not None and one not in self.choices:
        raise self._error(value)
      if self.minimum is not None and one < self.minimum:
        raise self._error(value)
      if self.maximum is not None and one > self.maximum:
        raise self._error(value)
    if self.check is not None and (wrong := self.check(value)):
      raise self._error(value, wrong)

  def _error(self, given: Any, wrong: str | None = None) -> OptionError:
    shown = ",".join(map(str, given)) if isinstance(given, tuple) else str(given)
    return OptionError(f"--{self.name}={shown}: " + (wrong or f"want {self.allowed}"))

  def show(self, value: Any) -> str:
    """The command-line text of a value."""
    if value is None:
      return ""
    if isinstance(value, tuple):
      return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def option(
  default: Any,
  *,
  help: str,
  choices: Sequence[Any] | None = None,
  minimum: float | None = None,
  maximum: float | None = None,
  check: Callable[[Any], str | None] | None = None,
  env: str | None = None,
  writes: bool = False,
) -> Any:
  """Declares a field of an option dataclass.

  Args:
    default: Value that changes nothing; immutable.
    help: One sentence on what the option does, with units.
    choices: Allowed values.
    minimum: Least allowed number.
    maximum: Greatest allowed number.
    check: Takes a value, returns what is wrong with it or None.
    env: Environment variable read, at the flag edge only, when the flag is absent.
    writes: The value names a file to write; it is judged before the tool starts.

  Returns:
    A dataclass field.
  """
  metadata = {
    "help": help,
    "choices": None if choices is None else tuple(choices),
    "minimum": minimum,
    "maximum": maximum,
    "check": check,
    "env": env,
    "writes": writes,
  }
  return dataclasses.field(default=default, metadata={_METADATA_KEY: metadata})


def _unwrap(annotation: Any) -> tuple[type, bool, bool]:
  """Element type, optional, many, of a field's annotation."""
  optional = many = False
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    arguments = [a for a in typing.get_args(annotation) if a is not type(None)]
    if len(arguments) != 1:
      raise TypeError(f"an option is of one type, or of one type and None, not {annotation}")
    optional, annotation = True, arguments[0]
  if typing.get_origin(annotation) is tuple:
    many, annotation = True, typing.get_args(annotation)[0]
  if annotation not in (bool, int, float, str):
    raise TypeError(f"an option is a bool, int, float, str or a tuple of one, not {annotation}")
  return annotation, optional, many


def declared(component: type) -> list[Option]:
  """The options that a dataclass declares, in order.

  Fields not made by `option` are no options and are passed over.
  """
  hints = typing.get_type_hints(component)
  found = []
  for field in dataclasses.fields(component):
    metadata = field.metadata.get(_METADATA_KEY)
    if metadata is None:
      continue
    kind, optional, many = _unwrap(hints[field.name])
    found.append(
      Option(
        name=field.name,
        kind=kind,
        optional=optional,
        many=many,
        default=field.default,
        component=component.__name__,
        **metadata,
      )
    )
  return found


def validate(instance: Any) -> None:
  """Checks every option of a dataclass instance, for callers that use no flags.

  Raises:
    OptionError: Naming the first value that is not allowed.
  """
  for opt in declared(type(instance)):
    opt.validate(getattr(instance, opt.name))


class Settings:
  """The values of several components' options, by component and by name.

  `settings.of(LossOptions)` is that dataclass; `settings.ratio_clip_min` is the value, whichever
  component declares it.  Option names are unique over the components.
  """

  def __init__(
    self,
    components: Iterable[type],
    values: Mapping[str, Any] | None = None,
    positionals: Sequence[str] = (),
    *,
    check_only: bool = False,
  ):
    """Checks the values and builds the dataclasses.

    Args:
      components: Option dataclasses.
      values: Values by option name; the others take their defaults.
      positionals: Command-line arguments that are no flags.
      check_only: Whether the caller asked for a judgement of the flags alone.

    Raises:
      OptionError: An unknown name, or a value that is not allowed.
      ValueError: Two components declare one name.
    """
    given = dict(values or {})
    self._options: dict[str, Option] = {}
    self._values: dict[str, Any] = {}
    self._instances: dict[type, Any] = {}
    self.positionals = tuple(positionals)
    self.check_only = check_only
    for component in components:
      for opt in declared(component):
        if opt.name in self._options:
          other = self._options[opt.name].component
          raise ValueError(f"{other} and {component.__name__} both declare {opt.name}")
        value = given.pop(opt.name, opt.default)
        if opt.kind is float and isinstance(value, int) and not isinstance(value, bool):
          value = float(value)
        opt.validate(value)
        self._options[opt.name] = opt
        self._values[opt.name] = value
      names = [opt.name for opt in declared(component)]
      self._instances[component] = component(**{n: self._values[n] for n in names})
    if given:
      raise OptionError(unknown_name(next(iter(given)), self._options))

  def of(self, component: type[Any]) -> Any:
    """The instance of one component's dataclass."""
    return self._instances[component]

  def __getattr__(self, name: str) -> Any:
    values = self.__dict__.get("_values", {})
    if name not in values:
      raise AttributeError(unknown_name(name, values))
    return values[name]

  @property
  def options(self) -> Mapping[str, Option]:
    """Every option by name, in the order of declaration."""
    return self._options

  @property
  def changed(self) -> dict[str, Any]:
    """The values that differ from their defaults, by name."""
    return {n: v for n, v in self._values.items() if v != self._options[n].default}

  def as_dict(self) -> dict[str, Any]:
    """Every value by name, tuples as lists: what a JSON file can hold."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in self._values.items()}


def nearest(name: str, known: Iterable[str]) -> str | None:
  """The known name closest to `name`, or None when nothing is known.

  Distance is Levenshtein's, so that some name is always nearest, however wrong the given one is; a
  letter left out costs less than a wrong one, since long names are mostly shortened.
  """
  names = list(known)
  return min(names, key=lambda k: (_distance(name, k), k)) if names else None


_LEFT_OUT = 0.3  # Of a wrong letter.


def _distance(given: str, known: str) -> float:
  row = [_LEFT_OUT * k for k in range(len(known) + 1)]
  for i, x in enumerate(given, 1):
    previous, row[0] = row[0], float(i)
    for j, y in enumerate(known, 1):
      previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + _LEFT_OUT, previous + (x != y))
  return row[-1]


def unknown_name(name: str, known: Iterable[str]) -> str:
  """The error text for a name that no option has."""
  close = nearest(name, known)
  hint = f"; the nearest flag is --{close}" if close else ""
  return f"unknown flag --{name}{hint} (--help lists all)"
