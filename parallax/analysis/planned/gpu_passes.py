"""What XLA for GPU moves through memory beside matrix products, as its compiled programs do.

A product reads whole arrays: what is sliced out of one at an index that the program computes is copied for it, as the
matrix of a group or the keys of a block. Rows that are gathered, and arrays that grow by padding, are copied, too. What
is added to a slice of sums is read again, with that slice. An array that is rounded to fewer bits is written once for
its readers, unless a product writes it so, perhaps times a scale. A reduction reads its operand once: what comes
between two of them is in the second. Largest magnitudes, by which arrays are rounded, are taken where these are
written.
"""

import math
from collections.abc import Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from parallax.analysis.traced.flops import PRODUCT_PRIMITIVES
from parallax.analysis.traced.memory import SAME_BYTES
from parallax.analysis.traced.trace import Origin
from parallax.jaxprs import called, programs_of

REDUCTIONS = ("reduce_sum", "reduce_max")
SLICES_AT, GATHERS_ROWS, PADDING, ADDS, CONVERTS = (
    "dynamic_slice",
    "gather",
    "pad",
    "scatter-add",
    "convert_element_type",
)
SAME_VALUES = SAME_BYTES | {"transpose"}
MAXIMUM = "reduce_max"
TAKES_MAGNITUDES = "abs"
BY_ONE_NUMBER = ("mul", "div")


class GpuPasses:
    """The passes of one traced program. `by_products` and `for_products` are the values that products write and read,
    perhaps in another order or shape, and `magnitudes` those of other arrays."""

    def __init__(self, program: ClosedJaxpr):
        self.by_products: set[Any] = set()
        self.for_products: set[Any] = set()
        self.magnitudes: set[Any] = set()
        self._find_written(program)
        self._find_read(program)

    def bytes(self, equation: JaxprEqn, origin: Origin | None = None) -> int | None:
        """Bytes that an equation reads and writes, 0 if it is fused; None for products and for writes into slots."""
        name, (x, *_), (out, *_) = equation.primitive.name, equation.invars or [None], equation.outvars
        if name == MAXIMUM and _is_in(self.magnitudes, x):
            return 0
        if name in REDUCTIONS:
            return _bytes(x) + _bytes(out)
        if name == SLICES_AT:
            return 2 * _bytes(out) * (out in self.for_products)
        if name == GATHERS_ROWS:  # of one row it is a slice
            return 2 * _bytes(out) * (math.prod(equation.invars[1].aval.shape[:-1]) > 1)
        if name == PADDING:
            return 2 * _bytes(out) * (_bytes(out) > _bytes(x))
        if name == ADDS:
            return 3 * _bytes(equation.invars[2])
        if name == CONVERTS:
            rounds = _bytes(out) < _bytes(x) and x.aval.size > 1 and not _is_in(self.by_products, x)
            return (_bytes(x) + _bytes(out)) * rounds
        return None

    def _find_written(self, program: ClosedJaxpr) -> None:
        for equation in program.jaxpr.eqns:
            for inner in programs_of(equation):
                self._find_written(inner)
            outs, inner = equation.outvars, called(equation)
            if inner is not None:
                pairs = zip(outs, inner.jaxpr.outvars)
                self.by_products.update(out for out, of_inner in pairs if _is_in(self.by_products, of_inner))
            else:
                self._follow(equation)

    def _follow(self, equation: JaxprEqn) -> None:
        name, outs = equation.primitive.name, equation.outvars
        arrays = [x for x in equation.invars if math.prod(x.aval.shape) > 1]
        of_product = _is_in(self.by_products, *arrays[:1])
        if _passes_on(equation, of_product) or (name in BY_ONE_NUMBER and len(arrays) == 1 and of_product):
            self.by_products.update(outs)
        if name == TAKES_MAGNITUDES or (name in SAME_VALUES and _is_in(self.magnitudes, *arrays[:1])):
            self.magnitudes.update(outs)

    def _find_read(self, program: ClosedJaxpr) -> None:
        for equation in reversed(program.jaxpr.eqns):
            ins, inner = equation.invars, called(equation)
            if inner is not None:
                pairs = zip(equation.outvars, inner.jaxpr.outvars)
                self._add_read(of_inner for out, of_inner in pairs if out in self.for_products)
            for program_of_it in programs_of(equation):
                self._find_read(program_of_it)
            if inner is not None:
                self._add_read(x for x, of_inner in zip(ins, inner.jaxpr.invars) if of_inner in self.for_products)
            elif _passes_on(equation, _is_in(self.for_products, *equation.outvars[:1])):
                self._add_read(ins)

    def _add_read(self, values: Iterable[Any]) -> None:
        self.for_products.update(value for value in values if not isinstance(value, Literal))


def _passes_on(equation: JaxprEqn, of_product: bool) -> bool:
    """Whether an equation is a product, or only another order or shape of a value `of_product`."""
    name = equation.primitive.name
    return name in PRODUCT_PRIMITIVES or (name in SAME_VALUES and of_product)


def _is_in(values: set[Any], value: Any = None) -> bool:
    return not isinstance(value, Literal) and value in values


def _bytes(value: Any) -> int:
    return math.prod(value.aval.shape) * getattr(value.aval.dtype, "itemsize", 4)
