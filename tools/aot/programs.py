"""Small programs for the TPU compiler: what the tests compile, and examples of builders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def mesh_of(topology: str, shape: Sequence[int], names: Sequence[str]):
  """A mesh over the devices of a TPU topology that is not there, such as tpu7x:4x4x8."""
  from jax.experimental import topologies

  described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
  return topologies.make_mesh(described, tuple(shape), tuple(names))


def sharded_product(
  *,
  topology: str = "tpu7x:4x4x8",
  mesh: Sequence[int] = (32, 4, 2),
  rows: int = 4096,
  width: int = 2048,
  layers: int = 3,
  overlap: bool = True,
  extra_gather: bool = False,
  doubled_buffer: bool = False,
) -> Any:
  """A scan over layers: gather a weight over fsdp, multiply, multiply by a Pallas kernel.

  Args:
    topology: TPU topology.
    mesh: Devices along fsdp, context, expert.
    rows: Rows per device.
    width: Width of the weights, [layers, width, width].
    layers: Length of the scan.
    overlap: Let the gather of a layer run beside the product before it, else tie it behind.
    extra_gather: Gather each weight a second time.
    doubled_buffer: Keep a second copy of the activations alive through the scan.

  Returns:
    The lowered program.
  """
  import jax
  import jax.numpy as jnp
  from jax import lax
  from jax.experimental import pallas as pl
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  devices = mesh_of(topology, mesh, ("fsdp", "context", "expert"))
  block = 512

  def kernel(x_ref, w_ref, out_ref):
    out_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(
      out_ref.dtype
    )

  def pallas_product(x, w):
    return pl.pallas_call(
      kernel,
      grid=(rows // block, width // block),
      in_specs=[
        pl.BlockSpec((block, width), lambda i, j: (i, 0)),
        pl.BlockSpec((width, block), lambda i, j: (0, j)),
      ],
      out_specs=pl.BlockSpec((block, block), lambda i, j: (i, j)),
      out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
      name="block_product",
    )(x, w)

  gather = lambda w: lax.all_gather(w, "fsdp", axis=0, tiled=True)

  def layer(carry, weights):
    x, kept = carry
    first, second = weights
    if not overlap:
      x, first, second = lax.optimization_barrier((x, first, second))
      first = gather(first)
      x, first = lax.optimization_barrier((x, first))
    else:
      first = gather(first)
    x = jnp.dot(x, first, preferred_element_type=jnp.float32).astype(x.dtype)
    if not overlap:
      x, second = lax.optimization_barrier((x, second))
      second = gather(second)
      x, second = lax.optimization_barrier((x, second))
    else:
      second = gather(second)
    x = pallas_product(x, second)
    if extra_gather:
      again = gather(lax.optimization_barrier(weights[0]) * 2)
      x = x + jnp.dot(x, again, preferred_element_type=jnp.float32).astype(x.dtype)
    if doubled_buffer:
      kept = kept + x
    return (x, kept), None

  def step(x, weights):
    kept = x * 2 if doubled_buffer else jnp.zeros((), x.dtype)
    (x, kept), _ = lax.scan(layer, (x, kept), weights)
    total = x.astype(jnp.float32).sum() + kept.astype(jnp.float32).sum()
    return lax.psum(total, ("fsdp", "context", "expert"))

  rows_spec = P(("fsdp", "context", "expert"), None)
  weight_spec = P(None, "fsdp", None)
  specs = (rows_spec, (weight_spec, weight_spec))
  program = jax.shard_map(step, mesh=devices, in_specs=specs, out_specs=P(), check_vma=False)
  struct = lambda shape, spec: jax.ShapeDtypeStruct(
    shape, jnp.bfloat16, sharding=NamedSharding(devices, spec)
  )
  weight = struct((layers, width, width), weight_spec)
  count = mesh[0] * mesh[1] * mesh[2]
  return (
    jax.jit(program)
    .trace(struct((rows * count, width), rows_spec), (weight, weight))
    .lower(lowering_platforms=("tpu",))
  )


def too_large(*, gib: int = 60) -> Any:
  """A program that holds several float32 arrays of `gib` GiB on every device at once."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  devices = mesh_of("tpu7x:2x2x1", (8,), ("fsdp",))
  width = 1024
  struct = lambda rows: jax.ShapeDtypeStruct(
    (rows, width), jnp.float32, sharding=NamedSharding(devices, P())
  )

  def step(x, w):
    y = jnp.sin(x) @ w
    return (y * y.sum()).sum() + (jnp.cos(x) * y.mean(0)).sum()

  lower = jax.jit(step).trace(struct(gib * 2**30 // (4 * width)), struct(width)).lower
  return lower(lowering_platforms=("tpu",))


def offloaded_update(*, layers: int = 4, width: int = 1024, rows: int = 2048) -> Any:
  """Nested scans with a checkpoint, a float8 product, and an optimizer state in host memory."""
  import jax
  import jax.numpy as jnp
  from jax import lax
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  devices = mesh_of("tpu7x:2x2x1", (4, 2), ("fsdp", "expert"))
  spec = P(None, "fsdp", None)

  def loss(weights, x):
    def inner(x, w):
      return jnp.tanh(x @ w), None

    def outer(x, w):
      w = lax.all_gather(w, "fsdp", axis=0, tiled=True)
      x, _ = lax.scan(inner, x, jnp.stack([w, w * 2, w * 3]))
      small = x.astype(jnp.float8_e4m3fn)
      return x + jnp.dot(small, w.astype(jnp.float8_e4m3fn)).astype(x.dtype), None

    x, _ = lax.scan(jax.checkpoint(outer), x, weights)
    return x.astype(jnp.float32).sum()

  def local(weights, x):
    value, grads = jax.value_and_grad(loss)(weights, x)
    return lax.psum(value, ("fsdp", "expert")), lax.psum(grads, "expert")

  mapped = jax.shard_map(
    local,
    mesh=devices,
    in_specs=(spec, P(("fsdp", "expert"), None)),
    out_specs=(P(), spec),
    check_vma=False,
  )

  def step(weights, moment, x):
    value, grads = mapped(weights, x)
    moment = jax.device_put(moment, jax.memory.Space.Device)
    moment = 0.9 * moment + grads.astype(jnp.float32)
    weights = weights - (0.01 * moment).astype(weights.dtype)
    return weights, jax.device_put(moment, jax.memory.Space.Host), value

  on = lambda s, kind=None: (
    NamedSharding(devices, s, memory_kind=kind) if kind else NamedSharding(devices, s)
  )
  struct = jax.ShapeDtypeStruct
  weights = struct((layers, width, width), jnp.bfloat16, sharding=on(spec))
  moment = struct((layers, width, width), jnp.float32, sharding=on(spec, "pinned_host"))
  x = struct((rows * 8, width), jnp.bfloat16, sharding=on(P(("fsdp", "expert"), None)))
  jitted = jax.jit(
    step,
    donate_argnums=(0, 1),
    out_shardings=(on(spec), on(spec, "pinned_host"), on(P())),
  )
  return jitted.trace(weights, moment, x).lower(lowering_platforms=("tpu",))
