"""What XLA for TPU moves through memory beside products of experts.

These products are kernels or ragged_dots of XLA, with which nothing is fused: rows of tokens that are gathered for them
are written, and so is what is computed from their results. Rows that are gathered to be added up are read alone, since
the sum is made in the same pass. An array that is rounded is read if a product wrote it, and written. One in fewer bits
is read where it is computed with in more, unless it was just rounded or gathered there.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from parallax.analysis.planned.gpu_passes import CONVERTS, GATHERS_ROWS, GpuPasses
from parallax.analysis.traced.flops import is_grouped
from parallax.analysis.traced.trace import Origin
from parallax.jaxprs import programs_of, var_bytes
from parallax.model.experts.experts import USUAL_LOAD

MIXTURE = "mlp"  # the module of a mixture
ROWS_IN = (MIXTURE, f"{MIXTURE}/{USUAL_LOAD}")  # in which its rows are


class RowPasses:
    """The passes of one traced program with a mixture."""

    def __init__(self, program: ClosedJaxpr):
        self._read_by_products = GpuPasses(program).for_products
        self._of_kernels: set[Any] = set()
        self._made_here: set[Any] = set()  # by gathering or rounding
        self._find(program)

    def bytes(self, equation: JaxprEqn, origin: Origin) -> int | None:
        """Bytes that an equation reads and writes; None for all that is no pass over a mixture's rows."""
        name, (x, *_), (out, *_) = equation.primitive.name, equation.invars or [None], equation.outvars
        if origin.module not in ROWS_IN or name not in (GATHERS_ROWS, CONVERTS) or not _are_rows(out):
            return None
        if name == GATHERS_ROWS:
            return var_bytes(out) * (2 if out in self._read_by_products else 1)
        if var_bytes(out) < var_bytes(x):
            return var_bytes(out) + var_bytes(x) * _is_in(self._of_kernels, x)
        return var_bytes(x) * (not _is_in(self._made_here, x))

    def _find(self, program: ClosedJaxpr) -> None:
        for equation in program.jaxpr.eqns:
            for inner in programs_of(equation):
                self._find(inner)
            if is_grouped(equation, str(equation.source_info.name_stack)):
                self._of_kernels.update(equation.outvars)
            if equation.primitive.name in (GATHERS_ROWS, CONVERTS):
                self._made_here.update(equation.outvars)


def _are_rows(value: Any) -> bool:
    """Whether these are rows of tokens, not numbers of places or of tokens."""
    return value.aval.ndim == 2 and jnp.issubdtype(value.aval.dtype, jnp.inexact)


def _is_in(values: set[Any], value: Any) -> bool:
    return not isinstance(value, Literal) and value in values
