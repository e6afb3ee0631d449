"""The split of a layer's forward from its backward: what is kept between the two."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array


class SplitVjp:
    """`y = layer(weights, x, context)` now, its gradient later, from the arrays that were saved.

    Weights and context are at hand again when the gradient is taken, so they are not saved. `forward` must be
    traced before `backward`.
    """

    def __init__(self, layer: Callable):
        self.layer = layer

    def forward(self, weights: Any, x: Array, context: Any) -> tuple[Array, list[Array]]:
        """The layer's output, and what `backward` needs besides weights and context."""
        y, pull = jax.vjp(lambda weights, x: self.layer(weights, x, context), weights, x)
        leaves, self.structure = jax.tree.flatten(pull)
        known = {id(leaf): at for at, leaf in enumerate(jax.tree.leaves((weights, context)))}
        self.source = [known.get(id(leaf)) for leaf in leaves]
        return y, [leaf for leaf, at in zip(leaves, self.source, strict=True) if at is None]

    def backward(self, weights: Any, saved: list[Array], context: Any, dy: Array) -> tuple[Any, Array]:
        """Gradients in weights and x."""
        known, rest = jax.tree.leaves((weights, context)), iter(saved)
        leaves = [next(rest) if at is None else known[at] for at in self.source]
        pull = jax.tree.unflatten(self.structure, leaves)
        return pull(dy)
