"""Memory that a run needs and does not have, said before it starts or in one line when it ends."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from kernels.base import options


def refuse_what_does_not_fit(params: int, trained: int) -> None:
  """Compares what training keeps with the memory there is, on a CPU: the system would kill it.

  Args:
    params: Number of parameters.
    trained: Number of those that are trained.

  Raises:
    options.UserError: This machine's memory is smaller.
  """
  import jax

  if jax.devices()[0].platform != "cpu":
    return
  # Weights; of those trained the moments and the sum of gradients.  A mesh of CPUs is one machine.
  need = 4 * params + 12 * trained
  have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  if need > have:
    raise options.UserError(
      f"{params:,} parameters take at least {need / 2**30:,.0f} GiB in training (weights, moments and "
      f"gradients in float32), this machine has {have / 2**30:,.0f}; take a smaller model, or "
      "//tools:aot_compile to see what this one takes on a TPU slice"
    )


@contextlib.contextmanager
def exhaustion_told(settings: options.Settings) -> Iterator[None]:
  """Turns a device's exhausted memory into an error that names the flags that decide it.

  Raises:
    options.UserError: In place of the runtime's error.
  """
  try:
    yield
  except RuntimeError as error:  # XLA's errors are of this kind.
    if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
      raise
    wanted = re.search(r"allocating (\d+) bytes", str(error))
    size = f" ({int(wanted[1]) / 2**30:,.0f} GiB in one piece)" if wanted else ""
    raise options.UserError(
      f"out of memory{size}: a micro-batch of --micro_batch_rows={settings.micro_batch_rows} rows "
      f"of --row_tokens={settings.row_tokens} is too large here; lower either, or --sampler_slots"
    ) from None
