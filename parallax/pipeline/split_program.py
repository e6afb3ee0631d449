"""Divides a traced program in two: what is computed now, and what is computed later from saved values.

Two functions are in front; `parallax/pipeline/layer_passes.py` is their one user. Each takes a program, as
`jax.make_jaxpr` gives it, and returns two that together have its results. Every equation is in one of the two, as it
was; where `select` recomputes, in both.

    split_backward   in: the backward pass of a layer, (weights, context, residuals, dy) -> (*dw, dx)
                     out: B, which gives dx, gradients without a product, and b_residuals; and W, which gives the other
                     gradients from residuals that it may read and b_residuals
    select           in: the forward pass with its residuals, (weights, x, context) -> (y, *residuals)
                     out: one program for y and the values with some names; and one for the residuals, from the
                     arguments and those values

The simple form is `jax.vjp`: tests/pipeline/test_split_program.py compares both with it.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from parallax.config.remat import NORM_MEANS, REMAT_PARTS
from parallax.errors import ConfigError, nearest
from parallax.jaxprs import CALLS, LOOPS_AND_BRANCHES, SCALED_MATMUL, ancestors, apply, called, part, within

# A weight gradient without these operations, as of a norm or a bias, is computed in B: deferring it to W would save
# whole activations in memory, only to defer a sum.
PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "pallas_call", SCALED_MATMUL)


class BackwardSplit(NamedTuple):
    """A program divided in two, with each equation in one of them.

    `first(*args)` returns `(*outputs, *b_residuals)`, `second(*args at reads, *b_residuals)` the deferred outputs.
    """

    first: ClosedJaxpr
    second: ClosedJaxpr
    deferred: tuple[int, ...]  # outputs of the whole program that the second one computes
    reads: tuple[int, ...]  # arguments of the whole program that the second one reads


def split_backward(program: ClosedJaxpr, *, wanted: Iterable[int], readable: Iterable[int]) -> BackwardSplit:
    """Divide a traced program. The first part computes the outputs at `wanted` and everything cheap, the second one the
    matrix products that these do not need.

    The second part reads arguments at `readable` itself; the first part passes everything else as `b_residuals`.
    """
    return split_inlined(inlined(program), wanted=wanted, readable=readable)


def split_inlined(whole: ClosedJaxpr, *, wanted: Iterable[int], readable: Iterable[int]) -> BackwardSplit:
    """The same for a program without calls."""
    jaxpr = whole.jaxpr
    readable = set(readable)
    first, deferred = ancestors(jaxpr, [jaxpr.outvars[place] for place in wanted]), []
    for place, out in enumerate(jaxpr.outvars):
        further = ancestors(jaxpr, [out]) - first
        if any(_multiplies(jaxpr.eqns[number]) for number in further):
            deferred.append(place)
        else:
            first |= further
    later = [jaxpr.outvars[place] for place in deferred]
    second = ancestors(jaxpr, later) - first
    crossing = _crossing(jaxpr, second, later)
    place_of = {var: place for place, var in enumerate(jaxpr.invars)}
    reads = [var for var in crossing if place_of.get(var) in readable]
    b_residuals = [var for var in crossing if place_of.get(var) not in readable and var not in set(jaxpr.constvars)]
    now = [out for place, out in enumerate(jaxpr.outvars) if place not in deferred]
    return BackwardSplit(
        _numbered(whole, first, jaxpr.invars, [*now, *b_residuals]),
        _numbered(whole, second, [*reads, *b_residuals], later),
        tuple(deferred),
        tuple(place_of[var] for var in reads),
    )


class Selection(NamedTuple):
    """`make(*args)` returns `(*outputs at given places, *kept)`, `recompute(*args, *kept)` the other outputs."""

    make: ClosedJaxpr
    recompute: ClosedJaxpr
    names: tuple[str, ...]  # of saved values


def select(program: ClosedJaxpr, *, now: Collection[int], names: Collection[str]) -> Selection:
    """Divide a traced program: the outputs at `now` are computed first, the others later, from the arguments and from
    values with these names, which are saved if the other outputs need them.

    Raises ConfigError if the program has a name that is not a part of `pipeline.remat`.
    """
    return select_inlined(inlined(program), now=now, names=names)


def select_inlined(whole: ClosedJaxpr, *, now: Collection[int], names: Collection[str]) -> Selection:
    """The same for a program without calls."""
    jaxpr = whole.jaxpr
    named = {e.outvars[0]: e.params["name"] for e in jaxpr.eqns if e.primitive.name == "name"}
    for name in sorted(set(named.values()) - {*REMAT_PARTS, NORM_MEANS}):
        raise ConfigError(
            f"checkpoint_name(..., {name!r}) in a layer: pipeline.remat has no such part; {nearest(name, REMAT_PARTS)}"
        )
    named = {var: name for var, name in named.items() if name in names}
    first = [jaxpr.outvars[place] for place in now]
    later = [out for place, out in enumerate(jaxpr.outvars) if place not in now]
    recomputed = ancestors(jaxpr, later, given=named)
    kept = [var for var in _crossing(jaxpr, recomputed, later) if var in named]
    first += kept
    return Selection(
        _numbered(whole, ancestors(jaxpr, first), jaxpr.invars, first),
        _numbered(whole, recomputed, [*jaxpr.invars, *kept], later),
        tuple(named[var] for var in kept),
    )


def inlined(closed: ClosedJaxpr, apart: Collection[str] = ()) -> ClosedJaxpr:
    """The same program with calls of jitted functions inlined, so that an einsum's two gradients are two equations.
    Values with names in `apart` are behind barriers: the compiler fuses them with nothing that reads them."""

    def run(jaxpr: Jaxpr, consts: list, args: list) -> list:
        value_of = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else value_of[atom]

        for equation in jaxpr.eqns:
            values = [read(atom) for atom in equation.invars]
            inner = called(equation) if equation.primitive.name in CALLS else None
            outs = run(inner.jaxpr, inner.consts, values) if inner else apply(equation, values)
            if equation.primitive.name == "name" and equation.params["name"] in apart:
                outs = lax.optimization_barrier(outs)
            value_of |= zip(equation.outvars, outs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def _multiplies(equation: JaxprEqn) -> bool:
    """Whether an equation is a matrix product, or a loop or a branch with one in it, as grouped products are."""
    inner = within(equation) if equation.primitive.name in LOOPS_AND_BRANCHES else ()
    return any(each.primitive.name in PRODUCTS for each in (equation, *inner))


def _crossing(jaxpr: Jaxpr, second: set[int], outs: Iterable) -> list:
    """Values that the second part reads but does not compute."""
    made = {var for number in second for var in jaxpr.eqns[number].outvars}
    read = [var for number in sorted(second) for var in jaxpr.eqns[number].invars] + list(outs)
    return [*dict.fromkeys(var for var in read if not isinstance(var, Literal) and var not in made)]


def _numbered(whole: ClosedJaxpr, numbers: set[int], invars: list, outvars: list) -> ClosedJaxpr:
    """Some equations of a program, from `invars` to `outvars`."""
    equations = [whole.jaxpr.eqns[number] for number in sorted(numbers)]
    return part(equations, invars, outvars, whole.jaxpr.constvars, whole.consts)
