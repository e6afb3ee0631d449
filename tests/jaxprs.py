"""What a traced function is made of."""

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def equations(function, *args):
    """Every equation of a traced function, those inside loops, branches and calls too, each as often as written."""
    yield from _inside(jax.make_jaxpr(function)(*args).jaxpr)


def _inside(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _inside(value.jaxpr if isinstance(value, ClosedJaxpr) else value)


def _is_jaxpr(value):
    return isinstance(value, Jaxpr | ClosedJaxpr)
