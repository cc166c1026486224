"""Formats and checks every source file: ruff, buildifier, mypy, and the tests that pages name.

    ./bazelw run //tools:format     rewrite files in the house format
    ./bazelw run //tools:lint       report faults, change nothing

The same checks are the test //tools/lint:lint_test.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys

_PACKAGES = ("kernels", "model", "rl", "launcher", "tests", "tools", "third_party")
# What the buildifier repository's stand-in returns where no buildifier can be had.
NO_BUILDIFIER = 77


def workspace() -> pathlib.Path:
  """The source tree: the caller's under `./bazelw run`, else the one that WORKSPACE links to."""
  given = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
  return pathlib.Path(given) if given else pathlib.Path("WORKSPACE").resolve().parent


def _run(command: list[str], root: pathlib.Path) -> int:
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
  return subprocess.run(command, cwd=root, env=environment, check=False).returncode


def _build_files(root: pathlib.Path) -> list[str]:
  found = [root / "BUILD", root / "WORKSPACE"]
  for package in _PACKAGES:
    found += sorted((root / package).rglob("BUILD")) + sorted((root / package).rglob("*.bzl"))
  return [str(p.relative_to(root)) for p in found if p.is_file()]


def _typed_files(root: pathlib.Path) -> list[str]:
  # Tests are run, which judges them better than their types would.
  found = [p for package in _PACKAGES for p in sorted((root / package).rglob("*.py"))]
  return [str(p.relative_to(root)) for p in found if not p.name.endswith("_test.py")]


def commands(root: pathlib.Path, ruff: str, buildifier: str, *, fix: bool) -> dict[str, list[str]]:
  """The checkers' command lines by name; `fix` rewrites instead of reporting."""
  build_files, python = _build_files(root), list(_PACKAGES)
  python = [p for p in python if (root / p).is_dir()]
  no_cache = ["--no-cache"]
  if fix:
    return {
      "imports": [ruff, "check", *no_cache, "--quiet", "--select", "I", "--fix", *python],
      "format": [ruff, "format", *no_cache, "--quiet", *python],
      "buildifier": [buildifier, "-mode=fix", "-lint=fix", *build_files],
    }
  return {
    "ruff": [ruff, "check", *no_cache, "--quiet", *python],
    "format": [ruff, "format", *no_cache, "--quiet", "--check", "--diff", *python],
    "buildifier": [buildifier, "-mode=check", "-lint=warn", *build_files],
    # Third-party packages are opaque to the type checker: it judges this repository in seconds.
    "mypy": [
      *[sys.executable, "-m", "mypy", "--no-site-packages", "--no-error-summary"],
      *["--cache-dir", os.environ.get("TEST_TMPDIR", os.devnull), *_typed_files(root)],
    ],
  }


def missing_tests(root: pathlib.Path) -> list[str]:
  """Tests that a page names as PATH_test.py::NAME and that do not exist, with the page."""
  found = []
  for page in sorted(p for package in _PACKAGES for p in (root / package).rglob("*.md")):
    for file, name in re.findall(r"([\w/]+_test\.py)::(\w+)", page.read_text()):
      source = root / file
      if not source.is_file() or f"def {name}(" not in source.read_text():
        found.append(f"{page.relative_to(root)}: no test {file}::{name}")
  return found


def check(root: pathlib.Path, *, ruff: str, buildifier: str, fix: bool = False) -> list[str]:
  """Runs every checker over a source tree; returns the names of those that found faults."""
  failed = []
  for name, command in commands(root, ruff, buildifier, fix=fix).items():
    status = _run(command, root)
    if status and not (name == "buildifier" and status == NO_BUILDIFIER):
      failed.append(name)
  if missing := missing_tests(root):
    print(*missing, sep="\n")
    failed.append("pages")
  return failed


def tools() -> dict[str, str]:
  """Paths of the programs, from this binary's runfiles."""
  import ruff

  buildifier = pathlib.Path.cwd() / "external" / "buildifier" / "buildifier"
  return {"ruff": os.path.abspath(ruff.find_ruff_bin()), "buildifier": str(buildifier.absolute())}


def main(argv: list[str]) -> int:
  """Formats or checks the source tree."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--fix", action="store_true", help="rewrite files instead of reporting")
  args = parser.parse_args(argv)
  failed = check(workspace(), fix=args.fix, **tools())
  if failed:
    print(f"\n{', '.join(failed)}: faults found; ./bazelw run //tools:format mends layout.")
    return 1
  print("formatted" if args.fix else "no faults")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
