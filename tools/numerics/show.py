"""Gates as a table, and the two runs as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from kernels.base import outputs
from tools.numerics import gates


def show(answers: Mapping[str, Sequence[gates.Gate]], console: Console | None = None) -> None:
  """Prints one table for every comparison."""
  console = console or Console()
  if not console.is_terminal:
    console.width = 180
  for title, found in answers.items():
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("gate", "answer", "worst", "limit", "detail"):
      table.add_column(heading, justify="right" if heading in ("worst", "limit") else "left")
    for gate in found:
      answer = "passes" if gate.passed else "FAILS"
      name = f"{gate.name} {gates.NAMES[gate.name]}"
      table.add_row(name, answer, f"{gate.value:.4g}", f"{gate.limit:.4g}", gate.detail)
    console.print(table)


def plot(reference: Sequence[gates.Step], candidate: Sequence[gates.Step], path: str) -> None:
  """Writes a picture: log-prob differences, and every parameter's cosine in the last step."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), layout="constrained")
  for number, (a, b) in enumerate(zip(reference, candidate), 1):
    gap = np.abs(a.logprobs - b.logprobs)
    left.plot(np.sort(gap[np.isfinite(gap)]), np.linspace(0, 1, int(np.isfinite(gap).sum())),
              label=f"step {number}")  # fmt: skip
  left.set_xscale("symlog", linthresh=1e-7)
  left.set_xlabel("absolute log-prob difference, nats")
  left.set_ylabel("part of the tokens")
  left.legend()
  last = reference[-1].gradients
  cosines = {n: gates.compare_gradients(g, candidate[-1].gradients[n])[0] for n, g in last.items()}
  worst = sorted(cosines, key=cosines.__getitem__)[:24]
  right.barh(worst, [max(1 - cosines[n], 1e-9) for n in worst])
  right.set_xscale("log")
  right.set_xlabel("1 - cosine of the gradient, last step")
  right.invert_yaxis()
  outputs.write_chart(figure, path, dpi=100)
  plt.close(figure)
