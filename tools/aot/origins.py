"""What traced operation an instruction comes from, and what component and pass that is.

XLA names most instructions after the operation that was traced (`op_name`), and leaves the name out
where a pass of the compiler makes new ones: the masked products that a ragged product's weight
gradient becomes, fused gathers of weights, copies to the host.  Such an instruction takes the name of
the nearest named one that reads it, else of the nearest that it reads: work is done for its reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from tools.aot import hlo

_COMPONENTS = tuple(
  (name, re.compile(pattern, re.IGNORECASE))
  for name, pattern in (
    ("optimizer", r"optimizer|adam|apply_update|clip_by"),
    ("head", r"log_?prob|unembed|lm_head|[/(]head(?:[/)]|$)|logits|cross_entropy"),
    ("moe", r"moe|expert|gmm|router|ragged|dispatch|combine|top_k|searchsorted"),
    ("gdn", r"gdn|delta|conv1d|linear_attn"),
    ("attention", r"attn|attention|splash|flash|rope|mqa"),
    ("mlp", r"mlp|ffn|swiglu"),
    ("embedding", r"embed"),
    ("norm", r"norm"),
  )
)
PASSES = ("forward", "replay", "backward")
_FAR = 64  # Instructions looked at in one direction before giving up.


def named_component(op_name: str) -> str:
  """The component that a traced operation's name tells, or an empty string."""
  return next((name for name, pattern in _COMPONENTS if pattern.search(op_name)), "")


def component_of(op_name: str, resource: str) -> str:
  """The component of an instruction: by its operation's name, else by what it uses."""
  if named := named_component(op_name):
    return named
  if resource in ("wire", "host in", "host out", "copy"):
    return f"{resource}, unnamed"
  if any(word in op_name for word in ("dot_general", "einsum")):
    return "products, unnamed"
  return "other"


def pass_of(op_name: str) -> str:
  """forward, backward, or replay: the forward that a checkpoint repeats in the backward."""
  if "rematted_computation" in op_name:
    return "replay"
  return "backward" if "transpose(" in op_name else "forward"


def trace(module: hlo.Module) -> dict[str, str]:
  """The operation of every instruction, by the instruction's name.

  Args:
    module: A parsed module.

  Returns:
    Its own `op_name` where it has one; else that of what it calls, of a reader, of what it reads, or
    of the loop around it; an empty string where none of them has any.
  """
  names = {
    instruction.name: instruction.op_name or _inherited(module, computation, instruction)
    for computation in module.computations.values()
    for instruction in computation.instructions
  }
  # What is still nameless lies in a computation whose caller may have a name: a loop, a wrapper of
  # something asynchronous.  Callers stand after what they call.
  for computation in reversed(module.computations.values()):
    for instruction in computation.instructions:
      for inner in module.called_by(instruction) if names[instruction.name] else ():
        for other in inner.instructions:
          names[other.name] = names[other.name] or names[instruction.name]
  return names


def _inherited(
  module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> str:
  inner = [c for names in instruction.called.values() for c in names if c in module.computations]
  readers = lambda i: computation.users.get(i.name, ())
  operands = lambda i: (computation.by_name[o] for o in i.operands if o in computation.by_name)
  for names in (
    [i.op_name for c in inner for i in reversed(module.computations[c].instructions)],
    _nearest(instruction, readers),
    _nearest(instruction, operands),
  ):
    if given := [name for name in names if name]:
      return next(filter(named_component, given), given[0])
  return ""


def _nearest(
  start: hlo.Instruction, step: Callable[[hlo.Instruction], Iterable[hlo.Instruction]]
) -> list[str]:
  """Names of the nearest named instructions in one direction, through nameless ones alone."""
  level, met = [start], {start.name}
  while level and len(met) < _FAR:
    others = {o.name: o for i in level for o in step(i) if o.name not in met}
    if names := [o.op_name for o in others.values() if o.op_name]:
      return names
    met |= set(others)
    level = list(others.values())
  return []
