"""One sampled trajectory, as numpy arrays on the host.

Every producer (the local sampler, an inference server, a file) makes these, and packing turns them
into device batches.  A multi-turn trajectory is one sequence: what the policy did not write, such
as tool output, lies in the completion with loss mask 0.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
  """A prompt and what the policy made of it.

  Lengths: P prompt tokens, C completion tokens, T = P + C.

  Attributes:
    group_id: The prompt it belongs to; trajectories of one group are compared with each other.
    prompt_ids: int32 [P].
    completion_ids: int32 [C].
    loss_mask: float32 [C], 1 on tokens that the policy produced, else 0.
    sampler_logprobs: float32 [C], log-probs of the completion under the sampler, at the sampling
      temperature; ignored where the loss mask is 0.
    reward: The verifier's score.
    old_logprobs: float32 [C], log-probs under the trainer's policy that the batch was sampled
      from, or None.
    truncated: Whether it ended at the length limit rather than by a stop token.
    policy_version: Version of the weights that produced it (updates made before it was sampled).
    routed_experts: int16 [T, layers, top_k], the sampler's expert of every token, -1 where unset;
      or None.
    step: Training step it was recorded at, or None.
    name: What messages call it, such as "rollouts.jsonl line 3".
  """

  group_id: int | str
  prompt_ids: np.ndarray
  completion_ids: np.ndarray
  loss_mask: np.ndarray
  sampler_logprobs: np.ndarray
  reward: float
  old_logprobs: np.ndarray | None = None
  truncated: bool = False
  policy_version: int = 0
  routed_experts: np.ndarray | None = None
  step: int | None = None
  name: str = ""

  @property
  def num_tokens(self) -> int:
    """Prompt and completion tokens."""
    return len(self.prompt_ids) + len(self.completion_ids)

  @property
  def num_loss_tokens(self) -> float:
    """Tokens with loss mask 1."""
    return float(np.sum(self.loss_mask))

  def called(self, index: int) -> str:
    """What an error message calls it, given its place in the batch."""
    return self.name or f"trajectory {index} of the batch (group {self.group_id})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """Shape of a model's routing decisions.

  Attributes:
    layers: Layers of the model.
    top_k: Experts of a token in each; 0 in a dense model.
    experts: Experts of a layer; 0 in a dense model.
  """

  layers: int
  top_k: int
  experts: int


def problem(
  trajectory: Trajectory, vocab_size: int | None = None, routing: Routing | None = None
) -> str | None:
  """What is wrong with a trajectory, in one clause, or None.

  Args:
    trajectory: The one to judge.
    vocab_size: Size of the model's vocabulary, when known.
    routing: That of the model which is to replay the experts; None where none is.
  """
  count = len(trajectory.completion_ids)
  if len(trajectory.prompt_ids) == 0:
    return "prompt_ids is empty, so the first completion token has no log-prob"
  for field in ("loss_mask", "sampler_logprobs", "old_logprobs"):
    values = getattr(trajectory, field)
    if values is None:
      continue
    if len(values) != count:
      return f"{field} has {len(values)} entries for {count} completion_ids"
    if not np.all(np.isfinite(values)):
      return f"{field} has a value that is not finite at entry {_first(~np.isfinite(values))}"
  mask = trajectory.loss_mask
  if not np.all((mask == 0) | (mask == 1)):
    return f"loss_mask is {mask[_first((mask != 0) & (mask != 1))]:g} somewhere; want 0 or 1"
  for field in ("sampler_logprobs", "old_logprobs"):
    values = getattr(trajectory, field)
    # A few above zero are a noisy producer's, which the loss's gates are for.
    if values is not None and np.sum((values > 0) & (mask > 0)) > 0.5 * np.sum(mask):
      return f"most of {field} are above 0: want log-probs, not probabilities"
  if not np.isfinite(trajectory.reward):
    return f"reward is {trajectory.reward}; want a finite number"
  ids = np.concatenate([trajectory.prompt_ids, trajectory.completion_ids])
  if ids.min() < 0:
    return f"token id {ids.min()} is negative"
  if vocab_size is not None and ids.max() >= vocab_size:
    return f"token id {ids.max()} is outside the model's vocabulary of {vocab_size}"
  routed = trajectory.routed_experts
  if routed is not None:
    if routed.ndim != 3 or len(routed) != len(ids):
      return (
        f"routed_experts has shape {tuple(routed.shape)}; want [{len(ids)} tokens, layers, top_k]"
      )
    if routed.min(initial=0) < -1:
      return f"routed_experts has {routed.min()}; want an expert or -1 for unset"
    if routing is not None:
      return _routing_problem(routed, routing)
  return None


def _routing_problem(routed: np.ndarray, routing: Routing) -> str | None:
  if not routing.experts:
    return "routed_experts cannot be replayed: the model has no experts"
  _, layers, top_k = routed.shape
  if (layers, top_k) != (routing.layers, routing.top_k):
    return (
      f"routed_experts has {layers} layers of {top_k} experts a token; the model has "
      f"{routing.layers} of {routing.top_k}"
    )
  if routed.max(initial=-1) >= routing.experts:
    return f"routed_experts has expert {routed.max()}; the model has {routing.experts}"
  return None


def _first(where: np.ndarray) -> int:
  return int(np.argmax(where))
