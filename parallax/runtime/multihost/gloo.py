"""Sums between CPU processes that are right: a way around one collective of old jaxlibs.

Up to jaxlib 0.11, a reduce_scatter of CPU devices of several processes is Gloo's own, which reuses a buffer that is
still being sent: some results are wrong, in silence (https://github.com/jax-ml/jax/issues/40830). From 0.12 on it is
XLA's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import Array, lax
from jax.interpreters import mlir

OLDEST_SOUND = (0, 12)


def needs_detour(jaxlib_version: str = jaxlib.__version__) -> bool:
    """Whether this jaxlib has Gloo's reduce_scatter.

    >>> needs_detour("0.10.2"), needs_detour("0.12.0.1")
    (True, False)
    """
    return tuple(map(int, jaxlib_version.split(".")[:2])) < OLDEST_SOUND


def avoid_reduce_scatter() -> None:
    """From now on every reduce_scatter of CPU devices in this process is compiled as an all_to_all and a sum.

    That sends as many bytes, and adds in the order of the ranks. To JAX it stays a reduce_scatter; what the program
    says, and its transposes, are the same.
    """
    mlir.register_lowering(_primitive(), mlir.lower_fun(_exchanged_and_added, multiple_results=False), platform="cpu")


def _primitive() -> Any:
    """What psum_scatter binds, for which JAX has no public name."""
    one = jax.ShapeDtypeStruct((1,), jnp.float32)  # no array: JAX must connect the processes before it has devices
    traced = jax.make_jaxpr(lambda x: lax.psum_scatter(x, "i", tiled=True), axis_env=[("i", 1)])(one)
    (primitive,) = {equation.primitive for equation in traced.eqns if "scatter" in equation.primitive.name}
    return primitive


def _exchanged_and_added(
    x: Array, *, scatter_dimension: int, axis_name: Any, axis_index_groups: Any, axis_size: int, tiled: bool
) -> Array:
    before, length, behind = x.shape[:scatter_dimension], x.shape[scatter_dimension], x.shape[scatter_dimension + 1 :]
    pieces = x.reshape(*before, axis_size, length // axis_size, *behind)
    pieces = lax.all_to_all(
        pieces, axis_name, scatter_dimension, scatter_dimension, axis_index_groups=axis_index_groups, tiled=True
    )
    total = pieces.sum(scatter_dimension, dtype=x.dtype)
    return total if tiled else total.reshape(*before, *behind)
