"""FLOPs that each device executes: the traced program, walked as that device runs it."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from parallax.analysis.report.origin import Origin
from parallax.analysis.report.walk import walk
from parallax.model.kernels import kernel_flops

UNCOUNTED = ("ragged_dot", "ragged_dot_general", "conv_general_dilated")


def matmul_flops(function: Callable, *args: Any, at: Mapping[str, int]) -> int:
    """FLOPs of the matrix products that the device at these mesh coordinates executes, 2 for each multiply-add.

    Raises ValueError where it depends on data which side of a branch is taken, and the sides cost differently.

    >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
    >>> matmul_flops(lambda x: jax.lax.cond(jax.numpy.arange(3)[1] > 0, lambda: x @ x.T, lambda: x[:, :4]), x, at={})
    256
    """
    return sum(flops_by_direction(jax.make_jaxpr(function)(*args), at=at).values())


def flops_by_direction(program: ClosedJaxpr, *, at: Mapping[str, int]) -> dict[str, int]:
    """The same of a program that was traced, apart for "forward", "backward" and "recompute"."""

    def count(equation: JaxprEqn, origin: Origin) -> Counter:
        flops = product_flops(equation)
        if flops is None:
            name = equation.primitive.name
            raise ValueError(f"{name} multiplies matrices in a way that is not counted here.")
        return Counter({origin.direction: flops})

    return dict(walk(program, at=at, count=count))


def product_flops(equation: JaxprEqn) -> int | None:
    """FLOPs of one equation's matrix products; None where it has some that nobody can count."""
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    if name == "pallas_call":
        arrays = (var.aval for var in equation.invars)
        floats = [x.shape for x in arrays if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
        return kernel_flops(equation.params["name"] or "", floats)
    return None if name in UNCOUNTED else 0
