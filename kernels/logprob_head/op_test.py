"""The head in plain JAX against the definition, with cotangents of each token's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.logprob_head import op, reference, scans

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2e-3}


def _inputs(tokens=37, vocab=203, width=24, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.standard_normal((tokens, width)), dtype)
  table = jnp.asarray(rng.standard_normal((vocab, width)) * 0.7, dtype)
  targets = jnp.asarray(rng.integers(0, vocab, tokens), jnp.int32)
  cotangents = tuple(jnp.asarray(rng.standard_normal(tokens), jnp.float32) for _ in range(2))
  return hidden, table, targets, cotangents


def _relative(got, want):
  got, want = (np.asarray(a, np.float64) for a in (got, want))
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def _both(function, hidden, table, targets, cotangents, **kwargs):
  outputs, vjp = jax.vjp(lambda h, t: function(h, t, targets, **kwargs), hidden, table)
  return outputs + vjp(cotangents)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("token_chunk, vocab_block", [(8, 29), (16, 64), (512, 203), (37, 1)])
def test_equals_the_reference(dtype, temperature, token_chunk, vocab_block):
  hidden, table, targets, cotangents = _inputs(dtype=dtype)
  got = _both(
    op.logprob_head,
    hidden,
    table,
    targets,
    cotangents,
    temperature=temperature,
    token_chunk=token_chunk,
    vocab_block=vocab_block,
  )
  # The reference on the same operands, in float32 throughout.
  want = _both(
    reference.logprob_head,
    hidden.astype(jnp.float32),
    table.astype(jnp.float32),
    targets,
    cotangents,
    temperature=temperature,
  )
  assert [a.dtype for a in got] == [jnp.float32, jnp.float32, dtype, dtype]
  for g, w in zip(got, want):
    assert _relative(g, w) < TOLERANCE[dtype]


def _overlap_counts_twice(vocab, block):
  wanted = jnp.arange(0, vocab, block, dtype=jnp.int32)
  starts = jnp.minimum(wanted, vocab - block)
  return starts, starts


def _one_product(a, b, axis):
  """The low part of the float32 side is left out."""
  half = b[: b.shape[0] // 2] if b.dtype == jnp.bfloat16 else b
  return jax.lax.dot_general(
    a.astype(jnp.bfloat16),
    half.astype(jnp.bfloat16),
    (((axis,), (0,)), ((), ())),
    preferred_element_type=jnp.float32,
  )


@pytest.mark.parametrize(
  ("name", "fault"),
  [
    ("_blocks", _overlap_counts_twice),
    ("_logits", lambda x, rows, temperature: jnp.dot(x, rows.T, precision="highest")),
    ("_dot_float32", _one_product),
  ],
)
def test_planted_faults_are_caught(name, fault, monkeypatch):
  case = (jnp.float32, 0.5, 16, 64)
  test_equals_the_reference(*case)
  monkeypatch.setattr(scans, name, fault)
  jax.clear_caches()
  with pytest.raises(AssertionError):
    test_equals_the_reference(*case)
  jax.clear_caches()


def test_float32_is_as_near_the_truth_as_the_reference():
  hidden, table, targets, cotangents = _inputs(tokens=300, vocab=2048, width=64)
  z = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
  lse = np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)
  p = np.exp(z - lse[:, None])
  logp = z[np.arange(300), targets] - lse
  entropy = lse - (p * z).sum(-1)
  c, e = (np.asarray(a, np.float64)[:, None] for a in cotangents)
  dz = c * (np.eye(2048)[np.asarray(targets)] - p) - e * p * (z - (p * z).sum(-1, keepdims=True))
  want = (logp, entropy, dz @ np.asarray(table, np.float64), dz.T @ np.asarray(hidden, np.float64))
  got = _both(op.logprob_head, hidden, table, targets, cotangents, token_chunk=64, vocab_block=256)
  for g, w in zip(got, want):
    assert _relative(g, w) < 2e-6


def test_cotangents_belong_to_their_tokens():
  # A head that sums over tokens first and scales by the mean cotangent passes for equal ones and
  # is far off for these: the error that the tolerance above must be able to see.
  hidden, table, targets, (c, _) = _inputs()
  zero = jnp.zeros_like(c)
  right = _both(op.logprob_head, hidden, table, targets, (c, zero), token_chunk=8)[3]
  ones = _both(op.logprob_head, hidden, table, targets, (jnp.ones_like(c), zero), token_chunk=8)[3]
  summed_first = jnp.mean(c) * ones
  want = _both(reference.logprob_head, hidden, table, targets, (c, zero))[3]
  assert _relative(right, want) < 2e-6
  assert _relative(summed_first, want) > 0.5
  same = jnp.full_like(c, 0.3)
  equal = _both(reference.logprob_head, hidden, table, targets, (same, zero))[3]
  assert _relative(0.3 * ones, equal) < 2e-6


def test_masked_tokens_add_exactly_nothing():
  hidden, table, targets, (c, e) = _inputs()
  keep = jnp.arange(37) % 3 == 0
  masked = (jnp.where(keep, c, 0.0), jnp.where(keep, e, 0.0))
  _, _, dhidden, dtable = _both(op.logprob_head, hidden, table, targets, masked, token_chunk=8)
  assert not np.any(np.asarray(dhidden)[~np.asarray(keep)])
  _, _, _, alone = _both(
    op.logprob_head, hidden[keep], table, targets[keep], (c[keep], e[keep]), token_chunk=8
  )
  assert _relative(dtable, alone) < 2e-6
  # Nothing but masked tokens: zeros, finite.
  nothing = (jnp.zeros_like(c), jnp.zeros_like(e))
  for array in _both(op.logprob_head, hidden, table, targets, nothing)[2:]:
    assert not np.any(np.asarray(array))


def test_extreme_logits_stay_finite():
  hidden, table, targets, cotangents = _inputs()
  for array in _both(op.logprob_head, hidden * 300, table, targets, cotangents, vocab_block=29):
    assert np.all(np.isfinite(np.asarray(array)))
  logp, entropy = op.logprob_head(hidden * 300, table, targets, vocab_block=29)
  assert np.all(np.asarray(logp) <= 0) and np.all(np.asarray(entropy) >= -1e-3)


def test_temperature_acts_on_both_outputs():
  hidden, table, targets, _ = _inputs()
  got = op.logprob_head(hidden, table, targets, temperature=0.5)
  want = op.logprob_head(2 * hidden, table, targets)
  for g, w in zip(got, want):
    np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_gradient_of_a_float32_table_is_float32_with_bfloat16_states():
  hidden, table, targets, cotangents = _inputs(dtype=jnp.bfloat16)
  got = _both(op.logprob_head, hidden, table.astype(jnp.float32), targets, cotangents)
  want = _both(
    reference.logprob_head,
    hidden.astype(jnp.float32),
    table.astype(jnp.float32),
    targets,
    cotangents,
  )
  assert got[3].dtype == jnp.float32
  # Not rounded at the end, so far nearer than bfloat16 could be.
  assert _relative(got[3], want[3]) < 2e-5


def test_no_array_of_tokens_by_vocabulary():
  tokens, vocab = 4096, 50_000
  shapes = (
    jax.ShapeDtypeStruct((tokens, 16), jnp.bfloat16),
    jax.ShapeDtypeStruct((vocab, 16), jnp.bfloat16),
    jax.ShapeDtypeStruct((tokens,), jnp.int32),
  )

  def total(hidden, table, targets):
    logp, entropy = op.logprob_head(hidden, table, targets, token_chunk=256, vocab_block=1024)
    return jnp.sum(logp) + jnp.sum(entropy)

  compiled = jax.jit(jax.grad(total, (0, 1))).lower(*shapes).compile()
  # Far below one float32 [tokens, vocab], which the reference would need.
  assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocab * 4 / 20


def test_blocks_fill_the_arrays():
  # 248,320 has no divisor near 8,192 that is a multiple of 256; 151,552 has 37 x 4,096.
  assert [scans.choose_block(v) for v in (248_320, 151_552, 65_536, 512)] == [8192, 4096, 8192, 512]


@pytest.mark.parametrize(
  "change, text",
  [
    ({"temperature": 0.0}, "temperature"),
    ({"token_chunk": 0}, "token_chunk"),
    ({"token_chunk": 2.5}, "token_chunk"),
    ({"targets": jnp.zeros(37)}, "integers, not float32"),
    ({"table": jnp.zeros((0, 24))}, "a vocabulary"),
    ({"targets": jnp.zeros(3, jnp.int32)}, "a target for each"),
    ({"table": jnp.zeros((5, 7))}, "hidden \\[N, D\\]"),
    ({"table": jnp.zeros((5, 24), jnp.int32)}, "float32 or bfloat16"),
  ],
)
def test_bad_arguments_are_refused(change, text):
  hidden, table, targets, _ = _inputs()
  kwargs = {"hidden": hidden, "table": table, "targets": targets} | change
  with pytest.raises(ValueError, match=text):
    op.logprob_head(**kwargs)
