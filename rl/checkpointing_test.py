"""Round trips, damage, and disks that fill up."""

import os
import pathlib
import resource
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.base import options
from rl import checkpointing


def _state(seed):
  key = jax.random.key(seed)
  return {
    "params": {"a": jax.random.normal(key, (33, 17)), "b": jnp.arange(5, dtype=jnp.bfloat16)},
    "residual": jnp.arange(7, dtype=jnp.uint16),
    "count": jnp.int32(seed),
  }


def _same(one, other):
  return all(
    x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  )


def test_round_trip_is_bit_exact_and_old_ones_go(tmp_path):
  store = checkpointing.Store(tmp_path / "c", keep=2)
  for number in (1, 2, 3):
    store.save(number, _state(number), {"step": number})
  store.close()
  again = checkpointing.Store(tmp_path / "c", keep=2)
  assert again.numbers() == [2, 3] and again.newest_whole() == 3
  assert again.record(3) == {"step": 3}
  assert _same(again.restore(3, _state(0)), _state(3))
  assert _same(again.restore(2, _state(0)), _state(2))
  again.close()


def _files(folder):
  return sorted(p for p in pathlib.Path(folder).rglob("*") if p.is_file())


def test_any_missing_cut_or_changed_file_makes_the_one_before_be_used(tmp_path):
  store = checkpointing.Store(tmp_path / "c", keep=2)
  store.save(1, _state(1), {"step": 1})
  store.save(2, _state(2), {"step": 2})
  store.close()
  names = [p.relative_to(tmp_path / "c/0000000002") for p in _files(tmp_path / "c/0000000002")]
  assert len(names) >= 4

  def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

  def cut(path):
    os.truncate(path, path.stat().st_size // 2)

  for name in names:
    for damage in (pathlib.Path.unlink, cut, flip):
      path = tmp_path / "c/0000000002" / name
      before = path.read_bytes()
      if not before:
        continue
      damage(path)
      said = []
      again = checkpointing.Store(tmp_path / "c", say=said.append)
      assert again.newest_whole() == 1, (name, damage)
      assert len(said) == 1 and "\n" not in said[0] and "checkpoint 2 is passed over" in said[0]
      again.close()
      path.write_bytes(before)
  again = checkpointing.Store(tmp_path / "c")
  assert again.newest_whole() == 2
  again.close()


def test_all_damaged_is_refused(tmp_path):
  store = checkpointing.Store(tmp_path / "c")
  store.save(1, _state(1), {})
  store.close()
  os.unlink(tmp_path / "c/0000000001/record.json")
  again = checkpointing.Store(tmp_path / "c", say=lambda text: None)
  with pytest.raises(options.UserError, match="every checkpoint is damaged"):
    again.newest_whole()
  again.close()


def test_unfinished_ones_are_never_seen(tmp_path):
  store = checkpointing.Store(tmp_path / "c")
  store.save(1, _state(1), {})
  store.close()
  (tmp_path / "c/.0000000002.partial/arrays").mkdir(parents=True)
  again = checkpointing.Store(tmp_path / "c")
  assert again.numbers() == [1]
  assert not (tmp_path / "c/.0000000002.partial").exists()
  again.close()


def test_what_is_not_ours_stays_and_is_no_checkpoint(tmp_path):
  store = checkpointing.Store(tmp_path / "c")
  store.save(1, _state(1), {})
  store.close()
  (tmp_path / "c/.DS_Store").write_bytes(b"x")
  (tmp_path / "c/.git").mkdir()
  (tmp_path / "c/.0000000009.partial.mine").mkdir()
  (tmp_path / "c/.0000000001.removed").mkdir()
  (tmp_path / "c/7").mkdir()
  (tmp_path / "c/0000000008").write_text("")
  before = {p.name for p in (tmp_path / "c").iterdir()}
  again = checkpointing.Store(tmp_path / "c")
  assert again.numbers() == [1] and again.newest_whole() == 1
  assert {p.name for p in (tmp_path / "c").iterdir()} == before - {".0000000001.removed"}
  again.close()


def test_other_shapes_and_trees_are_refused(tmp_path):
  store = checkpointing.Store(tmp_path / "c")
  store.save(1, _state(1), {})
  store.wait()
  other = _state(1)
  other["params"]["a"] = jnp.zeros((3, 3))
  with pytest.raises(options.UserError, match="arrays"):
    store.restore(1, other)
  del other["params"]
  with pytest.raises(options.UserError, match="another model"):
    store.restore(1, other)
  store.close()


def test_full_disk_loses_nothing(tmp_path):
  """A limit on the size of files stands for a full disk: the write fails half-way."""
  store = checkpointing.Store(tmp_path / "c")
  store.save(1, _state(1), {"step": 1})
  store.wait()
  big = {**_state(2), "big": jax.random.normal(jax.random.key(0), (400_000,))}
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
  try:
    with pytest.raises(
      options.UserError, match=r"step 2 could not be written \(File too large\); .*step 1 is whole"
    ):
      store.save(2, big, {"step": 2})
      store.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, old)
  assert not list((tmp_path / "c").glob(".*"))
  # The same store goes on once there is room.
  store.save(3, big, {"step": 3})
  store.close()
  again = checkpointing.Store(tmp_path / "c")
  assert again.newest_whole() == 3
  assert _same(again.restore(1, _state(0)), _state(1))
  again.close()


def test_unwritable_folder_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(options.UserError, match="cannot be written"):
    checkpointing.Store(tmp_path / "file" / "c")
