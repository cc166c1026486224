"""Log-probs, entropies, hidden states and logits of batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kernels.logprob_head import op
from model import api
from model import config as config_lib
from model.checkpoint import hf_names
from tools.score import layout

# Tokens whose logits are on the host at once.
_LOGIT_ROWS = 128


class Result(NamedTuple):
  """What a batch gives.

  Attributes:
    logprobs: float32 [rows, tokens]; at t, of the token at t + 1.
    entropy: float32 [rows, tokens]; at t, of the distribution of the token at t + 1.
    hidden: After the final norm [rows, tokens, h].
    hidden_states: [layers + 1, rows, tokens, h] or None.
    routed_experts: [rows, tokens, layers, k] or None.
  """

  logprobs: np.ndarray
  entropy: np.ndarray
  hidden: jax.Array | None
  hidden_states: jax.Array | None
  routed_experts: jax.Array | None


class Scorer:
  """A model ready to score.

  Attributes:
    programs: Number of batch shapes compiled so far.
    vocab_size: Width of the logits.
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    model_options: config_lib.ModelOptions,
    params: api.Params,
    *,
    hidden: bool = False,
  ):
    self._params = params
    self.vocab_size = config.vocab_size
    self.programs = 0

    def program(params, tokens, segment_ids, positions):
      self.programs += 1  # Counts traces: one a shape.
      out = api.forward(
        config,
        model_options,
        params,
        api.ModelInputs(tokens, segment_ids, positions),
        output_hidden_states=hidden,
      )
      flat = out.hidden.reshape(-1, out.hidden.shape[-1])
      # The last token of a row has no next one: whatever stands there is not read.
      targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
      found = op.logprob_head(
        flat,
        api.head_table(params),
        targets,
        implementation=model_options.kernel_implementation,
      )
      logprobs, entropy = (x.reshape(tokens.shape) for x in found)
      if not hidden:
        return logprobs, entropy, None, None, None
      return logprobs, entropy, out.hidden, out.hidden_states, out.routed_experts

    self._program = jax.jit(program)
    self._logits = jax.jit(lambda params, hidden: api.unembed(params, hidden).astype(jnp.float32))

  def __call__(self, batch: layout.Batch) -> Result:
    """Scores a batch."""
    out = self._program(self._params, batch.tokens, batch.segment_ids, batch.positions)
    return Result(np.asarray(out[0]), np.asarray(out[1]), *out[2:])

  def logits(self, hidden: np.ndarray):
    """Float32 logits of [tokens, h], in blocks of a bounded number of tokens."""
    for start in range(0, len(hidden), _LOGIT_ROWS):
      block = hidden[start : start + _LOGIT_ROWS]
      short = _LOGIT_ROWS - len(block)
      padded = np.pad(block, ((0, short), (0, 0)))  # One shape, one program.
      yield np.asarray(self._logits(self._params, padded))[: len(block)]


def spread(config: config_lib.ModelConfig, devices: list[jax.Device]) -> Any:
  """Shardings that divide every parameter over the devices, so that a model larger than one fits.

  Each parameter is cut along its longest axis that the devices divide, the stack's excepted; one
  without such an axis is on all of them.  None for one device.
  """
  if len(devices) == 1:
    return None
  automatic = (AxisType.Auto,)  # The compiler decides where the parts are brought together.
  mesh = jax.make_mesh((len(devices),), ("fsdp",), automatic, devices=devices)
  tree: dict[str, Any] = {}
  for parameter in hf_names.parameters(config, hf_names.FUSED):
    names: list[str | None] = [None] * len(parameter.shape)
    own = range(len(parameter.stack), len(parameter.shape))
    fitting = [axis for axis in own if parameter.shape[axis] % len(devices) == 0]
    if fitting:
      names[max(fitting, key=lambda axis: parameter.shape[axis])] = "fsdp"
    branch = tree
    for key in parameter.path[:-1]:
      branch = branch.setdefault(key, {})
    branch[parameter.path[-1]] = NamedSharding(mesh, PartitionSpec(*names))
  return tree
