"""Bytes, and a checkpoint's own tokenizer with its chat template."""

import json

import pytest
import tokenizers

from kernels.base import options
from rl import tokenizer

TEMPLATE = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if messages[0].role == 'assistant' %}{{ raise_exception('starts with the assistant') }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def _checkpoint(folder, template=TEMPLATE, **config):
  special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  model = tokenizers.models.BPE(vocab={}, merges=[])
  made = tokenizers.Tokenizer(model)
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=special,
    show_progress=False,
  )
  made.train_from_iterator(["user assistant what is 1 + 2"], trainer)
  # As many published tokenizers do; the loop must not have it done a second time.
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
  )
  made.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", **config})
  )
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
  if template:
    (folder / "chat_template.jinja").write_text(template)
  return str(folder)


def test_bytes_round_trip_and_specials_give_nothing():
  made = tokenizer.load(None)
  text = "3102> \n é 数"
  ids = made.encode(text)
  assert made.decode(ids) == text and max(ids) < 256
  assert made.decode([*ids, made.end_id, made.pad_id, 511]) == text
  assert made.stop_ids == (257,) and made.pad_id not in made.stop_ids
  assert made.vocab_size == 512 and made.prompt("ab") == [97, 98]
  assert tokenizer.load(None, stop_ids=(10, 257)).stop_ids == (10, 257)
  assert made.decode([0xFF]) == "\ufffd"  # no valid text: replaced, never an error


def test_checkpoint_tokenizer_and_chat_template(tmp_path):
  made = tokenizer.load(_checkpoint(tmp_path), system_prompt="Answer.")
  text = "what is 1 + 2 é"
  assert made.decode(made.encode(text)) == text
  ids = made.prompt("1 + 2")
  backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  assert backend.decode(ids, skip_special_tokens=False) == (
    "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\n1 + 2<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  assert made.stop_ids == (2, 0)  # the turn's end first, then generation_config's
  assert made.pad_id == 0 and made.vocab_size == backend.get_vocab_size()
  with pytest.raises(options.UserError, match="starts with the assistant"):
    made.render([{"role": "assistant", "content": "x"}])


def test_template_in_tokenizer_config_and_none_at_all(tmp_path):
  named = [{"name": "default", "template": "{{ messages[0].content }}!"}]
  made = tokenizer.load(_checkpoint(tmp_path, template=None, chat_template=named))
  assert made.decode(made.prompt("1 + 2")) == "1 + 2!"
  plain = tokenizer.load(_checkpoint(tmp_path, template=None))
  assert plain.decode(plain.prompt("1 + 2")) == "1 + 2"
  with pytest.raises(options.UserError, match="no chat template"):
    plain.render([])


def test_checkpoint_without_tokenizer_gives_bytes(tmp_path):
  assert isinstance(tokenizer.load(str(tmp_path)), tokenizer.ByteTokenizer)


def test_a_template_with_a_fault_is_named_with_its_file(tmp_path):
  broken = "{% for m in messages %}\n{{ m.content }"
  with pytest.raises(options.UserError, match="chat_template.jinja: is no chat template: line 2"):
    tokenizer.load(_checkpoint(tmp_path, template=broken))
  (tmp_path / "chat_template.jinja").write_bytes(b"\x80")
  with pytest.raises(options.UserError, match="chat_template.jinja: cannot be read as text"):
    tokenizer.load(str(tmp_path))
  (tmp_path / "chat_template.jinja").unlink()
  with pytest.raises(options.UserError, match="tokenizer_config.json: is no chat template: line 2"):
    tokenizer.load(_checkpoint(tmp_path, template=None, chat_template=broken))
  failing = tokenizer.load(_checkpoint(tmp_path, template="{{ messages[0].content + 1 }}"))
  with pytest.raises(options.UserError, match="chat template: "):
    failing.prompt("1 + 2")


def test_mistakes_are_named(tmp_path):
  path = _checkpoint(tmp_path)
  (tmp_path / "generation_config.json").unlink()
  (tmp_path / "tokenizer_config.json").write_text("{}")
  # Refused where they are needed, since --stop_ids may be given.
  unended = tokenizer.load(path)
  assert unended.pad_id == 0
  with pytest.raises(options.UserError, match="no end-of-text id.*give --stop_ids"):
    _ = unended.stop_ids
  assert tokenizer.load(path, stop_ids=(3,)).stop_ids == (3,)
  (tmp_path / "tokenizer_config.json").write_text("{")
  with pytest.raises(options.UserError, match="tokenizer_config.json: cannot be read as JSON"):
    tokenizer.load(path)
  (tmp_path / "tokenizer.json").write_text("[]")
  with pytest.raises(options.UserError, match="tokenizer.json: cannot be read"):
    tokenizer.load(path)
