"""What one scheduled instruction costs: FLOPs and bytes of HBM, by written rules.

FLOPs are those of dots and convolutions, inside fusions too, and what a Pallas call declares.
Bytes are what must cross HBM: operands and results that live there, a slice of an operand where
only a slice is read, an update where only an update is written.  VMEM, SMEM and host memory are
no HBM.
"""

from __future__ import annotations

import dataclasses
import math
import re

from tools.aot import hlo

# These move nothing, or only say where something lies.
FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all add-dependency partition-id"
  " replica-id opt-barrier token domain get-dimension-size".split()
)
_FREE_TARGETS = frozenset(
  "AllocateBuffer ConcatBitcast PrepareAsyncCallStart PrepareAsyncCallDone"
  " AssumeGatherIndicesInBound Sharding SPMDFullToShardShape SPMDShardToFullShape".split()
)
_SLICING = ("dynamic-slice", "slice", "gather")
_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_MOVED = re.compile(r'"bytes_accessed":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """Cost of running one instruction once on one device.

  Attributes:
    flops: FLOPs by operand kind: bf16, fp8, f32 passes already multiplied out.
    hbm_bytes: Bytes across HBM.
    cycles: The compiler's estimate, where the text has one.
    unknown: Why the cost is not known in full, or an empty string.
  """

  flops: dict[str, float] = dataclasses.field(default_factory=dict)
  hbm_bytes: float = 0.0
  cycles: int | None = None
  unknown: str = ""


def in_hbm(shapes) -> int:
  """Bytes of those arrays that live in HBM."""
  return sum(s.bytes for s in shapes if s.space == hlo.HBM)


def estimated_cycles(instruction: hlo.Instruction) -> int | None:
  """The compiler's cycles for an instruction, or None where it gives none."""
  found = _CYCLES.search(instruction.attributes)
  if not found or int(found[1]) >= _UNKNOWN_CYCLES:
    return None
  return int(found[1])


def product_flops(
  instruction: hlo.Instruction, computation: hlo.Computation
) -> tuple[str, float] | None:
  """Operand kind and FLOPs of a dot or convolution; None for anything else."""
  if instruction.opcode not in ("dot", "convolution"):
    return None
  operands = [computation.by_name[name].shapes[0] for name in instruction.operands[:2]]
  left, right = operands
  out = instruction.shapes[0]
  if instruction.opcode == "dot":
    contracted = [int(d) for d in re.findall(r"\d+", instruction.attribute("lhs_contracting_dims"))]
    flops = 2.0 * out.elements * math.prod(left.dims[d] for d in contracted)
  else:
    flops = _convolution_flops(instruction, left, right, out)
  kind, passes = _kind(instruction, operands)
  return kind, flops * passes


def _kind(instruction: hlo.Instruction, operands: list[hlo.Shape]) -> tuple[str, int]:
  """Operand kind of a product, and how many bfloat16 passes it takes."""
  if all(hlo.dtype_bits(s.dtype) <= 8 for s in operands):
    return "fp8", 1
  precision = instruction.attribute("operand_precision")
  if all(s.dtype == "f32" for s in operands):
    if "highest" in precision:
      return "bf16", 6
    if "high" in precision:
      return "bf16", 3
  return "bf16", 1


def _convolution_flops(
  instruction: hlo.Instruction, left: hlo.Shape, right: hlo.Shape, out: hlo.Shape
) -> float:
  """FLOPs of a convolution: only window positions that meet real data count.

  The TPU compiler writes products as convolutions, and the batch of a product as a spatial
  dimension whose window meets one element of it.
  """
  labels = instruction.attribute("dim_labels")
  lhs, _, rest = labels.partition("_")
  rhs, _, result = rest.partition("->")
  groups = int(instruction.attribute("feature_group_count") or 1)
  batch_groups = int(instruction.attribute("batch_group_count") or 1)
  features = left.dims[lhs.index("f")] / groups
  flops = 2.0 * left.dims[lhs.index("b")] / batch_groups * features * right.dims[rhs.index("o")]
  window = _window(instruction.attribute("window"))
  spatial = sorted(c for c in lhs if c.isdigit())
  for place, label in enumerate(spatial):
    field = {key: values[place] for key, values in window.items()}
    flops *= _positions(
      left.dims[lhs.index(label)],
      out.dims[result.index(label)],
      size=field.get("size", 1),
      stride=field.get("stride", 1),
      low=field.get("pad", 0),
      base=field.get("lhs_dilate", 1),
      spread=field.get("rhs_dilate", 1),
    )
  return flops


def _window(text: str) -> dict[str, list[int]]:
  """Fields of a window: size, stride, pad (its low side), lhs_dilate, rhs_dilate."""
  out: dict[str, list[int]] = {}
  for key, value in re.findall(r"(\w+)=([\d_x\-]+)", text):
    out[key] = [int(part.split("_")[0]) for part in value.split("x")]
  return out


def _positions(
  extent: int, results: int, *, size: int, stride: int, low: int, base: int, spread: int
) -> int:
  """Pairs of a result and a window element that meet real data, along one dimension."""
  if (base, size) == (1, 1):
    return results
  if base == size and stride == size - 1 and size > 1 and low == 0 and spread == 1:
    return extent  # the batch of a product
  dilated = (extent - 1) * base + 1
  count = 0
  for element in range(size):
    offset = element * spread - low
    # Results r with 0 <= r * stride + offset < dilated, on a multiple of the base dilation.
    if base == 1:
      first = max(0, math.ceil(-offset / stride))
      last = min(results - 1, (dilated - 1 - offset) // stride)
      count += max(0, last - first + 1)
    else:
      count += sum(
        0 <= r * stride + offset < dilated and (r * stride + offset) % base == 0
        for r in range(results)
      )
  return count


def read_bytes(module: hlo.Module, computation: hlo.Computation, name: str) -> float:
  """HBM bytes that a computation reads of one of its values, which lies in HBM."""
  value = computation.by_name[name]
  whole = in_hbm(value.shapes)
  total = 0.0
  for user in computation.users.get(name, []):
    places = [k for k, operand in enumerate(user.operands) if operand == name]
    if user.opcode in _SLICING and places == [0]:
      total += sum(s.bytes for s in user.shapes)
    elif user.opcode == "dynamic-update-slice" and places == [0]:
      continue  # written in place
    elif user.opcode in ("bitcast", "get-tuple-element"):
      total += read_bytes(module, computation, user.name)
    elif user.opcode == "fusion":
      inner = module.computations[user.called["calls"][0]]
      total += sum(read_bytes(module, inner, inner.parameters[k].name) for k in places)
    elif user.opcode in ("tuple", "opt-barrier") and user.is_root:
      continue  # handed through
    else:
      return whole
  return min(total, whole) if whole else 0.0


def written_bytes(module: hlo.Module, computation: hlo.Computation, name: str) -> float:
  """HBM bytes that a fused computation writes for its result: an update where it is one."""
  value = computation.by_name[name]
  if value.opcode == "tuple":
    return sum(written_bytes(module, computation, operand) for operand in value.operands)
  if value.opcode == "bitcast":
    return written_bytes(module, computation, value.operands[0])
  if value.opcode == "dynamic-update-slice":
    update = computation.by_name[value.operands[1]]
    return sum(s.bytes for s in update.shapes)
  if value.opcode == "parameter":
    return 0.0  # handed through
  if value.opcode == "fusion":
    inner = module.computations[value.called["calls"][0]]
    return written_bytes(module, inner, inner.root.name)
  return in_hbm(value.shapes)


def cost(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> Cost:
  """Cost of one instruction; loops, calls and collectives are not judged here.

  Args:
    module: The module.
    computation: Where the instruction stands.
    instruction: The instruction.

  Returns:
    Its cost on one device, once.
  """
  opcode = instruction.opcode
  if opcode in FREE or opcode.endswith("-done"):
    return Cost()
  cycles = estimated_cycles(instruction)
  operands = [computation.by_name[name] for name in instruction.operands]
  if opcode == "custom-call":
    return _custom_call(instruction, operands, cycles)
  if opcode == "fusion":
    return _fusion(module, instruction, operands, cycles)
  if opcode == "call" or (opcode.endswith("-start") and instruction.called):
    return _called(module, instruction)
  out = in_hbm(instruction.shapes)
  inputs = sum(in_hbm(o.shapes) for o in operands)
  flops: dict[str, float] = {}
  unknown = ""
  if found := product_flops(instruction, computation):
    flops[found[0]] = found[1]
  if opcode in _SLICING:
    moved = out + sum(s.bytes for s in instruction.shapes)
    moved += sum(in_hbm(o.shapes) for o in operands[1:])
  elif opcode == "dynamic-update-slice":
    moved = 2 * sum(s.bytes for s in operands[1].shapes)
  elif opcode == "scatter":
    updates = operands[len(operands) // 2 + 1 :]
    moved = 3 * sum(s.bytes for o in updates for s in o.shapes)
    moved += in_hbm(operands[len(operands) // 2].shapes)
  elif opcode == "copy-start":
    moved = in_hbm(instruction.shapes[:2])
  elif opcode in ("slice-start", "dynamic-slice-start"):
    result = [s for s in instruction.shapes if s.dims][-1]
    moved = result.bytes + in_hbm([result])
  elif opcode.endswith("-start"):
    moved = out  # its type holds operands and results
  elif opcode in ("send", "recv", "infeed", "outfeed", "rng-bit-generator", "cholesky", "fft"):
    moved, unknown = inputs + out, f"{opcode}: priced by its bytes alone"
  elif opcode == "ragged-dot":
    moved, unknown = inputs + out, "ragged-dot: FLOPs not known, priced by its bytes alone"
  else:
    moved = inputs + out
  return Cost(flops=flops, hbm_bytes=moved, cycles=cycles, unknown=unknown)


def _custom_call(
  instruction: hlo.Instruction, operands: list[hlo.Instruction], cycles: int | None
) -> Cost:
  target = instruction.custom_call_target
  if target in _FREE_TARGETS:
    return Cost()
  moved = float(sum(in_hbm(o.shapes) for o in operands) + in_hbm(instruction.shapes))
  flops: dict[str, float] = {}
  unknown = ""
  if found := _FLOPS.search(instruction.attributes):
    kinds = [s.dtype for o in operands for s in o.shapes if len(s.dims) > 1]
    small = bool(kinds) and all(hlo.dtype_bits(k) <= 8 for k in kinds)
    flops["fp8" if small else "bf16"] = float(found[1])
    if said := _MOVED.search(instruction.attributes):
      moved = max(moved, float(said[1]))
  else:
    unknown = f"{kernel_name(instruction)}: FLOPs not declared, priced by its bytes alone"
  return Cost(flops=flops, hbm_bytes=moved, cycles=cycles, unknown=unknown)


def kernel_name(instruction: hlo.Instruction) -> str:
  """Name of a Pallas kernel, or the target of another custom call."""
  target = instruction.custom_call_target
  if target != "tpu_custom_call":
    return f"custom call {target}"
  parts = instruction.op_name.split("/")
  name = parts[-2] if len(parts) > 1 else instruction.name.split(".")[0]
  return "kernel " + name.removeprefix("jit(").removesuffix(")")


def _fusion(
  module: hlo.Module,
  instruction: hlo.Instruction,
  operands: list[hlo.Instruction],
  cycles: int | None,
) -> Cost:
  inner = module.computations[instruction.called["calls"][0]]
  flops: dict[str, float] = {}
  unknown = ""
  for computation in _fused(module, inner):
    for each in computation.instructions:
      if found := product_flops(each, computation):
        flops[found[0]] = flops.get(found[0], 0.0) + found[1]
      if each.opcode == "custom-call" and each.custom_call_target not in _FREE_TARGETS:
        unknown = f"{kernel_name(each)} inside a fusion: FLOPs not known"
  moved = written_bytes(module, inner, inner.root.name) if in_hbm(instruction.shapes) else 0.0
  moved = min(moved, in_hbm(instruction.shapes))
  for place, operand in enumerate(operands):
    if in_hbm(operand.shapes):
      parameter = inner.parameters[place]
      moved += min(_read_of(module, inner, parameter), in_hbm(operand.shapes))
  return Cost(flops=flops, hbm_bytes=moved, cycles=cycles, unknown=unknown)


def _read_of(module: hlo.Module, inner: hlo.Computation, parameter: hlo.Instruction) -> float:
  """Reads of a parameter whose own type need not repeat the memory space."""
  if in_hbm(parameter.shapes):
    return read_bytes(module, inner, parameter.name)
  return float(sum(s.bytes for s in parameter.shapes))


def _fused(module: hlo.Module, computation: hlo.Computation):
  yield computation
  for instruction in computation.instructions:
    if instruction.opcode == "fusion":
      yield from _fused(module, module.computations[instruction.called["calls"][0]])


def _called(module: hlo.Module, instruction: hlo.Instruction) -> Cost:
  """Sum over a called computation: SparseCore work is written as calls within calls."""
  total: dict[str, float] = {}
  moved, unknown = 0.0, ""
  cycles = estimated_cycles(instruction)
  for computation in module.called_by(instruction):
    for inner in computation.instructions:
      if inner.opcode in ("while", "conditional"):
        unknown = f"{inner.opcode} inside {instruction.name}: not priced"
        continue
      one = cost(module, computation, inner)
      moved += one.hbm_bytes
      unknown = unknown or one.unknown
      for kind, flops in one.flops.items():
        total[kind] = total.get(kind, 0.0) + flops
  return Cost(flops=total, hbm_bytes=moved, cycles=cycles, unknown=unknown)
