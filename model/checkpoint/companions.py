"""What lies beside the weights: config.json, tokenizer, chat template, generation settings."""

from __future__ import annotations

import copy
import json
import pathlib
import shutil
from typing import Any

from kernels.base import options
from model import config as config_lib
from model.checkpoint import hf_names

# Copied as they are when they are there.
TEXT_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
  "LICENSE",
)
VISION_FILES = (
  "preprocessor_config.json",
  "video_preprocessor_config.json",
  "processor_config.json",
)


def copy_files(source: pathlib.Path, target: pathlib.Path, *, vision: bool) -> list[str]:
  """Copies the files beside the weights; returns the names of those that were there."""
  names = TEXT_FILES + (VISION_FILES if vision else ())
  found = [name for name in names if (source / name).is_file()]
  for name in found:
    shutil.copyfile(source / name, target / name)
  return found


def config_json(
  config: config_lib.ModelConfig,
  *,
  prefix: str,
  dtype: str,
  carried: tuple[str, ...],
  source: pathlib.Path | None,
) -> dict[str, Any]:
  """The mapping of the config.json to write.

  For the multimodal prefix, the source's own file with the new type; a plain root around the text
  configuration where there is no such file.  For the text prefix, the text configuration alone.
  A model whose multi-token prediction is not carried says it has none.

  Args:
    config: The model.
    prefix: Prefix of the tensors' names.
    dtype: Type that most tensors are stored in.
    carried: Prefixes of tensors that are carried over.
    source: Checkpoint directory that the weights descend from.

  Raises:
    options.UserError: The source describes another model.
  """
  given: dict[str, Any] = {}
  if source is not None:
    described = config_lib.ModelConfig.from_file(source)
    if described != config:
      names = [name for name in vars(config) if getattr(config, name) != getattr(described, name)]
      raise options.UserError(
        f"{source}: config.json describes another model than the one to save "
        f"({', '.join(names)} differ)"
      )
    given = json.loads((source / "config.json").read_text(encoding="utf-8"))
  text = config.to_hf() | {"dtype": dtype}
  layers = (given.get("text_config") or given).get("mtp_num_hidden_layers")
  if layers is not None:
    text["mtp_num_hidden_layers"] = layers if hf_names.MTP in carried else 0
  if prefix == hf_names.TEXT_PREFIX:
    return text
  kind = "qwen3_5_moe" if config.is_moe else "qwen3_5"
  camel = "Qwen3_5Moe" if config.is_moe else "Qwen3_5"
  root: dict[str, Any] = {
    "architectures": [camel + "ForConditionalGeneration"],
    "model_type": kind,
  }
  if "text_config" in given:
    root = copy.deepcopy(given)
    # The source's own spelling stays; what is changed is what is known to differ.
    text = root["text_config"] | {
      k: text[k] for k in ("dtype", "mtp_num_hidden_layers") if k in text
    }
    root.pop("torch_dtype", None)
    text.pop("torch_dtype", None)
  else:
    text.pop("architectures")
  return root | {
    "text_config": text,
    "tie_word_embeddings": config.tie_word_embeddings,
    "dtype": dtype,
  }
