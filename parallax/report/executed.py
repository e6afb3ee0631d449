"""FLOPs that each device executes: the traced program, walked as that device runs it.

Values that follow from tables, loop counters and the device's place in the mesh are computed on the way, so that of
a branch only the side is counted that is taken, and of a loop every turn.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from parallax.jaxprs import Loop, apply, called, closed, loop

LARGEST_KNOWN = 1 << 14  # entries; tables and counters are smaller, activations not worth computing
UNCOUNTED = ("ragged_dot", "ragged_dot_general", "conv_general_dilated", "pallas_call")
UNCHANGED = ("pvary", "pcast", "copy", "optimization_barrier")
Value = np.ndarray | None  # None: not known before the program runs


def matmul_flops(function: Callable, *args: Any, at: Mapping[str, int]) -> int:
    """FLOPs of the matrix products that the device at these mesh coordinates executes, 2 for each multiply-add.

    Raises ValueError where it depends on data which side of a branch is taken, and the sides cost differently.

    >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
    >>> matmul_flops(lambda x: jax.lax.cond(jax.numpy.arange(3)[1] > 0, lambda: x @ x.T, lambda: x[:, :4]), x, at={})
    256
    """
    program, walk = jax.make_jaxpr(function)(*args), Walk(dict(at))
    walk.run(program.jaxpr, program.consts, [None] * len(program.jaxpr.invars))
    return walk.flops


class Walk:
    """One device's way through a program; `flops` is what it has executed."""

    def __init__(self, at: dict[str, int]):
        self.at, self.flops = at, 0

    def run(self, jaxpr: Jaxpr, consts: list, args: list[Value]) -> list[Value]:
        """The known outputs of a program."""
        value_of = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_known, consts), *args], strict=True))
        read = lambda atom: np.asarray(atom.val) if isinstance(atom, Literal) else value_of[atom]  # noqa: E731
        for equation in jaxpr.eqns:
            outs = self._step(equation, [read(atom) for atom in equation.invars])
            value_of |= zip(equation.outvars, outs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name in UNCOUNTED:
            raise ValueError(f"{name} multiplies matrices in a way that is not counted here.")
        if name == "dot_general":
            self.flops += _product_flops(equation)
        if name == "axis_index" and params["axis_name"] in self.at:
            return [np.int32(self.at[params["axis_name"]])]
        if name in UNCHANGED:
            return values
        if name == "scan":
            return self._scan(loop(equation), values)
        if name == "cond":
            return self._branch([closed(branch) for branch in params["branches"]], values)
        if name == "while":
            return self._while(equation, params)
        if (inner := called(equation)) is not None:
            if name == "shard_map":  # what is cut there is another piece on each device
                shapes = [var.aval.shape for var in inner.jaxpr.invars]
                values = [v if v is not None and v.shape == s else None for v, s in zip(values, shapes, strict=True)]
            return self._call(inner, values)
        return _evaluate(equation, values)

    def _call(self, program: ClosedJaxpr, values: list[Value]) -> list[Value]:
        fixed = fixed_flops(program.jaxpr)
        if fixed:  # and so whole layers, of which nothing but their cost matters here
            self.flops += fixed
            return [None] * len(program.jaxpr.outvars)
        return self.run(program.jaxpr, program.consts, values)

    def _scan(self, scan: Loop, values: list[Value]) -> list[Value]:
        fixed = fixed_flops(scan.body.jaxpr)
        if fixed is not None:
            self.flops += fixed * scan.length
            return [None] * len(scan.body.jaxpr.outvars)
        split = scan.consts + scan.carried
        carry, xs = values[scan.consts : split], values[split:]
        for turn in reversed(range(scan.length)) if scan.reverse else range(scan.length):
            own = [None if x is None else x[turn] for x in xs]
            carry = self._call(scan.body, [*values[: scan.consts], *carry, *own])[: scan.carried]
        return [*carry, *[None] * (len(scan.body.jaxpr.outvars) - scan.carried)]

    def _branch(self, branches: list[ClosedJaxpr], values: list[Value]) -> list[Value]:
        which, *operands = values
        if which is not None:
            return self._call(branches[min(max(int(which), 0), len(branches) - 1)], operands)
        before, costs = self.flops, []
        for branch in branches:
            outs = self._call(branch, operands)
            costs.append(self.flops - before)
            self.flops = before
        if len(set(costs)) > 1:
            raise ValueError(f"which branch runs depends on data, and the branches take {costs} FLOPs.")
        self.flops = before + costs[0]
        return [None] * len(outs)

    def _while(self, equation: JaxprEqn, params: dict) -> list[Value]:
        before = self.flops
        body = closed(params["body_jaxpr"])
        self._call(body, [None] * len(body.jaxpr.invars))
        if self.flops != before:
            raise ValueError("a while loop holds matrix products, and how often it turns depends on data.")
        return [None] * len(equation.outvars)


@functools.cache
def fixed_flops(jaxpr: Jaxpr) -> int | None:
    """FLOPs of a program in which nothing branches; None of one in which something does."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner, times = called(equation), 1
        if name == "scan":
            inner, times = loop(equation).body, params["length"]
        if name in ("cond", "while", *UNCOUNTED):
            return None
        own = fixed_flops(inner.jaxpr) if inner is not None else 0
        if own is None:
            return None
        total += times * own + (_product_flops(equation) if name == "dot_general" else 0)
    return total


def _product_flops(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _evaluate(equation: JaxprEqn, values: list[Value]) -> list[Value]:
    """Outputs of an equation whose inputs are known, if they are small and count something."""
    small = all(_counts(var.aval) for var in equation.outvars)
    if not small or any(value is None for value in values):
        return [None] * len(equation.outvars)
    return [np.asarray(out) for out in apply(equation, values)]


def _known(const: Any) -> Value:
    return np.asarray(const) if _counts(const) else None


def _counts(array: Any) -> bool:
    """Whether an array, or what is known of it, is small and of whole numbers or truths."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or math.prod(array.shape) > LARGEST_KNOWN:
        return False
    return jax.dtypes.issubdtype(dtype, np.integer) or jax.dtypes.issubdtype(dtype, np.bool_)
