"""Time of an instruction on a GPU by a roofline over compiled fusions, since XLA for GPU estimates no cycles.

An instruction takes the longer of two times: that of its matrix products at the chip's peak for their dtype, and that
of its bytes at the bandwidth of the chip's memory. Intermediate values of a fusion stay in its core. If it slices an
array, only the slice is read; if it updates one in place, only the update is written. A fusion that runs at the same
time as others, as jax 0.12 copies slots, takes memory bandwidth from them, so it counts as if it ran after them.
Launches, caches, other arithmetic and tiles that do not fill a core are not counted, so most steps take longer.
"""

import re
from collections.abc import Iterable

from parallax.analysis.compiled.hlo import Computation, Instruction, Module, arrays_of, shape_bytes
from parallax.hardware.chips import Chip

PEAK_OF_DTYPE = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "f4e2m1fn": "float4"}
# Instructions that run nothing, and copies between GPU and host, which do not use the bandwidth of GPU memory.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"copy-start", "copy-done", "opt-barrier", "add-dependency"}
FUSIONS = ("fusion", "fusion-start")
SLICING = ("dynamic-slice", "slice", "gather")
UPDATES = ("dynamic-update-slice", "scatter")
WORKSPACE = ("s8[", "u8[")
VIEWS = ("bitcast", "reshape", "get-tuple-element")


def roofline_secs(products: Iterable[tuple[Instruction, Computation, int]], moved: int, chip: Chip) -> float:
    """The longer of two times: these products, each with computation and FLOPs, at peak, and moving the bytes."""
    return max(sum(flops / _peak(op, home, chip) for op, home, flops in products), moved / chip.hbm_bandwidth)


def _peak(op: Instruction, home: Computation, chip: Chip) -> float:
    """FLOP/s of a product: of the tensor cores or, at the highest precision, of the float units."""
    dtype = arrays_of(home.find(op.operands[0]).shape)[0][0]
    name = "float8" if dtype.startswith("f8") else PEAK_OF_DTYPE.get(dtype)
    if name not in chip.flops or (name == "float32" and "highest" in op.rest):
        return 2 * chip.target.cores * chip.target.float_units * chip.clock_hz
    return chip.flops[name]


def moved_bytes(op: Instruction, home: Computation, module: Module) -> int:
    """Bytes that an instruction of this computation reads from and writes to memory."""
    if op.kind in FREE or op.kind.endswith("-done"):
        return 0
    if op.kind in FUSIONS:
        return _of_fusion(op, home, module)
    if op.kind in SLICING:
        return 2 * shape_bytes(op.shape)
    if op.kind in UPDATES:
        return 2 * _updated(op, home)
    written = re.findall(r"\w+\[[\d,]*\]", op.shape)
    if op.kind == "custom-call":  # a library call has a workspace after a product's result
        written = [array for index, array in enumerate(written) if not (index and array.startswith(WORKSPACE))]
    return sum(map(shape_bytes, written)) + sum(shape_bytes(home.shape_of(name)) for name in dict.fromkeys(op.operands))


def _of_fusion(op: Instruction, home: Computation, module: Module) -> int:
    inside = module.computations[op.called[0]]
    written = sum(_written(root, inside) for root in _results(inside))
    return written + sum(_read(number, inside, module) for number, _ in enumerate(op.operands))


def _results(inside: Computation) -> list[Instruction]:
    root = inside.root
    return [inside.find(name) for name in root.operands] if root.kind == "tuple" else [root]


def _written(root: Instruction, inside: Computation) -> int:
    while root.kind in VIEWS:
        root = inside.find(root.operands[0])
    return _updated(root, inside) if root.kind in UPDATES else shape_bytes(root.shape)


def _updated(op: Instruction, home: Computation) -> int:
    """Bytes that an update in place writes; the operands of a scatter have indices before the update."""
    return shape_bytes(home.shape_of(op.operands[1 if op.kind == UPDATES[0] else -1]))


def _read(number: int, inside: Computation, module: Module) -> int:
    """Bytes of an operand that a fusion reads."""
    parameter = next(op for op in inside.instructions if op.kind == "parameter" and op.literal == str(number))
    return min(shape_bytes(parameter.shape), sum(_uses(parameter, inside, module)))


def _uses(op: Instruction, inside: Computation, module: Module) -> Iterable[int]:
    """Bytes of a value that each of its uses in a fusion reads."""
    for user in inside.instructions:
        places = [number for number, name in enumerate(user.operands) if name == op.name]
        if not places:
            continue
        if user.kind in VIEWS:
            yield from _uses(user, inside, module)
        elif user.kind == "fusion":
            yield from (_read(number, module.computations[user.called[0]], module) for number in places)
        elif user.kind in SLICING and places == [0]:
            yield shape_bytes(user.shape)
        elif user.kind not in UPDATES or places != [0]:
            yield shape_bytes(op.shape)
