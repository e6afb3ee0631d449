"""A parameter declared in the notation, at the shape of the piece that this device holds."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from parallax.sharding.collectives import bound_axis_sizes
from parallax.sharding.layout import Layout

MATRIX_NUMBERS = ("layers", "experts")  # dims before these, of many matrices in one array


class Declared(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter as `init` returns it: the value, the layout that its module computes with, and the dims of which data
    axes may cut one at rest, the best first, "" for none."""

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
    """Declare a float32 parameter of `module`; outside shard_map it is whole, inside it is this device's piece.

    `init(key, shape)` gives the values, `at_rest` are the dims of which data axes may cut one, the best first.
    `module.init` returns each parameter as `Declared`.
    """
    parsed = Layout.parse(layout)
    shape = parsed.local_shape(sizes, bound_axis_sizes())
    return module.param(name, lambda key: Declared(init(key, shape), parsed, at_rest))


def layouts_of(declared: Any) -> Any:
    """The tree of layouts of a tree of `Declared`."""
    return jax.tree.map(lambda leaf: leaf.layout, declared, is_leaf=lambda leaf: isinstance(leaf, Declared))


def stored_as(declared: Any, dtype: str) -> Any:
    """A tree of `Declared` shapes with the dtype in which parameters are kept between steps. What no gradient moves
    stays in float32."""

    def cast(leaf: Declared) -> Declared:
        kept = dtype if is_trained(leaf.layout) else "float32"
        return leaf.replace(value=jax.ShapeDtypeStruct(leaf.value.shape, jnp.dtype(kept)))

    return jax.tree.map(cast, declared, is_leaf=lambda leaf: isinstance(leaf, Declared))


def is_trained(layout: Layout) -> bool:
    """Whether a gradient moves a parameter: routers' biases and scales of 8-bit products follow from counts and
    maxima, which the backward pass returns in a gradient's place."""
    return not (is_load(layout) or is_amax(layout))


def is_amax(layout: Layout) -> bool:
    """Whether a parameter is the scales of an 8-bit product, whose gradient is the largest magnitudes of its operands.

    >>> is_amax(Layout.parse("layers/pp operands"))
    True
    """
    return layout.names[-1:] == ("operands",)


def is_load(layout: Layout) -> bool:
    """Whether a parameter is a router's bias, whose gradient is the load of its experts.

    >>> is_load(Layout.parse("layers/pp experts"))
    True
    """
    return layout.names[-1:] == ("experts",) and stacked_dims(layout) == len(layout.names)


def stacked_dims(layout: Layout) -> int:
    """How many dims at the front number matrices.

    >>> stacked_dims(Layout.parse("layers/pp experts/ep d_model d_expert/tp"))
    2
    """
    return sum(1 for _ in itertools.takewhile(MATRIX_NUMBERS.__contains__, layout.names))
