"""Parameters declared in the notation, with the shape of this device's piece."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.errors import ScopeParamShapeError
from jax import Array

from parallax.sharding.collectives import bound_axis_sizes
from parallax.sharding.layout import Layout

MATRIX_NUMBERS = ("layers", "experts")  # leading dims of arrays that hold many matrices


class Declared(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter as `init` returns it: the value, the layout that its module computes with, and the dims that data
    axes may shard at rest. They shard one of them; the best comes first, and "" means none."""

    value: Any
    layout: Layout = struct.field(pytree_node=False)
    at_rest: str = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Declared":
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict) -> "Declared":
        return self

    def remove_axis(self, index: int, params: dict) -> "Declared":
        return self


def parameter(
    module: nn.Module, name: str, layout: str, sizes: Mapping[str, int], init: Callable, *, at_rest: str = ""
) -> Array:
    """Declare a float32 parameter of `module`: the whole array outside shard_map, this device's piece inside.

    `init(key, shape)` returns the values. `at_rest` are the dims of which data axes may shard one, the best first.
    `module.init` returns each parameter as `Declared`. Raises Flax's ScopeParamShapeError if a given value has another
    shape.
    """
    parsed = Layout.parse(layout)
    shape = parsed.local_shape(sizes, bound_axis_sizes())
    # Flax would trace `init` at each use, to compare shapes.
    if module.has_variable("params", name) and not module.is_initializing():
        value = nn.meta.unbox(module.get_variable("params", name))
        if jnp.shape(value) != tuple(shape):
            raise ScopeParamShapeError(name, "/".join(module.path), jnp.shape(value), shape)
        return value
    return module.param(name, lambda key: Declared(_drawn(init, key, shape), parsed, at_rest))


def _drawn(init: Callable, key: Array, shape: Sequence[int]) -> Array:
    # With 64-bit types enabled, initializers would draw in float64, which are other numbers.
    with jax.enable_x64(False):
        return init(key, shape)


def layouts_of(declared: Any) -> Any:
    """The tree of layouts of a tree of `Declared`."""
    return jax.tree.map(lambda leaf: leaf.layout, declared, is_leaf=lambda leaf: isinstance(leaf, Declared))


def stored_as(declared: Any, dtype: str) -> Any:
    """A tree of `Declared` shapes with the dtype that parameters have between steps. Parameters without a gradient stay
    in float32."""

    def cast(leaf: Declared) -> Declared:
        kept = dtype if is_trained(leaf.layout) else "float32"
        return leaf.replace(value=jax.ShapeDtypeStruct(leaf.value.shape, jnp.dtype(kept)))

    return jax.tree.map(cast, declared, is_leaf=lambda leaf: isinstance(leaf, Declared))


def is_trained(layout: Layout) -> bool:
    """Whether a parameter is updated by its gradient. Routers' biases and scales of 8-bit products are not: they follow
    from counts and maxima, which the backward pass returns in place of gradients."""
    return not (is_load(layout) or is_amax(layout))


def is_amax(layout: Layout) -> bool:
    """Whether a parameter holds the scales of an 8-bit product; its gradient is the largest magnitude of each operand.

    >>> is_amax(Layout.parse("layers/pp operands"))
    True
    """
    return layout.names[-1:] == ("operands",)


def is_load(layout: Layout) -> bool:
    """Whether a parameter is a router's bias; its gradient is the load of the experts.

    >>> is_load(Layout.parse("layers/pp experts"))
    True
    """
    return layout.names[-1:] == ("experts",) and stacked_dims(layout) == len(layout.names)


def stacked_dims(layout: Layout) -> int:
    """Number of leading dims that index matrices.

    >>> stacked_dims(Layout.parse("layers/pp experts/ep d_model d_expert/tp"))
    2
    """
    return sum(1 for _ in itertools.takewhile(MATRIX_NUMBERS.__contains__, layout.names))
