"""Compares a program with a recorded one and names what got worse.

Meant for a test that compiles a small program every time: a collective that lost its overlap, one
more gather in a loop, a buffer held twice, more instructions in the loops.
"""

from __future__ import annotations

from tools.aot.report import Report, kinds_in_loops


def findings(
  recorded: Report,
  now: Report,
  *,
  hbm: float = 0.05,
  waits: float = 0.10,
  instructions: float = 0.10,
) -> list[str]:
  """What got worse from `recorded` to `now`.

  Args:
    recorded: The report that was right.
    now: The report to judge.
    hbm: Growth of HBM that is let pass, relative.
    waits: Growth of the part of the wire's time that the program waits for, of that time.
    instructions: Growth of the instructions in loops, relative.

  Returns:
    One sentence per finding; nothing where the program is as good as the recorded one.
  """
  out = []
  if now.hbm_bytes > recorded.hbm_bytes * (1 + hbm):
    extra = (now.hbm_bytes - recorded.hbm_bytes) / 2**20
    out.append(
      f"HBM grew by {extra:.1f} MiB, from {recorded.hbm_bytes / 2**20:.1f}; largest buffers now: "
      + ", ".join(f"{b.shape} {b.origin or b.name}" for b in now.buffers[:4])
    )
  before, after = kinds_in_loops(recorded), kinds_in_loops(now)
  for key in sorted(set(before) | set(after)):
    kind, axes, looped = key
    old, new = before.get(key, (0, 0, 0.0)), after.get(key, (0, 0, 0.0))
    place = "in loops" if looped else "outside loops"
    if new[1] > old[1]:
      out.append(f"{kind} over {axes} {place}: {new[1]} runs, recorded {old[1]}")
    elif new[2] > old[2] * 1.001:
      out.append(f"{kind} over {axes} {place}: {new[2]:.0f} bytes, recorded {old[2]:.0f}")
    elif new[1] < old[1]:
      out.append(
        f"{kind} over {axes} {place}: {new[1]} runs, recorded {old[1]}: if that is a gain, record"
        " it"
      )
  for looped in (True, False):
    old_wait, new_wait = _waited(recorded, looped), _waited(now, looped)
    if new_wait > old_wait + waits:
      out.append(
        f"lost overlap: the program waits for {new_wait:.0%} of its collectives' time"
        f" {'in' if looped else 'outside'} loops, recorded {old_wait:.0%}"
      )
  if now.loop_instructions > recorded.loop_instructions * (1 + instructions):
    out.append(
      f"{now.loop_instructions} instructions in loops, recorded {recorded.loop_instructions}"
    )
  return out


def _waited(report: Report, looped: bool) -> float:
  """Part of the collectives' link time that the program waits for."""
  rows = [r for r in report.collectives if bool(r.loops) == looped]
  whole = sum(r.seconds for r in rows)
  return sum(r.exposed for r in rows) / whole if whole else 0.0
