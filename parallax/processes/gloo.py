"""A workaround for incorrect sums between CPU processes in old jaxlibs.

Up to jaxlib 0.11, a reduce_scatter between CPU devices of several processes is that of Gloo, which reuses a buffer that
is still being sent: some results are silently wrong (https://github.com/jax-ml/jax/issues/40830). Since 0.12 it is that
of XLA.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import Array, lax
from jax.interpreters import mlir

OLDEST_SOUND = (0, 12)


def needs_detour(jaxlib_version: str = jaxlib.__version__) -> bool:
    """Whether this jaxlib uses Gloo's reduce_scatter.

    >>> needs_detour("0.10.2"), needs_detour("0.12.0.1")
    (True, False)
    """
    return tuple(map(int, jaxlib_version.split(".")[:2])) < OLDEST_SOUND


def avoid_reduce_scatter() -> None:
    """Compile every later reduce_scatter of CPU devices in this process as an all_to_all and a sum.

    It sends the same number of bytes and adds in the order of the ranks. In JAX it remains a reduce_scatter; traced
    programs and transposes do not change.
    """
    lowering = mlir.lower_fun(reduce_scatter_by_exchange, multiple_results=False)
    mlir.register_lowering(_primitive(), lowering, platform="cpu")


def _primitive() -> Any:
    """The primitive of psum_scatter, for which JAX has no public name."""
    # Not an array, which would initialise the devices before JAX connects the processes.
    shape = jax.ShapeDtypeStruct((1,), jnp.float32)
    traced = jax.make_jaxpr(lambda x: lax.psum_scatter(x, "i", tiled=True), axis_env=[("i", 1)])(shape)
    (primitive,) = {equation.primitive for equation in traced.eqns if "scatter" in equation.primitive.name}
    return primitive


def reduce_scatter_by_exchange(
    x: Array, *, scatter_dimension: int, axis_name: Any, axis_index_groups: Any, axis_size: int, tiled: bool
) -> Array:
    """What `psum_scatter` computes, with its parameters."""
    before, length, behind = x.shape[:scatter_dimension], x.shape[scatter_dimension], x.shape[scatter_dimension + 1 :]
    pieces = x.reshape(*before, axis_size, length // axis_size, *behind)
    pieces = lax.all_to_all(
        pieces, axis_name, scatter_dimension, scatter_dimension, axis_index_groups=axis_index_groups, tiled=True
    )
    total = pieces.sum(scatter_dimension, dtype=x.dtype)
    return total if tiled else total.reshape(*before, *behind)
