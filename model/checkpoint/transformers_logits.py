"""Loads a checkpoint with Hugging Face transformers and writes its logits.

    python transformers_logits.py CHECKPOINT IDS.npy OUT.npz

Runs under an interpreter that has torch and transformers, which this repository does not pin; see
`transformers_test.py`.  OUT.npz holds "logits" (float32) and "problems": the keys that were missing,
unexpected or of another shape.
"""

from __future__ import annotations

import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


def main(checkpoint: str, ids_file: str, out_file: str) -> None:
  """Loads, runs, writes."""
  torch.set_num_threads(1)
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
  )
  kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
  problems = [f"{kind}: {key}" for kind in kinds for key in info[kind]]
  with torch.no_grad():
    logits = model.eval()(input_ids=torch.from_numpy(np.load(ids_file)), use_cache=False).logits
  np.savez(out_file, logits=logits.float().numpy(), problems=np.array(problems, dtype=str))


if __name__ == "__main__":
  main(*sys.argv[1:])
