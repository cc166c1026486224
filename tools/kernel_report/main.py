"""Profiles Pallas kernels without a TPU: static cycles against the floor of their shapes.

./bazelw run //tools:kernel_report -- --cases=megablox --json=kernels.json --plot=kernels.png

Each kernel is compiled in a process of its own.  Cycles are the compiler's static schedule with
every grid step simulated; HBM bandwidth is not in them, so a kernel takes at least
max(cycles / clock, bytes / HBM rate).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile

from kernels.base import cli, options, outputs, refusals


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelReportOptions:
  """Which kernels, and what to write."""

  cases: tuple[str, ...] = options.option(
    (), help="Words of case names, such as megablox or forward; empty: all cases."
  )
  list: bool = options.option(False, help="Print the names of the cases and stop.")
  whole: bool = options.option(
    True, help="Compile a device's whole work too, for its VMEM, spills and compile time."
  )
  time_limit: float = options.option(600.0, help="Seconds for each compile.", minimum=1.0)
  jobs: int = options.option(
    1, help="Compiles at a time; each takes a core or two and up to 8 GiB.", minimum=1
  )
  json: str | None = options.option(None, help="File to write rows to as JSON.", writes=True)
  markdown: str | None = options.option(
    None, help="File to write the table to as Markdown.", writes=True
  )
  keep_rows: bool = options.option(
    False,
    help="Keep what --json already holds and profile the other cases: all of them take hours.",
  )
  plot: str | None = options.option(
    None,
    help="File to write the chart to: .png, .pdf or .svg.",
    check=outputs.chart_fault,
    writes=True,
  )


RULES = (
  refusals.Rule(
    name="keep-rows-needs-json",
    keys=("keep_rows", "json"),
    broken=lambda s: s.keep_rows and s.json is None,
    reason="the rows to keep are those of --json; name its file",
    accepted={"keep_rows": True, "json": "rows.json"},
    refused={"keep_rows": True},
  ),
)


def run(settings: options.Settings) -> int:
  """Profiles, prints and writes."""
  from tools.aot import compiler
  from tools.kernel_report import cases, report, running

  os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
  chosen = [c for c in cases.CASES if all(w in c.name for w in settings.cases)]
  if not chosen:
    raise options.UserError(
      f"no case has {' and '.join(settings.cases)} in its name; --list names them"
    )
  if settings.list:
    print("\n".join(c.name for c in chosen))
    return 0
  kept = report.read_json(settings.json) if settings.keep_rows else {}
  same = lambda case: report.same_work(kept.get(case.name), case, whole=settings.whole)
  left = [case for case in chosen if not same(case)]
  count = itertools.count(len(chosen) - len(left) + 1)
  order = {case.name: place for place, case in enumerate(cases.CASES)}

  def done(row: report.Row) -> None:
    print(f"{next(count)}/{len(chosen)} {report.line(row)}", flush=True)
    kept[row.name] = row
    if settings.json:  # after each: a compile can take minutes
      in_order = sorted(kept.values(), key=lambda row: order.get(row.name, len(order)))
      report.write_json(in_order, settings.json)

  with tempfile.TemporaryDirectory() as scratch:

    def profile(case, seen, stop):
      place, limit = tempfile.mkdtemp(dir=scratch), settings.time_limit
      return report.profile_case(
        case, f"{place}/out", limit, whole=settings.whole, seen=seen, stop=stop
      )

    try:
      running.run(left, profile, done, jobs=settings.jobs)
    except compiler.LibtpuMissingError as error:
      raise options.UserError(str(error)) from error
  rows = [kept[case.name] for case in chosen]
  report.show(rows)
  if settings.markdown:
    report.write_markdown(rows, settings.markdown)
  if settings.plot:
    report.plot(rows, settings.plot)
  return 1 if all(row.error for row in rows) else 0


if __name__ == "__main__":
  cli.main(run, components=[KernelReportOptions], rules=RULES, description=__doc__)
