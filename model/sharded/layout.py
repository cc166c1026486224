"""Where every parameter lies on a mesh, and which collectives that costs: the sharding plan.

Three rule sets name the mesh axes that split a weight:

                          dense weights            experts              optimizer of dense weights
  default                 fsdp                     expert; fsdp         as the weights
  cp-as-ep                fsdp, context, expert    context, expert; fsdp  as the weights
  cp-as-ep-dense-no-cp    fsdp, expert             context, expert; fsdp  fsdp, expert, context

A dense matrix is split along its embedding dimension, a table along its vocabulary, an expert tensor
by expert and along its embedding dimension over fsdp; vectors are whole on every device.  The
optimizer's axes start with the weights' own, so that a weight's shard holds its optimizer's shards
and cutting one out of it moves nothing.

A layer gathers what it needs and the transpose of that gather reduces its gradient over the same
axes.  Over the axes that a weight is not split over, its gradient stays unreduced, one partial sum a
rank, until the update: the ranks' sums lie along a leading axis of the accumulator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.base.mesh import DEVICE_ORDER
from kernels.base.options import UserError
from model import api
from model.config import ModelConfig
from model.sharded.options import DENSE_AXES, ShardedOptions

Tree = Any
Axes = tuple[str, ...]

ROWS: Axes = (
  "fsdp",
  "expert",
)  # packed rows are split over these, the tokens of a row over context


@dataclasses.dataclass(frozen=True)
class Rule:
  """Mesh axes of one rule set.

  Attributes:
    dense: Axes that split a dense weight.
    expert: Axes that split the experts.
    state: Axes that split what the optimizer keeps of a dense weight, `dense` first.
  """

  dense: Axes
  expert: Axes
  state: Axes


RULES = {
  "default": Rule(DENSE_AXES["default"], ("expert",), ("fsdp",)),
  "cp-as-ep": Rule(DENSE_AXES["cp-as-ep"], ("context", "expert"), ("fsdp", "context", "expert")),
  "cp-as-ep-dense-no-cp": Rule(
    DENSE_AXES["cp-as-ep-dense-no-cp"], ("context", "expert"), ("fsdp", "expert", "context")
  ),
}


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter.

  Attributes:
    spec: Of the stored weight.
    state: Of masters, moments and the reduced gradient.
    gather: (dimension counted from the end, axes) of each gather that a layer makes.
    unreduced: Axes over which the accumulated gradient is still a sum of partial sums.
    exact: It travels in its own type, not in the one it is multiplied in.
  """

  spec: P
  state: P
  gather: tuple[tuple[int, Axes], ...]
  unreduced: Axes
  exact: bool = False

  @property
  def sums(self) -> P:
    """Of the accumulated gradient, which has a leading axis of partial sums where there are any."""
    return P(self.unreduced, *self.spec) if self.unreduced else self.spec


@dataclasses.dataclass(frozen=True)
class Layout:
  """The plan of a model on a mesh.

  Attributes:
    mesh: The devices.
    leaves: A `Leaf` for every parameter, in the parameters' tree.
    experts: Axes that split the experts, outermost first.
  """

  mesh: Mesh
  leaves: Tree
  experts: Axes

  def size(self, axes: str | Axes) -> int:
    """Ranks along one axis or the product over several."""
    axes = (axes,) if isinstance(axes, str) else axes
    count = 1
    for axis in axes:
      count *= self.mesh.shape[axis]
    return count


def _leaf(names: tuple[str, ...], rule: Rule, ring: bool, mesh: Mesh) -> Leaf:
  spec: list[Any] = [None] * len(names)
  state: list[Any] = [None] * len(names)
  gather: list[tuple[int, Axes]] = []

  def split(name: str, axes: Axes, state_axes: Axes, gathered: bool):
    at = names.index(name)
    spec[at], state[at] = axes, state_axes
    if gathered:
      gather.append((at - len(names), axes))

  if "expert" in names:
    split("embed", ("fsdp",), ("fsdp",), True)
    split("expert", rule.expert, rule.expert, not ring)
  elif "vocab" in names:
    split("vocab", rule.dense, rule.state, True)
  elif "embed" in names and "one" not in names:
    split("embed", rule.dense, rule.state, True)
  used = {axis for axes in spec for axis in (axes or ())}
  unreduced = tuple(a for a in DEVICE_ORDER if a not in used and mesh.shape[a] > 1)
  return Leaf(P(*spec), P(*state), tuple(gather), unreduced, exact="router" in names)


def plan(config: ModelConfig, options: ShardedOptions, mesh: Mesh) -> Layout:
  """Places every parameter.

  Args:
    config: The model.
    options: Which rule set, and whether tokens travel to experts.
    mesh: Axes fsdp, context, expert.

  Raises:
    UserError: A size of the model does not divide over the axes that split it.
  """
  rule = RULES[options.custom_mesh_and_rule]
  names = api.logical_axes(config)
  is_names = lambda x: isinstance(x, tuple)
  make = lambda axes: _leaf(axes, rule, options.use_ring_of_experts, mesh)
  layout = Layout(mesh, jax.tree.map(make, names, is_leaf=is_names), rule.expert)
  wanted = [
    ("hidden_size", config.hidden_size, rule.state),
    ("vocab_size", config.vocab_size, rule.state),
  ]
  if config.is_moe:
    wanted.append(("num_experts", config.num_experts, rule.expert))
  if mesh.shape["context"] > 1 and options.gdn_cp_mode == "head":
    wanted.append(("linear_num_key_heads", config.linear_num_key_heads, ("context",)))
  for name, value, axes in wanted:
    if value % layout.size(axes):
      raise UserError(
        f"{name}={value} does not divide over {' x '.join(axes)} = {layout.size(axes)} devices"
        f" (--custom_mesh_and_rule={options.custom_mesh_and_rule}); take another mesh"
      )
  return layout
