"""Tiles and arithmetic of the flash attention kernels, as options."""

from __future__ import annotations

import dataclasses

from kernels.base import options

# A word of 32 bits holds two bits for each part of a key block, and two flags.
_MOST_PARTS = 14
_LANES = 128
# Up to this many scores per head and row the whole matrix is cheaper than a loop over blocks: the
# op then runs no kernel unless it is asked for by name.
DENSE_SCORES = 1024 * 1024


def _block(value: int) -> str | None:
  return None if value % _LANES == 0 else f"want a multiple of {_LANES}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
  """Tiles of flash attention.

  Raises:
    options.OptionError: A value is not allowed, or a key block is no multiple of its part or has too
      many parts.
  """

  sa_block_q: int = options.option(
    1024, help="Queries per block, forward.", minimum=_LANES, check=_block
  )
  sa_block_kv: int = options.option(
    4096, help="Keys fetched per block, forward.", minimum=_LANES, check=_block
  )
  sa_block_kv_compute: int = options.option(
    512, help="Keys per product within a block, forward.", minimum=_LANES, check=_block
  )
  sa_block_q_dkv: int = options.option(
    2048, help="Queries per block, backward.", minimum=_LANES, check=_block
  )
  sa_block_kv_dkv: int = options.option(
    2048, help="Keys fetched per block, backward.", minimum=_LANES, check=_block
  )
  sa_block_kv_dkv_compute: int = options.option(
    512, help="Keys per product within a block, backward.", minimum=_LANES, check=_block
  )
  sa_use_base2_exp: bool = options.option(
    False,
    help="Exponentials to base 2 of scores x scale x log2(e): one product a score less.",
  )
  dq_reduction_steps: int = options.option(
    1,
    help="Float32 buffers that key blocks add to the queries' gradient in turn.",
    minimum=1,
    maximum=8,
  )

  def __post_init__(self):
    options.validate(self)
    for whole, part in (
      ("sa_block_kv", "sa_block_kv_compute"),
      ("sa_block_kv_dkv", "sa_block_kv_dkv_compute"),
    ):
      keys, keys_at_once = getattr(self, whole), getattr(self, part)
      if keys % keys_at_once or keys // keys_at_once > _MOST_PARTS:
        raise options.OptionError(
          f"{whole}={keys} and {part}={keys_at_once}: want {whole} to be 1 to {_MOST_PARTS} times"
          f" {part}"
        )


def _near(block: int, length: int) -> str:
  """Blocks that do divide a length, next to the given one."""
  legal = [n for n in range(_LANES, length + 1, _LANES) if length % n == 0]
  below = [n for n in legal if n < block][-1:]
  near = below + [n for n in legal if n > block][:1]
  return (
    f"nearest that do: {' and '.join(map(str, near))}" if near else f"no multiple of {_LANES} does"
  )


def misfits(given: AttentionOptions, queries: int, keys: int) -> list[str]:
  """What does not divide a rank's tokens; such blocks work, padded, but waste a part of the last.

  Args:
    given: Tiles.
    queries: Tokens of a row on one rank.
    keys: Tokens of the row on all ranks of its context group.
  """
  out = []
  for name, length in (
    ("sa_block_q", queries),
    ("sa_block_q_dkv", queries),
    ("sa_block_kv", keys),
    ("sa_block_kv_dkv", keys),
  ):
    block = getattr(given, name)
    if length % block:
      out.append(
        f"{name}={block} does not divide the {length} tokens it cuts; {_near(block, length)}"
      )
  return out
