"""Files to write, judged before a tool starts; arms of a comparison; the judge of a command line."""

import dataclasses
import errno
import os

import pytest

from kernels.base import cli, options, outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Files:
  """Files."""

  input: str | None = options.option(None, help="Read.")
  json: str | None = options.option(None, help="Written.", writes=True)
  plot: str | None = options.option(None, help="Written.", writes=True)


def _judge(base, *positionals, **values):
  settings = options.Settings([_Files], values, positionals)
  outputs.refuse_unwritable(settings, str(base))


def test_files_that_cannot_be_written_are_named_with_their_flag(tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "in.txt").write_text("kept")
  for values, words in (
    ({"json": "folder"}, "--json=folder is a directory"),
    ({"json": "no/x"}, "--json=no/x: there is no directory .*no; make it first"),
    ({"json": "x", "plot": "./x"}, "--plot=./x would overwrite --json=x"),
    ({"input": "in.txt", "json": "folder/../in.txt"}, "would overwrite --input=in.txt"),
  ):
    with pytest.raises(options.UserError, match=words):
      _judge(tmp_path, **values)
  with pytest.raises(options.UserError, match="--json=in.txt would overwrite in.txt"):
    _judge(tmp_path, "in.txt", json="in.txt")
  _judge(tmp_path, "in.txt", input="in.txt", json="out.json", plot="folder/x.png")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "in.txt"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
  path = tmp_path / "out.json"
  outputs.write(path, "first")
  outputs.write(str(path), b"second")
  assert path.read_text() == "second"
  with monkeypatch.context() as patched:
    patched.setattr(outputs.os, "fsync", _full)
    with pytest.raises(options.UserError, match="out.json: cannot be written .*No space"):
      outputs.write(path, "third")
  assert path.read_text() == "second" and list(tmp_path.iterdir()) == [path]
  link = tmp_path / "link"
  link.symlink_to(path)
  outputs.write(link, "through")
  assert link.is_symlink() and path.read_text() == "through"


def _full(_):
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_charts_have_a_format():
  assert outputs.chart_fault("a/b.PNG") is None
  for name in ("chart", "chart.xyz", "chart.png.txt"):
    assert ".png, .pdf, .svg" in outputs.chart_fault(name)


def test_an_arm_follows_the_command_line():
  assert cli.arm(["t", "--a=1"], "b_flags", "--b=2 --c='x y'", ()) == [
    "t",
    "--a=1",
    "--b=2",
    "--c=x y",
  ]
  for extra, word in (
    ("--c='x", "No closing quotation"),
    ("--check", "--check"),
    ("--json=x", "--json=x"),
    ("--b_flags=--x", "--b_flags=--x"),
  ):
    with pytest.raises(options.OptionError, match=f"--b_flags.*{word}"):
      cli.arm(["t"], "b_flags", extra, ("json",))


@pytest.mark.parametrize("more", [[], ["--check"]])
def test_check_asks_the_judge_too(more, capsys):
  def judge(settings):
    raise options.OptionError(f"{settings.input} is none")

  with pytest.raises(SystemExit) as end:
    cli.main(lambda s: 0, components=[_Files], argv=["t", "--input=x", *more], judge=judge)
  assert end.value.code == 2 and capsys.readouterr().err == "error: x is none\n"


def test_a_flag_file_that_is_no_text_is_named(tmp_path):
  (tmp_path / "flags").write_bytes(b"\xff\xfe--input=x")
  with pytest.raises(options.OptionError, match="flags: no UTF-8 text"):
    cli.parse(["t", f"--flagfile={tmp_path / 'flags'}"], [_Files])
  with pytest.raises(options.OptionError, match="s a directory"):
    cli.parse(["t", f"--flagfile={tmp_path}"], [_Files])
