"""What a traced function is made of, and what it sends."""

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from parallax.jaxprs import called, closed, loop

# How JAX calls what the notation calls.
KINDS = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
}


def equations(function, *args):
    """Every equation of a traced function, those inside loops, branches and calls too, each as often as written."""
    yield from inside(jax.make_jaxpr(function)(*args))


def inside(jaxpr):
    """Every equation of a jaxpr and of those in it."""
    for equation in (jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr).eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from inside(value)


def sent(equations):
    """The collectives among equations, each as "kind axis axis"."""
    for equation in equations:
        if (kind := KINDS.get(equation.primitive.name)) is not None:
            axes = equation.params["axes" if "axes" in equation.params else "axis_name"]
            yield " ".join([kind, *([axes] if isinstance(axes, str) else axes)])


def is_jaxpr(value):
    """Whether a parameter of an equation is a program."""
    return isinstance(value, Jaxpr | ClosedJaxpr)


# What hands on an array as it is, whole or in part, and how many of its first operands are such arrays.
MOVES = {
    "broadcast_in_dim": 1,
    "device_put": 1,
    "dynamic_update_slice": 2,
    "layout_constraint": 1,
    "pcast": 1,
    "ppermute": 1,
    "pvary": 1,
    "reshape": 1,
    "squeeze": 1,
}
# What takes entries of arrays, and the operands that say which.
CHOOSE = {"select_n": lambda count: [0], "dynamic_slice": lambda count: range(1, count)}


def readers_of_unset(function, *args):
    """The names of the primitives that read what may hold entries of a `lax.empty`, in loops, branches and calls, too.
    A select is a reader, as is the read of a slot: what they give is not followed."""
    program, readers = jax.make_jaxpr(function)(*args), set()
    assert not any(_unset_outputs(program.jaxpr, [False] * len(program.jaxpr.invars), readers))
    return readers


def _unset_outputs(jaxpr, unset, readers):
    """For each output of a program whether it may hold such entries, if these inputs do; adds to `readers`."""
    known = dict(zip(jaxpr.invars, unset, strict=True))
    is_unset = lambda atom: not isinstance(atom, Literal) and known.get(atom, False)  # noqa: E731
    for equation in jaxpr.eqns:
        known |= zip(equation.outvars, _unset_of(equation, [*map(is_unset, equation.invars)], readers), strict=True)
    return [*map(is_unset, jaxpr.outvars)]


def _unset_of(equation, given, readers):
    name, outs = equation.primitive.name, len(equation.outvars)
    if name == "empty":
        return [True]
    if name == "optimization_barrier":
        return given
    if name == "scan":
        body = loop(equation)
        return _of_loop(body.body.jaxpr, given, body.consts, body.carried, readers)
    if name == "while":
        condition, body = (closed(equation.params[f"{part}_jaxpr"]).jaxpr for part in ("cond", "body"))
        consts, of_body = len(condition.invars) - outs, len(body.invars) - outs
        after = _of_loop(body, given[consts:], of_body, outs, readers)
        if any(_unset_outputs(condition, given[:consts] + after, readers)):
            readers.add("while")
        return after
    if name == "cond":
        readers |= {name} if given[0] else set()
        branches = [_unset_outputs(closed(of).jaxpr, given[1:], readers) for of in equation.params["branches"]]
        return [*map(any, zip(*branches, strict=True))]
    if inner := called(equation):
        return _unset_outputs(inner.jaxpr, given, readers)
    if name in CHOOSE:
        readers |= {name} if any(given) else set()
        readers |= {f"{name}'s choice"} if any(given[place] for place in CHOOSE[name](len(given))) else set()
        return [False] * outs
    moved = MOVES.get(name, 0)
    if any(given[moved:]):
        readers.add(name)
    return [any(given[:moved])] * outs


def _of_loop(body, given, consts, carried, readers):
    """The same for a loop. A turn may set more of what the next one is given; there may be none."""
    while True:
        after = _unset_outputs(body, given, readers)
        carry = [before or made for before, made in zip(given[consts : consts + carried], after)]
        wider = [*given[:consts], *carry, *given[consts + carried :]]
        if wider == given:
            return [*carry, *after[carried:]]
        given = wider
