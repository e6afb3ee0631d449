"""A traced program walked as one device runs it, counting on the way.

Values that follow from tables, loop counters and the device's place in the mesh are computed, so that of a branch only
the side is counted that is taken, and of a loop every turn. What no output needs is not counted: XLA drops it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from parallax.analysis.report.gradients import Gradients, inputs_in, operands
from parallax.analysis.report.origin import Origin
from parallax.analysis.report.steering import Steering
from parallax.runtime.jaxprs import Loop, apply, called, closed, loop

LARGEST_KNOWN = 1 << 14  # entries; tables and counters are smaller, activations not worth computing
UNCHANGED = ("pvary", "pcast", "copy", "optimization_barrier", "layout_constraint")
Count = Callable[[JaxprEqn, Origin], Counter]
Value = np.ndarray | None  # None: not known before the program runs


def walk(program: ClosedJaxpr, *, at: Mapping[str, int], count: Count) -> Counter:
    """The sum of `count` over every equation that the device at these mesh coordinates runs, as often as it does.

    Raises ValueError where it depends on data which side of a branch is taken, or how often a loop turns, and that
    changes the sum.
    """
    device = Walk(at, count)
    device.call(program, Call("", set(), set()), [None] * len(program.jaxpr.invars))
    return device.total


class Call(NamedTuple):
    """How a program is called."""

    stack: str  # of names, as in Origin
    gradients: Set[int]  # inputs that are made from gradients
    wanted: Set[int]  # outputs whose values steer what runs later


class Walk:
    """One device's way through a program; `total` is what it has counted."""

    def __init__(self, at: Mapping[str, int], count: Count):
        self.at, self.count, self.total = dict(at), count, Counter()
        self._steering, self._gradients, self._calls, self._used = Steering(), Gradients(), {}, {}

    def call(self, program: ClosedJaxpr, how: Call, args: Sequence[Value]) -> list[Value]:
        """Run a program; its outputs, known at least where they are wanted and can be.

        It is run again only with other values of what steers it: most ticks are like others, and layers alike.
        """
        steers = self._steering.inputs(program.jaxpr, how.wanted)
        args = [value if at in steers else None for at, value in enumerate(args)]
        values = tuple(None if value is None else value.tobytes() for value in args)
        key = program.jaxpr, how.stack, frozenset(how.gradients), frozenset(how.wanted), values
        if key not in self._calls:
            counted, outs = self._apart(lambda: self._run(program, how, args))
            self._calls[key] = counted, outs
        counted, outs = self._calls[key]
        self.total.update(counted)
        return outs

    def _apart(self, run: Callable[[], list[Value]]) -> tuple[Counter, list[Value]]:
        """What a run counts, not added to the total, and what it returns."""
        before, self.total = self.total, Counter()
        outs = run()
        counted, self.total = self.total, before
        return counted, outs

    def _run(self, program: ClosedJaxpr, how: Call, args: Sequence[Value]) -> list[Value]:
        jaxpr = program.jaxpr
        steering = self._steering.variables(jaxpr, how.wanted)
        gradients = self._gradients.variables(jaxpr, how.stack, how.gradients)
        value_of = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_known, program.consts), *args], strict=True))
        read = lambda atom: np.asarray(atom.val) if isinstance(atom, Literal) else value_of[atom]  # noqa: E731
        for equation in self._needed(jaxpr):
            given = inputs_in(equation, gradients)
            origin = Origin.of(equation, how.stack, bool(given))
            self.total.update(self.count(equation, origin))
            inner = Call(origin.stack, given, {at for at, out in enumerate(equation.outvars) if out in steering})
            outs = self._outputs(equation, inner, [read(atom) for atom in equation.invars])
            value_of |= zip(equation.outvars, outs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, equation: JaxprEqn, how: Call, values: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name == "axis_index" and params["axis_name"] in self.at:
            return [np.int32(self.at[params["axis_name"]])]
        if name in UNCHANGED:
            return values
        if name == "scan":
            return self._scan(loop(equation), how, values)
        if name == "cond":
            inner = Call(how.stack, operands(how.gradients), how.wanted)
            return self._branch([closed(branch) for branch in params["branches"]], inner, *values)
        if name == "while":
            return self._while(closed(params["body_jaxpr"]), how, len(equation.outvars))
        if (inner := called(equation)) is not None:
            if name == "shard_map":  # what is cut there is another piece on each device
                shapes = [var.aval.shape for var in inner.jaxpr.invars]
                values = [v if v is not None and v.shape == s else None for v, s in zip(values, shapes, strict=True)]
            return self.call(inner, how, values)
        return _evaluate(equation, values) if how.wanted else [None] * len(equation.outvars)

    def _scan(self, scan: Loop, how: Call, values: list[Value]) -> list[Value]:
        given = self._gradients.given_to_body(scan, how.stack, how.gradients)
        split, made = scan.consts + scan.carried, len(scan.body.jaxpr.outvars) - scan.carried
        read = self._steering.inputs(scan.body.jaxpr, how.wanted)
        if all(at < scan.consts for at in read):  # every turn is like the first
            counted, _ = self._apart(lambda: self.call(scan.body, Call(how.stack, given, set()), values))
            self.total.update({key: number * scan.length for key, number in counted.items()})
            return [None] * (scan.carried + made)
        inner = Call(how.stack, given, how.wanted | {at - scan.consts for at in read if scan.consts <= at < split})
        carry, xs = values[scan.consts : split], values[split:]
        for turn in reversed(range(scan.length)) if scan.reverse else range(scan.length):
            own = [None if x is None else x[turn] for x in xs]
            carry = self.call(scan.body, inner, [*values[: scan.consts], *carry, *own])[: scan.carried]
        return [*carry, *[None] * made]

    def _branch(self, branches: list[ClosedJaxpr], how: Call, which: Value, *values: Value) -> list[Value]:
        if which is not None:
            return self.call(branches[min(max(int(which), 0), len(branches) - 1)], how, values)
        found = [self._apart(partial(self.call, branch, how, values))[0] for branch in branches]
        if any(counted != found[0] for counted in found):
            shown = " or ".join(str(dict(counted)) for counted in found)
            raise ValueError(f"which branch runs depends on data, and they differ in what is counted: {shown}.")
        self.total.update(found[0])
        return [None] * len(branches[0].jaxpr.outvars)

    def _while(self, body: ClosedJaxpr, how: Call, outputs: int) -> list[Value]:
        inputs = len(body.jaxpr.invars)
        given = range(inputs) if how.gradients else ()
        counted, _ = self._apart(lambda: self.call(body, Call(how.stack, set(given), set()), [None] * inputs))
        if counted:
            raise ValueError(f"how often a while loop turns depends on data, and each turn counts {dict(counted)}.")
        return [None] * outputs

    def _needed(self, jaxpr: Jaxpr) -> list[JaxprEqn]:
        """The equations of which an output is used, in order."""
        if jaxpr not in self._used:
            used, needed = {out for out in jaxpr.outvars if not isinstance(out, Literal)}, []
            for equation in reversed(jaxpr.eqns):
                if used.intersection(equation.outvars):
                    needed.append(equation)
                    used |= {var for var in equation.invars if not isinstance(var, Literal)}
            self._used[jaxpr] = needed[::-1]
        return self._used[jaxpr]


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
