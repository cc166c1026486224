"""From checked settings to the parts of a run: model, tokenizer, task, sampler, learner."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
from typing import Any

import jax

from kernels.base import options
from model import api
from model import config as model_config
from model.sharded.options import ShardedOptions
from rl import (
  collect,
  config,
  finite,
  learner,
  memory,
  optimizer,
  packing,
  placed,
  rollouts,
  run_config,
  sampler,
  throughput,
  tokenizer,
  trajectory,
)
from rl.tasks import registry, task


@functools.lru_cache(maxsize=4)
def _random_params(
  model: model_config.ModelConfig,
  model_options: model_config.ModelOptions,
  mesh: str | None,
  sharded: ShardedOptions,
):
  layout = placed.layout_of(model, model_options, mesh, sharded)
  return jax.jit(
    functools.partial(api.init_params, model, model_options),
    out_shardings=None if layout is None else layout.parameters,
  )


@functools.lru_cache(maxsize=4)
def _local_sampler(*arguments, with_routed_experts: bool) -> sampler.LocalSampler:
  """Runs of one process that sample alike share what was compiled."""
  return sampler.LocalSampler(*arguments, with_routed_experts=with_routed_experts)


@dataclasses.dataclass(frozen=True)
class Setup:
  """The parts of a run that do not change while it runs.

  Attributes:
    settings: Checked options.
    model: The model's configuration.
    model_options: How it is computed.
    tokenizer: Between text and ids.
    task: Problems and verifier; None when training from recorded rollouts without evaluation.
    sampler: Draws completions; None likewise.
    source: Where sampled trajectories come from; None with recorded ones.
    recorded: Batches of recorded trajectories, in order; empty when sampling.
    layout: Where the arrays of a step lie; None for one device.
    meter: What throughput is measured against.
    output_dir: Directory of everything that is written.
  """

  settings: options.Settings
  model: model_config.ModelConfig
  model_options: model_config.ModelOptions
  tokenizer: tokenizer.Tokenizer
  task: task.Task | None
  sampler: sampler.LocalSampler | None
  source: collect.Source | None
  recorded: list[list[trajectory.Trajectory]]
  layout: placed.Layout
  meter: throughput.Meter
  output_dir: pathlib.Path

  def initial_params(self) -> Any:
    """The weights that the run starts from: a checkpoint's, or random ones of the seed.

    Raises:
      options.UserError: The checkpoint cannot be read, or not all of its weights are finite.
    """
    run = self.settings.of(run_config.RunOptions)
    if run.checkpoint is not None:
      from model.checkpoint import loading

      _, params = loading.load_params(
        user_path(run.checkpoint),
        self.model,
        shardings=None if self.layout is None else self.layout.parameters,
        dtype=self.model_options.weight_dtype,
      )
      if names := finite.broken(params):
        raise options.UserError(
          f"--checkpoint={run.checkpoint}: {len(names)} parameters are not finite, such as {names[0]}; "
          "nothing can be learned from them: take another checkpoint"
        )
      return params
    make = _random_params(
      self.model, self.model_options, self.settings.mesh, self.settings.of(ShardedOptions)
    )
    return make(jax.random.key(run.seed))

  def for_sampling(self, weights: Any) -> Any:
    """Weights where the sampler decodes: on one device, gathered there if they are split."""
    return weights if self.layout is None else jax.device_put(weights, jax.devices()[0])

  def learner(self, params: Any) -> learner.Learner:
    """The learner of the run's own loss."""
    return learner.Learner(
      self.model,
      self.model_options,
      learner.LearnerOptions(
        loss=self.settings.of(config.LossOptions),
        advantage=self.settings.of(config.AdvantageOptions),
        batch=self.settings.of(config.BatchOptions),
        optimizer=self.settings.of(config.OptimizerOptions),
        mesh=self.settings.mesh,
        sharded=self.settings.of(ShardedOptions),
        router_replay=self.settings.router_replay,
      ),
      params,
    )

  def warmup_learner(self, params: Any) -> learner.Learner:
    """The learner of the supervised phase: the same model and optimizer, another loss and rate."""
    settings = self.settings
    return learner.Learner(
      self.model,
      self.model_options,
      learner.LearnerOptions(
        loss=config.LossOptions(loss="sft", logps_chunk_size=settings.logps_chunk_size),
        advantage=settings.of(config.AdvantageOptions),
        batch=settings.of(config.BatchOptions),
        optimizer=dataclasses.replace(
          settings.of(config.OptimizerOptions),
          learning_rate=settings.warmup_learning_rate,
          learning_rate_decay_steps=None,
        ),
        mesh=settings.mesh,
        sharded=settings.of(ShardedOptions),
      ),
      params,
    )

  def export(self, params: Any) -> pathlib.Path:
    """Writes the weights as a Hugging Face checkpoint with the tokenizer's files; its path.

    Raises:
      options.UserError: It cannot be written.
    """
    from model.checkpoint import saving

    path = self.output_dir / "model"
    source = user_path(self.settings.checkpoint)
    # Of an earlier end of this run there may be one; it stays until the new one is whole.
    saving.save_params(path, self.model, params, source=source, overwrite=True)
    return path


def output_directory(given: str | None, name: str) -> pathlib.Path:
  """Makes the output directory: the one given, or a new numbered one.

  Relative paths and the default are taken from where the command was typed: Bazel starts a
  program elsewhere and says so in BUILD_WORKING_DIRECTORY.

  Raises:
    options.UserError: It cannot be made or written.
  """
  base = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd()))
  try:
    if given is not None:
      path = base / given
      path.mkdir(parents=True, exist_ok=True)
    else:
      number = 1
      while True:
        path = base / "runs" / f"{name}-{number:03d}"
        try:
          path.mkdir(parents=True)
          break
        except FileExistsError:
          number += 1
    probe = path / ".writable"
    probe.write_text("")
    probe.unlink()
  except OSError as error:
    raise options.UserError(
      f"--output_dir={path}: cannot be written: {error.strerror}; choose another directory"
    ) from None
  return path


def user_path(given: str | None) -> str | None:
  """A path of the command line, seen from where the command was typed."""
  if given is None:
    return None
  return str(pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd())) / given)


def build(settings: options.Settings) -> Setup:
  """Makes the parts of a run.

  Raises:
    options.UserError: A file is missing or malformed, the tokenizer is of another model, the
      batch sizes are missing, a trajectory is or may become longer than a row, or the mesh is not
      that of the devices.
  """
  run = settings.of(run_config.RunOptions)
  directory = user_path(run.checkpoint)
  model = _model(directory, run)
  model_options = settings.of(model_config.ModelOptions).for_checkpoint(directory)
  layout = placed.layout_of(model, model_options, settings.mesh, settings.of(ShardedOptions))
  trained = _trained(model, model_options, settings.of(config.OptimizerOptions))
  text = tokenizer.load(directory, system_prompt=settings.system_prompt, stop_ids=settings.stop_ids)
  if text.vocab_size > model.vocab_size and run.rollouts is None:
    raise options.UserError(
      f"the tokenizer has {text.vocab_size} ids, the model's vocabulary {model.vocab_size}; use the "
      "tokenizer.json of this model"
    )
  batch = settings.of(config.BatchOptions)
  recorded: list[list[trajectory.Trajectory]] = []
  if run.rollouts is not None:
    found = rollouts.read(
      user_path(run.rollouts),
      vocab_size=model.vocab_size,
      routing=trajectory.Routing(
        layers=model.num_hidden_layers, top_k=model.num_experts_per_tok, experts=model.num_experts
      )
      if settings.router_replay
      else None,
    )
    if settings.router_replay and all(t.routed_experts is None for t in found):
      raise options.UserError(
        f"--rollouts={run.rollouts}: no trajectory carries routed_experts; leave "
        "--router_replay out, or record them with it"
      )
    # Now, not at the step that meets it after hours of others.
    packing.refuse_longer([t.num_tokens for t in found], batch.row_tokens, [t.name for t in found])
    recorded = rollouts.steps(
      found,
      generations_per_prompt=batch.generations_per_prompt,
      prompts_per_step=batch.prompts_per_step,
    )

  made_task = local = source = None
  if not recorded or settings.eval_every:
    made_task = registry.make(
      settings.task,
      prompts=user_path(settings.prompts),
      held_out_prompts=user_path(settings.held_out_prompts),
      verifier_command=settings.verifier_command,
    )
    _refuse_long_problems(made_task, text, settings)
    local = _local_sampler(
      model,
      model_options,
      settings.of(run_config.SamplerOptions),
      text.stop_ids,
      with_routed_experts=settings.router_replay,
    )
  if not recorded:
    if settings.loss != "sft":
      longest = (settings.max_prompt_tokens, settings.max_completion_tokens)
      what = "a sample of --max_prompt_tokens={} and --max_completion_tokens={}".format(*longest)
      packing.refuse_longer([sum(longest)], batch.row_tokens, [what])
    source = collect.Source(
      task=made_task,
      tokenizer=text,
      sampler=local,
      distribution=sampler.Distribution(
        temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k
      ),
      prompts=batch.prompts_per_step or 16,
      generations=batch.generations_per_prompt or 16,
      seed=run.seed,
    )
  if run.save_rollouts is not None:
    rollouts.require_writable(user_path(run.save_rollouts), "save_rollouts")
  memory.refuse_what_does_not_fit(count_params(model), trained)
  # Last, so that what is refused leaves no empty directory.
  name = "recorded" if recorded else settings.task.replace(":", "-")
  output_dir = output_directory(run.output_dir, f"{name}-seed{run.seed}")
  return Setup(
    settings=settings,
    model=model,
    model_options=model_options,
    tokenizer=text,
    task=made_task,
    sampler=local,
    source=source,
    recorded=recorded,
    layout=layout,
    meter=throughput.Meter.of_devices(
      model,
      model_options.gdn_chunk_size,
      1 if layout is None else layout.mesh.size,
      jax.devices()[0].device_kind,
      settings.peak_tflops,
    ),
    output_dir=output_dir,
  )


def _model(directory: str | None, run: run_config.RunOptions) -> model_config.ModelConfig:
  if directory is None:
    return model_config.preset(run.model_preset)
  try:
    return model_config.ModelConfig.from_file(directory)
  except options.UserError as error:
    raise options.UserError(f"--checkpoint={run.checkpoint}: {error}") from None


def _trained(
  model: model_config.ModelConfig,
  model_options: model_config.ModelOptions,
  chosen: config.OptimizerOptions,
) -> int:
  """Number of trained parameters; a mask that matches none is named before anything is loaded."""
  params = api.abstract_params(model, model_options)
  mask = optimizer.trainable_mask(params, chosen)
  return sum(math.prod(p.shape) for p in jax.tree.leaves(optimizer.select(params, mask)))


def _refuse_long_problems(
  chosen: task.Task, text: tokenizer.Tokenizer, settings: options.Settings
) -> None:
  """Names a problem of a file that could not be asked, now and not at the step that draws it."""
  for problem in chosen.file_problems():
    length = len(text.prompt(problem.question))
    if not 0 < length <= settings.max_prompt_tokens:
      raise options.UserError(
        f"{problem.name}: the prompt has {length} tokens, want 1 to --max_prompt_tokens="
        f"{settings.max_prompt_tokens}; raise it, or leave the line out"
      )
    if not chosen.exact:
      continue
    length = len(text.encode(problem.answer))
    if length > settings.max_completion_tokens:
      raise options.UserError(
        f"{problem.name}: the answer has {length} tokens, more than --max_completion_tokens="
        f"{settings.max_completion_tokens}, so no completion can equal it; raise it, or leave the "
        "line out"
      )


def load_exported(parts: Setup, path: pathlib.Path) -> Any:
  """The weights of an exported checkpoint, in the type that the run keeps them in."""
  from model.checkpoint import loading

  return loading.load_params(path, parts.model, dtype=parts.model_options.weight_dtype)[1]


def count_params(model: model_config.ModelConfig) -> int:
  """Number of parameters."""
  return api.count_params(model)
