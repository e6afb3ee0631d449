"""Which values of a traced program decide what it runs."""

from collections.abc import Set

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from parallax.runtime.jaxprs import called, closed, loop


class Steering:
    """Of many programs; what was found is kept."""

    def __init__(self):
        self._found: dict = {}

    def variables(self, jaxpr: Jaxpr, wanted: Set[int]) -> Set:
        """Variables on which it depends which sides of branches are taken, or what the `wanted` outputs are."""
        key = jaxpr, frozenset(wanted)
        if key not in self._found:
            steer = {jaxpr.outvars[at] for at in wanted if not isinstance(jaxpr.outvars[at], Literal)}
            for equation in reversed(jaxpr.eqns):
                read = self._operands(equation, {at for at, out in enumerate(equation.outvars) if out in steer})
                steer |= {equation.invars[at] for at in read if not isinstance(equation.invars[at], Literal)}
            self._found[key] = steer
        return self._found[key]

    def inputs(self, jaxpr: Jaxpr, wanted: Set[int]) -> Set[int]:
        """Numbers of the inputs among them."""
        steer = self.variables(jaxpr, wanted)
        return {at for at, var in enumerate(jaxpr.invars) if var in steer}

    def _operands(self, equation: JaxprEqn, wanted: Set[int]) -> Set[int]:
        name = equation.primitive.name
        if name == "cond":
            sides = (self.inputs(closed(branch).jaxpr, wanted) for branch in equation.params["branches"])
            return {0} | {1 + at for side in sides for at in side}
        if name == "scan":
            return self._of_loop(equation, wanted)
        if name == "while":  # its outputs are not known in any case
            return set()
        if (inner := called(equation)) is not None:
            return self.inputs(inner.jaxpr, wanted)
        return set(range(len(equation.invars))) if wanted else set()

    def _of_loop(self, equation: JaxprEqn, wanted: Set[int]) -> Set[int]:
        """What a turn reads of the turn before is wanted of that one, too."""
        scan = loop(equation)
        while True:
            read = self.inputs(scan.body.jaxpr, wanted)
            more = {at - scan.consts for at in read if 0 <= at - scan.consts < scan.carried} - wanted
            if not more:
                return read
            wanted = wanted | more
