"""A parameter declared in the notation, at the shape of the piece that this device holds."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import struct
from jax import Array

from parallax.sharding.collectives import bound_axis_sizes
from parallax.sharding.layout import Layout


class Declared(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter as `init` returns it: the value, the layout that its module computes with, and the dim that data axes
    may cut at rest, "" for none."""

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

    `init(key, shape)` gives the values, `at_rest` is the dim that data axes may cut. `module.init` returns each
    parameter as `Declared`.
    """
    parsed = Layout.parse(layout)
    shape = parsed.local_shape(sizes, bound_axis_sizes())
    return module.param(name, lambda key: Declared(init(key, shape), parsed, at_rest))


def layouts_of(declared: Any) -> Any:
    """The tree of layouts of a tree of `Declared`."""
    return jax.tree.map(lambda leaf: leaf.layout, declared, is_leaf=lambda leaf: isinstance(leaf, Declared))
