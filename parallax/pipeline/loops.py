"""A pass over the layers of a stage: whose weights are gathered when, and when gradients are scattered."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.pipeline.simulated import after
from parallax.pipeline.slots import entry
from parallax.sharding.collectives import vary_all

# `step(carry, layer, number, gathered)` is one layer: `layer` counts in the stage, `number` in the rank's places. It
# returns the carry and, by number of the leaf, gradients of the gathered weights; those of a layer that is not there
# are not taken.
Step = Callable[[Any, Array, Array, Any], tuple[Any, dict[int, Array]]]
# The layer of the stage in each turn of a loop over its layers. It is computed from the loop's own counter, not looked
# up: then XLA sees that a loop writes all of an array, and does not empty it before.
LayerOf = Callable[[Any], Any]


@dataclasses.dataclass
class LayerLoop:
    """`gather` makes whole weights of those that are stored, `scatter` (one function for each leaf) turns their
    gradients into those of what is stored.

    Plain, a layer is gathered, run and released. With `prefetch`, while a layer computes, the weights of the next are
    gathered and the gradients of the one before are scattered; two layers exist whole at most, and the arithmetic
    is the same. The first and the last layer then stand before and after the loop, so that nothing is sent for a layer
    that is not there; XLA may fuse them otherwise, which rounds gradients otherwise.

    `in_turn` puts what stands before a layer, what it computes and what is sent meanwhile one after the other;
    simulated devices need that, see `after`. `numbers` is the model's layer in each place, -1 for none; `uneven` says
    whether there are such places, which are skipped, or, if `masked`, computed and thrown away.
    """

    gather: Callable[[Any], Any]
    scatter: Sequence[Callable[[Array], Array]]
    stage_layers: int
    numbers: Array
    uneven: bool
    masked: bool
    prefetch: bool
    in_turn: bool

    def run(
        self,
        step: Step,
        carry: Any,
        chunk: Array | int,
        *,
        weights: Any = None,
        grads: Sequence[Array] = (),
        active: Array | None = None,
        reverse: bool = False,
    ) -> tuple[Any, list[Array]]:
        """All layers of a stage; returns the last carry and `grads` with what the steps found added.

        Without `weights` nothing is gathered. Where `active` does not hold, nothing is added.
        """
        turn = self._buffered if self.prefetch and self.stage_layers > 1 else self._plain
        layer_of = (lambda turn: self.stage_layers - 1 - turn) if reverse else (lambda turn: turn)
        return turn(step, (carry, list(grads)), chunk * self.stage_layers, layer_of, weights, active)

    def gathered(self, weights: Any, number: Array | int, earlier: Sequence[Array] = ()) -> Any:
        """The whole weights of the layer in this place; None of None. See `_after` for `earlier`."""
        if weights is None:
            return None
        return self.gather(jax.tree.map(lambda weight: self._after(weight, earlier), entry(weights, number)))

    def _plain(self, step: Step, state: Any, first: Array | int, layer_of: LayerOf, weights: Any, active: Array | None):
        def turn(at, state):
            layer = layer_of(at)
            number = first + layer

            def run():
                carry, grads = state
                carry, shares = step(carry, layer, number, self.gathered(weights, number, _first(carry)))
                return carry, self._add(grads, number, shares, active)

            return self._where_layer(number, run, lambda: state)

        return lax.fori_loop(0, self.stage_layers, turn, state)

    def _buffered(
        self, step: Step, state: Any, first: Array | int, layer_of: LayerOf, weights: Any, active: Array | None
    ):
        last = self.stage_layers - 1

        def turn(at, state, *, is_first=False, is_last=False):
            carry, gathered, shares, grads = state
            layer, number = layer_of(at), first + layer_of(at)
            if not is_first:
                grads = self._add(grads, first + layer_of(at - 1), shares, active)
                carry = self._carry_after(carry, grads)
            run = lambda: step(carry, layer, number, gathered)  # noqa: E731
            empty = jax.tree.map(jnp.zeros_like, jax.eval_shape(run)[1]) if self.uneven else None
            carry, shares = self._where_layer(number, run, lambda: (carry, empty))
            coming = gathered if is_last else self.gathered(weights, first + layer_of(at + 1), _first(carry))
            return carry, coming, shares, grads

        carry, grads = state
        gathered = self.gathered(weights, first + layer_of(0), _first(carry))
        state = turn(0, (carry, gathered, {}, grads), is_first=True)
        state = lax.fori_loop(1, last, turn, state)
        carry, _, shares, grads = turn(last, state, is_last=True)
        return carry, self._add(grads, first + layer_of(last), shares, active)

    def _after(self, x: Array, earlier: Sequence[Array]) -> Array:
        """The same array; where all is done in turn, not before those."""
        return functools.reduce(after, earlier, x) if self.in_turn else x

    def _carry_after(self, carry: Any, grads: list[Array]) -> Any:
        if not jax.tree.leaves(carry):  # W sends nothing but gradients
            return carry
        (x, *rest), structure = jax.tree.flatten(carry)
        return jax.tree.unflatten(structure, [self._after(x, grads), *rest])

    def _where_layer(self, number: Array, run: Callable, otherwise: Callable) -> Any:
        """`run()` where there is a layer."""
        if not self.uneven:
            return run()
        there = self.numbers[number] >= 0
        if self.masked:
            return jax.tree.map(lambda new, old: jnp.where(there, new, old), vary_all(run()), vary_all(otherwise()))
        return lax.cond(there, lambda: vary_all(run()), lambda: vary_all(otherwise()))

    def _add(self, grads: list[Array], number: Array, shares: dict[int, Array], active: Array | None) -> list[Array]:
        def add(total: Array, share: Array) -> Array:
            share = share.astype(total.dtype)
            return total.at[number].add(share if active is None else jnp.where(active, share, 0))

        return [add(total, self.scatter[at](shares[at])) if at in shares else total for at, total in enumerate(grads)]


def _first(carry: Any) -> list[Array]:
    """What a layer reads first: the layer before it has ended, and what stands before the first layer."""
    return jax.tree.leaves(carry)[:1]
