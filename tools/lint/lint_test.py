"""The source tree has no lint faults, and each checker reports a planted one."""

import pathlib
import shutil
import subprocess
import tempfile

import pytest

from tools.lint import lint

_CLEAN = '"""A module."""\n\n\ndef double(x: int) -> int:\n  """Twice x."""\n  return 2 * x\n'


@pytest.fixture(scope="module")
def programs():
  return lint.tools()


def test_the_source_tree_has_no_faults(programs):
  assert lint.check(lint.workspace(), **programs) == []


@pytest.mark.parametrize(
  "checker, name, text",
  [
    (None, "kernels/clean.py", _CLEAN),
    ("ruff", "kernels/unused.py", '"""A module."""\n\nimport os\n'),
    ("format", "kernels/layout.py", _CLEAN.replace("2 * x", "2*x")),
    ("mypy", "kernels/types.py", _CLEAN.replace("2 * x", "str(x)")),
    (None, "kernels/page.md", "kernels/some_test.py::test_double\n"),
    ("pages", "kernels/page.md", "kernels/some_test.py::test_triple\n"),
    ("pages", "kernels/page.md", "kernels/other_test.py::test_double\n"),
    ("buildifier", "kernels/BUILD", 'exports_files( ["b"] )\n'),
  ],
)
def test_a_planted_fault_is_reported(checker, name, text, programs):
  if checker == "buildifier":
    probe = subprocess.run([programs["buildifier"], "--version"], capture_output=True, check=False)
    if probe.returncode == lint.NO_BUILDIFIER:
      pytest.skip("no buildifier on this machine: install npm")
  # Outside the workspace, whose ignore files would hide the planted one.
  with tempfile.TemporaryDirectory(dir="/tmp") as folder:
    assert _faults(pathlib.Path(folder), name, text, programs) == ([checker] if checker else [])


def _faults(root, name, text, programs):
  (root / "kernels").mkdir()
  (root / "kernels" / "other.py").write_text(_CLEAN)
  (root / "kernels" / "some_test.py").write_text(_CLEAN.replace("double(x", "test_double(x"))
  shutil.copy(lint.workspace() / "pyproject.toml", root)
  (root / "WORKSPACE").write_text("")
  (root / "BUILD").write_text("")
  (root / pathlib.Path(name)).write_text(text)
  return lint.check(root, **programs)
