"""Makes the reference checkpoints and numbers that the parity tests hold the model to.

    python tests/oracle/make_oracle.py tests/data/oracle

needs torch and transformers (2.13.0+cpu and 5.17.0 made the files in the repository), which the
repository itself does not depend on.  Everything is seeded: a second run gives the same weights
bit for bit, and numbers that differ by float32 rounding.  For each case a folder is written:

- `config.json`, `model.safetensors`: a tiny random model as transformers saves it;
- `oracle.npz`: `ids`, `logits`, `logprobs` (of the next token), `adv` (weights of the loss),
  `loss` = -mean(adv * logprobs), `hidden_i`, `router_i`, and `grad:NAME` of every parameter.

Cases:
- `moe`, `dense`: three Gated DeltaNet layers, then attention; 150 tokens, so that rows span three
  chunks of 64 and end inside one.
- `moe_fused`: the weights of `moe` in the published spelling (experts in one tensor).
- `ratios_397b`: the head and expert ratios of the largest model (4 value heads a key head, 16
  query heads a key/value head, 10 of 32 experts), an attention interval of 2 and a layer after
  the last group.
- `near_zero_key`: tied embeddings, and one key head whose keys are so small that the epsilon of
  the L2 norm decides.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import numpy as np
import torch
import transformers

_ROPE = {
  "rope_type": "default",
  "rope_theta": 1e7,
  "partial_rotary_factor": 0.25,
  "mrope_section": [2, 1, 1],
  "mrope_interleaved": True,
}
_SMALL = {
  "vocab_size": 512,
  "hidden_size": 64,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "max_position_embeddings": 4096,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 16,
  "linear_value_head_dim": 16,
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
  "rope_parameters": _ROPE,
}
_SMALLER = _SMALL | {"vocab_size": 128, "hidden_size": 32}
CASES = {
  "moe": _SMALL
  | {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
  },
  "dense": _SMALL | {"intermediate_size": 96},
  "ratios_397b": _SMALLER
  | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 32,
    "num_experts_per_tok": 10,
  },
  "near_zero_key": _SMALLER
  | {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "intermediate_size": 48,
    "tie_word_embeddings": True,
  },
}
_LENGTH = {"moe": 150, "dense": 150, "ratios_397b": 100, "near_zero_key": 100}
# Scale of the rows that make the keys of key head 0 in `near_zero_key`: the sum of squares of
# such a key is then of the size of the epsilon, 1e-6.
_NEAR_ZERO = 5e-4


def scatter_weights(model: torch.nn.Module, seed: int) -> None:
  """Moves every weight away from the symmetric initial values, under which mistakes hide."""
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, weight in sorted(model.named_parameters()):
      noise = torch.randn(weight.shape, generator=generator)
      if name.endswith("A_log"):
        rate = torch.empty(weight.shape).uniform_(0.05, 4, generator=generator)
        weight.copy_(rate.log())
      elif name.endswith("dt_bias"):
        weight.copy_(0.5 * noise - 1.0)
      elif name.endswith("linear_attn.norm.weight"):
        weight.copy_(1 + 0.2 * noise)
      elif "norm" in name:
        weight.copy_(0.2 * noise)
      elif "conv1d" in name:
        weight.copy_(0.4 * noise)
      elif "embed" in name:
        weight.copy_(noise)
      elif name.endswith("mlp.gate.weight"):
        weight.copy_(0.3 * noise)
      else:
        weight.copy_(noise * (1.0 / weight.shape[-1]) ** 0.5)


def build(case: str):
  """The model of a case, in float32, with eager attention and experts."""
  torch.manual_seed(0)
  moe = "num_experts" in CASES[case]
  kind = "Qwen3_5Moe" if moe else "Qwen3_5"
  config = getattr(transformers, kind + "TextConfig")(**CASES[case])
  cls = getattr(transformers, kind + "ForCausalLM")
  model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
  if moe:
    model.set_experts_implementation("eager")
  scatter_weights(model, 1)
  if case == "near_zero_key":
    with torch.no_grad():  # As the output table too: logits of the size of the other cases'.
      model.model.embed_tokens.weight *= config.hidden_size**-0.5
    first = config.linear_num_key_heads * config.linear_key_head_dim
    with torch.no_grad():
      for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
          head = slice(first, first + config.linear_key_head_dim)
          layer.linear_attn.in_proj_qkv.weight[head] *= _NEAR_ZERO
  return model.eval()


def numbers(model, length: int) -> dict[str, np.ndarray]:
  """Forward and backward of a batch of two rows."""
  generator = torch.Generator().manual_seed(7)
  ids = torch.randint(0, model.config.vocab_size, (2, length), generator=generator)
  moe = hasattr(model.config, "num_experts")
  extra = {"output_router_logits": True} if moe else {}
  with torch.no_grad():
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True, **extra)
  pick = lambda logits: torch.log_softmax(logits.float(), -1)[:, :-1].gather(-1, ids[:, 1:, None])[
    ..., 0
  ]
  logprobs = pick(out.logits)
  weights = torch.randn(logprobs.shape, generator=generator)
  loss = -(pick(model(input_ids=ids, use_cache=False).logits) * weights).mean()
  loss.backward()
  arrays = {"ids": ids, "logits": out.logits, "logprobs": logprobs, "adv": weights, "loss": loss}
  arrays |= {f"hidden_{i}": h for i, h in enumerate(out.hidden_states)}
  arrays |= {f"router_{i}": r for i, r in enumerate(out.router_logits)} if moe else {}
  arrays |= {"grad:" + n: p.grad for n, p in model.named_parameters() if p.grad is not None}
  return {name: value.detach().numpy() for name, value in arrays.items()}


def save(model, folder: pathlib.Path, **kwargs) -> None:
  """Saves weights and configuration, and nothing else."""
  shutil.rmtree(folder, ignore_errors=True)
  model.save_pretrained(folder, **kwargs)
  (folder / "generation_config.json").unlink(missing_ok=True)


def main(out: pathlib.Path) -> None:
  """Writes every case."""
  torch.set_num_threads(2)
  for case in CASES:
    model = build(case)
    save(model, out / case)
    if case == "moe":
      save(model, out / "moe_fused", save_original_format=False)
    arrays = numbers(model, _LENGTH[case])
    np.savez_compressed(out / case / "oracle.npz", **arrays)
    print(case, sum(p.numel() for p in model.parameters()), "parameters, loss", arrays["loss"])


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
