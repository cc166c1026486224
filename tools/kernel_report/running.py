"""Profiles many cases, some at a time, and hands on each row as soon as it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent import futures

from tools.kernel_report.case import KernelCase
from tools.kernel_report.report import Row, part_key

Profile = Callable[[KernelCase, dict[str, Row], threading.Event], Row]


def run(
  cases: Sequence[KernelCase], profile: Profile, done: Callable[[Row], None], *, jobs: int
) -> None:
  """Profiles every case.

  Cases that share a simulation follow each other in one thread, so that it is made once.

  Args:
    cases: What to profile.
    profile: Takes a case, the rows of parts that its thread has seen, and what ends a compile early.
    done: Is called with each row, one at a time.
    jobs: Compiles at a time.

  Raises:
    Whatever the first of `profile` and `done` raised, or KeyboardInterrupt; the others are ended.
  """
  groups: dict[str, list[KernelCase]] = {}
  for case in cases:
    groups.setdefault(part_key(case), []).append(case)
  stop, lock = threading.Event(), threading.Lock()
  failures: list[BaseException] = []

  def work(group: list[KernelCase]) -> None:
    seen: dict[str, Row] = {}
    try:
      for case in group:
        if stop.is_set():
          return
        row = profile(case, seen, stop)
        with lock:
          done(row)
    except BaseException as error:
      with lock:
        failures.append(error)
      stop.set()

  with futures.ThreadPoolExecutor(max_workers=jobs) as pool:
    running = [pool.submit(work, group) for group in groups.values()]
    try:
      futures.wait(running)
    except BaseException:  # an interrupt comes to this thread alone
      stop.set()
      raise
  if failures:
    raise failures[0]
