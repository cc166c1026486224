"""Reads the text of a scheduled HLO module: computations, instructions, shapes, loops.

Any HLO text will do, from whichever trainer.  Nothing here knows what an operation costs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_DTYPE_BITS = {
  "pred": 8,
  "s2": 2,
  "u2": 2,
  "s4": 4,
  "u4": 4,
  "s8": 8,
  "u8": 8,
  "s16": 16,
  "u16": 16,
  "s32": 32,
  "u32": 32,
  "s64": 64,
  "u64": 64,
  "f16": 16,
  "bf16": 16,
  "f32": 32,
  "f64": 64,
  "c64": 64,
  "c128": 128,
  "f4e2m1fn": 4,
  "f8e8m0fnu": 8,
  "token": 0,
  "opaque": 0,
}
HBM, VMEM, HOST = 0, 1, 5  # memory spaces as layouts write them, S(n); no S is HBM

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ")
_END = re.compile(r"^\}(?:, execution_thread=\"[^\"]*\")?\s*$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
  r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_MANY = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True)
class Shape:
  """An array's type: dtype, dimensions, memory space."""

  dtype: str
  dims: tuple[int, ...]
  space: int = HBM

  @property
  def elements(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Bytes without the padding of tiles."""
    return (self.elements * dtype_bits(self.dtype) + 7) // 8

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def dtype_bits(dtype: str) -> int:
  """Bits of one element; float8 kinds by their prefix."""
  if dtype.startswith("f8"):
    return 8
  return _DTYPE_BITS.get(dtype, 0)


def parse_shapes(text: str) -> tuple[Shape, ...]:
  """Every array in a type, tuples flattened."""
  found = []
  for dtype, dims, layout in _SHAPE.findall(text):
    space = _SPACE.search(layout)
    sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
    found.append(Shape(dtype, sizes, int(space[1]) if space else HBM))
  return tuple(found)


@dataclasses.dataclass(eq=False)
class Instruction:
  """One line of a computation.

  Attributes:
    name: Its name, without the per cent sign.
    opcode: Such as fusion, while, all-gather.
    type_text: Its type as written.
    operands: Names of its operands.
    attributes: Everything after the operands.
    literal: Text between the parentheses: a constant's value, a parameter's number.
    is_root: Whether it is the computation's result.
  """

  name: str
  opcode: str
  type_text: str
  operands: tuple[str, ...]
  attributes: str
  literal: str
  is_root: bool

  @functools.cached_property
  def shapes(self) -> tuple[Shape, ...]:
    """Arrays of its result."""
    return parse_shapes(self.type_text)

  @functools.cached_property
  def bytes(self) -> int:
    """Bytes of its result in all memory spaces."""
    return sum(s.bytes for s in self.shapes)

  @functools.cached_property
  def op_name(self) -> str:
    """The traced operation it comes from, or an empty string."""
    found = _OP_NAME.search(self.attributes)
    return found[1] if found else ""

  @functools.cached_property
  def called(self) -> dict[str, tuple[str, ...]]:
    """Names of called computations by role: calls, to_apply, body, condition, branches."""
    found: dict[str, tuple[str, ...]] = {}
    for role, name in _CALLED.findall(self.attributes):
      found[role] = (name,)
    for role, names in _CALLED_MANY.findall(self.attributes):
      found[role] = tuple(n.strip().lstrip("%") for n in names.split(",") if n.strip())
    return found

  def attribute(self, name: str) -> str:
    """The value of `name=...` up to the next comma outside brackets, or an empty string."""
    start = re.search(rf"(?:^|, ){re.escape(name)}=", self.attributes)
    if not start:
      return ""
    depth = 0
    for end in range(start.end(), len(self.attributes)):
      c = self.attributes[end]
      if c in "{[(":
        depth += 1
      elif c in "}])":
        depth -= 1
      elif c == "," and depth == 0:
        return self.attributes[start.end() : end]
    return self.attributes[start.end() :]

  @property
  def custom_call_target(self) -> str:
    """Target of a custom call, or an empty string."""
    return self.attribute("custom_call_target").strip('"')


@dataclasses.dataclass(eq=False)
class Computation:
  """A named list of instructions, in schedule order where the module is scheduled."""

  name: str
  is_entry: bool
  instructions: list[Instruction]

  @functools.cached_property
  def by_name(self) -> dict[str, Instruction]:
    """Instructions by name."""
    return {i.name: i for i in self.instructions}

  @functools.cached_property
  def root(self) -> Instruction:
    """The result."""
    return next((i for i in reversed(self.instructions) if i.is_root), self.instructions[-1])

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    """Parameters by number."""
    return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """Instructions that read each value."""
    found: dict[str, list[Instruction]] = {}
    for instruction in self.instructions:
      for operand in set(instruction.operands):
        found.setdefault(operand, []).append(instruction)
    return found


@dataclasses.dataclass(eq=False)
class Module:
  """A parsed HLO module."""

  name: str
  computations: dict[str, Computation]
  is_scheduled: bool

  @functools.cached_property
  def entry(self) -> Computation:
    """The entry computation."""
    return next(c for c in self.computations.values() if c.is_entry)

  @property
  def instruction_count(self) -> int:
    """Instructions of all computations."""
    return sum(len(c.instructions) for c in self.computations.values())

  def called_by(self, instruction: Instruction) -> Iterator[Computation]:
    """Computations that an instruction calls directly."""
    for names in instruction.called.values():
      for name in names:
        if name in self.computations:
          yield self.computations[name]

  def inside(self, instruction: Instruction) -> Iterator[Instruction]:
    """Instructions of everything that an instruction calls, to any depth."""
    seen: set[str] = set()
    pending = list(self.called_by(instruction))
    while pending:
      computation = pending.pop()
      if computation.name in seen:
        continue
      seen.add(computation.name)
      for inner in computation.instructions:
        yield inner
        pending += self.called_by(inner)


def _close(text: str, start: int) -> int:
  """Index of the bracket that closes the one at `start`, strings skipped."""
  depth, quoted, i = 0, False, start
  while i < len(text):
    c = text[i]
    if quoted:
      if c == "\\":
        i += 1
      elif c == '"':
        quoted = False
    elif c == '"':
      quoted = True
    elif c in "([{":
      depth += 1
    elif c in ")]}":
      depth -= 1
      if depth == 0:
        return i
    i += 1
  raise ValueError(f"HLO text: no closing bracket in {text[:80]!r}")


def _parse_instruction(line: str) -> Instruction | None:
  text = line.strip()
  is_root = text.startswith("ROOT ")
  if is_root:
    text = text[5:]
  left, equals, right = text.partition(" = ")
  if not equals or " " in left:
    return None
  if right.startswith("("):
    end = _close(right, 0) + 1
  else:
    end = right.find(" ")
    if end < 0:
      return None
  type_text, rest = right[:end], right[end:].lstrip()
  open_at = rest.find("(")
  if open_at < 0:
    return None
  close_at = _close(rest, open_at)
  inner = _COMMENT.sub("", rest[open_at + 1 : close_at])
  opcode = rest[:open_at]
  has_operands = opcode not in ("constant", "parameter", "iota")
  return Instruction(
    name=left.lstrip("%"),
    opcode=opcode,
    type_text=type_text,
    operands=tuple(_operands(inner)) if has_operands else (),
    attributes=rest[close_at + 1 :].lstrip(", "),
    literal=inner,
    is_root=is_root,
  )


def _operands(text: str) -> list[str]:
  if "%" in text:
    return _NAME.findall(text)
  # Without per cent signs a name is the last word of each part.
  return [part.split()[-1] for part in text.split(",") if part.strip()]


def _logical_lines(text: str) -> Iterator[str]:
  """Lines with those joined that an attribute with line breaks has torn apart."""
  held = ""
  for line in text.splitlines():
    if _INSTRUCTION.match(line) or _END.match(line) or _COMPUTATION.match(line):
      if held:
        yield held
      held = line
    elif held and not _END.match(held):
      held += " " + line
  if held:
    yield held


def parse(text: str) -> Module:
  """Parses a module.

  Args:
    text: Text of one HLO module, as dumped or as `as_text()` gives it.

  Returns:
    The module.

  Raises:
    ValueError: The text has no entry computation, or ends within one.
  """
  header = next((line for line in text.splitlines() if line.startswith("HloModule")), "")
  name = header.split(",")[0].removeprefix("HloModule ").strip()
  computations: dict[str, Computation] = {}
  current: Computation | None = None
  for line in _logical_lines(text):
    if current is None:
      if m := _COMPUTATION.match(line):
        current = Computation(m[2], bool(m[1]), [])
        computations[current.name] = current
    elif _END.match(line):
      current = None
    elif instruction := _parse_instruction(line):
      current.instructions.append(instruction)
  module = Module(name, computations, "is_scheduled=true" in header)
  if not any(c.is_entry for c in computations.values()):
    raise ValueError("HLO text has no ENTRY computation: want the text of one HLO module")
  if current is not None:
    raise ValueError(f"HLO text is cut short: computation {current.name} does not end")
  return module


def trip_count(module: Module, loop: Instruction, within: Computation) -> int | None:
  """Iterations of a while loop, from the constant that its condition compares with.

  The counter's start is read from the loop's operand where it is a constant there, else taken as
  0, and its step from the body's addition, else 1.

  Returns:
    The count, or None where the condition is no comparison of one counter with one constant.
  """
  condition = module.computations[loop.called["condition"][0]]
  compare, constant_of = _comparison(module, condition)
  if compare is None:
    return None
  sides = [constant_of(name) for name in compare.operands]
  if sum(s is not None for s in sides) != 1:
    return None
  limit_at = 0 if sides[0] is not None else 1
  limit = sides[limit_at]
  assert limit is not None
  direction = compare.attribute("direction")
  if limit_at == 0:
    direction = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE"}.get(direction, direction)
  index = _counter_index(module, condition, compare, compare.operands[1 - limit_at])
  start, step = 0, 1
  if index is not None:
    start = _start(module, loop, within, index)
    step = _step(module, loop, index)
  distance = {"LT": limit - start, "LE": limit - start + 1, "NE": limit - start}.get(direction)
  if distance is None or step <= 0:
    return None
  return max(0, -(-distance // step))


def _integer(instruction: Instruction | None) -> int | None:
  if instruction is None or instruction.opcode != "constant":
    return None
  return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal.strip()) else None


def _comparison(module: Module, condition: Computation):
  """The comparison that decides a condition, and a look-up of constants among its operands."""
  root = condition.root
  if root.opcode == "compare":
    return root, lambda name: _integer(condition.by_name.get(name))
  if root.opcode == "fusion":
    inner = module.computations[root.called["calls"][0]]
    compare = inner.root
    if compare.opcode != "compare":
      return None, None

    def constant_of(name: str) -> int | None:
      value = inner.by_name.get(name)
      if value is not None and value.opcode == "parameter":
        value = condition.by_name.get(root.operands[int(value.literal)])
      return _integer(value)

    return compare, constant_of
  return None, None


def _counter_index(
  module: Module, condition: Computation, compare: Instruction, name: str
) -> int | None:
  """Place of the loop's counter in its tuple."""
  value = condition.by_name.get(name)
  if value is None and condition.root.opcode == "fusion":
    inner = module.computations[condition.root.called["calls"][0]].by_name.get(name)
    if inner is not None and inner.opcode == "parameter":
      value = condition.by_name.get(condition.root.operands[int(inner.literal)])
  if value is not None and value.opcode == "get-tuple-element":
    return int(value.attribute("index"))
  return None


def _start(module: Module, loop: Instruction, within: Computation, index: int) -> int:
  value = within.by_name.get(loop.operands[0])
  for _ in range(8):
    if value is None:
      return 0
    if value.opcode == "tuple":
      value = within.by_name.get(value.operands[index])
    elif value.opcode in ("copy", "bitcast"):
      value = within.by_name.get(value.operands[0])
    else:
      return _integer(value) or 0
  return 0


def _step(module: Module, loop: Instruction, index: int) -> int:
  body = module.computations[loop.called["body"][0]]
  root = body.root
  if root.opcode != "tuple" or index >= len(root.operands):
    return 1
  value = body.by_name.get(root.operands[index])
  scope = body
  if value is not None and value.opcode == "fusion":
    scope = module.computations[value.called["calls"][0]]
    value = scope.root
  if value is None or value.opcode != "add":
    return 1
  steps = [_integer(scope.by_name.get(o)) for o in value.operands]
  return next((s for s in steps if s is not None), 1)
