"""Traced programs as values: parts of them as functions again."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun


def part(
    equations: Sequence[JaxprEqn], invars: Sequence, outvars: Sequence, constvars: Sequence = (), consts: Sequence = ()
) -> Callable[..., list]:
    """Some equations of a program as a function from `invars` to `outvars`.

    What it runs keeps the names and source lines that it came from.
    """
    names = DebugInfo("part", "part of a program", (None,) * len(invars), (None,) * len(outvars))
    jaxpr = Jaxpr(list(constvars), list(invars), list(outvars), list(equations), debug_info=names)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, list(consts)))


def apply(equation: JaxprEqn, values: Sequence[Any]) -> list:
    """The outputs of one equation for values of its inputs."""
    value_of = {v: value for v, value in zip(equation.invars, values, strict=True) if not isinstance(v, Literal)}
    return part([equation], [*value_of], equation.outvars)(*value_of.values())


def called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The program that an equation runs once, as a call; None for other equations."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if equation.primitive.name in ("scan", "while", "cond") or not isinstance(inner, Jaxpr | ClosedJaxpr):
        return None
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])
