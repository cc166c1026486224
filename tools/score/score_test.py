import json
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from kernels.base import options, refusals
from model import api
from model import config as config_lib
from model.checkpoint import fixtures, saving
from tools.score import arrays, layout, main, scorer
from tools.score import lines as lines_lib

jax.config.update("jax_num_cpu_devices", 4)

_CONFIG = config_lib.preset("tiny_moe")
_FLOAT32 = config_lib.ModelOptions(dtype="float32", remat_policy="none")
_LENGTHS = (100, 37, 1, 51, 40, 2, 128)


@pytest.fixture(scope="module")
def params():
  params = jax.tree.map(lambda x: 0.2 * x, fixtures.random_params(_CONFIG))
  params["embed"]["embedding"] *= 5
  return params


@pytest.fixture(scope="module")
def checkpoint(params, tmp_path_factory):
  path = tmp_path_factory.mktemp("score") / "c"
  saving.save_params(path, _CONFIG, params)
  return path


@pytest.fixture(scope="module")
def tokens():
  rng = np.random.default_rng(3)
  return [rng.integers(0, _CONFIG.vocab_size, n).tolist() for n in _LENGTHS]


def _write_lines(path: pathlib.Path, records):
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  return path


_MADE = {}


def _made_once(config, model_options, params, *, hidden=False):
  """A scorer that keeps its compiled programs from test to test."""
  place = str(jax.tree.leaves(params)[0].sharding)
  key = (config, model_options, hidden, place)
  if key not in _MADE:
    _MADE[key] = _Scorer(config, model_options, params, hidden=hidden)
  return _MADE[key]


_Scorer = scorer.Scorer


def _score(checkpoint, folder, records, model_options=_FLOAT32, all_devices=False, **kwargs):
  """Scores on one device, unless all are asked for."""
  source = _write_lines(folder / "in.jsonl", records)
  devices = jax.devices() if all_devices else jax.devices()[:1]
  chosen = main.ScoreOptions(
    checkpoint=str(checkpoint), input=str(source), output=str(folder / "out.jsonl"), **kwargs
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(scorer, "Scorer", _made_once)
    main.score(chosen, model_options, devices)
  return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(checkpoint, tokens, tmp_path_factory):
  folder = tmp_path_factory.mktemp("alone")
  records = [{"id": f"l{i}", "tokens": t, "note": [1]} for i, t in enumerate(tokens)]
  return _score(checkpoint, folder, records, row_tokens=384)


@pytest.fixture(scope="module")
def direct(params, tokens):
  """Every line alone, the plain way: forward, logits, log-softmax."""

  @jax.jit
  def run(params, ids, length):
    out = api.forward(
      _CONFIG,
      _FLOAT32,
      params,
      api.row_inputs(ids[None], length[None]),
      output_hidden_states=True,
    )
    return api.unembed(params, out.hidden)[0], out.hidden_states[:, 0], out.routed_experts[0]

  found = []
  for ids in tokens:
    padded = jnp.zeros(128, jnp.int32).at[: len(ids)].set(jnp.array(ids))
    logits, hidden, routed = run(params, padded, jnp.array(len(ids)))
    n = len(ids)
    found.append((np.asarray(logits)[:n], np.asarray(hidden)[:, :n], np.asarray(routed)[:n]))
  return found


def test_numbers_are_those_of_the_model(alone, direct, tokens):
  records = alone
  for record, (logits, _, _), ids in zip(records, direct, tokens, strict=True):
    logp = np.asarray(jax.nn.log_softmax(logits.astype(np.float64)))
    want = logp[np.arange(len(ids) - 1), ids[1:]]
    entropy = -(np.exp(logp) * logp).sum(-1)[:-1]
    assert record["logprobs"][0] is None and record["entropy"][0] is None
    np.testing.assert_allclose(record["logprobs"][1:], want, atol=2e-5)
    np.testing.assert_allclose(record["entropy"][1:], entropy, atol=2e-5)
    assert record["note"] == [1] and record["tokens"] == ids
    # A float32 and nothing finer, in its shortest form.
    assert all(float(str(np.float32(x))) == x for x in record["logprobs"][1:])
  assert [r["id"] for r in records] == [f"l{i}" for i in range(len(tokens))]


def test_hidden_states_and_logits(checkpoint, direct, tokens, tmp_path):
  chosen = [0, 2, 1]
  records = [{"tokens": tokens[i]} for i in chosen]
  _score(checkpoint, tmp_path, records, row_tokens=128, hidden=str(tmp_path / "h.npz"))
  saved = np.load(tmp_path / "h.npz")
  kinds = {"tokens", "hidden", "logits", "routed_experts"}
  assert set(saved.files) == {f"{i}/{k}" for i in (1, 2, 3) for k in kinds}
  for number, i in enumerate(chosen, 1):
    logits, hidden, routed = direct[i]
    assert saved[f"{number}/hidden"].dtype == saved[f"{number}/logits"].dtype == np.float32
    np.testing.assert_array_equal(saved[f"{number}/tokens"], tokens[i])
    np.testing.assert_allclose(saved[f"{number}/logits"], logits, atol=5e-5)
    np.testing.assert_allclose(saved[f"{number}/hidden"], hidden, atol=5e-5)
    np.testing.assert_array_equal(saved[f"{number}/routed_experts"], routed)


def _largest_difference(first, second, key):
  return max(
    abs(np.subtract(a[key][1:], b[key][1:])).max() for a, b in zip(first, second) if len(a[key]) > 1
  )


def test_packed_is_the_same(alone, checkpoint, tokens, tmp_path, monkeypatch):
  records = [{"tokens": t} for t in tokens]
  packed = _score(checkpoint, tmp_path, records, pack=True, row_tokens=384)
  assert _largest_difference(alone, packed, "logprobs") <= 1e-5
  assert _largest_difference(alone, packed, "entropy") <= 1e-5
  # The comparison can fail: segments that see each other give other numbers.
  build = layout._batch

  def leaking(*args):
    batch = build(*args)
    return layout.Batch(
      batch.tokens, np.minimum(batch.segment_ids, 1), batch.positions, batch.places
    )

  monkeypatch.setattr(layout, "_batch", leaking)
  leaked = _score(checkpoint, tmp_path, records, pack=True, row_tokens=384)
  assert _largest_difference(alone, leaked, "logprobs") > 1e-2


def test_weights_spread_over_devices(alone, checkpoint, tokens, tmp_path):
  spread = _score(checkpoint, tmp_path, [{"tokens": tokens[1]}], all_devices=True, row_tokens=128)
  # Sums are split over devices, so rounding differs: ten units in the last place of a log-prob.
  for key in ("logprobs", "entropy"):
    np.testing.assert_allclose(spread[0][key][1:], alone[1][key][1:], rtol=1e-5, atol=1e-5)


def test_every_large_parameter_is_spread():
  tree = scorer.spread(_CONFIG, jax.devices())
  assert scorer.spread(_CONFIG, jax.devices()[:1]) is None
  shapes = api.abstract_params(_CONFIG, _FLOAT32)
  for sharding, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(shapes), strict=True):
    part = sharding.shard_shape(leaf.shape)
    assert np.prod(part) * 4 == leaf.size or leaf.size < 1024


def test_bfloat16(alone, checkpoint, tokens, tmp_path):
  dtypes = config_lib.ModelOptions(dtype="bfloat16", weight_dtype="bfloat16")
  records = _score(checkpoint, tmp_path, [{"tokens": tokens[0]}], dtypes, row_tokens=128)
  difference = np.abs(np.subtract(records[0]["logprobs"][1:], alone[0]["logprobs"][1:]))
  assert 1e-4 < difference.mean() < 0.3


def test_no_array_of_tokens_by_vocabulary():
  given = config_lib.preset("tiny").to_hf() | {"vocab_size": 65536}
  config = config_lib.ModelConfig.from_hf(given)
  shapes = api.abstract_params(config, _FLOAT32)
  model = scorer.Scorer(config, _FLOAT32, shapes)
  ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
  text = model._program.lower(shapes, ids, ids, ids).as_text()
  sizes = [
    np.prod([int(n) for n in dims.split("x")])
    for dims in re.findall(r"tensor<((?:\d+x)*\d+)xf32>", text)
  ]
  # The table is there; tokens by vocabulary would be 16 times as large as anything that is.
  assert "65536x64xf32" in text and max(sizes) <= 2048 * 65536 / 16


def _lines(*lengths):
  return [lines_lib.Line(i, {}, np.full(n, i, np.int32)) for i, n in enumerate(lengths, 1)]


def test_few_shapes():
  lines = _lines(*range(1, 2000))
  shapes = {b.tokens.shape for b in layout.alone(lines, 4096)}
  assert len(shapes) == 9  # 128, 192, 256, ..., 2048
  assert {b.tokens.shape for b in layout.packed(lines, 4096, 64)} == {(1, 4096)}
  for batch in layout.alone(lines, 4096):
    assert all(
      2 * len(p.line.tokens) > batch.tokens.shape[1] or batch.tokens.shape[1] == 128
      for p in batch.places
    )


@pytest.mark.parametrize("alignment", [1, 64])
def test_layout_holds_every_token_once(alignment):
  lines = _lines(200, 37, 1, 384, 51, 64, 65, 7)
  for batches in (layout.packed(lines, 384, alignment), layout.alone(lines, 512)):
    seen = {}
    for batch in batches:
      total = 0
      for place in batch.places:
        n = len(place.line.tokens)
        cut = (place.row, slice(place.start, place.start + n))
        np.testing.assert_array_equal(batch.tokens[cut], place.line.tokens)
        np.testing.assert_array_equal(batch.positions[cut], np.arange(n))
        segment = set(batch.segment_ids[cut].tolist())
        assert len(segment) == 1 and segment != {0}
        assert (batch.segment_ids[place.row] == segment.pop()).sum() == n
        seen[place.line.number] = seen.get(place.line.number, 0) + 1
        total += n
      assert (batch.segment_ids > 0).sum() == total
      for ids in batch.segment_ids:  # As the gated delta rule wants them.
        assert (np.diff(ids[ids > 0]) >= 0).all()
    assert seen == {line.number: 1 for line in lines}


def test_packing_is_tight():
  rows = layout.packed(_lines(*[64] * 40), 640, 64)
  assert len(rows) == 4


def _tokenizer(checkpoint):
  words = tokenizers.models.WordLevel({"one": 5, "two": 6, "far": 5000, "?": 7}, unk_token="?")
  made = tokenizers.Tokenizer(words)
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.save(str(checkpoint / "tokenizer.json"))


def test_text(checkpoint, tmp_path):
  source = _write_lines(tmp_path / "in", [{"tokens": [1]}, {"id": 3, "text": "two one two"}])
  with pytest.raises(options.UserError, match="has no tokenizer .*tokenizer.json"):
    lines_lib.read(source, 512, checkpoint)
  _tokenizer(checkpoint)
  lines = lines_lib.read(source, 512, checkpoint)
  assert lines[1].record == {"id": 3, "text": "two one two", "tokens": [6, 5, 6]}
  with pytest.raises(options.UserError, match="in:1: token 0 is 5000, outside"):
    lines_lib.read(_write_lines(tmp_path / "in", [{"text": "far"}]), 512, checkpoint)
  with pytest.raises(options.UserError, match="in:1: want at least one token"):
    lines_lib.read(_write_lines(tmp_path / "in", [{"text": ""}]), 512, checkpoint)
  (checkpoint / "tokenizer.json").write_text("{")
  with pytest.raises(options.UserError, match="cannot be read as a tokenizer"):
    lines_lib.read(source, 512, checkpoint)
  (checkpoint / "tokenizer.json").unlink()


@pytest.mark.parametrize(
  "line, message",
  [
    ("{nonsense", "no JSON"),
    ('{"tokens": [1]} {"tokens": [2]}', "no JSON"),
    ("[1, 2]", "want a JSON object, found list"),
    ("{}", 'want "tokens"'),
    ('{"tokens": [1], "logprobs": [0]}', 'has "logprobs" already'),
    ('{"text": 3}', 'want "tokens"'),
    ('{"tokens": "1 2"}', "want at least one token"),
    ('{"tokens": []}', "want at least one token"),
    ('{"tokens": [1, 2.5]}', "token 1 is 2.5, not an integer"),
    ('{"tokens": [true]}', "token 0 is True, not an integer"),
    ('{"tokens": [1, 512]}', "token 1 is 512, outside the vocabulary of 512"),
    ('{"tokens": [-1]}', "token 0 is -1, outside"),
    ('{"tokens": [1], "id": "\\ud800\\', "no JSON"),
  ],
)
def test_a_wrong_line_is_told_by_its_number(tmp_path, line, message):
  path = tmp_path / "in.jsonl"
  path.write_text('{"tokens": [3, 4]}\n\n' + line + "\n")
  with pytest.raises(options.UserError, match=re.escape(message)) as error:
    lines_lib.read(path, 512, tmp_path)
  assert str(error.value).startswith(f"{path}:3: ")


def test_bytes_that_are_no_text(tmp_path):
  path = tmp_path / "in.jsonl"
  path.write_bytes(b'{"tokens": [1], "id": "\xff"}\n')
  with pytest.raises(options.UserError, match="in.jsonl:1: no JSON"):
    lines_lib.read(path, 512, tmp_path)


def test_no_lines_no_file(tmp_path):
  (tmp_path / "in").write_text("\n\n")
  with pytest.raises(options.UserError, match="no line to score"):
    lines_lib.read(tmp_path / "in", 512, tmp_path)
  with pytest.raises(options.UserError, match="cannot be read"):
    lines_lib.read(tmp_path / "none", 512, tmp_path)


def test_a_line_longer_than_a_packed_row():
  with pytest.raises(options.UserError, match="line 2: 385 tokens do not fit .*--row_tokens=384"):
    layout.packed(_lines(3, 385), 384, 64)


def test_output_is_whole_or_absent(tmp_path):
  path = tmp_path / "out.jsonl"
  path.write_text("old\n")

  def records():
    yield {"a": 1}
    raise options.UserError("stopped")

  with pytest.raises(options.UserError, match="stopped"):
    lines_lib.write(path, records())
  assert path.read_text() == "old\n" and os.listdir(tmp_path) == ["out.jsonl"]
  with pytest.raises(RuntimeError), arrays.NpzWriter(tmp_path / "h.npz") as writer:
    writer.add("a", (2,), np.float32, [np.zeros(2)])
    raise RuntimeError
  assert os.listdir(tmp_path) == ["out.jsonl"]


def test_numbers_that_are_not_finite():
  line = lines_lib.Line(7, {"tokens": [1, 2, 3]}, np.array([1, 2, 3], np.int32))
  good = np.zeros(2, np.float32)
  with pytest.raises(options.UserError, match="line 7: the log-prob of token 2 is nan"):
    lines_lib.scored(line, np.array([0, np.nan], np.float32), good)
  with pytest.raises(options.UserError, match="line 7: the entropy of token 1 is inf"):
    lines_lib.scored(line, good, np.array([np.inf, 0], np.float32))


def test_what_cannot_be_written_is_told_first(tmp_path):
  for path, message in {
    tmp_path: "is a directory",
    tmp_path / "none" / "out": "there is no directory",
  }.items():
    with pytest.raises(options.UserError, match=message):
      lines_lib.check_writable([path])


def test_flags(tmp_path, capsys):
  def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
      main.cli.main(
        main.run,
        components=[main.ScoreOptions, config_lib.ModelOptions],
        rules=main.RULES,
        argv=["score", *arguments],
        judge=main.judge,
      )
    return stopped.value.code, capsys.readouterr().err

  status, text = run()
  assert status == 2 and all(f"--{n} is needed" in text for n in ("checkpoint", "input", "output"))
  (tmp_path / "in.npz").write_text("{}\n")
  given = f"--checkpoint={tmp_path}", f"--input={tmp_path / 'in.npz'}", f"--output={tmp_path / 'o'}"
  status, text = run(*given, f"--hidden={tmp_path / 'in.npz'}")
  assert status == 1 and "would overwrite --input=" in text
  assert (tmp_path / "in.npz").read_text() == "{}\n"
  status, text = run(*given, f"--hidden={tmp_path / 'o.txt'}")
  assert status == 2 and "want a name in .npz" in text
  # What the trainer refuses as inert is refused here, and so is what a forward pass has no use for.
  for flag, rule in (
    ("--param_scan_axis=1", "stack-axis-is-first"),
    ("--use_gmm_v2", "gmm-v2-needs-gmm"),
    ("--sa_block_q=128", "attention-tiles-without-kernels"),
    ("--remat_policy=none", "nothing-to-rematerialise"),
  ):
    status, text = run(*given, flag)
    assert status == 2 and f"[{rule}]" in text
  (own,) = [r for r in main.RULES if r.name == "nothing-to-rematerialise"]
  parsed = lambda values: options.Settings([main.ScoreOptions, config_lib.ModelOptions], values)
  assert not refusals.broken_rules(parsed(own.accepted), [own])
  assert refusals.broken_rules(parsed(own.refused), [own])
  status, text = run("--checkpoints=x")
  assert status == 2 and "nearest flag is --checkpoint" in text
  status, text = run(f"--checkpoint={tmp_path / 'c'}", "--input=x", f"--output={tmp_path / 'out'}")
  assert status == 1 and "no such directory" in text and "Traceback" not in text
