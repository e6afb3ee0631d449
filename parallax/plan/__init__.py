"""Plan a pod before renting it: what a step needs, how long it takes, which layout is best.

In a notebook `px.plan(settings, "v5p:4x4x4")` is a plan, and `px.plan.compare([...])` puts several side by side.
"""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """The module as its main function: a package's submodule hides a function of the same name.

    The command sets environment variables before JAX is imported, which this file therefore must not do.
    """

    def __call__(self, settings: Any, topology: Any, *, name: str = "step") -> Any:
        """The step of settings on a topology, as "v5p:4x4x4": a `parallax.plan.planned.Plan`."""
        from parallax.plan.planned import plan

        return plan(settings, topology, name=name)

    def compare(self, plans: Sequence[Any]) -> Any:
        """Plans for one place side by side, the fastest first: a `parallax.plan.planned.Comparison`."""
        from parallax.plan.planned import compare

        return compare(plans)


sys.modules[__name__].__class__ = _Callable
