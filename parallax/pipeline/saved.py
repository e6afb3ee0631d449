"""The split of a layer's forward from its backward, and of the backward in two: what is kept between them."""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax import Array

from parallax.pipeline.division import Division, Selection, divide, select
from parallax.sharding.collectives import as_varying


class SplitVjp:
    """`y = layer(weights, x, context)` now, its gradient later, from the arrays that were saved.

    Weights and context are at hand again when the gradient is taken, so they are not saved. `forward` must be
    traced before `backward`, `plan_division` before the two halves of a divided backward pass, and `plan_selection`
    before the forward pass that keeps little.
    """

    def __init__(self, layer: Callable):
        self.layer = layer

    def forward(self, weights: Any, x: Array, context: Any) -> tuple[Array, list[Array]]:
        """The layer's output, and what `backward` needs besides weights and context."""
        y, pull = jax.vjp(lambda weights, x: self.layer(weights, x, context), weights, x)
        leaves, self.structure = jax.tree.flatten(pull)
        known = {id(leaf): at for at, leaf in enumerate(jax.tree.leaves((weights, context)))}
        self.source = [known.get(id(leaf)) for leaf in leaves]
        # What comes out of a slot varies over pp, and a program that was divided is particular about that.
        return y, [as_varying(leaf, ["pp"]) for leaf, at in zip(leaves, self.source, strict=True) if at is None]

    def backward(self, weights: Any, saved: list[Array], context: Any, dy: Array) -> tuple[Any, Array]:
        """Gradients in weights and x."""
        known, rest = jax.tree.leaves((weights, context)), iter(saved)
        leaves = [next(rest) if at is None else known[at] for at in self.source]
        pull = jax.tree.unflatten(self.structure, leaves)
        return pull(dy)

    def plan_selection(self, weights: Any, x: Array, context: Any, names: Collection[str]) -> None:
        """Divide the forward pass: what has one of these names is kept, the rest made again."""
        args, structure = jax.tree.flatten((weights, x, context))

        def forward(*args):
            y, saved = self.forward(*jax.tree.unflatten(structure, args))
            return [y, *saved]

        self.selection: Selection = select(forward, tuple(args), now=[0], names=names)

    def forward_selected(self, weights: Any, x: Array, context: Any) -> tuple[Array, list[Array]]:
        """The layer's output, and what `saved_again` needs besides weights, x and context."""
        y, *kept = self.selection.make(*jax.tree.leaves((weights, x, context)))
        return y, kept

    def saved_again(self, weights: Any, x: Array, context: Any, kept: list[Array]) -> list[Array]:
        """What `forward` saves."""
        return self.selection.again(*jax.tree.leaves((weights, x, context)), *kept)

    def plan_division(self, weights: Any, saved: list[Array], context: Any, dy: Array, *, saved_is_kept: bool) -> None:
        """Divide the backward pass. With `saved_is_kept` the second half reads of `saved` what it needs, in place."""
        known, structure = jax.tree.flatten((weights, context))

        def backward(*args):
            weights, context = jax.tree.unflatten(structure, args[: len(known)])
            dw, dx = self.backward(weights, list(args[len(known) : -1]), context, args[-1])
            return [*jax.tree.leaves(dw), dx]

        first_saved, last_saved = len(known), len(known) + len(saved)
        readable = range(first_saved, last_saved) if saved_is_kept else ()
        wanted = len(jax.tree.leaves(weights))
        self.division: Division = divide(backward, (*known, *saved, dy), wanted=[wanted], readable=readable)
        self.read_later = tuple(at - first_saved for at in self.division.reads)
        self.now = tuple(at for at in range(wanted) if at not in self.division.deferred)

    def input_backward(
        self, weights: Any, saved: list[Array], context: Any, dy: Array
    ) -> tuple[Array, dict[int, Array], list[Array]]:
        """B: the gradient in x; those of weights that cost no matrix product, by their number; what W needs."""
        dw_and_dx = self.division.first(*jax.tree.leaves((weights, context)), *saved, dy)
        few, (dx, *handed) = dw_and_dx[: len(self.now)], dw_and_dx[len(self.now) :]
        return dx, dict(zip(self.now, few, strict=True)), handed

    def weight_backward(self, read: list[Array], handed: list[Array]) -> dict[int, Array]:
        """W: the gradients of the other weights, from saved arrays `read_later` and what B handed on."""
        return dict(zip(self.division.deferred, self.division.second(*read, *handed), strict=True))
