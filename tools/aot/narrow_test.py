"""A narrow program is compiled and held to its record; faults planted in it are each caught."""

import pytest

from tools.aot import guard, narrow, report


@pytest.fixture(scope="module")
def recorded():
  return report.read(str(narrow.RECORD))


def test_the_program_is_as_good_as_its_record(tmp_path, recorded):
  now = narrow.compile_report(str(tmp_path / "out"))
  assert guard.findings(recorded, now) == []
  # What the record holds is worth holding to: gathers that other work hides in part.
  (gathers,) = [r for r in now.collectives if r.kind == "all-gather"]
  assert (gathers.axes, gathers.loops, gathers.runs) == (("fsdp",), (3,), 6)
  assert 0.2 < gathers.exposed / gathers.seconds < 0.8


@pytest.mark.parametrize(
  "fault, words",
  [
    ({"overlap": False}, ["lost overlap"]),
    ({"extra_gather": True}, ["all-gather over fsdp in loops: 9 runs, recorded 6"]),
    ({"doubled_buffer": True}, ["HBM grew by"]),
  ],
  ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_planted_fault_is_caught(tmp_path, recorded, fault, words):
  found = guard.findings(recorded, narrow.compile_report(str(tmp_path / "out"), **fault))
  for word in words:
    assert any(word in sentence for sentence in found), found
  if "overlap" in fault or "doubled_buffer" in fault:
    assert len(found) == 1, found  # that fault, and nothing else
