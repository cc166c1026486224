"""Options: declaration, parsing, checks, nearest names."""

import dataclasses
import subprocess
import sys

import pytest

from kernels.base import options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alpha:
  """Alpha."""

  rate: float = options.option(1e-3, help="A rate.", minimum=0.0, maximum=1.0)
  count: int = options.option(2, help="A count.", minimum=1)
  on: bool = options.option(False, help="A switch.")
  path: str | None = options.option(None, help="A path.")
  ids: tuple[int, ...] = options.option((), help="Ids.")
  kind: str = options.option("a", help="A kind.", choices=("a", "b"))
  even: int = options.option(2, help="Even.", check=lambda v: "must be even" if v % 2 else None)
  plain: int = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beta:
  """Beta, which repeats a name of Alpha."""

  count: int = options.option(1, help="A count.")


def _option(name):
  return {o.name: o for o in options.declared(Alpha)}[name]


def test_declared_in_order_and_without_plain_fields():
  assert [o.name for o in options.declared(Alpha)] == [
    "rate", "count", "on", "path", "ids", "kind", "even",
  ]  # fmt: skip


@pytest.mark.parametrize(
  "name, text, value",
  [
    ("rate", "0.5", 0.5),
    ("count", "3", 3),
    ("on", "true", True),
    ("on", "False", False),
    ("path", "", None),
    ("path", "x,y", "x,y"),
    ("ids", "1, 2", (1, 2)),
    ("ids", "", ()),
    ("kind", "b", "b"),
  ],
)
def test_parse_and_show_round_trip(name, text, value):
  opt = _option(name)
  assert opt.parse(text) == value
  assert opt.parse(opt.show(value)) == value


@pytest.mark.parametrize(
  "name, text, words",
  [
    ("rate", "nan", "finite"),
    ("rate", "inf", "finite"),
    ("rate", "1.5", "<= 1"),
    ("rate", "-1.0", ">= 0"),
    ("rate", "x", "finite number"),
    ("count", "1.5", "an integer"),
    ("count", "0", ">= 1"),
    ("on", "yes", "true or false"),
    ("kind", "c", "one of a, b"),
    ("ids", "1,x", "comma-separated"),
    ("even", "3", "must be even"),
  ],
)
def test_values_not_allowed_say_what_is(name, text, words):
  with pytest.raises(options.OptionError) as error:
    _option(name).parse(text)
  assert f"--{name}={text}" in str(error.value)
  assert words in str(error.value)


@pytest.mark.parametrize(
  "name, value", [("count", True), ("count", 1.0), ("ids", [1]), ("rate", None), ("on", 1)]
)
def test_values_of_the_wrong_type_are_refused(name, value):
  with pytest.raises(options.OptionError):
    options.validate(dataclasses.replace(Alpha(), **{name: value}))


def test_settings_by_component_and_name():
  settings = options.Settings([Alpha], {"rate": 1, "ids": (3,)})
  assert settings.of(Alpha) == Alpha(rate=1.0, ids=(3,))
  assert isinstance(settings.rate, float)
  assert settings.changed == {"rate": 1.0, "ids": (3,)}
  assert settings.as_dict()["ids"] == [3]
  with pytest.raises(AttributeError, match="--count"):
    _ = settings.cuont


def test_settings_refuse_unknown_and_doubled_names():
  with pytest.raises(options.OptionError, match="nearest flag is --kind"):
    options.Settings([Alpha], {"kinds": "a"})
  with pytest.raises(ValueError, match="both declare count"):
    options.Settings([Alpha, Beta])


def test_nearest_always_names_one():
  names = ["learning_rate", "max_steps", "seed"]
  assert options.nearest("learnign_rate", names) == "learning_rate"
  assert options.nearest("zzzz", names) == "seed"
  assert options.nearest("x", []) is None
  shortened = ("gdn_chunk_size", "gdn_fwd_kernel_head_group_size", "gdn_cp")
  assert options.nearest("gdn_head_group", shortened) == "gdn_fwd_kernel_head_group_size"
  assert options.nearest("397B", ("27B", "397B-A17B", "9B")) == "397B-A17B"


def test_unsupported_types_are_programming_errors():
  @dataclasses.dataclass(frozen=True)
  class Bad:
    value: dict = options.option(None, help="No.")

  with pytest.raises(TypeError):
    options.declared(Bad)


def test_configuration_imports_no_jax():
  code = "import kernels.base.cli, sys; sys.exit(any(m.startswith('jax') for m in sys.modules))"
  env = {"PYTHONPATH": ":".join(sys.path)}
  assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
