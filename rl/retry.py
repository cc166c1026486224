"""Micro-batches whose tokens found no room among the experts' rows are run again with room for all.

A small buffer is faster and almost always enough.  The program with the small buffer adds nothing
for a micro-batch of which a pair was dropped, but counts it; the caller sees the count and runs the
same micro-batch in the program of the worst case.  So each micro-batch counts once, and the result
is that of a run in which nothing is dropped.

The second program is compiled in the background from the first micro-batch on, so that the first
overflow finds it ready.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

import jax
import numpy as np

from rl.mesh_step import DISCARDED
from rl.packing import PackedBatch
from rl.train_step import Accumulators, StepFunctions

Tree = Any


class Retrying:
  """The programs of a step that run a micro-batch again where its tokens were dropped.

  `programs` has the interface of `train_step.compile_programs`.
  """

  def __init__(self, tight: StepFunctions, roomy: StepFunctions):
    """Takes compiled programs that accumulate the same sums.

    Args:
      tight: Made with `discard_overflowing`.
      roomy: Made with a buffer for the worst case; also scores.
    """
    self._tight = tight
    self._compiled: Any = roomy.accumulate  # jitted
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "compile")
    self._ready: concurrent.futures.Future | None = None
    self._discarded = 0.0
    self.programs = StepFunctions(
      first_micro_batch=self._first,
      accumulate=self._accumulate,
      update=tight.update,
      log_probs=roomy.log_probs,
      prepare=tight.prepare,
    )

  @property
  def replayed(self) -> float:
    """Micro-batches of the current step that were run again."""
    return self._discarded

  def prepare(self, weights: Tree, sums: Accumulators, batch: PackedBatch) -> None:
    """Starts compiling the program of the worst case, once; returns at once."""
    if self._ready is None:
      shape = lambda x: jax.ShapeDtypeStruct(
        np.shape(x), x.dtype, sharding=getattr(x, "sharding", None)
      )
      shapes = jax.tree.map(shape, (weights, sums, batch))
      make = lambda: self._compiled.lower(*shapes).compile()
      self._ready = self._worker.submit(make)

  def _first(self, weights: Tree, batch: PackedBatch) -> Accumulators:
    self._discarded = 0.0
    sums = self._tight.first_micro_batch(weights, batch)
    self.prepare(weights, sums, batch)
    return self._again(weights, sums, batch)

  def _accumulate(self, weights: Tree, sums: Accumulators, batch: PackedBatch) -> Accumulators:
    # Of these sums, which need not be those that came out last; before they are donated.
    self._discarded = _discarded(sums)
    self.prepare(weights, sums, batch)
    return self._again(weights, self._tight.accumulate(weights, sums, batch), batch)

  def _again(self, weights: Tree, sums: Accumulators, batch: PackedBatch) -> Accumulators:
    """The sums with the micro-batch in them, whether or not it fitted."""
    discarded = _discarded(sums)
    if discarded == self._discarded:
      return sums
    self._discarded = discarded
    self.prepare(weights, sums, batch)
    assert self._ready is not None
    return self._ready.result()(weights, sums, batch)


def _discarded(sums: Accumulators) -> float:
  """Micro-batches that were discarded so far; waits for the device."""
  if DISCARDED not in sums.metrics:
    raise ValueError("the sums do not say what overflowed: a dropped token would go unseen")
  return float(sums.metrics[DISCARDED].value)
