"""Sampling: requests in, completions with log-probs and routed experts out.

`LocalSampler` decodes with the trainer's own weights on the trainer's devices:

1. Distinct prompts of waiting requests are prefilled together, one fixed shape a call; long
   prompts in chunks.  Samples of one prompt share its prefill.
2. Each request takes a free slot: the prompt's memory is copied into it.
3. All slots decode `decode_block` tokens in one call; then the finished ones give their slots to
   waiting requests, and so on.  Every shape is fixed, so nothing is compiled twice.

The prefix is never computed again: a Gated DeltaNet layer carries its state, an attention layer
its keys and values.  A request's randomness is a function of its own seed and the token's place,
so its completion does not depend on which slot it gets or who its neighbours are.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kernels.base import options
from model import api
from model import config as model_config
from rl import run_config


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to continue.

  Attributes:
    prompt_ids: Its tokens, at least one.
    seed: Seed of this request's draws.
  """

  prompt_ids: tuple[int, ...]
  seed: int


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
  """What the policy wrote.

  Attributes:
    ids: int32 [C], the stop token included where there is one.
    logprobs: float32 [C], under softmax(logits / temperature) over the whole vocabulary, whatever
      top-p and top-k left out.
    truncated: Whether it ended at the length limit.
    routed_experts: int16 [P + C, layers, top_k] of prompt and completion, or None.  The last token
      was never fed to the model: its entry is -1.
  """

  ids: np.ndarray
  logprobs: np.ndarray
  truncated: bool
  routed_experts: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Distribution:
  """How tokens are drawn.

  Attributes:
    temperature: Above 0.
    top_p: In (0, 1]; 1 keeps all.
    top_k: 0 keeps all.
    greedy: Take the likeliest token; log-probs are still those at `temperature`.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  greedy: bool = False


class Sampler(Protocol):
  """What the loop needs of a source of completions."""

  def sample(
    self, weights: Any, requests: Sequence[Request], distribution: Distribution
  ) -> list[Completion]:
    """Completes every request, in their order."""
    ...


def draw(
  logits: Float[Array, "B V"],
  keys: Key[Array, " B"],
  temperature: Float[Array, ""],
  top_p: Float[Array, ""],
  top_k: Int[Array, ""],
  greedy: Bool[Array, ""],
  *,
  filtered: bool,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
  """Draws one token a row.

  Args:
    logits: Of the next token, float32.
    keys: One a row.
    temperature: Divides the logits, for the draw and for the log-probs.
    top_p: The likeliest tokens whose probability before each is below this may be drawn.
    top_k: So many likeliest tokens may be drawn; 0 for all.
    greedy: Take the likeliest token, ignoring the keys.
    filtered: Whether top_p and top_k are looked at; they cost a sort.

  Returns:
    Tokens, and their log-probs under softmax(logits / temperature).
  """
  logits = logits / temperature
  draw_row = jax.vmap(jax.random.categorical)
  if filtered:
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    rank = jnp.arange(logits.shape[-1])
    kept = (before < top_p) & ((top_k == 0) | (rank < top_k))
    kept = kept | (rank == 0)
    place = draw_row(keys, jnp.where(kept, ranked, -jnp.inf))
    drawn = jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0]
  else:
    drawn = draw_row(keys, logits)
  token = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
  chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
  return token, chosen - jax.nn.logsumexp(logits, axis=-1)


class _Slots(NamedTuple):
  """Device state of B slots, C completion tokens each."""

  cache: Any
  token: Int[Array, " B"]  # Drawn last, not yet fed.
  count: Int[Array, " B"]  # Tokens drawn.
  active: Bool[Array, " B"]
  seed: Int[Array, " B"]
  ids: Int[Array, "B C"]
  logprobs: Float[Array, "B C"]
  routed: Int[Array, "B C L K"] | None  # Of the completion tokens that were fed.


class _Prefilled(NamedTuple):
  """What prefill leaves of R prompts."""

  cache: Any
  hidden: Float[Array, "R h"]  # Of each prompt's last token.


class _Draws(NamedTuple):
  """A `Distribution` as traced values: another temperature compiles nothing."""

  temperature: Float[Array, ""]
  top_p: Float[Array, ""]
  top_k: Int[Array, ""]
  greedy: Bool[Array, ""]


class LocalSampler:
  """Decodes with the trainer's weights on the trainer's devices."""

  def __init__(
    self,
    config: model_config.ModelConfig,
    model_options: model_config.ModelOptions,
    sampler_options: run_config.SamplerOptions,
    stop_ids: Sequence[int],
    *,
    with_routed_experts: bool = False,
  ):
    """Makes the programs; nothing is compiled before the first call.

    Args:
      config: The model.
      model_options: How it is computed; the same as the trainer's, or log-probs differ.
      sampler_options: Slots, lengths.
      stop_ids: Tokens that end a completion.
      with_routed_experts: Whether completions carry the experts used.

    Raises:
      options.UserError: A stop id is outside the vocabulary.
    """
    for stop in stop_ids:
      if not 0 <= stop < config.vocab_size:
        outside = f"outside the model's vocabulary of {config.vocab_size}"
        if sampler_options.stop_ids:
          raise options.UserError(f"--stop_ids: {stop} is {outside}; want ids below that")
        raise options.UserError(
          f"the tokenizer's stop id {stop} is {outside}: it is of another model; give --stop_ids"
        )
    self._config, self._model_options = config, model_options
    self._options = sampler_options
    self._stop_ids = tuple(stop_ids)
    self._routed = with_routed_experts and config.is_moe
    self._limit = sampler_options.max_completion_tokens
    self._capacity = sampler_options.max_prompt_tokens + self._limit
    self._rows = min(sampler_options.prefill_rows, sampler_options.sampler_slots)
    self._chunk = min(sampler_options.prefill_chunk, sampler_options.max_prompt_tokens)
    self._empty = jax.jit(self._empty_slots)
    self._fresh_cache = jax.jit(lambda: self._init_cache(self._rows))
    self._prefill = jax.jit(self._prefill_chunk, donate_argnums=1)
    self._insert = jax.jit(self._insert_prompts, donate_argnums=1, static_argnames="filtered")
    self._decode = jax.jit(self._decode_block, donate_argnums=1, static_argnames="filtered")
    self._slots: _Slots | None = None
    self.generated_tokens = 0
    self.prompt_tokens = 0
    self.seconds = 0.0

  # Programs.

  def _init_cache(self, batch: int) -> Any:
    return api.init_cache(self._config, self._model_options, batch, self._capacity)

  @functools.cached_property
  def _batch_axes(self) -> Any:
    """Axis of the batch in each leaf of a cache: the one that grows with it."""
    one, two = (jax.eval_shape(functools.partial(self._init_cache, n)) for n in (1, 2))
    axis = lambda a, b: next(i for i, (m, n) in enumerate(zip(a.shape, b.shape)) if m != n)
    return jax.tree.map(axis, one, two)

  def _empty_slots(self) -> _Slots:
    slots, limit = self._options.sampler_slots, self._limit
    routed = None
    if self._routed:
      shape = (slots, limit, self._config.num_hidden_layers, self._config.num_experts_per_tok)
      routed = jnp.full(shape, -1, jnp.int16)
    return _Slots(
      cache=self._init_cache(slots),
      token=jnp.zeros(slots, jnp.int32),
      count=jnp.zeros(slots, jnp.int32),
      active=jnp.zeros(slots, bool),
      seed=jnp.zeros(slots, jnp.uint32),
      ids=jnp.zeros((slots, limit), jnp.int32),
      logprobs=jnp.zeros((slots, limit), jnp.float32),
      routed=routed,
    )

  def _prefill_chunk(self, weights, before: _Prefilled, tokens, start, lengths):
    """Continues R prompts by tokens[:, :chunk], which begin at position `start`."""
    place = start + jnp.arange(tokens.shape[1])
    real = place[None] < lengths[:, None]
    inputs = api.ModelInputs(
      tokens=tokens,
      segment_ids=real.astype(jnp.int32),
      positions=jnp.broadcast_to(place, tokens.shape),
      routed_experts=None,
    )
    hidden, cache, routed = api.prefill(
      self._config, self._model_options, weights, inputs, before.cache
    )
    # A row that ended in an earlier chunk keeps what it had.
    hidden = jnp.where((lengths > start)[:, None], hidden, before.hidden)
    return _Prefilled(cache, hidden), routed

  def _insert_prompts(self, weights, slots: _Slots, prompts, source, seed, draws, *, filtered):
    """Fills slot b from prefilled row source[b]; a source of -1 leaves the slot alone."""
    taken = source >= 0
    row = jnp.maximum(source, 0)

    def merge(axis, old, new):
      shape = [1] * old.ndim
      shape[axis] = old.shape[axis]
      return jnp.where(taken.reshape(shape), jnp.take(new, row, axis=axis), old)

    cache = jax.tree.map(merge, self._batch_axes, slots.cache, prompts.cache)
    seed = jnp.where(taken, seed, slots.seed)
    slots = slots._replace(
      cache=cache,
      seed=seed,
      count=jnp.where(taken, 0, slots.count),
      active=slots.active | taken,
      routed=None
      if slots.routed is None
      else jnp.where(taken[:, None, None, None], jnp.int16(-1), slots.routed),
    )
    return self._append(weights, slots, prompts.hidden[row], taken, draws, filtered)

  def _append(self, weights, slots: _Slots, hidden, where, draws: _Draws, filtered) -> _Slots:
    """Draws the next token of the slots in `where` and notes it."""
    logits = api.unembed(weights, hidden).astype(jnp.float32)
    keys = jax.vmap(lambda s, c: jax.random.fold_in(jax.random.key(s), c))(slots.seed, slots.count)
    token, logprob = draw(logits, keys, *draws, filtered=filtered)
    place = jnp.where(where, slots.count, self._limit)
    rows = jnp.arange(len(token))
    stopped = jnp.isin(token, jnp.asarray(self._stop_ids, jnp.int32))
    count = slots.count + where
    return slots._replace(
      token=jnp.where(where, token, slots.token),
      count=count,
      active=slots.active & ~(where & (stopped | (count >= self._limit))),
      ids=slots.ids.at[rows, place].set(token, mode="drop"),
      logprobs=slots.logprobs.at[rows, place].set(logprob, mode="drop"),
    )

  def _decode_block(self, weights, slots: _Slots, draws: _Draws, *, filtered) -> _Slots:
    """Draws up to `decode_block` tokens in every active slot."""

    def step(carry):
      done, slots = carry
      active = slots.active
      hidden, cache, routed = api.decode_step(
        self._config, self._model_options, weights, slots.cache, slots.token, active
      )
      if slots.routed is not None:
        place = jnp.where(active, slots.count - 1, self._limit)
        rows = jnp.arange(len(active))
        slots = slots._replace(routed=slots.routed.at[rows, place].set(routed, mode="drop"))
      slots = slots._replace(cache=cache)
      return done + 1, self._append(weights, slots, hidden, active, draws, filtered)

    def more(carry):
      done, slots = carry
      return (done < self._options.decode_block) & jnp.any(slots.active)

    return jax.lax.while_loop(more, step, (jnp.int32(0), slots))[1]

  # The host's side.

  def sample(
    self, weights: Any, requests: Sequence[Request], distribution: Distribution
  ) -> list[Completion]:
    """Completes every request.

    Args:
      weights: The model's parameters.
      requests: Prompts with seeds.
      distribution: How to draw.

    Returns:
      One completion a request, in their order.

    Raises:
      options.UserError: A prompt is empty or longer than --max_prompt_tokens.
    """
    started = time.perf_counter()
    self._check(requests)
    draws = _Draws(
      jnp.float32(distribution.temperature),
      jnp.float32(distribution.top_p),
      jnp.int32(distribution.top_k),
      jnp.bool_(distribution.greedy),
    )
    filtered = (distribution.top_p < 1 or distribution.top_k > 0) and not distribution.greedy
    slots = self._empty() if self._slots is None else self._slots
    self._slots = None  # Donated below; an error on the way must not leave it in use.
    results: list[Completion | None] = [None] * len(requests)
    prompt_routed: dict[int, np.ndarray] = {}
    owner = np.full(self._options.sampler_slots, -1)  # The request in each slot.
    waiting = collections.deque(range(len(requests)))
    while waiting or np.any(owner >= 0):
      while waiting and np.any(owner < 0):
        slots = self._refill(
          weights, slots, requests, waiting, owner, prompt_routed, draws, filtered
        )
      slots = self._decode(weights, slots, draws, filtered=filtered)
      self._collect(slots, requests, owner, prompt_routed, results)
    self._slots = slots
    self.seconds += time.perf_counter() - started
    return results  # type: ignore[return-value]

  def _check(self, requests: Sequence[Request]) -> None:
    for request in requests:
      length, longest = len(request.prompt_ids), self._options.max_prompt_tokens
      if not length:
        raise options.UserError("a prompt has no tokens; a completion needs at least one before it")
      if length > longest:
        raise options.UserError(
          f"a prompt has {length} tokens, more than --max_prompt_tokens={longest}; raise it, or "
          "leave the prompt out"
        )
      for token in (min(request.prompt_ids), max(request.prompt_ids)):
        if not 0 <= token < self._config.vocab_size:
          raise options.UserError(
            f"token id {token} is outside the model's vocabulary of {self._config.vocab_size}; the "
            "tokenizer is of another model"
          )

  def _refill(self, weights, slots, requests, waiting, owner, prompt_routed, draws, filtered):
    """Prefills the next distinct prompts and gives free slots to their requests."""
    rows: dict[tuple[int, ...], int] = {}
    source = np.full(len(owner), -1, np.int32)
    seed = np.zeros(len(owner), np.uint32)
    for slot in np.flatnonzero(owner < 0):
      if not waiting:
        break
      prompt = requests[waiting[0]].prompt_ids
      if prompt not in rows:
        if len(rows) == self._rows:
          break
        rows[prompt] = len(rows)
      index = waiting.popleft()
      owner[slot], source[slot] = index, rows[prompt]
      seed[slot] = requests[index].seed
    longest = max(map(len, rows))
    padded = -(-longest // self._chunk) * self._chunk
    tokens = np.zeros((self._rows, padded), np.int32)
    lengths = np.zeros(self._rows, np.int32)
    for prompt, row in rows.items():
      tokens[row, : len(prompt)] = prompt
      lengths[row] = len(prompt)
    prompts = _Prefilled(
      self._fresh_cache(),
      jnp.zeros((self._rows, self._config.hidden_size), self._model_options.activation_dtype),
    )
    routed = []
    for start in range(0, padded, self._chunk):
      chunk = tokens[:, start : start + self._chunk]
      prompts, used = self._prefill(weights, prompts, chunk, np.int32(start), lengths)
      routed.append(used)
    if self._routed:
      whole = np.concatenate([np.asarray(r) for r in routed], axis=1)
      for slot in np.flatnonzero(source >= 0):
        row = source[slot]
        prompt_routed[int(owner[slot])] = whole[row, : lengths[row]]
    self.prompt_tokens += int(lengths.sum())
    return self._insert(weights, slots, prompts, source, seed, draws, filtered=filtered)

  def _collect(self, slots: _Slots, requests, owner, prompt_routed, results) -> None:
    """Takes the completions of slots that are done and frees them."""
    done = np.flatnonzero((owner >= 0) & ~np.asarray(slots.active))
    if not len(done):
      return
    count, ids, logprobs = jax.device_get((slots.count, slots.ids, slots.logprobs))
    used = None if slots.routed is None else np.asarray(slots.routed)
    for slot in done:
      index, length = int(owner[slot]), int(count[slot])
      routed = None
      if used is not None:
        routed = np.concatenate([prompt_routed.pop(index), used[slot, :length]])
      results[index] = Completion(
        ids=ids[slot, :length].copy(),
        logprobs=logprobs[slot, :length].copy(),
        truncated=int(ids[slot, length - 1]) not in self._stop_ids,
        routed_experts=routed,
      )
      self.generated_tokens += length
      owner[slot] = -1
