"""Which values of a traced program are made from gradients."""

from collections.abc import Set

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from parallax.analysis.report.origin import Origin
from parallax.runtime.jaxprs import Loop, called, closed, loop


class Gradients:
    """Of many programs, whatever sides of branches they take; what was found is kept.

    A step's forward pass reads no gradient of the same step: what does is backward, if no scope says otherwise.
    """

    def __init__(self):
        self._found: dict = {}

    def variables(self, jaxpr: Jaxpr, stack: str, given: Set[int]) -> Set:
        """Variables that are, where the inputs with the numbers `given` are; `stack` as in Origin."""
        key = jaxpr, stack, frozenset(given)
        if key not in self._found:
            found = {jaxpr.invars[at] for at in given}
            for equation in jaxpr.eqns:
                found |= {equation.outvars[at] for at in self._outputs(equation, stack, inputs_in(equation, found))}
            self._found[key] = found
        return self._found[key]

    def given_to_body(self, scan: Loop, stack: str, given: Set[int]) -> Set[int]:
        """Inputs of a loop's body that are gradients in some turn, where those `given` are at its start."""
        while True:
            carried = {at for at in self._returned(scan.body.jaxpr, stack, given) if at < scan.carried}
            more = {scan.consts + at for at in carried} - given
            if not more:
                return given
            given = given | more

    def _returned(self, jaxpr: Jaxpr, stack: str, given: Set[int]) -> Set[int]:
        found = self.variables(jaxpr, stack, given)
        return {at for at, out in enumerate(jaxpr.outvars) if not isinstance(out, Literal) and out in found}

    def _outputs(self, equation: JaxprEqn, outer: str, given: Set[int]) -> Set[int]:
        origin, name = Origin.of(equation, outer, bool(given)), equation.primitive.name
        if origin.makes_no_gradient:
            return set()
        if name == "cond":
            sides = (closed(branch).jaxpr for branch in equation.params["branches"])
            return set().union(*(self._returned(side, origin.stack, operands(given)) for side in sides))
        if name == "scan":
            scan = loop(equation)
            return self._returned(scan.body.jaxpr, origin.stack, self.given_to_body(scan, origin.stack, given))
        if (inner := called(equation)) is not None:
            return self._returned(inner.jaxpr, origin.stack, given)
        return set(range(len(equation.outvars))) if origin.gradient else set()


def inputs_in(equation: JaxprEqn, variables: Set) -> Set[int]:
    """Numbers of an equation's inputs that are among some variables."""
    return {at for at, var in enumerate(equation.invars) if not isinstance(var, Literal) and var in variables}


def operands(numbers: Set[int]) -> Set[int]:
    """Inputs of a branch, by number, from those of the equation, whose first is the index of the branch."""
    return {at - 1 for at in numbers if at > 0}
