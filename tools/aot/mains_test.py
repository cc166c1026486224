"""The commands: what they print and write, and what they refuse."""

import pathlib

import pytest

from kernels.base import options, refusals
from tools.aot import diff_main, files, report, report_main

RECORDED = "tools/aot/testdata"


def settings(component, positionals, **values):
  return options.Settings([component], values, positionals)


@pytest.fixture(autouse=True)
def here(monkeypatch):
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)


def test_report_prints_and_writes(tmp_path, capsys):
  out = str(tmp_path / "r.json")
  given = settings(
    report_main.ReportOptions,
    [f"{RECORDED}/sharded_product.txt"],
    mesh="32x2x4",
    json=out,
    plot=str(tmp_path / "r.png"),
    name="product",
  )
  assert report_main.run(given) == 0
  text = capsys.readouterr().out
  assert "HBM fits: 0.05 GiB" in text and "kernel block_product" in text
  made = report.read(out)
  assert made.name == "product" and made.mesh == {"fsdp": 32, "context": 4, "expert": 2}
  assert (tmp_path / "r.png").exists()


def test_diff_of_a_report_and_a_text(tmp_path, capsys):
  axes = ("fsdp:32", "context:4", "expert:2")
  a, b = f"{RECORDED}/narrow.json", f"{RECORDED}/sharded_product.txt"
  assert diff_main.run(settings(diff_main.DiffOptions, [a, b], mesh_axes=axes)) == 0
  assert "no difference" in capsys.readouterr().out  # the same program, recorded both ways
  b = f"{RECORDED}/offloaded_update.txt"
  diff_main.run(settings(diff_main.DiffOptions, [a, b], mesh_axes=("fsdp:4", "expert:2")))
  assert "reduce-scatter fsdp in loops: runs" in capsys.readouterr().out


@pytest.mark.parametrize(
  "axes, mesh, word",
  [
    (("fsdp",), None, "name:size"),
    (("fsdp:0",), None, "--mesh_axes=fsdp:0: want name:size"),
    ((":2",), None, "name:size"),
    (("data:4", "data:2"), None, "--mesh_axes=data:4,data:2: data is named twice"),
    (("fsdp:3", "expert:1"), None, "does not fill chips"),
    ((), "32x2", "--mesh=32x2: .*fsdp x expert x context"),
  ],
)
def test_meshes_that_cannot_be_are_refused(axes, mesh, word):
  for component, main in (
    (report_main.ReportOptions, report_main),
    (diff_main.DiffOptions, diff_main),
  ):
    given = settings(component, ["a.txt", "b.txt"], mesh=mesh, mesh_axes=axes)
    with pytest.raises(options.OptionError, match=word):
      main.judge(given)


@pytest.mark.parametrize(
  "values, word",
  [
    ({"mesh": "32x2x4"}, "--mesh: .*a report .*json. has its own"),
    ({"mesh_axes": ("a:2",)}, "--mesh_axes: .*a report .*json. has its own"),
    ({"name": "x"}, "--name: .*a report .*json. has its own"),
  ],
)
def test_what_a_report_has_in_it_is_refused(values, word):
  with pytest.raises(options.OptionError, match=word):
    report_main.judge(settings(report_main.ReportOptions, ["r.json"], **values))
  report_main.judge(settings(report_main.ReportOptions, ["r.txt"], **values))
  if "name" not in values:
    with pytest.raises(options.OptionError, match=word):
      diff_main.judge(settings(diff_main.DiffOptions, ["a.json", "b.json"], **values))
    diff_main.judge(settings(diff_main.DiffOptions, ["a.json", "b.txt"], **values))


def test_files_that_are_none_are_refused(tmp_path):
  with pytest.raises(options.UserError, match="is a directory; give HLO text"):
    files.load(str(tmp_path))
  with pytest.raises(options.UserError, match="no such file"):
    files.load(str(tmp_path / "nothing.txt"))
  (tmp_path / "words.txt").write_text("words\n")
  with pytest.raises(options.UserError, match="ENTRY"):
    files.load(str(tmp_path / "words.txt"))
  for text, word in (('{"a": 1}', "no AOT report"), ("[1]", "no AOT report"), ("", "is no JSON")):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(options.UserError, match=word):
      files.load(str(tmp_path / "other.json"))
  (tmp_path / "module.txt").write_bytes(b"\x08\x97\xff")
  with pytest.raises(options.UserError, match="scheduled HLO text, not a proto"):
    files.load(str(tmp_path / "module.txt"))


def test_a_mesh_of_another_number_of_devices_is_refused():
  with pytest.raises(options.UserError, match="for 256 devices, the mesh .* has 128"):
    files.load(f"{RECORDED}/sharded_product.txt", files.grid_of("128x1x1", ()))


def test_a_text_that_was_cut_is_refused(tmp_path):
  whole = pathlib.Path(f"{RECORDED}/sharded_product.txt").read_text()
  for part in (0.3, 0.9, (whole.index("ENTRY") + 80) / len(whole)):
    (tmp_path / "cut.txt").write_text(whole[: int(part * len(whole))])
    with pytest.raises(options.UserError, match="cut.txt"):
      files.load(str(tmp_path / "cut.txt"))


@pytest.mark.parametrize("rule", report_main.RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("component", [report_main.ReportOptions, diff_main.DiffOptions])
def test_refusals(rule, component):
  check = lambda values: refusals.broken_rules(settings(component, [], **values), report_main.RULES)
  assert check(rule.accepted) == [] and check(rule.refused) == [rule]
