"""Checkpoints that transformers wrote: loaded, saved again, scored."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from kernels.base import options
from model import config as config_lib
from model.checkpoint import loading, saving
from tests.oracle import reading
from tools.score import main


@pytest.mark.parametrize("case", reading.CASES)
def test_loads_what_another_reader_reads(case):
  config, want, _ = reading.load(case)
  found, params = loading.load_params(reading.directory(case))
  assert found == config and jax.tree.structure(params) == jax.tree.structure(want)
  for got, leaf in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
    assert got.dtype == leaf.dtype
    np.testing.assert_array_equal(got, leaf)


@pytest.mark.parametrize("case", ["moe", "moe_fused", "dense"])
def test_saves_what_transformers_saved(tmp_path, case):
  config, params = loading.load_params(reading.directory(case))
  spelling = "fused" if case == "moe_fused" else "per_expert"
  saving.save_params(tmp_path / "c", config, params, experts=spelling)
  want = load_file(reading.directory(case) / "model.safetensors")
  got = load_file(tmp_path / "c" / "model.safetensors")
  assert got.keys() == want.keys()
  for name, tensor in want.items():
    assert got[name].dtype == tensor.dtype
    np.testing.assert_array_equal(got[name], tensor)


# Prefixes of the two reference rows: attention is causal, so the reference's numbers hold.
_LINES = ((0, 150), (1, 150), (0, 37), (1, 51), (0, 1), (1, 40))


def _score(folder, case, **kwargs):
  numbers = np.load(reading.directory("moe") / "oracle.npz")
  lines = [
    {"id": i, "tokens": numbers["ids"][row, :n].tolist()} for i, (row, n) in enumerate(_LINES)
  ]
  (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  chosen = main.ScoreOptions(
    checkpoint=str(reading.directory(case)),
    input=str(folder / "in.jsonl"),
    output=str(folder / "out.jsonl"),
    **kwargs,
  )
  main.score(chosen, config_lib.ModelOptions(dtype="float32", remat_policy="none"))
  out = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
  assert [record["id"] for record in out] == list(range(len(_LINES)))
  return numbers, out


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  folder = tmp_path_factory.mktemp("alone")
  numbers, out = _score(folder, "moe", row_tokens=384, hidden=str(folder / "h.npz"))
  return numbers, out, np.load(folder / "h.npz")


def _close(numbers, out):
  for record, (row, n) in zip(out, _LINES, strict=True):
    assert record["logprobs"][0] is None and len(record["logprobs"]) == n
    got = np.array(record["logprobs"][1:], np.float32)
    logits = numbers["logits"][row, : n - 1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, numbers["logprobs"][row, : n - 1], rtol=0, atol=5e-5)
    np.testing.assert_allclose(record["entropy"][1:], -(p * np.log(p)).sum(-1), rtol=0, atol=5e-5)


def _distance(got, want):
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_score_agrees_with_transformers(alone):
  numbers, out, saved = alone
  _close(numbers, out)
  for number, (row, n) in enumerate(_LINES, 1):
    assert _distance(saved[f"{number}/logits"], numbers["logits"][row, :n]) <= 1e-5
    for layer, hidden in enumerate(saved[f"{number}/hidden"]):
      assert _distance(hidden, numbers[f"hidden_{layer}"][row, :n]) <= 1e-5
    top = np.argsort(-numbers["router_0"].reshape(2, 150, -1)[row, :n], axis=-1)[:, :2]
    routed = saved[f"{number}/routed_experts"][:, 0]
    np.testing.assert_array_equal(np.sort(routed, axis=-1), np.sort(top, axis=-1))


def test_packed_rows_of_the_fused_spelling_too(alone, tmp_path):
  numbers, out = _score(tmp_path, "moe_fused", row_tokens=384, pack=True)
  _close(numbers, out)


def test_another_models_checkpoint_is_told(tmp_path):
  (tmp_path / "c").mkdir()
  for name, case in (("config.json", "dense"), ("model.safetensors", "moe")):
    (tmp_path / "c" / name).write_bytes((reading.directory(case) / name).read_bytes())
  with pytest.raises(options.UserError, match="missing model.layers.0.mlp.gate_proj.weight"):
    loading.load_params(tmp_path / "c")
