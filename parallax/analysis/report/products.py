"""FLOPs of the matrix products in a compiled program, as often as an average device runs them."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from parallax.analysis.report.hlo import Computation, Instruction, Module, float_dims, of_update, parse
from parallax.analysis.report.shares import Shares, name_of
from parallax.model.kernels import kernel_flops

CALLS = ("fusion", "call", "async-start")
PRODUCTS = ("dot", "convolution", "custom-call")


class CompiledFlops(NamedTuple):
    """FLOPs of matrix products that an average device executes in a step: for loss and gradients, which can be traced,
    and for the update of the parameters."""

    passes: float
    update: float


def compiled_flops(text: str, shares: Shares | None = None) -> CompiledFlops:
    """FLOPs that an average device executes, 2 for each multiply-add, of a program as text.

    Loops turn as often as they say, once where that depends on data; branches are taken as `shares` say, and the
    dearest where they do not. What is multiplied by the zeros of a padded or spread operand is not counted.
    """
    module = parse(text)
    return CompiledFlops(*(Products(module, shares or {}, update).of(module.entry, False) for update in (False, True)))


class Products:
    """Adds FLOPs up, those of the update or the others, each computation once."""

    def __init__(self, module: Module, shares: Shares, update: bool):
        self.module, self.shares, self.update = module, shares, update
        self._known: dict[tuple[str, bool], float] = {}

    def of(self, name: str, within: bool) -> float:
        """Those of one computation and all that it calls; `within` says whether the update calls it."""
        if (name, within) not in self._known:
            home = self.module.computations[name]
            self._known[name, within] = sum(self._flops(one, home, within) for one in home.instructions)
        return self._known[name, within]

    def _flops(self, one: Instruction, home: Computation, within: bool) -> float:
        # What the compiler made without a name belongs to what calls it.
        within = of_update(one.op_name) if one.op_name else within
        if one.kind in PRODUCTS and within != self.update:
            return 0
        if one.kind == "dot":
            return _dot(one, home)
        if one.kind == "convolution":
            return _convolution(one, home)
        if one.kind == "custom-call":
            return _kernel(one, home)
        if one.kind == "while":
            return (self.module.trips(one, home) or 1) * self.of(one.attribute("body"), within)
        sides = [self.of(name, within) for name in one.called] if one.kind in (*CALLS, "conditional") else []
        return self._branch(one, sides) if one.kind == "conditional" else sum(sides)

    def _branch(self, one: Instruction, sides: list[float]) -> float:
        share = self.shares.get(name_of(one.op_name))
        if share is None or len(sides) != 2:
            return max(sides)
        return (1 - share.own) * sides[0] + share.own * sides[1]


def _dot(one: Instruction, home: Computation) -> int:
    left = _dims(home, one.operands[0])
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
    return 2 * math.prod(_array(one.shape)) * math.prod(left[int(dim)] for dim in contracted.split(",") if dim)


def _convolution(one: Instruction, home: Computation) -> int:
    """The TPU compiler writes products as convolutions; batch dims become spatial ones, with zeros between."""
    left, right, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest).groups()
    sizes = dict(zip(left, _dims(home, one.operands[0]))), dict(zip(right, _dims(home, one.operands[1])))
    result = dict(zip(out, _array(one.shape)))
    pairs = (
        _pairs(sizes[0][dim], sizes[1][dim], result[dim], window)
        for dim, window in zip(sorted(filter(str.isdigit, out)), _windows(one.rest))
    )
    return 2 * result["b"] * result["f"] * sizes[1]["i"] * math.prod(pairs)


def _pairs(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Pairs of places in the output and the kernel that meet an entry of the input, along one dim."""
    stride, spread, apart = (int(window.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    places = (at * stride + k * apart - low for at in range(out) for k in range(kernel))
    return sum(place % spread == 0 and 0 <= place < size * spread for place in places)


def _windows(rest: str) -> Iterator[dict[str, str]]:
    """The window's numbers, one dim after the other."""
    found = re.search(r"window=\{([^}]*)\}", rest)
    given = dict(part.split("=") for part in found[1].split()) if found else {}
    yield from ({name: value.split("x")[at] for name, value in given.items()} for at in range(_rank(given)))


def _rank(window: dict[str, str]) -> int:
    return len(window["size"].split("x")) if window else 0


def _kernel(one: Instruction, home: Computation) -> int:
    return kernel_flops(one.name, [dims for name in one.operands for dims in float_dims(home.find(name).shape)]) or 0


def _dims(home: Computation, name: str) -> list[int]:
    return _array(home.find(name).shape)


def _array(shape: str) -> list[int]:
    return [int(size) for size in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if size]
