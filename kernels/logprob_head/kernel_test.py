"""The Pallas kernels, interpreted, against the definition in float32; planted faults."""

import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.logprob_head import op, pallas_backward, pallas_forward, reference
from kernels.logprob_head import tiles as tiles_lib

_LIMIT = {jnp.float32: 2e-6, jnp.bfloat16: 2e-3}
_WIDTH = 128
# 200 tokens are no multiple of a tile; 300 words leave a last tile of 44 and, two tiles a block, a
# last block that overlaps the one before; 256 words are whole tiles.
_TILES = tiles_lib.HeadTiles(tokens=128, words=64)


def _problem(dtype, vocab, tokens=200, scale=0.3, seed=0):
  rng = np.random.default_rng(seed)
  hidden = rng.standard_normal((tokens, _WIDTH))
  table = rng.standard_normal((vocab, _WIDTH)) * scale
  if dtype == jnp.bfloat16:
    # All logits are far below the zero of a word that is not there.
    hidden[:, 0], table[:, 0] = 16, -8
  hidden, table = jnp.asarray(hidden, dtype), jnp.asarray(table, dtype)
  targets = rng.integers(0, vocab, tokens)
  # The borders of strips, tiles and the vocabulary, at the borders of tiles of tokens too.
  borders = [0, 31, 32, 63, 64, vocab - 45, vocab - 44, vocab - 1]
  for first in (0, 124, tokens - len(borders)):
    targets[first : first + len(borders)] = borders
  # Mixed signs and very different sizes.
  cotangents = rng.standard_normal((2, tokens)) * np.exp(rng.standard_normal((2, tokens)))
  return hidden, table, jnp.asarray(targets, jnp.int32), *jnp.asarray(cotangents, jnp.float32)


@functools.partial(jax.jit, static_argnames=("temperature", "module"))
def _forward(hidden, table, targets, temperature, module):
  return module.forward(
    hidden, table, targets, temperature=temperature, tiles=_TILES, interpret=True
  )


@functools.partial(jax.jit, static_argnames=("temperature", "module"))
def _backward(*operands, temperature, module):
  sizes = {"tiles": _TILES, "most_words": 128}
  return module.backward(*operands, temperature=temperature, interpret=True, **sizes)


def _kernels(
  hidden, table, targets, c, e, *, temperature=1.0, modules=(pallas_forward, pallas_backward)
):
  logps, entropies, lse = _forward(hidden, table, targets, temperature, modules[0])
  if modules[0] is not pallas_forward:
    return logps, entropies  # a planted fault
  operands = (hidden, table, targets, lse, entropies, c, e)
  return logps, entropies, *_backward(*operands, temperature=temperature, module=modules[1])


@functools.partial(jax.jit, static_argnames="temperature")
def _reference(hidden, table, targets, c, e, *, temperature=1.0):
  run = functools.partial(reference.logprob_head, temperature=temperature)
  wide = (a.astype(jnp.float32) for a in (hidden, table))
  outputs, pull = jax.vjp(lambda x, w: run(x, w, targets), *wide)
  return *outputs, *pull((c, e))


def _relative(got, want):
  got, want = (np.asarray(a, np.float64) for a in (got, want))
  assert got.shape == want.shape and np.isfinite(got).all()
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def _check(dtype, vocab, temperature=1.0, **changes):
  problem = _problem(dtype, vocab)
  got = _kernels(*problem, temperature=temperature, **changes)
  assert [a.dtype for a in got] == [jnp.float32, jnp.float32, dtype, dtype][: len(got)]
  for a, b in zip(got, _reference(*problem, temperature=temperature)):
    assert _relative(a, b) < _LIMIT[dtype]


@pytest.mark.parametrize(
  ("dtype", "vocab", "temperature"),
  [(jnp.float32, 300, 0.7), (jnp.bfloat16, 300, 1.0), (jnp.bfloat16, 256, 2.0)],
)
def test_equals_the_reference(dtype, vocab, temperature):
  _check(dtype, vocab, temperature)


_FAULTS = {
  "sums not rescaled to a new maximum": (0, "sum_ = scale * sum_ + ", "sum_ = sum_ + "),
  "weighted sum not shifted": (0, "weighted[:, columns] + step * sum_", "weighted[:, columns]"),
  "targets of a strip's last register lost": (0, "range(registers)", "range(registers - 1)"),
  "words behind the last": (0, "jnp.where(word < vocab, z, LOW)", "z"),
  "last strip left out": (0, "add(second, y_ref, start + rows)", "pass"),
  "tokens summed before they are scaled": (
    *(1, "dlogprobs / temp", "jnp.full_like(dlogprobs, jnp.mean(dlogprobs)) / temp"),
  ),
  "overlap of the last block counted twice": (1, "live = tile >= where[1]", "live = tile >= 0"),
  "sum of a tile not begun at zero": (1, "_zero(sums)", "pass"),
  "last tokens left out": (1, "live & (token_tile == token_tiles - 1)", "live & (token_tile == 0)"),
  "zeros behind the last word": (1, "jnp.where(word < vocab, z, pallas_forward.LOW)", "z"),
  "one rounding of dz": (1, "(dz - high.astype(jnp.float32))", "(0 * dz)"),
  "sums left in the scale of the cotangents": (1, "sums[rows, :] * inverse", "sums[rows, :]"),
  "dead rows in the low part": (1, "      _zero(ref)", "      _zero(dz_refs[0])"),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_planted_faults_are_caught(fault):
  which, right, wrong = _FAULTS[fault]
  modules = [pallas_forward, pallas_backward]
  source = inspect.getsource(modules[which])
  assert source.count(right) == 1
  modules[which] = types.ModuleType("faulty")
  exec(compile(source.replace(right, wrong), "faulty", "exec"), modules[which].__dict__)
  with pytest.raises(AssertionError):
    _check(jnp.bfloat16, 300, modules=tuple(modules))


@functools.partial(jax.jit, static_argnames="implementation")
def _op(hidden, table, targets, c, e, implementation="interpret"):
  run = lambda x, w: op.logprob_head(x, w, targets, implementation=implementation)
  outputs, pull = jax.vjp(run, hidden, table)
  return *outputs, *pull((c, e))


def test_a_float32_table_has_a_float32_gradient():
  hidden, table, *rest = _problem(jnp.bfloat16, 300)
  got = _op(hidden, table.astype(jnp.float32), *rest)
  want = _reference(hidden, table, *rest)
  assert [a.dtype for a in got[2:]] == [jnp.bfloat16, jnp.float32]
  # Not rounded at the end, so far nearer than bfloat16 could be.
  for i, limit in ((2, 2e-3), (3, 2e-5)):
    assert _relative(got[i], want[i]) < limit
  plain = _op(hidden, table.astype(jnp.float32), *rest, implementation="reference")
  assert [a.dtype for a in plain] == [a.dtype for a in got]


def test_masked_tokens_add_exactly_nothing():
  hidden, table, targets, c, e = _problem(jnp.float32, 300)
  keep = jnp.arange(200) % 3 == 0
  got = _kernels(hidden, table, targets, jnp.where(keep, c, 0.0), jnp.where(keep, e, 0.0))
  assert not np.any(np.asarray(got[2])[~np.asarray(keep)])
  alone = _reference(hidden[keep], table, targets[keep], c[keep], e[keep])
  assert _relative(got[3], alone[3]) < 2e-6


def test_extreme_logits_stay_finite():
  hidden, table, targets, c, e = _problem(jnp.float32, 300, scale=300.0)
  z = hidden @ table.T
  assert float(jnp.max(jnp.abs(z))) > 1e4
  for scale in (1.0, -1.0):
    got = _kernels(scale * hidden, table, targets, c, e)
    assert all(np.isfinite(np.asarray(a)).all() for a in got)
    assert np.all(np.asarray(got[0]) <= 0) and np.all(np.asarray(got[1]) >= -1e-3)


def test_the_kernels_are_in_a_program_for_a_tpu():
  shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in _problem(jnp.bfloat16, 300)]
  lower = lambda how: (
    _op.trace(*shapes, implementation=how).lower(lowering_platforms=("tpu",)).as_text()
  )
  text = lower("auto")
  assert "logprob_head_forward" in text and "logprob_head_backward" in text
  assert "tpu_custom_call" not in lower("reference")


@pytest.mark.parametrize("sizes", [{"tokens": 100, "words": 64}, {"tokens": 128, "words": 40}])
def test_tiles_that_fill_no_registers_are_refused(sizes):
  with pytest.raises(ValueError, match="want a multiple of"):
    tiles_lib.HeadTiles(**sizes)


def test_good_tiles_divide_the_vocabulary():
  good = functools.partial(tiles_lib.good, 16_384, most_tokens=1024)
  assert good(248_320, 4096) == tiles_lib.HeadTiles(tokens=1024, words=512)
  assert good(248_320, 8192).tokens == 512
  assert 151_552 % good(151_552, 4096).words == 0
  assert good(1000, 128) == tiles_lib.HeadTiles(tokens=1024, words=512)


def test_a_width_that_fills_no_lanes_is_plain_jax():
  hidden, table, *rest = _problem(jnp.float32, 300)
  got = _op(hidden[:, :24], table[:, :24], *rest)
  want = _op(hidden[:, :24], table[:, :24], *rest, implementation="reference")
  assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
