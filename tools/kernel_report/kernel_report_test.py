"""Profiles: reading what the compiler writes, figures by hand, and one kernel for real."""

import dataclasses
import importlib.util
import json
import threading
from typing import Any

import pytest

from kernels.base import options, refusals
from tools.kernel_report import case as case_lib
from tools.kernel_report import cases, main, public_cases, report, running, schedule
from tools.roofline.machine import TPU7X

PROGRAM = """HloModule m, is_scheduled=true

ENTRY %main (x: bf16[512,512]) -> bf16[512,512] {
  %x = bf16[512,512]{1,0} parameter(0)
  %other.2 = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  %gmm.1 = bf16[512,512]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"bundle_analysis_data":{"estimated_cycles":"7000","flops":"0","scalar_inputs":"2"},"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"7831552"}]}
  ROOT %copy.3 = bf16[512,512]{1,0} copy(%gmm.1)
}
"""


def write_dump(folder):
  """A static profile and low-level dumps as libtpu names and writes them."""
  profiles, schedules = folder / "profiles", folder / "schedules"
  profiles.mkdir()
  schedules.mkdir()
  for name, cycles in (("gmm.1", 7000), ("other.2", 50), ("copy.3", 90000)):
    (profiles / f"{name}_TPU7x_static_llo_profile.textproto").write_text(
      f'hlo_op_estimate {{\n  hlo_op_name: "{name}"\n  estimated_cycles: {cycles}\n'
      "  num_equivalent_hlos: 1\n}\n"
    )
  (schedules / "17-gmm.1-70-schedule-analysis_final_bundles.txt").write_text(
    "Schedule analysis:\n\ttotal scheduled bundles:    869\n\tempty scheduled bundles:    7\n"
  )
  (schedules / "17-gmm.1-71-final_bundles.txt").write_text(
    "0x1 : > { %1 = vst [vmem:[#allocation92_spill] sm:$0xff] %v1 }\n"
    "0x2 : > { %2 = vld [vmem:[#allocation92_spill] sm:$0xff] ;; %3 = vst [vmem:[#allocation7_spill]"
    " sm:$0xff] %v2 }\n0x3 : > { %4 = vld [vmem:[#allocation9] sm:$0xff] }\n"
  )
  return profiles, schedules


def test_a_profile_is_gathered(tmp_path):
  profiles, schedules = write_dump(tmp_path)
  cycles = schedule.read_cycles(profiles)
  assert cycles == {"gmm.1": 7000, "other.2": 50, "copy.3": 90000}
  found = schedule.read(PROGRAM, "gmm", cycles, schedules)
  assert found == schedule.Profile(
    kernel="gmm.1", cycles=7000, bundles=869, spills=2, vmem_bytes=7831552
  )
  unsimulated = schedule.read(PROGRAM, "gmm", None, schedules)
  assert (unsimulated.cycles, unsimulated.bundles, unsimulated.spills) == (0, 869, 2)
  # Without a name it is the dearest Pallas kernel, never another instruction.
  assert schedule.read(PROGRAM, "", cycles, schedules).kernel == "gmm.1"


@pytest.mark.parametrize("prefix, kept", [("tgmm", ("gmm.1",)), ("gmm", ("other.2",))])
def test_a_missing_profile_is_an_error(tmp_path, prefix, kept):
  profiles, schedules = write_dump(tmp_path)
  cycles = {name: n for name, n in schedule.read_cycles(profiles).items() if name in kept}
  with pytest.raises(schedule.NoProfileError, match="kernels: .*gmm.1"):
    schedule.read(PROGRAM, prefix, cycles, schedules)


def case(**changes):
  values: dict[str, Any] = {
    "name": "library: kernel",
    "builder": "m:f",
    "arguments": {},
    "kernel": "gmm",
    "flops": TPU7X.bf16_flops / 2 * 1e-3,  # a millisecond of one device
    "bytes": TPU7X.hbm_bytes_per_second / 2 * 0.25e-3,
    "part": "all",
  }
  return case_lib.KernelCase(**(values | changes))


def found(cycles):
  return schedule.Profile(kernel="gmm.1", cycles=cycles, bundles=1, spills=0, vmem_bytes=2**20)


def test_figures_by_hand():
  row = report.make_row(case(), found(4_400_000), 3.0)  # 2 ms at 2.2 GHz
  assert row.floor_us == pytest.approx(1000) and row.static_us == pytest.approx(2000)
  assert row.ratio == pytest.approx(2.0) and row.peak == pytest.approx(0.5)
  # A schedule quicker than HBM cannot be: the bytes decide.
  bound = case(bytes=TPU7X.hbm_bytes_per_second / 2 * 4e-3)
  row = report.make_row(bound, found(2_200_000), 3.0)
  assert row.floor_us == pytest.approx(4000) and row.ratio == pytest.approx(1.0)
  fp8 = report.make_row(case(dtype="fp8"), found(2_200_000), 3.0)
  assert fp8.floor_us == pytest.approx(500) and fp8.peak == pytest.approx(0.5)


def test_a_schedule_quicker_than_its_products_is_no_ratio():
  row = report.make_row(case(), found(1_100_000), 3.0)  # half of what the peak needs
  assert row.ratio == 0 and "not simulated in full" in row.note and row.cycles == 1_100_000
  assert "| - |" in report.markdown([row])
  silent = report.make_row(case(), found(0), 3.0)
  assert silent.ratio == 0 and "not simulated" in silent.note and silent.vmem_mib == 1


def test_without_a_simulation_the_rest_is_told(tmp_path, monkeypatch):
  def compile_(case, *_, simulate, **__):
    if simulate:
      raise report.compiler.CompilerAbortedError("the compiler ended its process by signal 6")
    return report.make_row(case, found(0), 3.0)

  monkeypatch.setattr(report, "_compile", compile_)
  row = report.profile_case(case(), str(tmp_path), 1.0)
  assert "signal 6" in row.note and row.vmem_mib == 1 and not row.ratio


def test_an_error_names_no_file_of_the_removed_folder(tmp_path):
  slow = report.compiler.CompileTimeoutError("no program after 5 s; give more, or read /tmp/x/log")
  aborted = report.compiler.CompilerAbortedError(
    "signal 6:\n  check failed\n  all of it: /tmp/x/log"
  )
  assert report._first_line(slow) == "no program after 5 s; --time_limit gives more"
  assert report._failed(case(), aborted).error == "signal 6:\ncheck failed"


def test_cases_are_well_formed():
  names = [c.name for c in cases.CASES]
  assert len(set(names)) == len(names)
  for each in cases.CASES:
    json.dumps(each.arguments)
    module, _, function = each.builder.partition(":")
    text = open(module.replace(".", "/") + ".py").read()
    assert f"def {function}(" in text, each.builder
    assert each.flops > 0 and each.bytes > 0
  # FLOPs and bytes a row of the six grouped products of a layer, ours and the public ones.
  wide, narrow = 4.0 * public_cases.D * public_cases.EXPERT_DIM, 2.0 * 4096 * 1024
  for library, count in (("megablox: 397B", 6), ("tokamax: 397B", 6), ("ours: 397B", 23)):
    mine = [c for c in cases.CASES if c.name.startswith(library)]
    mine = [c for c in mine if " wi " in c.name or " wo " in c.name]
    assert len(mine) == count
    for each in mine:
      rows = each.arguments.get("expert_rows") or each.arguments["rows"]
      assert each.flops / rows == (wide if " wi " in each.name else narrow), each.name
  named = {c.name: c for c in cases.CASES}
  for case_name, operands in (
    ("ours: 397B wi forward", 10240 * (4096 + 2048) * 2 + 4 * 4096 * 2048 * 2),
    ("ours: 397B wo forward, e4m3", 10240 * (1024 + 2 * 4096) + 4 * 4096 * 1024),
    ("ours: 35B wi weight gradient", 32768 * (2048 + 1024) * 2 + 8 * 2048 * 1024 * 2),
  ):
    assert named[case_name].bytes == operands


def test_table_json_and_chart(tmp_path):
  rows = [report.make_row(case(), found(4_400_000), 3.0)]
  rows.append(
    dataclasses.replace(rows[0], name="other: refused", cycles=0, ratio=0.0, error="no tiling")
  )
  report.write_json(rows, str(tmp_path / "r.json"))
  assert json.loads((tmp_path / "r.json").read_text())[0]["ratio"] == pytest.approx(2.0)
  text = report.markdown(rows)
  assert "| library: kernel | 1153.5 |" in text and "none: no tiling" in text
  assert len({line.count("|") for line in text.splitlines()}) == 1
  report.plot(rows, str(tmp_path / "r.svg"))
  assert b"<svg" in (tmp_path / "r.svg").read_bytes()
  report.plot(rows, str(tmp_path / "r.png"))
  assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def settings(**values):
  return options.Settings([main.KernelReportOptions], values)


def test_cases_are_chosen_by_words(capsys):
  assert main.run(settings(list=True, cases=("megablox", "397B", "forward"))) == 0
  assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
    "megablox: 397B wi forward",
    "megablox: 397B wo forward",
  ]
  with pytest.raises(options.UserError, match="--list"):
    main.run(settings(cases=("nothing",)))


def test_rows_of_a_file_are_kept_where_the_work_is_the_same(tmp_path, monkeypatch):
  first, second, third = (case(name=name, part="all") for name in ("a", "b", "c"))
  path = tmp_path / "rows.json"
  rows = [report.make_row(c, found(2_000_000), 3.0) for c in (first, second)]
  report.write_json([rows[0], dataclasses.replace(rows[1], part="half")], str(path))
  profiled = []

  def profile(case, *_, **__):
    profiled.append(case.name)
    return report.make_row(case, found(4_000_000), 1.0)

  monkeypatch.setattr(report, "profile_case", profile)
  monkeypatch.setattr(cases, "CASES", (first, second, third))
  monkeypatch.chdir(tmp_path)
  given = {"json": str(path), "whole": False}
  assert main.run(settings(keep_rows=True, **given)) == 0
  assert profiled == ["b", "c"]
  assert [r.cycles for r in report.read_json(str(path)).values()] == [2_000_000] + 2 * [4_000_000]
  assert not report.same_work(dataclasses.replace(rows[0], error="no tiling"), first, whole=True)
  assert not report.same_work(None, first, whole=True)
  # Size and seconds of the part are not those of the whole work.
  with_whole = dataclasses.replace(first, whole={})
  assert report.same_work(rows[0], with_whole, whole=False)
  assert not report.same_work(rows[0], with_whole, whole=True)
  assert report.same_work(dataclasses.replace(rows[0], of_whole=True), with_whole, whole=True)
  # Rows of cases that are not asked for stay in the file.
  monkeypatch.setattr(report, "same_work", lambda row, case, whole: False)
  assert main.run(settings(keep_rows=True, cases=("b",), **given)) == 0
  assert profiled == ["b", "c", "b"] and list(report.read_json(str(path))) == ["a", "b", "c"]
  assert main.run(settings(cases=("c",), **given)) == 0
  assert list(report.read_json(str(path))) == ["c"]
  path.write_text('{"rows": 1}')
  with pytest.raises(options.UserError, match="another file"):
    main.run(settings(keep_rows=True, **given))
  for rule in main.RULES:
    assert not refusals.broken_rules(settings(**rule.accepted), main.RULES)
    assert refusals.broken_rules(settings(**rule.refused), main.RULES) == [rule]


def small(**changes):
  arguments = {
    "kind": "gmm",
    "experts": 2,
    "expert_rows": 256,
    "k": 256,
    "n": 256,
    "tiles": [128, 256, 256],
  }
  return case(
    builder="tools.kernel_report.public_kernels:grouped_product",
    arguments=arguments | changes,
    flops=2.0 * 512 * 256 * 256,
    bytes=2.0 * (512 * 512 + 2 * 256 * 256),
  )


def test_a_kernel_is_profiled_for_real(tmp_path):
  row = report.profile_case(small(), str(tmp_path / "out"), 240.0)
  assert not row.error
  # Four grid steps of 128 x 256 x 256 on an array of 256 x 256: 32 cycles each at the very least.
  assert 4 * 32 < row.cycles < 40_000
  # At least the float32 accumulator of a tile.
  assert row.vmem_mib >= 128 * 256 * 4 / 2**20 and row.bundles > 50
  assert 1 < row.cpu_s < 240
  assert not list(tmp_path.iterdir())  # tens of MB a kernel are not left behind


def test_a_case_that_cannot_be_built_is_a_row_with_the_reason(tmp_path):
  row = report.profile_case(small(expert_rows=250), str(tmp_path / "out"), 60.0)
  assert "no multiple of the tile's 128" in row.error and not row.cycles
  assert importlib.util.find_spec("libtpu")


def test_the_whole_work_gives_compile_facts_and_the_part_gives_cycles(tmp_path, monkeypatch):
  seen = []

  def compile_(case, directory, time_limit, *, simulate, **_):
    seen.append((case.arguments["rows"], simulate))
    row = report.make_row(case, found(4_400_000 if simulate else 0), 3.0 if simulate else 9.0)
    return dataclasses.replace(row, vmem_mib=float(case.arguments["rows"]))

  monkeypatch.setattr(report, "_compile", compile_)
  both = case(arguments={"rows": 1}, whole={"rows": 64})
  row = report.profile_case(both, str(tmp_path), 1.0)
  assert (row.cycles, row.vmem_mib, row.compile_s, row.note) == (4_400_000, 64.0, 9.0, "")
  assert seen == [(1, True), (64, False)]
  assert report.profile_case(both, str(tmp_path), 1.0, whole=False).vmem_mib == 1.0

  def refused(case, directory, time_limit, *, simulate, **_):
    if simulate:
      return compile_(case, directory, time_limit, simulate=True)
    raise report.compiler.ProgramError("exceeds scoped vmem")

  monkeypatch.setattr(report, "_compile", refused)
  row = report.profile_case(both, str(tmp_path), 1.0)
  assert "scoped vmem" in row.note and row.cycles == 4_400_000 and not row.vmem_mib
  assert "| - | - | - | - | - |" in report.markdown(
    [row]
  )  # size and compile time are not the part's


def test_models_share_a_part(tmp_path, monkeypatch):
  seen: dict[str, report.Row] = {}
  runs = []
  make = lambda case, *_, simulate, **__: (
    runs.append(simulate) or report.make_row(case, found(1), 3.0)
  )
  monkeypatch.setattr(report, "_compile", make)
  first = report.profile_case(case(), str(tmp_path), 1.0, seen=seen)
  second = report.profile_case(case(name="b: other", part="half"), str(tmp_path), 1.0, seen=seen)
  assert runs == [True] and (second.name, second.part) == ("b: other", "half")
  assert second.cycles == first.cycles
  report.profile_case(case(arguments={"rows": 2}), str(tmp_path), 1.0, seen=seen)
  assert runs == [True, True]


XLA_PROGRAM = """HloModule m, is_scheduled=true

ENTRY %main (x: bf16[512,512], y: bf16[512,512]) -> bf16[512,512] {
  %x = bf16[512,512]{1,0} parameter(0)
  %y = bf16[512,512]{1,0} parameter(1)
  %odd.1 = bf16[512,512]{1,0} custom-call(%x), custom_call_target="Mystery"
  ROOT %dot.3 = bf16[512,512]{1,0} dot(%odd.1, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, backend_config={"estimated_cycles":"22000"}
}
"""


def test_a_program_of_xla_is_played():
  program = case(flops=2.0 * 512**3, bytes=3.0 * 2 * 512**2, program=True)
  row = report.program_row(program, XLA_PROGRAM, 3.0)
  # A product of 512 cycles at peak; the bytes of the rest, and of what memory bounds, are less.
  assert row.cycles > 8000 and row.ratio > 8
  assert "not priced" in row.note and "Mystery" in row.note


def test_cases_run_side_by_side_but_a_shared_part_once():
  shared = [case(name=name, arguments={"rows": 1}) for name in ("a", "b")]
  others = [case(name=name, arguments={"rows": name}) for name in ("c", "d")]
  both, rows = threading.Barrier(2, timeout=20), []

  def profile(case, seen, stop):
    if case.name in ("c", "d"):
      both.wait()  # passes only where two run at a time
    fresh = report.part_key(case) not in seen
    seen[report.part_key(case)] = None
    return f"{case.name} {fresh}"

  running.run([shared[0], *others, shared[1]], profile, rows.append, jobs=3)
  assert sorted(rows) == ["a True", "b False", "c True", "d True"]
  assert rows.index("a True") < rows.index("b False")


@pytest.mark.parametrize("error", [options.UserError("disk full"), KeyboardInterrupt()])
def test_an_end_stops_the_compiles_that_run(error):
  stopped, begun = [], threading.Event()

  def profile(case, seen, stop):
    if case.name != "wrong":
      begun.set()
      assert stop.wait(20)
      stopped.append(case.name)
      raise report.compiler.CompileStoppedError("stopped")
    assert begun.wait(20)
    raise error

  cases_ = [case(name=name, arguments={"rows": name}) for name in ("long", "wrong", "waits")]
  with pytest.raises(type(error)):
    running.run(cases_, profile, lambda row: None, jobs=2)
  assert "long" in stopped


def test_what_one_case_does_wrong_does_not_end_the_others(tmp_path, monkeypatch):
  def wrong(case, *_, simulate, **__):
    raise ValueError("no such tile")

  monkeypatch.setattr(report, "_compile", wrong)
  assert report.profile_case(case(), str(tmp_path), 1.0).error == "no such tile"
  assert report.profile_case(case(program=True), str(tmp_path), 1.0).error == "no such tile"
