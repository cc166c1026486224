"""The step's programs on a small model: what a gradient and a metric may and may not depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.base.options import UserError
from model import api
from model.config import ModelConfig, ModelOptions
from rl import optimizer, packing, train_step
from rl.config import BatchOptions, LossOptions, OptimizerOptions
from rl.trajectory import Trajectory

# Compilation is most of this test's time; what it computes is small.
jax.config.update("jax_disable_most_optimizations", True)

CONFIG = ModelConfig(
  vocab_size=96,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=16,
  full_attention_interval=2,
  linear_num_key_heads=1,
  linear_num_value_heads=2,
  linear_key_head_dim=8,
  linear_value_head_dim=8,
  num_experts=4,
  num_experts_per_tok=2,
  moe_intermediate_size=16,
  shared_expert_intermediate_size=16,
  partial_rotary_factor=0.5,
  mrope_section=(2, 1, 1),
  initializer_range=0.1,
)
# Attention alone, dense: what the tests use that are about neither, since it compiles fast.
PLAIN = dataclasses.replace(
  CONFIG,
  full_attention_interval=1,
  num_hidden_layers=1,
  num_experts=0,
  num_experts_per_tok=0,
  moe_intermediate_size=0,
  shared_expert_intermediate_size=0,
  intermediate_size=32,
)
MODEL = ModelOptions(dtype="float32", remat_policy="none", gdn_chunk_size=16)
PPO = LossOptions(
  force_on_policy_ratio=False,
  truncated_importance_sampling_type="tis",
  reference_policy_kl_penalty=0.05,
  entropy_bonus=0.01,
  logps_chunk_size=64,
)
OPTIMIZER = OptimizerOptions(learning_rate=1e-2, gradient_clip=1.0)
ROW = 48


@functools.cache
def _params(config=PLAIN):
  return api.init_params(config, MODEL, jax.random.key(0))


@functools.cache
def _programs(loss=PPO, model=MODEL, config=PLAIN):
  return train_step.compile_programs(train_step.make_functions(config, model, loss, OPTIMIZER))


def _state(config=PLAIN, **kwargs):
  return optimizer.init_state(jax.tree.map(jnp.copy, _params(config)), OPTIMIZER, **kwargs)


def _trajectories(count=9, seed=0, **kwargs):
  rng = np.random.default_rng(seed)
  made = []
  for index in range(count):
    # Lengths differ several-fold, so a mean of means is far from the mean.
    prompt, completion = rng.integers(1, 8), int(rng.integers(2, ROW - 8) // (1 + index % 4)) + 2
    old = -rng.gamma(3.0, 1.2, completion).astype(np.float32)
    values = {
      "group_id": index // 3,
      "prompt_ids": rng.integers(0, 96, prompt, dtype=np.int32),
      "completion_ids": rng.integers(0, 96, completion, dtype=np.int32),
      "loss_mask": (rng.random(completion) < 0.8).astype(np.float32),
      "old_logprobs": old,
      "sampler_logprobs": np.minimum(old + rng.normal(0, 0.2, completion), 0).astype(np.float32),
      "reward": float(rng.integers(0, 2)),
      "truncated": index == 4,
    }
    made.append(Trajectory(**(values | kwargs)))
  return made


def _batches(trajectories, *, rows, packed, order=None, seed=1, **kwargs):
  options = BatchOptions(
    row_tokens=ROW, micro_batch_rows=rows, max_segments_per_row=4, packing=packed
  )
  advantages = np.random.default_rng(seed).standard_normal(len(trajectories))
  if order is not None:
    trajectories, advantages = [trajectories[i] for i in order], advantages[list(order)]
  made, plan = packing.pack(trajectories, advantages, options, with_old_logprobs=True, **kwargs)
  return [b._replace(reference_logprobs=b.sampler_logprobs - 0.1 * b.loss_mask) for b in made], plan


def _shuffled(batches, seed):
  """The same rows in another order, across micro-batches too: packing itself sorts them."""
  whole = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
  order = np.random.default_rng(seed).permutation(len(whole.tokens))
  rows = len(batches[0].tokens)
  return [
    jax.tree.map(lambda a, start=start: a[order[start : start + rows]], whole)
    for start in range(0, len(order), rows)
  ]


def _accumulate(programs, batches, config=PLAIN):
  weights = _params(config)
  accumulators = programs.first_micro_batch(weights, batches[0])
  for batch in batches[1:]:
    accumulators = programs.accumulate(weights, accumulators, batch)
  return accumulators


def _relative(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def _assert_same_gradients(got, want):
  for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
    name = optimizer.path_name(path)
    limit = 5e-5 if name.endswith(("A_log", "dt_bias")) else 1e-5
    assert _relative(g, w) < limit, name


@functools.cache
def _one_micro_batch():
  """Everything unpacked in one micro-batch of nine rows: what all partitions must equal."""
  batches, plan = _batches(_trajectories(), rows=9, packed=False)
  assert len(batches) == 1 and len(plan.micro_batches[0]) == 9
  return _accumulate(_programs(config=CONFIG), batches, CONFIG)


@pytest.mark.parametrize(
  "rows, packed, count",
  [(3, False, 3), (1, False, 9), (9, True, 1), (3, True, None), (1, True, None)],
)
def test_gradients_and_metrics_do_not_depend_on_the_partition(rows, packed, count):
  want = _one_micro_batch()
  programs = _programs(config=CONFIG)
  reported = lambda a: train_step.host_metrics(
    programs.update(_state(CONFIG), a, optimizer.hyper_parameters(OPTIMIZER, 0, 9))[1]
  )
  for seed in range(2):
    order = np.random.default_rng(seed).permutation(9)
    batches, _ = _batches(_trajectories(), rows=rows, packed=packed, order=order)
    assert count is None or len(batches) == count
    got = _accumulate(programs, _shuffled(batches, seed), CONFIG)
    _assert_same_gradients(got.gradients, want.gradients)
    np.testing.assert_array_equal(np.asarray(got.denominators), np.asarray(want.denominators))
    metrics, right = reported(got), reported(want)
    assert metrics.keys() == right.keys()
    for name, value in right.items():
      assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    for name in ("clip_fraction", "is_oob_ratio", "tis_kept_fraction"):
      assert 0 <= metrics[name] <= 1


def test_partition_test_would_see_a_mean_of_means():
  # The error that the test above is there for: a mean per micro-batch, averaged.
  programs = _programs()
  batches, _ = _batches(_trajectories(), rows=3, packed=False)
  parts = [programs.first_micro_batch(_params(), b) for b in batches]
  means = [jax.tree.map(lambda g, p=p: g / p.denominators.tokens, p.gradients) for p in parts]
  wrong = jax.tree.map(lambda *g: sum(g) / len(g), *means)
  whole = _accumulate(programs, batches)
  right = jax.tree.map(lambda g: g / whole.denominators.tokens, whole.gradients)
  assert _relative(wrong["lm_head"]["kernel"], right["lm_head"]["kernel"]) > 0.05


def test_no_label_crosses_a_segment_or_the_rows_end():
  ids = np.array([10, 11, 12, 20, 21], np.int32)
  make = lambda a: Trajectory(
    group_id=0,
    prompt_ids=a[:1],
    completion_ids=a[1:],
    loss_mask=np.ones(len(a) - 1, np.float32),
    sampler_logprobs=np.full(len(a) - 1, -1.0, np.float32),
    old_logprobs=np.full(len(a) - 1, -1.0, np.float32),
    reward=0.0,
  )
  packed, _ = _batches([make(ids[:3]), make(ids[3:])], rows=1, packed=True)
  got = np.asarray(_programs().log_probs(_params(), packed[0]).logprobs)[0]
  want = np.zeros(ROW)
  for start, end in ((0, 3), (3, 5)):
    inputs = api.row_inputs(jnp.asarray(ids[None, start:end]))
    logits = api.unembed(_params(), api.forward(PLAIN, MODEL, _params(), inputs).hidden)
    logps = jax.nn.log_softmax(logits.astype(jnp.float32))[0]
    for i in range(start + 1, end):
      want[i] = logps[i - start - 1, ids[i]]
  np.testing.assert_allclose(got, want, atol=2e-5)
  # First tokens and padding are exactly 0: nothing predicts them.
  assert not got[[0, 3]].any() and not got[5:].any()


def test_a_row_filled_to_its_last_token_does_not_wrap_around():
  full = dataclasses.replace(
    _trajectories(1)[0],
    prompt_ids=np.arange(1, dtype=np.int32),
    completion_ids=np.arange(1, ROW, dtype=np.int32),
    loss_mask=np.ones(ROW - 1, np.float32),
    sampler_logprobs=np.full(ROW - 1, -1.0, np.float32),
    old_logprobs=np.full(ROW - 1, -1.0, np.float32),
  )
  batches, _ = _batches([full], rows=1, packed=True)
  log_probs = _programs().log_probs
  got = np.asarray(log_probs(_params(), batches[0]).logprobs)
  # A change of the first token's id moves later log-probs, never its own place.
  changed = batches[0]._replace(tokens=np.where(batches[0].positions == 0, 50, batches[0].tokens))
  moved = np.asarray(log_probs(_params(), changed).logprobs)
  assert got[0, 0] == moved[0, 0] == 0 and got[0, 1] != moved[0, 1]


def test_temperature_divides_logits_of_both_outputs():
  batches, _ = _batches(_trajectories(3), rows=1, packed=True)
  half = _programs(dataclasses.replace(PPO, temperature=0.5)).log_probs(_params(), batches[0])
  tokens = jnp.asarray(batches[0].tokens)
  inputs = api.ModelInputs(
    tokens, jnp.asarray(batches[0].segment_ids), jnp.asarray(batches[0].positions)
  )
  logits = api.unembed(_params(), api.forward(PLAIN, MODEL, _params(), inputs).hidden) / 0.5
  logps = np.asarray(jax.nn.log_softmax(logits, axis=-1))[0]
  entropy = -np.sum(np.exp(logps) * logps, axis=-1)
  on = np.flatnonzero(batches[0].positions[0] > 0)
  chosen = logps[on - 1, batches[0].tokens[0, on]]
  np.testing.assert_allclose(np.asarray(half.logprobs)[0, on], chosen, atol=3e-5)
  np.testing.assert_allclose(np.asarray(half.entropies)[0, on], entropy[on - 1], atol=3e-5)


def test_step_without_a_valid_token_is_finite_and_moves_nothing():
  masked = [dataclasses.replace(t, loss_mask=np.zeros_like(t.loss_mask)) for t in _trajectories(3)]
  for trajectories in (masked, []):
    batches, _ = _batches(trajectories, rows=3, packed=True)
    state, metrics = train_step.run_step(
      _programs(), _state(), batches, optimizer.hyper_parameters(OPTIMIZER, 0, 3)
    )
    metrics = train_step.host_metrics(metrics)
    assert all(np.isfinite(v) for v in metrics.values())
    assert metrics["loss"] == metrics["grad_norm"] == metrics["entropy"] == 0
    for a, b in zip(jax.tree.leaves(state.weights), jax.tree.leaves(_params())):
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_empty_micro_batch_adds_exactly_nothing():
  programs = _programs()
  batches, _ = _batches(_trajectories(), rows=3, packed=True)
  (empty,), _ = _batches([], rows=3, packed=True)
  with_dummy = _accumulate(programs, [*batches, empty])
  without = _accumulate(programs, batches)
  for a, b in zip(jax.tree.leaves(with_dummy), jax.tree.leaves(without)):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_programs_compile_once_and_donate_what_they_replace():
  programs = _programs()
  state = _state()
  sizes = None
  for step in range(3):
    batches, _ = _batches(_trajectories(seed=step), rows=3, packed=False)
    hyper = optimizer.hyper_parameters(OPTIMIZER, step, 9)
    first = programs.first_micro_batch(state.weights, batches[0])
    second = programs.accumulate(state.weights, first, batches[1])
    before = state
    state, _ = programs.update(state, second, hyper)
    if step == 0:
      sizes = [f._cache_size() for f in (programs.first_micro_batch, programs.accumulate)]
    assert first.gradients["lm_head"]["kernel"].is_deleted()
    assert before.weights["lm_head"]["kernel"].is_deleted()
    assert before.moments[0].mu["lm_head"]["kernel"].is_deleted()
  assert sizes == [f._cache_size() for f in (programs.first_micro_batch, programs.accumulate)]
  assert int(state.step) == 3


def test_nan_in_a_batch_skips_the_step_and_the_next_one_trains():
  programs = _programs()
  batches, _ = _batches(_trajectories(), rows=3, packed=True)
  hyper = optimizer.hyper_parameters(OPTIMIZER, 0, 9)
  broken = [batches[0]._replace(advantages=batches[0].advantages * np.nan), *batches[1:]]
  state, metrics = train_step.run_step(programs, _state(), broken, hyper)
  assert float(metrics["update_applied"]) == 0 and float(metrics["skipped_steps"]) == 1
  after, metrics = train_step.run_step(programs, state, batches, hyper)
  clean, _ = train_step.run_step(programs, _state(), batches, hyper)
  assert float(metrics["update_applied"]) == 1
  for a, b in zip(jax.tree.leaves(after.weights), jax.tree.leaves(clean.weights)):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_routers_are_frozen_by_default_and_trained_when_asked():
  gradients = _one_micro_batch().gradients
  router = lambda tree: tree["groups"]["gdn"]["mlp"]["router"]["kernel"]
  assert router(gradients) is None
  state = _state(CONFIG)
  assert router(state.moments[0].mu) is None
  every = dataclasses.replace(OPTIMIZER, trainable_parameters_mask=".*")
  functions = train_step.make_functions(CONFIG, MODEL, PPO, every)
  batches, _ = _batches(_trajectories(), rows=3, packed=True)
  shapes = jax.eval_shape(functions.first_micro_batch, _params(CONFIG), batches[0])
  assert router(shapes.gradients).shape == router(_params(CONFIG)).shape


def test_recomputed_old_logprobs_make_the_ratio_one():
  programs = _programs()
  batches, _ = _batches(_trajectories(), rows=3, packed=True)
  filled = train_step.with_old_logprobs(programs, _params(), batches)
  # A sampler that agrees, so that no sequence is gated.
  filled = [b._replace(sampler_logprobs=b.old_logprobs) for b in filled]
  _, metrics = train_step.run_step(
    programs, _state(), filled, optimizer.hyper_parameters(OPTIMIZER, 0, 9)
  )
  assert float(metrics["probs_ratio"]) == pytest.approx(1.0, abs=1e-5)
  assert float(metrics["probs_ratio_max"]) == pytest.approx(1.0, abs=1e-4)


def test_supervised_loss_goes_down_with_bfloat16_weights_and_masters():
  loss = LossOptions(loss="sft", overlong_filtering=False)
  model = dataclasses.replace(MODEL, dtype="bfloat16", weight_dtype="bfloat16")
  programs = _programs(loss, model)
  dtypes = lambda config: jax.tree.map(lambda p: p.dtype, api.abstract_params(config, model))
  mixed = _state(CONFIG, weight_dtypes=dtypes(CONFIG))
  assert mixed.weights["groups"]["gdn"]["gdn"]["A_log"].dtype == jnp.float32
  assert mixed.masters["groups"]["gdn"]["gdn"]["A_log"] is None
  assert mixed.masters["groups"]["gdn"]["gdn"]["out_proj"]["kernel"].dtype == jnp.float32
  state = _state(weight_dtypes=dtypes(PLAIN))
  batches, _ = _batches(_trajectories(4), rows=3, packed=True)
  seen = []
  for step in range(8):
    state, metrics = train_step.run_step(
      programs, state, batches, optimizer.hyper_parameters(OPTIMIZER, step, 4)
    )
    seen.append(float(metrics["loss"]))
  assert seen[-1] < 0.6 * seen[0]
  for weight, master in zip(
    jax.tree.leaves(state.weights),
    jax.tree.leaves(state.masters, is_leaf=lambda m: m is None),
  ):
    if master is not None:
      np.testing.assert_array_equal(np.asarray(weight), np.asarray(master.astype(jnp.bfloat16)))


def test_step_needs_a_micro_batch():
  with pytest.raises(ValueError, match="at least one micro-batch"):
    train_step.run_step(_programs(), _state(), [], optimizer.hyper_parameters(OPTIMIZER, 0, 1))


def test_source_of_old_logprobs():
  have, lack = _trajectories(2), _trajectories(2, old_logprobs=None)
  source = lambda batch, version=0, **kw: train_step.old_logprobs_source(
    LossOptions(**kw), batch, version
  )
  off = {"force_on_policy_ratio": False}
  assert source(have) == source(lack) == "none"
  assert source(have, **off) == "batch" and source(lack, **off) == "recompute"
  assert source(have, old_logprobs="recompute", **off) == "recompute"
  assert source(lack, loss="sft", **off) == "none"
  with pytest.raises(UserError, match="has no old_logprobs"):
    source(lack, old_logprobs="batch", **off)


def test_stale_trajectories_need_a_correction_when_old_logprobs_are_the_current_policys():
  stale = _trajectories(2, old_logprobs=None, policy_version=3)
  bare = {
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": "none",
  }
  source = lambda batch, version, **kw: train_step.old_logprobs_source(
    LossOptions(**kw), batch, version
  )
  for forced in (True, False):
    with pytest.raises(UserError, match="sampled by policy version 3 and is trained at 4"):
      source(stale, 4, force_on_policy_ratio=forced, **bare)
    assert source(stale, 3, force_on_policy_ratio=forced, **bare) in ("none", "recompute")
    # With the sampler's log-probs in use, in any of the corrections, it is right.
    assert source(stale, 4, force_on_policy_ratio=forced) in ("none", "recompute")
  recorded = _trajectories(2, policy_version=3)
  assert source(recorded, 4, force_on_policy_ratio=False, **bare) == "batch"


def test_the_heads_kernels_are_in_a_step_for_a_tpu():
  config = dataclasses.replace(PLAIN, hidden_size=128)
  (batch,), _ = _batches(_trajectories(), rows=9, packed=False)

  def text(implementation):
    model = dataclasses.replace(MODEL, kernel_implementation=implementation)

    def loss(params, batch):
      scores = train_step.score(config, model, params, batch, temperature=1.0, token_chunk=512)
      return jnp.sum(scores.logprobs) + jnp.sum(scores.entropies)

    traced = jax.jit(jax.grad(loss)).trace(api.abstract_params(config, model), batch)
    return traced.lower(lowering_platforms=("tpu",)).as_text()

  found = text("auto")
  assert "logprob_head_forward" in found and "logprob_head_backward" in found
  assert "logprob_head" not in text("reference")
