"""The command line: flags, flag files, environment, exit statuses."""

import dataclasses

import pytest

from kernels.base import cli, options, refusals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
  """Demo component."""

  learning_rate: float = options.option(1e-3, help="Rate.", minimum=0.0)
  use_scan: bool = options.option(False, help="Scan.")
  mode: str = options.option("off", help="Mode.", choices=("off", "on"), env="DEMO_MODE")
  ids: tuple[int, ...] = options.option((1,), help="Ids.")


RULE = refusals.Rule(
  name="scan-off",
  keys=("use_scan",),
  broken=lambda s: s.use_scan and s.mode == "off",
  reason="use_scan needs --mode=on",
  accepted={"use_scan": True, "mode": "on"},
  refused={"use_scan": True},
)


def _parse(*arguments, **kwargs):
  kwargs.setdefault("environ", {})
  return cli.parse(["prog", *arguments], [Demo], **kwargs)


def test_values():
  settings = _parse("--learning_rate=2", "--use_scan", "--ids=3,4", "--mode", "on")
  assert settings.of(Demo) == Demo(learning_rate=2.0, use_scan=True, ids=(3, 4), mode="on")
  assert _parse("--nouse_scan").use_scan is False
  assert _parse("--use_scan=true").use_scan is True


@pytest.mark.parametrize(
  "argument, words",
  [
    ("--learnign_rate=1", "unknown flag --learnign_rate; the nearest flag is --learning_rate"),
    ("--nosuch", "unknown flag --nosuch; the nearest flag is --"),
    ("--learning_rate=fast", "--learning_rate=fast: want a finite number >= 0"),
    ("--learning_rate", "learning_rate"),
    ("--nouse_scan=3", "use_scan"),
    ("--use_scan=maybe", "--use_scan=maybe: want true or false"),
    ("mode=on", "arguments that are no flags: got mode=on, want none"),
    ("--undefok=nosuch", "undefok"),
    ("--flagfile=/nonexistent/flags", "/nonexistent/flags"),
  ],
)
def test_refused_arguments(argument, words):
  with pytest.raises(options.OptionError) as error:
    _parse(argument)
  assert words in str(error.value)


def test_everything_wrong_is_told_at_once():
  arguments = ("--learning_rate=fast", "--nosuch", "--use_scan=maybe", "--learnign_rate", "3", "x")
  with pytest.raises(options.OptionError) as error:
    _parse(*arguments, environ={"DEMO_MODE": "half"})
  lines = str(error.value).splitlines()
  for line, words in zip(
    lines,
    ("--nosuch;", "--learnign_rate;", "=fast: want", "=maybe: want", "DEMO_MODE: "),
    strict=True,
  ):
    assert words in line
  # What follows two dashes is no flag.
  assert _parse("--use_scan", "--", "--nosuch", positionals=("file",)).positionals == ("--nosuch",)


def test_flagfile(tmp_path):
  file = tmp_path / "flags.txt"
  file.write_text("# a comment\n--learning_rate=0.5\n--mode=on\n")
  assert _parse(f"--flagfile={file}").of(Demo) == Demo(learning_rate=0.5, mode="on")
  assert _parse(f"--flagfile={file}", "--learning_rate=0.25").learning_rate == 0.25
  file.write_text("--undefok=typo\n--typo=1\n")
  with pytest.raises(options.OptionError, match="undefok"):
    _parse(f"--flagfile={file}")
  file.write_text("--check\n")
  assert _parse(f"--flagfile={file}").check_only


def test_environment_gives_a_default_and_the_flag_wins():
  assert _parse(environ={"DEMO_MODE": "on"}).mode == "on"
  assert _parse("--mode=off", environ={"DEMO_MODE": "on"}).mode == "off"
  with pytest.raises(options.OptionError, match="DEMO_MODE.*one of off, on"):
    _parse(environ={"DEMO_MODE": "maybe"})


def test_positionals_are_counted():
  assert _parse("a", "b", positionals=("A", "B")).positionals == ("a", "b")
  with pytest.raises(options.OptionError, match="want A B"):
    _parse("a", positionals=("A", "B"))


def _exit_status(*arguments, run=lambda settings: None):
  with pytest.raises(SystemExit) as done:
    cli.main(run, components=[Demo], rules=[RULE], argv=["prog", *arguments])
  return done.value.code


def test_exit_statuses(capsys):
  def fails(settings):
    raise options.UserError("no such file: x")

  def crashes(settings):
    raise AssertionError("run must not be reached")

  assert _exit_status() == 0
  assert _exit_status(run=lambda s: 3) == 3
  assert _exit_status("--check", run=crashes) == 0
  assert "accepted" in capsys.readouterr().out
  assert _exit_status("--help", run=crashes) == 0
  assert "--learning_rate=0.001" in capsys.readouterr().out
  assert _exit_status("--nosuch", run=crashes) == 2
  assert "nearest" in capsys.readouterr().err
  assert _exit_status("--check", "--use_scan", run=crashes) == 2
  assert "error: refused [scan-off] --use_scan=true" in capsys.readouterr().err
  assert _exit_status(run=fails) == 1
  assert capsys.readouterr().err == "error: no such file: x\n"
  assert _exit_status(run=lambda s: open("/nowhere/out.json", "w")) == 1
  assert capsys.readouterr().err == "error: /nowhere/out.json: No such file or directory\n"
