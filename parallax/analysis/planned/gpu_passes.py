"""What XLA for GPU moves through memory beside matrix products, as its compiled programs do.

A product reads whole arrays: what is sliced out of one at an index that the program computes is copied for it, as the
matrix of a group or the keys of a block. Rows that are gathered, and arrays that grow by padding, are copied, too. What
is added to a slice of sums is read again, with that slice. An array that is rounded to fewer bits is written once for
its readers, unless a product writes it so, perhaps times a scale. A reduction reads its operand once: what comes
between two of them is in the second.

Readers of a float8 product apply its scales of rows, unless they read whole arrays. What is rounded twice to 8 bits is
read once. Largest magnitudes for the next step are taken where an array is rounded. Those by which it is itself rounded
are taken where a pass writes it. They are a pass over what a product wrote, and over an array that has no other reader:
it is computed twice, or written and read again.
"""

import math
from collections.abc import Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from parallax.analysis.traced.flops import PRODUCT_PRIMITIVES
from parallax.analysis.traced.memory import FUSED, SAME_BYTES
from parallax.analysis.traced.trace import Origin
from parallax.jaxprs import called, programs_of, var_bytes

REDUCTIONS = ("reduce_sum", "reduce_max")
SLICES_AT, GATHERS_ROWS, PADDING, ADDS, CONVERTS = (
    "dynamic_slice",
    "gather",
    "pad",
    "scatter-add",
    "convert_element_type",
)
SAME_VALUES = SAME_BYTES | {"transpose"}
BY_ENTRY = FUSED - {SLICES_AT, GATHERS_ROWS, PADDING, "slice", "split"}
MAXIMUM = "reduce_max"
TAKES_MAGNITUDES = "abs"
SELECTS, SPREADS = "select_n", "broadcast_in_dim"
BY_ONE_NUMBER = ("mul", "div")
MULTIPLIES = "dot_general"
BACKWARD_PASS = "backward"  # a direction of Origin


class GpuPasses:
    """The passes of one traced program. `by_products` and `for_products` are the values that products write and read,
    perhaps in another order or shape, `scaled` those of float8 products times units of rows. `magnitudes` are those of
    other arrays; `own_magnitudes` those with which an array is itself rounded, in which nan is infinite."""

    def __init__(self, program: ClosedJaxpr):
        self.by_products: set[Any] = set()
        self.for_products: set[Any] = set()
        self.scaled: set[Any] = set()
        self.magnitudes: set[Any] = set()
        self.own_magnitudes: set[Any] = set()
        self._of_float8: set[Any] = set()  # sums of products, not scaled
        self._spread: set[Any] = set()  # as wide as another array, with fewer numbers
        self._from: dict[Any, Any] = {}  # the array that a value follows from, entry by entry
        self._joined: set[Any] = set()  # what follows from several
        self._to_eight_bits: dict[Any, Any] = {}  # by result, the operand
        self._own_maxima: dict[Any, Any] = {}
        self._find_written(program)
        self._find_read(program)
        self._second = self._not_first(self._to_eight_bits) | self._not_first(self._own_maxima)

    def bytes(self, equation: JaxprEqn, origin: Origin | None = None) -> int | None:
        """Bytes that an equation reads and writes, 0 if it is fused; None for products and for writes into slots."""
        name, (x, *_), (out, *_) = equation.primitive.name, equation.invars or [None], equation.outvars
        if out in self._own_maxima:
            return self._of_own_maximum(x, out, origin)
        if name == MAXIMUM and _is_in(self.magnitudes, x):
            return 0
        if name in REDUCTIONS:
            return var_bytes(x) + var_bytes(out)
        if name == SLICES_AT:
            return 2 * var_bytes(out) * (out in self.for_products)
        if name == GATHERS_ROWS:  # of one row it is a slice
            return 2 * var_bytes(out) * (math.prod(equation.invars[1].aval.shape[:-1]) > 1)
        if name == PADDING:
            return 2 * var_bytes(out) * (var_bytes(out) > var_bytes(x))
        if name == ADDS:
            return 3 * var_bytes(equation.invars[2])
        if name == CONVERTS:
            return self._of_rounding(x, out, origin)
        return None

    def _of_rounding(self, x: Any, out: Any, origin: Origin | None) -> int:
        if not self._rounds(x, out):
            return 0
        if _is_in(self.scaled, x):  # the product wrote it in as few bits
            return 2 * var_bytes(out) * (out in self.for_products)
        source = self._source(x)
        read = source if out in self._to_eight_bits and self._is_written(source, origin) else x
        return var_bytes(read) * (out not in self._second) + var_bytes(out)

    def _rounds(self, x: Any, out: Any) -> bool:
        return var_bytes(out) < var_bytes(x) and x.aval.size > 1 and not _is_in(self.by_products, x)

    def _of_own_maximum(self, x: Any, out: Any, origin: Origin | None) -> int:
        source = self._source(x)
        if self._is_written(source, origin):
            return (var_bytes(source) + var_bytes(out)) * (source not in self._joined or out in self._second)
        return var_bytes(x) + var_bytes(out)

    def _is_written(self, source: Any, origin: Origin | None) -> bool:
        """Whether an array is in memory whatever is rounded of it. One that is computed from several is if a product
        reads it, too, and in the backward pass, where one pass computes the gradients of several activations."""
        gradient = origin is not None and origin.direction == BACKWARD_PASS
        return source not in self._joined or source in self.for_products or gradient

    def _source(self, value: Any) -> Any:
        """The array in memory, or the one computed from several, from which a value follows entry by entry."""
        while value in self._from and value not in self.for_products:
            value = self._from[value]
        return value

    def _not_first(self, operands: dict[Any, Any]) -> set[Any]:
        """Of these results those whose operand's source is already that of another."""
        sources: set[Any] = set()
        results = set()
        for result, operand in operands.items():
            source = self._source(operand)
            if source in sources:
                results.add(result)
            sources.add(source)
        return results

    def _find_written(self, program: ClosedJaxpr) -> None:
        for equation in program.jaxpr.eqns:
            for inner in programs_of(equation):
                self._find_written(inner)
            outs, inner = equation.outvars, called(equation)
            if inner is not None:
                pairs = zip(outs, inner.jaxpr.outvars)
                self.by_products.update(out for out, of_inner in pairs if _is_in(self.by_products, of_inner))
                self._follow_call(equation, inner)
            else:
                self._follow(equation)

    def _follow_call(self, equation: JaxprEqn, inner: ClosedJaxpr) -> None:
        """What `_follow` records, of a called program, as jnp.where and jnp.clip are."""
        ins = dict(zip(inner.jaxpr.invars, equation.invars))
        selects = any(each.primitive.name == SELECTS for each in inner.jaxpr.eqns)
        for out, result in zip(equation.outvars, inner.jaxpr.outvars):
            if isinstance(result, Literal):
                continue
            source = self._source(result)  # no product's operand is known yet: back to the program's inputs
            if source in self._joined:
                self._joined.add(out)
            elif source in ins and not isinstance(ins[source], Literal):
                self._from[out] = ins[source]
                if selects and ins[source] in self.magnitudes:
                    self.own_magnitudes.add(out)

    def _follow(self, equation: JaxprEqn) -> None:
        name, outs = equation.primitive.name, equation.outvars
        size = max((math.prod(out.aval.shape) for out in outs), default=0)
        wide = [x for x in equation.invars if math.prod(x.aval.shape) > 1]
        arrays = [x for x in wide if not self._is_units(x, size, name)]
        of_product = _is_in(self.by_products, *arrays[:1])
        if name == SPREADS or (wide and not arrays and name in BY_ENTRY):
            self._spread.update(outs)
            return
        if _passes_on(equation, of_product) or (name in BY_ONE_NUMBER and len(wide) == 1 and of_product):
            self.by_products.update(outs)
        of_float8 = _is_in(self._of_float8, *arrays[:1])
        if _multiplies_float8(name, arrays) or (of_float8 and name in SAME_VALUES):
            self._of_float8.update(outs)
        if of_float8 and name in BY_ONE_NUMBER and len(wide) > len(arrays) == 1:
            self.scaled.update(outs)
        self._follow_magnitudes(equation, arrays)
        self._follow_entries(equation, arrays)

    def _is_units(self, x: Any, size: int, name: str) -> bool:
        """Whether an operand has one number for many entries of a result of this size, or is a mask of them."""
        if name not in BY_ENTRY or isinstance(x, Literal):
            return False
        return x in self._spread or math.prod(x.aval.shape) < size or x.aval.dtype == bool

    def _follow_magnitudes(self, equation: JaxprEqn, arrays: list[Any]) -> None:
        name, outs = equation.primitive.name, equation.outvars
        same = name in SAME_VALUES
        if name == TAKES_MAGNITUDES or (same and _is_in(self.magnitudes, *arrays[:1])):
            self.magnitudes.update(outs)
        if (name == SELECTS and _is_in(self.magnitudes, *arrays[:1])) or (same and self._is_own(arrays)):
            self.own_magnitudes.update(outs)
        if name == MAXIMUM and self._is_own(arrays):
            self._own_maxima[outs[0]] = arrays[0]

    def _is_own(self, arrays: list[Any]) -> bool:
        return _is_in(self.own_magnitudes, *arrays[:1])

    def _follow_entries(self, equation: JaxprEqn, arrays: list[Any]) -> None:
        """Where the entries of a result come from."""
        name, outs = equation.primitive.name, equation.outvars
        arrays = [x for x in arrays if not isinstance(x, Literal)]
        if not arrays or not (name in SAME_VALUES or name in BY_ENTRY):
            return
        rounds = name == CONVERTS and self._rounds(arrays[0], outs[0])
        to_eight_bits = rounds and outs[0].aval.dtype.itemsize == 1
        if to_eight_bits:
            self._to_eight_bits[outs[0]] = arrays[0]
        if len(arrays) == 1 and (to_eight_bits or not rounds):
            self._from.update(dict.fromkeys(outs, arrays[0]))
        else:  # computed from several, or written by a pass that rounds
            self._joined.update(outs)

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


def _multiplies_float8(name: str, operands: list[Any]) -> bool:
    return name == MULTIPLIES and bool(operands) and all("float8" in x.aval.dtype.name for x in operands)


def _is_in(values: set[Any], value: Any = None) -> bool:
    return not isinstance(value, Literal) and value in values
