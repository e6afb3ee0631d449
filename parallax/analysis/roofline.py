"""The time of an instruction on a GPU, whose compiler estimates no cycles: a roofline over the compiled fusions.

An instruction takes the longer of two times: that of its matrix products at the chip's peak for their dtype, and that
of its bytes at the bandwidth of the chip's memory. What a fusion computes stays in its core; of an array that it slices
the slice alone is read, and of one that it updates in place the update alone is written. A fusion that runs beside
others, as jax 0.12 copies slots, takes the memory's bandwidth from them, and counts as if in turn. Launches, caches,
other arithmetic and tiles that fill no core count as nothing, so that most steps take longer than this.
"""

import re
from collections.abc import Iterable

from parallax.analysis.hlo import Computation, Instruction, Module, arrays_of, shape_bytes
from parallax.runtime.chips import Chip

PEAK_OF_DTYPE = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8"}
# What runs nothing, and copies between a GPU and its host, which are none of its memory's bandwidth.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"copy-start", "copy-done", "opt-barrier", "add-dependency"}
FUSIONS = ("fusion", "fusion-start")
SLICING = ("dynamic-slice", "slice", "gather")
UPDATES = ("dynamic-update-slice", "scatter")
WORKSPACE = ("s8[", "u8[")
VIEWS = ("bitcast", "reshape", "get-tuple-element")


def roofline_secs(products: Iterable[tuple[Instruction, Computation, int]], moved: int, chip: Chip) -> float:
    """The longer of these products, each with its computation and its FLOPs, at their peaks, and of moving bytes."""
    return max(sum(flops / _peak(one, home, chip) for one, home, flops in products), moved / chip.hbm_bandwidth)


def _peak(one: Instruction, home: Computation, chip: Chip) -> float:
    """FLOP/s of a product: on tensor cores, but of the float units where it asks for the highest precision."""
    dtype = arrays_of(home.find(one.operands[0]).shape)[0][0]
    name = "float8" if dtype.startswith("f8") else PEAK_OF_DTYPE.get(dtype)
    if name not in chip.flops or (name == "float32" and "highest" in one.rest):
        return 2 * chip.target.cores * chip.target.float_units * chip.clock_hz
    return chip.flops[name]


def moved_bytes(one: Instruction, home: Computation, module: Module) -> int:
    """Bytes that an instruction of this computation reads from memory and writes there."""
    if one.kind in FREE or one.kind.endswith("-done"):
        return 0
    if one.kind in FUSIONS:
        return _of_fusion(one, home, module)
    if one.kind in SLICING:
        return 2 * shape_bytes(one.shape)
    if one.kind in UPDATES:
        return 2 * _updated(one, home)
    written = re.findall(r"\w+\[[\d,]*\]", one.shape)
    if one.kind == "custom-call":  # behind a product's result, a library's call has bytes to work in
        written = [array for at, array in enumerate(written) if not (at and array.startswith(WORKSPACE))]
    return sum(map(shape_bytes, written)) + sum(shape_bytes(_shape(home, name)) for name in dict.fromkeys(one.operands))


def _of_fusion(one: Instruction, home: Computation, module: Module) -> int:
    inside = module.computations[one.called[0]]
    written = sum(_written(root, inside) for root in _results(inside))
    return written + sum(_read(at, inside, module) for at, _ in enumerate(one.operands))


def _results(inside: Computation) -> list[Instruction]:
    root = inside.root
    return [inside.find(name) for name in root.operands] if root.kind == "tuple" else [root]


def _written(root: Instruction, inside: Computation) -> int:
    while root.kind in VIEWS:
        root = inside.find(root.operands[0])
    return _updated(root, inside) if root.kind in UPDATES else shape_bytes(root.shape)


def _updated(one: Instruction, home: Computation) -> int:
    """Bytes of what an update in place writes: a scatter has indices before it."""
    return shape_bytes(_shape(home, one.operands[1 if one.kind == UPDATES[0] else -1]))


def _read(number: int, inside: Computation, module: Module) -> int:
    """Bytes that a fusion reads of an operand."""
    parameter = next(one for one in inside.instructions if one.kind == "parameter" and one.literal == str(number))
    return min(shape_bytes(parameter.shape), sum(_uses(parameter, inside, module)))


def _uses(one: Instruction, inside: Computation, module: Module) -> Iterable[int]:
    """Bytes that each use of a value in a fusion reads of it."""
    for user in inside.instructions:
        places = [at for at, name in enumerate(user.operands) if name == one.name]
        if not places:
            continue
        if user.kind in VIEWS:
            yield from _uses(user, inside, module)
        elif user.kind == "fusion":
            yield from (_read(at, module.computations[user.called[0]], module) for at in places)
        elif user.kind in SLICING and places == [0]:
            yield shape_bytes(user.shape)
        elif user.kind not in UPDATES or places != [0]:
            yield shape_bytes(one.shape)


def _shape(home: Computation, name: str) -> str:
    one = home.find(name)
    return one.shape if one is not None else ""
