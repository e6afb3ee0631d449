"""Helpers for jaxprs: parts of a traced program."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

SCALED_MATMUL = "scaled_matmul_wrapper"  # the primitive of jax.nn.scaled_matmul
LOOPS_AND_BRANCHES = ("scan", "while", "cond")
CALLS = ("jit", "pjit", "closed_call", "core_call")
NO_CALLS = (*LOOPS_AND_BRANCHES, "pallas_call")  # they do not run their programs exactly once
RAGGED_PRIMITIVE = "ragged_all_to_all"
# JAX's names of the notation's collectives.
KIND_OF_PRIMITIVE = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    RAGGED_PRIMITIVE: "all-to-all",
    "ppermute": "permute",
}


def part(
    equations: Sequence[JaxprEqn], invars: Sequence, outvars: Sequence, constvars: Sequence = (), consts: Sequence = ()
) -> ClosedJaxpr:
    """Some equations of a program as a program from `invars` to `outvars`.

    Equations keep their names and source lines.
    """
    names = DebugInfo("part", "part of a program", (None,) * len(invars), (None,) * len(outvars))
    jaxpr = Jaxpr(list(constvars), list(invars), list(outvars), list(equations), debug_info=names)
    return ClosedJaxpr(jaxpr, list(consts))


def apply(equation: JaxprEqn, values: Sequence[Any]) -> list:
    """The outputs of one equation for values of its inputs."""
    value_of = {v: value for v, value in zip(equation.invars, values, strict=True) if not isinstance(v, Literal)}
    return jaxpr_as_fun(part([equation], [*value_of], equation.outvars))(*value_of.values())


def called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The program that an equation calls, that is, runs exactly once; None for other equations."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if equation.primitive.name in NO_CALLS or not isinstance(inner, Jaxpr | ClosedJaxpr):
        return None
    return closed(inner)


def programs_of(equation: JaxprEqn) -> Iterator[ClosedJaxpr]:
    """The programs that an equation runs, without those nested in them."""
    for value in equation.params.values():
        yield from _programs_in(value)


def _programs_in(value: Any) -> Iterator[ClosedJaxpr]:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        yield closed(value)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _programs_in(inner)


def within(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equations of all programs that an equation runs, including nested ones."""
    for program in programs_of(equation):
        for inner in program.jaxpr.eqns:
            yield inner
            yield from within(inner)


def ancestors(jaxpr: Jaxpr, outs: Iterable, given: Collection = ()) -> set[int]:
    """Indices of the equations that these outputs need, if the values `given` are known."""
    needed = {out for out in outs if not isinstance(out, Literal) and out not in given}
    indices = set()
    for number in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[number]
        if needed & set(equation.outvars):
            indices.add(number)
            needed |= {var for var in equation.invars if not isinstance(var, Literal) and var not in given}
    return indices


def needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations that a program's outputs need, in order."""
    return [jaxpr.eqns[number] for number in sorted(ancestors(jaxpr, jaxpr.outvars))]


def aval_bytes(aval: Any) -> int:
    """Bytes of an array of this type; a semaphore of a kernel, whose dtype has no size, counts as one number."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)


def var_bytes(var: Any) -> int:
    """The same of a variable of a program, or of a literal."""
    return aval_bytes(var.aval)


class Loop(NamedTuple):
    """A scan: `body` takes constants, the carry, and a slice of each other operand."""

    body: ClosedJaxpr
    length: int
    reverse: bool
    consts: int
    carried: int


def loop(equation: JaxprEqn) -> Loop:
    """The parts of a scan, counted by shapes, since JAX 0.10 and 0.12 name the counts differently."""
    body = closed(equation.params["jaxpr"])
    sliced = _deeper(equation.invars, body.jaxpr.invars)
    carried = len(equation.outvars) - _deeper(equation.outvars, body.jaxpr.outvars)
    consts = len(equation.invars) - sliced - carried
    return Loop(body, equation.params["length"], equation.params["reverse"], consts, carried)


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """A program with its constants; since jax 0.12 programs of loops and branches have none."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, [])


def _deeper(outer: Sequence, inner: Sequence) -> int:
    """Number of variables with one more dim outside a loop than in it."""
    return sum(o.aval.ndim > i.aval.ndim for o, i in zip(outer, inner, strict=True))
