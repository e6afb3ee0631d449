"""A traced program as lists of operations, with calls inlined, and what kind of memory each operation asks for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from parallax.runtime.jaxprs import Loop, called, closed, loop

SAME = {"pvary", "pcast", "copy", "stop_gradient", "optimization_barrier", "layout_constraint", "name"}
# Another name for the same bytes.
VIEWS = SAME | {"reshape", "squeeze", "expand_dims", "bitcast_convert_type"}
# Computed again by each reader rather than once and kept, as XLA does; these it does not compute twice.
# fmt: off
EXPENSIVE = {
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "rsqrt", "sqrt", "cbrt", "div", "rem", "pow",
    "erf", "sin", "cos", "tan",
}
# fmt: on
# fmt: off
CHEAP = {
    "add", "sub", "mul", "neg", "max", "min", "abs", "sign", "floor", "ceil", "round", "square", "integer_pow",
    "add_any", "clamp", "select_n", "convert_element_type", "eq", "ne", "lt", "le", "gt", "ge", "and", "or",
    "not", "xor", "is_finite", "shift_left", "shift_right_logical", "shift_right_arithmetic", "broadcast_in_dim",
    "iota", "axis_index", "transpose", "slice", "dynamic_slice", "pad", "rev", "split", "concatenate", "stack",
    "unstack", "gather", "random_bits", "random_wrap", "random_unwrap", "random_fold_in", "random_seed",
    "threefry2x32", "reduce_precision",
}
# fmt: on
ELEMENTWISE = EXPENSIVE | CHEAP
# Written, and what they read is computed on the way.
# fmt: off
REDUCTIONS = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "cumsum", "arrange",
}
# fmt: on
FOLDS = {"reduce_sum", "reduce_max", "reduce_min"}  # of floating point numbers, a library's where there is one
IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}


@dataclasses.dataclass(eq=False)
class Value:
    """What an operation makes or a program takes, as a device has it."""

    shape: tuple[int, ...]
    bytes: int

    @staticmethod
    def of(aval: Any) -> Value:
        return Value(tuple(aval.shape), math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4))


@dataclasses.dataclass(eq=False)
class Op:
    """`numbers` are those of operands that are one number throughout; such an operand may be None.

    Of a scan or cond, `inner` are its body or branches, `loop` the counts of a scan, and `dropped` the outputs that
    turned out to be constant.
    """

    name: str
    ins: list[Value | None]
    outs: list[Value]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    numbers: Sequence[float | None] = ()
    inner: Sequence[Program] = ()
    loop: Loop | None = None
    dropped: set[int] = dataclasses.field(default_factory=set)

    def reads_on_the_way(self, at: int) -> bool:
        """Whether operand `at` need not be written to be read."""
        computed = self.name in ELEMENTWISE or self.name in REDUCTIONS
        return computed or (self.name == "dynamic_update_slice" and at == 1)


@dataclasses.dataclass(eq=False)
class Program:
    """`slices` are the outputs that a loop stacks, slice by slice."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value | None]
    numbers: list[float | None]  # of outputs that are literals
    slices: frozenset[int] = frozenset()

    def without_unused(self) -> Program:
        needed, kept = {v for v in self.outputs if v is not None}, []
        for op in reversed(self.ops):
            if not needed.isdisjoint(op.outs):
                kept.append(op)
                needed.update(v for v in op.ins if v is not None)
        self.ops = kept[::-1]
        return self


def flat(program: ClosedJaxpr, slices: Iterable[int] = ()) -> Program:
    """The program and those in it, each as one list."""
    inputs = [Value.of(var.aval) for var in program.jaxpr.invars]
    ops: list[Op] = []
    outputs, numbers = inline(program, inputs, ops)
    return Program(inputs, ops, outputs, numbers, frozenset(slices)).without_unused()


def inline(program: ClosedJaxpr, inputs: list[Value], ops: list[Op]) -> tuple[list[Value | None], list[float | None]]:
    """Append a program's operations; its outputs, and their numbers where they are literals."""
    jaxpr = program.jaxpr
    value_of: dict[Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    value_of |= {var: Value.of(var.aval) for var in jaxpr.constvars}

    def read(atom: Any) -> Value | None:
        return None if isinstance(atom, Literal) else value_of[atom]

    def filled(atoms: Sequence, values: Sequence[Value | None], like: Sequence) -> list[Value]:
        """With literals made arrays, where a call takes or returns them."""
        made = [Value.of(var.aval) if value is None else value for value, var in zip(values, like, strict=True)]
        for atom, value, new in zip(atoms, values, made, strict=True):
            if value is None:
                ops.append(Op("broadcast_in_dim", [None], [new], numbers=[_number(atom)]))
        return made

    for equation in jaxpr.eqns:
        ins, inner = [read(atom) for atom in equation.invars], called(equation)
        if inner is None:
            outs = [Value.of(var.aval) for var in equation.outvars]
            ops.append(_op(equation, ins, outs))
        else:
            ins = filled(equation.invars, ins, inner.jaxpr.invars)
            outs = filled(inner.jaxpr.outvars, inline(inner, ins, ops)[0], equation.outvars)
        value_of |= zip(equation.outvars, outs, strict=True)
    return [read(atom) for atom in jaxpr.outvars], [_number(atom) for atom in jaxpr.outvars]


def _op(equation: JaxprEqn, ins: list[Value | None], outs: list[Value]) -> Op:
    op = Op(equation.primitive.name, ins, outs, equation.params, [_number(atom) for atom in equation.invars])
    if op.name == "scan":
        op.loop = loop(equation)
        op.inner = [flat(op.loop.body, slices=range(op.loop.carried, len(outs)))]
    elif op.name == "cond":
        op.inner = [flat(closed(branch)) for branch in equation.params["branches"]]
    return op


def _number(atom: Any) -> float | None:
    if not isinstance(atom, Literal):
        return None
    value = np.asarray(atom.val)
    return float(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind in "fiub" else None
