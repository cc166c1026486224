"""Which model a command line names, as far as it can be told before anything is loaded.

Imports no JAX: the rules that need it also answer `--check`.
"""

from __future__ import annotations

import os
import pathlib

from kernels.base.options import Settings, UserError
from model import config as model_config


def of(settings: Settings) -> model_config.ModelConfig | None:
  """The preset's model, or that of the checkpoint's config.json.

  None where neither can be read: what is wrong with it is said by who loads it.
  """
  if settings.checkpoint:
    # Relative paths are taken from where the command was typed, as everywhere.
    base = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd()))
    try:
      return model_config.ModelConfig.from_file(base / settings.checkpoint)
    except (UserError, OSError):
      return None
  if settings.model_preset not in model_config.PRESETS:
    return None
  return model_config.preset(settings.model_preset)


def dense(settings: Settings) -> bool:
  """Whether it is known to have no experts."""
  model = of(settings)
  return model is not None and not model.is_moe
