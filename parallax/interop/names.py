"""Plain names of parameters: those of the model, with the number of the layer where layers are stacked."""

from collections.abc import Mapping
from typing import Any, NamedTuple

STACKED = "blocks."


class Source(NamedTuple):
    """The array that a plain name is part of, and where: all of it, or one layer. `shape` is that of the tensor."""

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any


def plain_names(arrays: Mapping[str, Any]) -> dict[str, Source]:
    """Plain names in the order of the model, layer by layer; `arrays` are anything with shape and dtype, by name.

    >>> from jax import ShapeDtypeStruct as Shape
    >>> arrays = {"blocks.mlp.up.kernel": Shape((2, 4, 8), "float32"), "embedding.table": Shape((9, 4), "float32")}
    >>> list(plain_names(arrays))
    ['embedding.table', 'blocks.0.mlp.up.kernel', 'blocks.1.mlp.up.kernel']
    """
    stacked = {name: about for name, about in arrays.items() if name.startswith(STACKED)}
    single = {name: Source(name, (), tuple(about.shape), about.dtype) for name, about in arrays.items()}
    layers = max((about.shape[0] for about in stacked.values()), default=0)
    of_layers = {
        f"{STACKED}{layer}.{name.removeprefix(STACKED)}": Source(name, (layer,), tuple(about.shape[1:]), about.dtype)
        for layer in range(layers)
        for name, about in stacked.items()
    }
    first = {name: source for name, source in single.items() if name.startswith("embedding.")}
    last = {name: source for name, source in single.items() if name not in first and name not in stacked}
    return {**first, **of_layers, **last}
