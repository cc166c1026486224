"""Tokenizers: bytes, or what a checkpoint brings in tokenizer.json with its chat template.

`load(directory)` gives the checkpoint's own tokenizer; `ByteTokenizer` needs no file and serves
the built-in tasks.  Both map text to ids and back, and turn a question into the prompt that the
policy sees.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kernels.base import options


class Tokenizer(Protocol):
  """What the loop needs of a tokenizer.

  Attributes:
    vocab_size: One more than the largest id that `encode` can give.
    pad_id: Filler of fixed-shape buffers.  Masks never come from it.
    stop_ids: Ids that end a completion.
  """

  vocab_size: int
  pad_id: int

  @property
  def stop_ids(self) -> tuple[int, ...]: ...

  def encode(self, text: str) -> list[int]:
    """Ids of a text, without any special token added."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids; special tokens give nothing."""
    ...

  def prompt(self, question: str) -> list[int]:
    """Ids of the prompt that asks `question`, ready for the policy to continue."""
    ...


class ByteTokenizer:
  """One id for each of the 256 bytes, then padding and end of text; 512 rows in all.

  The unused rows keep the embedding a multiple of what accelerators tile by.
  """

  pad_id = 256
  end_id = 257
  vocab_size = 512

  def __init__(self, stop_ids: Sequence[int] = ()):
    """Takes the ids that end a completion; empty for `end_id`."""
    self.stop_ids: tuple[int, ...] = tuple(stop_ids) or (self.end_id,)

  def encode(self, text: str) -> list[int]:
    return list(text.encode("utf-8"))

  def decode(self, ids: Sequence[int]) -> str:
    return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

  def prompt(self, question: str) -> list[int]:
    return self.encode(question)


class FileTokenizer:
  """The tokenizer of a Hugging Face checkpoint directory.

  Reads tokenizer.json; the chat template from chat_template.jinja or tokenizer_config.json; stop
  ids from generation_config.json, tokenizer_config.json and config.json.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    *,
    system_prompt: str | None = None,
    stop_ids: Sequence[int] = (),
  ):
    """Reads the files.

    Args:
      directory: Checkpoint directory.
      system_prompt: Text of the system turn, or None for none.
      stop_ids: Ids that end a completion; empty for those that the files name.

    Raises:
      options.UserError: No tokenizer.json, an unreadable file, or a chat template that is no
        template.
    """
    import tokenizers

    self._directory = pathlib.Path(directory)
    self._system_prompt = system_prompt
    path = self._directory / "tokenizer.json"
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises bare Exception for every kind of failure.
      raise options.UserError(f"{path}: cannot be read as a tokenizer: {error}") from None
    config = self._json("tokenizer_config.json")
    self._template = self._find_template(config)
    self._tokens = {
      name: self._token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")
    }
    self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
    self._stop_ids = tuple(stop_ids) or self._find_stop_ids()
    pad = self._tokens["pad_token"]
    pad_id = self._tokenizer.token_to_id(pad) if pad else None
    self.pad_id = pad_id if pad_id is not None else next(iter(self._stop_ids), 0)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end a completion.

    Raises:
      options.UserError: The files name none.  Only who needs them is refused: --stop_ids may
        stand in their place.
    """
    if not self._stop_ids:
      raise options.UserError(
        f"{self._directory}: no end-of-text id in generation_config.json, tokenizer_config.json or "
        "config.json; give --stop_ids"
      )
    return self._stop_ids

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    return self._tokenizer.decode(list(ids), skip_special_tokens=True)

  def prompt(self, question: str) -> list[int]:
    if self._template is None:
      return self.encode(question)
    messages = [{"role": "user", "content": question}]
    if self._system_prompt is not None:
      messages.insert(0, {"role": "system", "content": self._system_prompt})
    return self.encode(self.render(messages))

  def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The chat template applied to messages, ending where the assistant's turn begins.

    Args:
      messages: Dicts with role and content, oldest first.
      **variables: Further names that the template may use (tools, enable_thinking).

    Raises:
      options.UserError: There is no template, or it refuses these messages.
    """
    if self._template is None:
      raise options.UserError(f"{self._directory}: no chat template in this checkpoint")
    try:
      return self._template.render(
        messages=list(messages), add_generation_prompt=True, **self._tokens, **variables
      )
    except Exception as error:  # A template computes, so it may fail in any way.
      raise options.UserError(f"{self._directory}: chat template: {error}") from None

  def _json(self, name: str) -> dict[str, Any]:
    path = self._directory / name
    if not path.exists():
      return {}
    try:
      return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
      raise options.UserError(f"{path}: cannot be read as JSON: {error}") from None

  def _find_template(self, config: Mapping[str, Any]) -> Any:
    path = self._directory / "chat_template.jinja"
    template: Any
    if path.exists():
      try:
        template = path.read_text(encoding="utf-8")
      except (OSError, UnicodeDecodeError) as error:
        raise options.UserError(f"{path}: cannot be read as text: {error}") from None
    else:
      path = self._directory / "tokenizer_config.json"
      template = config.get("chat_template")
      if isinstance(template, list):  # Several named ones; "default" is the plain chat.
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return None if template is None else _compiled(template, path)

  def _find_stop_ids(self) -> tuple[int, ...]:
    found: list[int] = []
    text_config = self._json("config.json")
    text_config = text_config.get("text_config", text_config)
    for config in (self._json("generation_config.json"), text_config):
      ids = config.get("eos_token_id")
      found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    eos = self._tokens["eos_token"]
    eos_id = self._tokenizer.token_to_id(eos) if eos else None
    if eos_id is not None:  # The tokenizer's own end of turn comes first.
      found.insert(0, eos_id)
    return tuple(dict.fromkeys(found))

  @staticmethod
  def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _compiled(text: str, path: pathlib.Path) -> Any:
  import jinja2
  import jinja2.sandbox

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
  )
  environment.globals["raise_exception"] = _raise_template_error
  environment.filters["tojson"] = _to_json
  try:
    return environment.from_string(text)
  except jinja2.TemplateSyntaxError as error:
    raise options.UserError(
      f"{path}: is no chat template: line {error.lineno}: {error.message}"
    ) from None


def _raise_template_error(message: str) -> None:
  import jinja2

  raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
  return json.dumps(value, ensure_ascii=False, indent=indent)


def load(
  directory: str | None, *, system_prompt: str | None = None, stop_ids: Sequence[int] = ()
) -> Tokenizer:
  """The checkpoint's tokenizer where it has one, else bytes.

  Args:
    directory: Checkpoint directory or None.
    system_prompt: System turn for the chat template.
    stop_ids: Ids that end a completion, and the first of them a demonstration; empty for the
      tokenizer's own.
  """
  if directory is not None and (pathlib.Path(directory) / "tokenizer.json").exists():
    return FileTokenizer(directory, system_prompt=system_prompt, stop_ids=stop_ids)
  return ByteTokenizer(stop_ids)
