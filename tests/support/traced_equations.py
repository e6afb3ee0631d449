"""What a traced function is made of, and what it sends."""

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

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
