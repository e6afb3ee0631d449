"""FLOPs that each device executes: the traced program, walked as that device runs it."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from parallax.report.origin import Origin
from parallax.report.walk import walk

UNCOUNTED = ("ragged_dot", "ragged_dot_general", "conv_general_dilated", "pallas_call")


def matmul_flops(function: Callable, *args: Any, at: Mapping[str, int]) -> int:
    """FLOPs of the matrix products that the device at these mesh coordinates executes, 2 for each multiply-add.

    Raises ValueError where it depends on data which side of a branch is taken, and the sides cost differently.

    >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
    >>> matmul_flops(lambda x: jax.lax.cond(jax.numpy.arange(3)[1] > 0, lambda: x @ x.T, lambda: x[:, :4]), x, at={})
    256
    """
    return sum(matmul_flops_by_direction(function, *args, at=at).values())


def matmul_flops_by_direction(function: Callable, *args: Any, at: Mapping[str, int]) -> dict[str, int]:
    """The same apart for "forward", "backward" and "recompute"."""
    return dict(walk(jax.make_jaxpr(function)(*args), at=at, count=_product_flops))


def _product_flops(equation: JaxprEqn, origin: Origin) -> Counter:
    name = equation.primitive.name
    if name in UNCOUNTED:
        raise ValueError(f"{name} multiplies matrices in a way that is not counted here.")
    if name != "dot_general":
        return Counter()
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    terms = math.prod(left[dim] for dim in contracted)
    return Counter({origin.direction: 2 * math.prod(equation.outvars[0].aval.shape) * terms})
