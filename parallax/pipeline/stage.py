"""What one stage does with one microbatch: forward, and backward from what forward kept."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.layers.context import Context
from parallax.pipeline.saved import SplitVjp


@dataclasses.dataclass
class Stage:
    """The layers of one rank. Weights are trees with a leading dim of layers, gradients likewise in float32.

    `layer(weights, x, context)` is one layer on gathered weights; `gather` makes those of what is stored, `scatter`
    turns their gradient into that of what is stored. Forward of a layer: gather, compute, release.
    """

    layer: Callable[[Any, Array, Context], Array]
    gather: Callable[[Any], Any]
    scatter: Callable[[Any], Any]
    remat: str

    def __post_init__(self):
        self.split = SplitVjp(self.layer)

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, Any]:
        """The stage's output, and what `backward` will read."""
        if self.remat == "none":
            return self._forward_keeping_residuals(weights, x, context)
        y, inputs = lax.scan(
            lambda x, layer: (self.layer(self.gather(layer[0]), x, _at(context, layer[1])), x),
            x,
            _numbered(weights),
        )
        return y, (x if self.remat == "stage" else inputs)

    def backward(
        self, weights: Any, kept: Any, context: Context, dy: Array, grads: Any, slot: Array | None = None
    ) -> tuple[Array, Any]:
        """The gradient in the stage's input, and `grads` with this microbatch's share added.

        With `slot`, `kept` is what several microbatches kept; each layer reads its own entry, nothing is copied whole.
        """
        if self.remat == "stage":
            kept = kept if slot is None else _entry(kept, slot)
            _, kept = self._forward_keeping_residuals(weights, kept, context)
        at = () if slot is None or self.remat == "stage" else (slot,)

        def step(carry, layer):
            dy, grads = carry
            stored, number = layer
            dw, dx = self._layer_backward(self.gather(stored), _entry(kept, *at, number), _at(context, number), dy)
            return (dx, _add_at(grads, number, self.scatter(dw))), None

        (dx, grads), _ = lax.scan(step, (dy, grads), _numbered(weights), reverse=True)
        return dx, grads

    def _forward_keeping_residuals(self, weights, x, context):
        return lax.scan(
            lambda x, layer: self.split.forward(self.gather(layer[0]), x, _at(context, layer[1])),
            x,
            _numbered(weights),
        )

    def _layer_backward(self, gathered, kept, context, dy):
        if self.remat == "layer":
            _, kept = self.split.forward(gathered, kept, context)
        return self.split.backward(gathered, kept, context, dy)


def _numbered(weights: Any) -> tuple[Any, Array]:
    return weights, jnp.arange(len(jax.tree.leaves(weights)[0]))


def _at(context: Context, number: Array) -> Context:
    """The context with a dropout key of this layer's own."""
    if context.key is None:
        return context
    return context._replace(key=jax.random.fold_in(context.key, 1 + context.first_layer + number))


def _entry(stacked: Any, *numbers: Array) -> Any:
    """The entry at these indices of the leading dims."""

    def entry(leaf: Array) -> Array:
        rest = leaf.shape[len(numbers) :]
        piece = lax.dynamic_slice(leaf, (*numbers, *(0 for _ in rest)), (*(1 for _ in numbers), *rest))
        return piece.reshape(rest)

    return jax.tree.map(entry, stacked)


def _add_at(total: Any, number: Array, share: Any) -> Any:
    return jax.tree.map(lambda t, s: t.at[number].add(s.astype(t.dtype)), total, share)
