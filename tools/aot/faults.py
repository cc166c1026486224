"""Builders that fail in the ways a compile can fail; tests plant them."""

from __future__ import annotations

import os
import sys
import time


def abort() -> None:
  """Ends the process as the compiler does when one of its own checks fails."""
  print("I0000 00:00:00.000000  1 pass.cc:10] a pass began", file=sys.stderr)
  print("F0000 00:00:00.000000  1 layout.cc:42] Check failed: planted.ok()", file=sys.stderr)
  print("    @     0x7fcc97651050  (unknown)", file=sys.stderr, flush=True)
  os.abort()


def hang(*, pid_file: str) -> None:
  """Never returns, and starts a process that does not return either."""
  child = os.fork()
  if child == 0:
    time.sleep(3600)
  with open(pid_file, "w") as file:
    file.write(str(child))
  time.sleep(3600)


def swell() -> None:
  """Takes memory without end."""
  held = []
  while True:
    held.append(bytearray(os.urandom(1)) * (64 * 2**20))
    time.sleep(0.02)


def mistake() -> None:
  """Raises while the program is built."""
  raise ValueError("planted: axis of 7 does not divide")


def wrong_mesh() -> None:
  """A value that the trainer's own code refuses without saying that it is the user's."""
  from kernels.base import mesh

  mesh.MeshShape.parse("2x2")


def wrong_shape() -> None:
  """A mistake in the trainer's code that JAX finds."""
  import jax
  import jax.numpy as jnp

  model = {"__name__": "model.planted", "jax": jax, "jnp": jnp}
  exec("def add():\n  return jax.vmap(jnp.add)(jnp.zeros(3), jnp.zeros(4))", model)
  model["add"]()


def refused():
  """A program that the TPU compiler refuses: a block that no tiling of Mosaic's serves."""
  import jax
  import jax.numpy as jnp
  from jax.experimental import pallas as pl
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  from tools.aot import programs

  devices = programs.mesh_of("tpu7x:2x2x1", (8,), ("fsdp",))

  def kernel(x_ref, out_ref):
    out_ref[...] = jnp.sort(x_ref[...], axis=0)

  def step(x):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32))(x)

  struct = jax.ShapeDtypeStruct((16, 128), jnp.float32, sharding=NamedSharding(devices, P()))
  mapped = jax.shard_map(step, mesh=devices, in_specs=P(), out_specs=P(), check_vma=False)
  return jax.jit(mapped).trace(struct).lower(lowering_platforms=("tpu",))
