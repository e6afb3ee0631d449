"""A traced program walked as one device runs it, counting on the way.

Values that follow from tables, loop counters and the device's place in the mesh are computed, so that of a branch only
the side is counted that is taken, and of a loop every turn. What no output needs is not counted: XLA drops it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from parallax.jaxprs import Loop, apply, called, closed, loop
from parallax.report.origin import Origin
from parallax.report.steering import Steering

LARGEST_KNOWN = 1 << 14  # entries; tables and counters are smaller, activations not worth computing
UNCHANGED = ("pvary", "pcast", "copy", "optimization_barrier")


class Value(NamedTuple):
    """What is known of an array before the program runs: the numbers, and whether it was made from a gradient."""

    known: np.ndarray | None = None
    gradient: bool = False

    def key(self) -> tuple[bytes | None, bool]:
        """Equal for equal values."""
        return None if self.known is None else self.known.tobytes(), self.gradient

    def has_shape(self, var: Any) -> bool:
        return self.known is not None and self.known.shape == var.aval.shape


Count = Callable[[JaxprEqn, Origin], Counter]


def walk(program: ClosedJaxpr, *, at: Mapping[str, int], count: Count) -> Counter:
    """The sum of `count` over every equation that the device at these mesh coordinates runs, as often as it does.

    Raises ValueError where it depends on data which side of a branch is taken, or how often a loop turns, and that
    changes the sum.
    """
    device = Walk(at, count)
    device.call(program, [Value()] * len(program.jaxpr.invars), "")
    return device.total


class Walk:
    """One device's way through a program; `total` is what it has counted."""

    def __init__(self, at: Mapping[str, int], count: Count):
        self.at, self.count, self.total = dict(at), count, Counter()
        self._steering, self._calls, self._used = Steering(), {}, {}

    def call(self, program: ClosedJaxpr, args: Sequence[Value], stack: str, wanted: Set[int] = frozenset()):
        """Run a program under this stack of names; its outputs, known at least where they are wanted and can be.

        Programs are run again only with other values of what steers them: most ticks are like others, and layers alike.
        """
        steers = self._steering.inputs(program.jaxpr, wanted)
        args = [value if at in steers else Value(None, value.gradient) for at, value in enumerate(args)]
        key = program.jaxpr, stack, frozenset(wanted), tuple(map(Value.key, args))
        if key not in self._calls:
            before, self.total = self.total, Counter()
            outs = self._run(program, args, stack, self._steering.variables(program.jaxpr, wanted))
            self._calls[key], self.total = (self.total, outs), before
        counted, outs = self._calls[key]
        self.total.update(counted)
        return outs

    def _run(self, program: ClosedJaxpr, args: Sequence[Value], stack: str, steering: Set) -> list[Value]:
        jaxpr = program.jaxpr
        consts = [Value(_known(const)) for const in program.consts]
        value_of = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda atom: Value(np.asarray(atom.val)) if isinstance(atom, Literal) else value_of[atom]  # noqa: E731
        for equation in self._needed(jaxpr):
            wanted = {at for at, out in enumerate(equation.outvars) if out in steering}
            outs = self._step(equation, [*map(read, equation.invars)], stack, wanted)
            value_of |= zip(equation.outvars, outs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, equation: JaxprEqn, values: list[Value], stack: str, wanted: Set[int]) -> list[Value]:
        origin = Origin.of(equation, stack, any(value.gradient for value in values))
        self.total.update(self.count(equation, origin))
        outs = self._outputs(equation, values, origin, wanted)
        if origin.is_forward:  # nothing there was made from a gradient, even what waited for one
            return [out._replace(gradient=False) for out in outs]
        return outs

    def _outputs(self, equation: JaxprEqn, values: list[Value], origin: Origin, wanted: Set[int]) -> list[Value]:
        name, params, stack = equation.primitive.name, equation.params, origin.stack
        if name == "axis_index" and params["axis_name"] in self.at:
            return [Value(np.int32(self.at[params["axis_name"]]))]
        if name in UNCHANGED:
            return values
        if name == "scan":
            return self._scan(loop(equation), values, stack, wanted)
        if name == "cond":
            return self._branch([closed(branch) for branch in params["branches"]], values, stack, wanted)
        if name == "while":
            return self._while(closed(params["body_jaxpr"]), equation, origin)
        if (inner := called(equation)) is not None:
            if name == "shard_map":  # what is cut there is another piece on each device
                pairs = zip(values, inner.jaxpr.invars, strict=True)
                values = [value if value.has_shape(var) else Value(None, value.gradient) for value, var in pairs]
            return self.call(inner, values, stack, wanted)
        known = _evaluate(equation, values) if wanted else [None] * len(equation.outvars)
        return [Value(out, origin.gradient) for out in known]

    def _scan(self, scan: Loop, values: list[Value], stack: str, wanted: Set[int]) -> list[Value]:
        read = self._steering.inputs(scan.body.jaxpr, wanted)
        if all(at < scan.consts for at in read):  # every turn is like the first
            before, self.total = self.total, Counter()
            outs = self.call(scan.body, values, stack)
            before.update({key: count * scan.length for key, count in self.total.items()})
            self.total = before
            return [Value(None, out.gradient) for out in outs]
        split = scan.consts + scan.carried
        carry, xs, made = values[scan.consts : split], values[split:], []
        asked = set(wanted) | {at - scan.consts for at in read if scan.consts <= at < split}
        for turn in reversed(range(scan.length)) if scan.reverse else range(scan.length):
            own = [Value(None if x.known is None else x.known[turn], x.gradient) for x in xs]
            outs = self.call(scan.body, [*values[: scan.consts], *carry, *own], stack, asked)
            carry, made = outs[: scan.carried], outs[scan.carried :]
        return [*carry, *(Value(None, out.gradient) for out in made)]

    def _branch(self, branches: list[ClosedJaxpr], values: list[Value], stack: str, wanted: Set[int]) -> list[Value]:
        (which, _), *operands = values
        if which is not None:
            return self.call(branches[min(max(int(which), 0), len(branches) - 1)], operands, stack, wanted)
        before, found, gradients = self.total, [], []
        for branch in branches:
            self.total = Counter()
            gradients.append([out.gradient for out in self.call(branch, operands, stack)])
            found.append(self.total)
        if any(counted != found[0] for counted in found):
            shown = " or ".join(str(dict(counted)) for counted in found)
            raise ValueError(f"which branch runs depends on data, and they differ in what is counted: {shown}.")
        self.total = before
        self.total.update(found[0])
        return [Value(None, any(each)) for each in zip(*gradients, strict=True)]

    def _while(self, body: ClosedJaxpr, equation: JaxprEqn, origin: Origin) -> list[Value]:
        before, self.total = self.total, Counter()
        self.call(body, [Value(None, origin.gradient)] * len(body.jaxpr.invars), origin.stack)
        counted, self.total = self.total, before
        if counted:
            raise ValueError(f"how often a while loop turns depends on data, and each turn counts {dict(counted)}.")
        return [Value(None, origin.gradient)] * len(equation.outvars)

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


def _evaluate(equation: JaxprEqn, values: list[Value]) -> list[np.ndarray | None]:
    """Outputs of an equation whose inputs are known, if they are small and count something."""
    small = all(_counts(var.aval) for var in equation.outvars)
    if not small or any(value.known is None for value in values):
        return [None] * len(equation.outvars)
    return [np.asarray(out) for out in apply(equation, [value.known for value in values])]


def _known(const: Any) -> np.ndarray | None:
    return np.asarray(const) if _counts(const) else None


def _counts(array: Any) -> bool:
    """Whether an array, or what is known of it, is small and of whole numbers or truths."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or math.prod(array.shape) > LARGEST_KNOWN:
        return False
    return jax.dtypes.issubdtype(dtype, np.integer) or jax.dtypes.issubdtype(dtype, np.bool_)
