"""Zig-zag order on mocked devices against index arithmetic."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kernels.attention import zigzag

jax.config.update("jax_num_cpu_devices", 8)


def _on_ranks(function, ranks):
  mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
  spec = PartitionSpec(None, "context")
  return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))


def _row(ranks, dtype=np.float32):
  bits = np.random.default_rng(ranks).integers(0, 2**32, (2, 12 * ranks, 3), dtype=np.uint32)
  return bits.view(dtype)


def test_four_ranks_by_hand():
  assert [zigzag.chunks_of(r, 4) for r in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
  assert zigzag.permutation(8, 4).tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
  even, odd = zigzag.pairs(4)
  assert even == ((0, 0), (1, 2), (2, 3), (3, 1))
  assert odd == ((0, 1), (1, 3), (2, 2), (3, 0))


@pytest.mark.parametrize("ranks", range(1, 65))
def test_both_moves_are_bijections(ranks):
  for moves in zigzag.pairs(ranks):
    assert sorted(a for a, _ in moves) == sorted(b for _, b in moves) == list(range(ranks))
  order = zigzag.permutation(6 * ranks, ranks)
  np.testing.assert_array_equal(
    order[zigzag.inverse_permutation(6 * ranks, ranks)], np.arange(6 * ranks)
  )
  # Causal work: visible keys of each rank, all equal.
  work = (order + 1).reshape(ranks, -1).sum(axis=1)
  assert len(set(work.tolist())) == 1


@pytest.mark.parametrize("order", zigzag.ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_ranks_hold_their_chunks_and_return_them_bit_for_bit(ranks, order):
  row = _row(ranks)
  there = _on_ranks(lambda x: zigzag.to_zigzag(x, "context", order=order), ranks)
  back = _on_ranks(lambda x: zigzag.from_zigzag(x, "context", order=order), ranks)
  moved = np.asarray(there(row))
  want = row[:, zigzag.permutation(row.shape[1], ranks)]
  np.testing.assert_array_equal(moved.view(np.uint32), want.view(np.uint32))
  np.testing.assert_array_equal(np.asarray(back(moved)).view(np.uint32), row.view(np.uint32))


@pytest.mark.parametrize("order", zigzag.ORDERS)
def test_derivative_is_the_way_back(order):
  row = np.random.default_rng(0).normal(size=(2, 32, 3)).astype(np.float32)
  there = _on_ranks(lambda x: zigzag.to_zigzag(x, "context", order=order), 4)
  _, vjp = jax.vjp(there, row)
  np.testing.assert_array_equal(vjp(there(row))[0], row)


def test_other_axes_and_integers():
  ids = np.arange(48, dtype=np.int32).reshape(24, 2)
  mesh = Mesh(np.array(jax.devices()[:4]), ("context",))
  spec = PartitionSpec("context")
  run = lambda x: zigzag.to_zigzag(x, "context", axis=0)
  got = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(ids)
  np.testing.assert_array_equal(got, ids[zigzag.permutation(24, 4)])


def _pairs_in(order):
  run = _on_ranks(lambda x: zigzag.to_zigzag(x, "context", order=order), 4)
  text = run.lower(jnp.zeros((1, 16, 2))).compile().as_text()
  found = re.findall(r"source_target_pairs=\{(.*?)\}\}", text)
  return [re.findall(r"\{(\d+),(\d+)", "{" + pairs.lstrip("{") + "}") for pairs in found]


def test_self_pairs_stay_out_of_the_permutes():
  everything, others = (_pairs_in(order) for order in zigzag.ORDERS)
  assert len(everything) == len(others) == 2
  assert sum(a == b for moves in everything for a, b in moves) == 2
  assert sum(len(moves) for moves in others) == 6
  assert not any(a == b for moves in others for a, b in moves)


def test_planted_fault_a_wrong_pair_is_seen(monkeypatch):
  even, odd = zigzag.pairs(4)
  monkeypatch.setattr(zigzag, "pairs", lambda ranks: (odd, even))
  row = _row(4)
  moved = np.asarray(_on_ranks(lambda x: zigzag.to_zigzag(x, "context"), 4)(row))
  assert (moved.view(np.uint32) != row[:, zigzag.permutation(48, 4)].view(np.uint32)).any()


def test_refusals():
  with pytest.raises(ValueError, match="multiple of 2 x 4"):
    zigzag.permutation(12, 4)
  with pytest.raises(ValueError, match="even number of tokens a rank, got 3"):
    _on_ranks(lambda x: zigzag.to_zigzag(x, "context"), 4)(jnp.zeros((1, 12)))
  with pytest.raises(ValueError, match="dual_chunk_swap_local_self"):
    _on_ranks(lambda x: zigzag.to_zigzag(x, "context", order="ring"), 4)(jnp.zeros((1, 16)))
