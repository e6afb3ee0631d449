"""What XLA for GPU moves through memory beside matrix products, as its compiled programs do.

A product reads whole arrays: what is sliced out of one at an index that the program computes is copied first, as the
matrix of a group or the keys of a block. Rows that are gathered, and arrays that are padded, are copied, too. What is
added to a slice of sums is read again, with that slice. What is rounded to fewer bits is written once for its readers,
unless a product writes it so. A reduction reads its operand once: what comes between two of them is in the second.
"""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from parallax.analysis.traced.flops import PRODUCT_PRIMITIVES
from parallax.analysis.traced.memory import SAME_BYTES
from parallax.jaxprs import called, programs_of

REDUCTIONS = ("reduce_sum", "reduce_max")
COPIES = ("dynamic_slice", "gather", "pad")
ADDS = "scatter-add"
ROUNDS = "convert_element_type"
SAME_VALUES = SAME_BYTES | {"transpose"}


class GpuPasses:
    """The passes of one traced program."""

    def __init__(self, program: ClosedJaxpr):
        self.of_products: set[Any] = set()
        self._follow(program)

    def bytes(self, equation: JaxprEqn) -> int | None:
        """Bytes that an equation reads and writes, 0 if it is fused; None for products and for writes into slots."""
        name, (out, *_) = equation.primitive.name, equation.outvars
        if name in REDUCTIONS:
            return sum(map(_bytes, (equation.invars[0], out)))
        if name in COPIES:
            return 2 * _bytes(out)
        if name == ADDS:
            return 3 * _bytes(equation.invars[2])
        if name == ROUNDS:
            return self._rounded(equation.invars[0], out)
        return None

    def _rounded(self, x: Any, out: Any) -> int:
        by_product = not isinstance(x, Literal) and x in self.of_products
        return 0 if by_product or _bytes(out) >= _bytes(x) else _bytes(x) + _bytes(out)

    def _follow(self, program: ClosedJaxpr) -> None:
        """Find the values that are a product's result, perhaps in another order or shape."""
        for equation in program.jaxpr.eqns:
            for inner in programs_of(equation):
                self._follow(inner)
            self.of_products.update(self._results(equation))

    def _results(self, equation: JaxprEqn) -> Iterator[Any]:
        name, inner = equation.primitive.name, called(equation)
        if inner is not None:
            yield from (o for o, i in zip(equation.outvars, inner.jaxpr.outvars) if self._is_product(i))
        elif name in PRODUCT_PRIMITIVES or (name in SAME_VALUES and self._is_product(equation.invars[0])):
            yield from equation.outvars

    def _is_product(self, value: Any) -> bool:
        return not isinstance(value, Literal) and value in self.of_products


def _bytes(value: Any) -> int:
    return math.prod(value.aval.shape) * getattr(value.aval.dtype, "itemsize", 4)
