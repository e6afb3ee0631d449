"""The backward pass of a layer in two: B, all that the gradient of the input needs, and W, the rest."""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from parallax.runtime.jaxprs import apply, called, part

CALLS = ("jit", "pjit", "closed_call", "core_call")
# A weight's gradient that takes none of these, as a norm's or a bias's, is made in B: to defer it, W would keep
# whole activations to save a sum.
PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "pallas_call")


class Division(NamedTuple):
    """Two programs that do together what one did, each equation in one of them.

    `first(*args)` returns `(*outputs, *handed)`, `second(*args at reads, *handed)` the deferred outputs.
    """

    first: Callable
    second: Callable
    deferred: tuple[int, ...]  # outputs of the whole that the second makes
    reads: tuple[int, ...]  # arguments of the whole that the second reads, too


def divide(function: Callable, args: tuple, *, wanted: Iterable[int], readable: Iterable[int]) -> Division:
    """Divide `function(*args) -> flat list`: the outputs at `wanted` and what is cheap first, matrix products that
    they do not need second.

    The second reads arguments at `readable` itself; all else that it needs, the first hands to it.
    """
    whole = inlined(jax.make_jaxpr(function)(*args))
    jaxpr = whole.jaxpr
    wanted, readable = set(wanted), set(readable)
    first = _ancestors(jaxpr, [jaxpr.outvars[at] for at in wanted])
    deferred = []
    for at, out in enumerate(jaxpr.outvars):
        if at in wanted:
            continue
        own = _ancestors(jaxpr, [out]) - first
        if any(jaxpr.eqns[number].primitive.name in PRODUCTS for number in own):
            deferred.append(at)
        else:
            first |= own
    second = _ancestors(jaxpr, [jaxpr.outvars[at] for at in deferred]) - first
    crossing = _crossing(jaxpr, second, [jaxpr.outvars[at] for at in deferred])
    place = {var: at for at, var in enumerate(jaxpr.invars)}
    reads = [var for var in crossing if place.get(var) in readable]
    handed = [var for var in crossing if place.get(var) not in readable and var not in set(jaxpr.constvars)]
    now = [out for at, out in enumerate(jaxpr.outvars) if at not in deferred]
    later = [jaxpr.outvars[at] for at in deferred]
    return Division(
        _numbered(whole, first, jaxpr.invars, [*now, *handed]),
        _numbered(whole, second, [*reads, *handed], later),
        tuple(deferred),
        tuple(place[var] for var in reads),
    )


class Selection(NamedTuple):
    """`make(*args)` returns `(*outputs at given places, *kept)`, `again(*args, *kept)` the other outputs."""

    make: Callable
    again: Callable


def select(function: Callable, args: tuple, *, now: Iterable[int], names: Collection[str]) -> Selection:
    """Divide `function(*args) -> flat list` in time: the outputs at `now` are made first, the others later, from the
    arguments again and from values of these names, which are kept where the others need them."""
    whole = inlined(jax.make_jaxpr(function)(*args))
    jaxpr = whole.jaxpr
    named = {e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "name" and e.params["name"] in names}
    first, later = [], []
    for at, out in enumerate(jaxpr.outvars):
        (first if at in now else later).append(out)
    again = _ancestors(jaxpr, later, given=named)
    read = [var for number in again for var in jaxpr.eqns[number].invars] + later
    kept = [*dict.fromkeys(var for var in read if not isinstance(var, Literal) and var in named)]
    first += kept
    return Selection(
        _numbered(whole, _ancestors(jaxpr, first), jaxpr.invars, first),
        _numbered(whole, again, [*jaxpr.invars, *kept], later),
    )


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program without calls of jitted functions: an einsum's two gradients are two equations then."""

    def run(jaxpr: Jaxpr, consts: list, args: list) -> list:
        value_of = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda atom: atom.val if isinstance(atom, Literal) else value_of[atom]  # noqa: E731
        for equation in jaxpr.eqns:
            values = [read(atom) for atom in equation.invars]
            inner = called(equation) if equation.primitive.name in CALLS else None
            outs = run(inner.jaxpr, inner.consts, values) if inner else apply(equation, values)
            value_of |= zip(equation.outvars, outs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def _ancestors(jaxpr: Jaxpr, outs: Iterable, given: Collection = ()) -> set[int]:
    """Numbers of the equations that these outputs need, where these values are given."""
    needed = {out for out in outs if not isinstance(out, Literal) and out not in given}
    found = set()
    for number in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[number]
        if needed & set(equation.outvars):
            found.add(number)
            needed |= {var for var in equation.invars if not isinstance(var, Literal) and var not in given}
    return found


def _crossing(jaxpr: Jaxpr, second: set[int], outs: Iterable) -> list:
    """What the second part reads and does not make."""
    made = {var for number in second for var in jaxpr.eqns[number].outvars}
    read = [var for number in sorted(second) for var in jaxpr.eqns[number].invars] + list(outs)
    return [*dict.fromkeys(var for var in read if not isinstance(var, Literal) and var not in made)]


def _numbered(whole: ClosedJaxpr, numbers: set[int], invars: list, outvars: list) -> Callable:
    """Some of the equations of a program, from `invars` to `outvars`."""
    equations = [whole.jaxpr.eqns[number] for number in sorted(numbers)]
    return part(equations, invars, outvars, whole.jaxpr.constvars, whole.consts)
