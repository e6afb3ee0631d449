"""Parameters declared in the notation, with the shape of this device's piece."""

import contextlib
import dataclasses
import enum
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.errors import ScopeParamShapeError
from jax import Array

from parallax.config.sections import COMPUTE
from parallax.errors import ConfigError, check_choice, nearest, quoted
from parallax.sharding.collectives import bound_axis_sizes
from parallax.sharding.eight_bits import EIGHT_BIT_DTYPES
from parallax.sharding.layout import Layout, named_leaves, with_parents


def in_32_bits() -> contextlib.ContextDecorator:
    """A context, or the decorator of a function, without JAX's 64-bit types.

    With them (JAX_ENABLE_X64=1) initial values would be drawn in float64, which are other numbers, and scalars of an
    update would be float64, to which other numbers follow.
    """
    return jax.enable_x64(False)


class Role(enum.StrEnum):
    """What a parameter does. The last three follow from a statistic of each step: the largest magnitudes of an 8-bit
    product's operands, how many tokens each expert got, or each head's largest attention logit. A layer's vjp returns
    it in the place of a gradient."""

    WEIGHT = "weight"
    NORM = "norm"
    BIAS = "bias"
    TABLE = "table"
    MAXIMA = "maxima"
    COUNTS = "counts"
    LOGITS = "logits"


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is: what it does, and to which part of the model it belongs.

    `inputs` are the dims that the product with a weight contracts. `products` is the form of these products, see
    parallax/model/products.py. `scales` is the name of the parameter, in the same module, with the scales of 8-bit
    products; their word, as "current", if no parameter has them.
    """

    role: Role
    part: str = ""  # of a layer, as "attention"; outside of layers "embedding" or "head"
    stack: str = ""  # the layers among which it is stacked, as "blocks" or "blocks/moe"; "" outside of layers
    inputs: tuple[str, ...] = ()
    products: str = COMPUTE
    scales: str = ""
    frozen: bool = False  # by optimizer.frozen or beside adapters; statistics are taken all the same
    stored: str = ""  # its dtype between steps, if that is another than other parameters'
    unit: str = ""  # the parameter, in the same module, with the values of one unit of its 8-bit numbers
    adapts: str = ""  # an adapter's kernel, in the same module

    @property
    def is_statistic(self) -> bool:
        return self.is_maximum or self.role == Role.COUNTS

    @property
    def is_maximum(self) -> bool:
        """Whether it is the maximum of microbatches and devices, and not a sum."""
        return self.role in (Role.MAXIMA, Role.LOGITS)

    @property
    def is_trained(self) -> bool:
        """Whether its gradient updates it."""
        return not (self.frozen or self.is_statistic)

    @property
    def is_constant(self) -> bool:
        """Whether the backward pass returns nothing for it: neither a gradient nor a statistic."""
        return self.frozen and not self.is_statistic

    def stacked(self, layout: Layout) -> int:
        """The number of leading dims that index layers or matrices.

        >>> expert = ParameterSpec(Role.WEIGHT, stack="blocks", inputs=("d_model",))
        >>> expert.stacked(Layout.parse("layers/pp experts/ep d_model d_expert/tp"))
        2
        """
        return layout.index(self.inputs[0]) if self.inputs else int(bool(self.stack))


class Declared(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter as `init` returns it: the value, the layout that its module computes with, the dims that data axes
    may shard at rest, and what it is. They shard one of the dims; the best comes first, and "" means none."""

    value: Any
    layout: Layout = struct.field(pytree_node=False)
    at_rest: str = struct.field(pytree_node=False)
    spec: ParameterSpec = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Declared":
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict) -> "Declared":
        return self

    def remove_axis(self, index: int, params: dict) -> "Declared":
        return self


def parameter(
    module: nn.Module,
    name: str,
    layout: str,
    sizes: Mapping[str, int],
    init: Callable,
    *,
    role: str,
    part: str = "",
    at_rest: str = "",
    inputs: str = "",
    products: str = COMPUTE,
    scales: str = "",
    stored: str = "",
    unit: str = "",
    adapts: str = "",
) -> Array:
    """Declare a parameter of `module`, float32 unless it is `stored` in another dtype between steps: the whole array
    outside shard_map, this device's piece inside.

    `init(key, shape)` returns the values. `at_rest` are the dims of which data axes may shard one, the best first. For
    `role` and `part` see ParameterSpec; a weight's `inputs` are its first dim if they are left out.
    `module.init` returns each parameter as `Declared`. Raises ConfigError for an unknown role, and Flax's
    ScopeParamShapeError if a given value has another shape.
    """
    parsed = Layout.parse(layout)
    shape = parsed.local_shape(sizes, bound_axis_sizes())
    # Flax would trace `init` at each use, to compare shapes.
    if module.has_variable("params", name) and not module.is_initializing():
        value = nn.meta.unbox(module.get_variable("params", name))
        if jnp.shape(value) != tuple(shape):
            raise ScopeParamShapeError(name, "/".join(module.path), jnp.shape(value), shape)
        return value
    check_choice(f"the role of {'/'.join((*module.path, name))}", role, [*map(str, Role)])
    contracted = tuple(inputs.split() or parsed.names[:1]) if role == Role.WEIGHT else ()
    spec = ParameterSpec(Role(role), part, inputs=contracted, products=products, scales=scales)
    spec = dataclasses.replace(spec, stored=stored, unit=unit, adapts=adapts)
    return module.param(name, lambda key: Declared(_drawn(init, key, shape), parsed, at_rest, spec))


def _drawn(init: Callable, key: Array, shape: Sequence[int]) -> Array:
    with in_32_bits():
        return init(key, shape)


def layouts_of(declared: Any) -> Any:
    """The tree of layouts of a tree of `Declared`."""
    return map_declared(lambda leaf: leaf.layout, declared)


def specs_of(declared: Any) -> Any:
    """The tree of what the parameters of a tree of `Declared` are."""
    return map_declared(lambda leaf: leaf.spec, declared)


def is_declared(leaf: Any) -> bool:
    """Whether it is a leaf of a tree of `Declared`."""
    return isinstance(leaf, Declared)


def map_declared(function: Callable[[Declared], Any], declared: Any) -> Any:
    """Map over a tree of `Declared`."""
    return jax.tree.map(function, declared, is_leaf=is_declared)


def declared_leaves(declared: Any) -> list[Declared]:
    """The leaves of a tree of `Declared`."""
    return jax.tree.leaves(declared, is_leaf=is_declared)


def stored_as(declared: Any, dtype: str, of_frozen: str = "") -> Any:
    """A tree of `Declared` shapes with the dtype that parameters have between steps, those that are not trained in
    another if it is given. Statistics stay in float32."""

    def cast(leaf: Declared) -> Declared:
        kept = "float32" if leaf.spec.is_statistic else leaf.spec.stored or (leaf.spec.frozen and of_frozen) or dtype
        kept = EIGHT_BIT_DTYPES.get(kept) or jnp.dtype(kept)
        return leaf.replace(value=jax.ShapeDtypeStruct(leaf.value.shape, kept))

    return map_declared(cast, declared)


def freeze(declared: Any, frozen: str) -> Any:
    """A tree of `Declared` in which the parameters that `frozen` names are not trained, and beside adapters no others.

    Its words are names of parts, modules or parameters, or patterns of such names, in which * stands for any letters,
    "/" too. Statistics of the forward pass are taken in any case; a router's bias that is frozen stays as it is.

    Raises:
        ConfigError: a word names nothing of this model, or nothing is left to train.
    """
    specs = named_leaves(specs_of(declared))
    adapters = {name for name, spec in specs.items() if spec.adapts}
    chosen = {*specs} - adapters if adapters else set()
    if not (chosen or frozen.split()):
        return declared
    for word in frozen.split():
        matches = {name for name in specs if any(fnmatch.fnmatchcase(above, word) for above in with_parents(name))}
        if not matches:
            known = dict.fromkeys(above for name in specs for above in with_parents(name))
            raise ConfigError(
                f"optimizer.frozen names {quoted(word)}, which is no part, module or parameter of this model, and no "
                f"pattern of one; {nearest(word, known)}"
            )
        chosen |= matches
    if not any(spec.is_trained for name, spec in specs.items() if name not in chosen):
        raise ConfigError(f"optimizer.frozen={quoted(frozen)} leaves no parameter to train; name fewer, or use ''.")

    def mark(path: Any, leaf: Declared) -> Declared:
        is_chosen = jax.tree_util.keystr(path, simple=True, separator="/") in chosen
        return leaf.replace(spec=dataclasses.replace(leaf.spec, frozen=is_chosen))

    return jax.tree_util.tree_map_with_path(mark, declared, is_leaf=is_declared)
