"""What one stage does with one microbatch: forward, backward from what forward kept, and the weights' part apart."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from parallax.model.context import Context
from parallax.model.remat import KEPT
from parallax.pipeline.loops import LayerLoop
from parallax.pipeline.saved import SplitVjp
from parallax.pipeline.slots import entry, put, row_major, zeros


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a pass of a stage works: which of the rank's stages, in which slot of each pool, and whether at all.

    `active` is None where the pass is known to happen; else a pass that is not active changes no gradient.
    """

    chunk: Array | int
    slots: dict[str, Array | int]
    active: Array | None = None


@dataclasses.dataclass
class Stage:
    """The layers of one rank's stages. Weights are trees with a leading dim of places, as many for each stage;
    gradients are lists of their leaves in float32.

    `layer(weights, x, context)` is one layer on gathered weights, `loop` runs a stage's. With `split`, `backward`
    leaves out what `weigh` does. `kept` is what passes leave for later ones: by pool, lists of arrays
    `[slot, layer of stage, ...]`. With `in_rows`, what was kept of a layer in place of making it again is read as it
    lies (parallax/sharding/compiler.py says where that is needed).
    """

    layer: Callable[[Any, Array, Context], Array]
    loop: LayerLoop
    remat: str
    split: bool
    in_rows: bool = False

    def __post_init__(self):
        self.vjp = SplitVjp(self.layer)

    def plan(self, weights: Any, x: Array, context: Context) -> dict[str, list[Array]]:
        """What a layer keeps in each pool. Called once, for its shapes, before the passes below are traced."""
        gathered, context = self.loop.gathered(weights, 0), self._at(context, 0)
        y, saved = self.vjp.forward(gathered, x, context)
        in_place = self.remat == "none"
        pools = {"FB": saved if in_place else [x], "FW": [], "BW": []}
        if self.remat in KEPT:
            self.vjp.plan_selection(gathered, x, context, KEPT[self.remat])
            pools["FB"] = [x, *self.vjp.forward_selected(gathered, x, context)[1]]
        if self.split:
            self.vjp.plan_division(gathered, saved, context, y, saved_is_kept=in_place)
            pools["FW"] = [saved[at] for at in self.vjp.read_later]
            pools["BW"] = self.vjp.input_backward(gathered, saved, context, y)[2]
            if in_place:
                pools["FB"] = [leaf for at, leaf in enumerate(saved) if at not in self.vjp.read_later]
        return pools

    @property
    def last_weight(self) -> int:
        """A leaf of the gradients to which the last pass of a tick adds: W, where there is one."""
        return self.vjp.division.deferred[0] if self.split else 0

    def empty(self, pools: dict[str, list[Any]], slots: dict[str, int]) -> dict[str, list[Array]]:
        """Slots for what `plan` says, empty."""

        def empty(pool: str, leaf: Any) -> Array:
            layers = () if self._whole_stage(pool) else (self.loop.stage_layers,)
            return zeros(leaf, slots[pool], *layers)

        return {pool: [empty(pool, leaf) for leaf in pools[pool]] for pool in slots}

    def run(self, weights: Any, x: Array, context: Context, chunk: Array | int) -> Array:
        """The stage's output; nothing is kept."""

        def step(x, layer, number, gathered):
            return self.layer(gathered, x, self._at(context, number)), {}

        return self.loop.run(step, x, chunk, weights=weights)[0]

    def forward(self, weights: Any, x: Array, context: Context, kept: Any, place: Place) -> tuple[Array, Any]:
        """The stage's output, and `kept` with what the backward pass will read."""
        if self.remat == "stage":
            kept = kept | {"FB": put(kept["FB"], [x], place.slots["FB"])}
            return self.run(weights, x, context, place.chunk), kept

        def step(carry, layer, number, gathered):
            (x, kept), here = carry, self._at(context, number)
            if self.remat == "layer":
                saved, y = [x], self.layer(gathered, x, here)
            elif self.remat in KEPT:
                y, kept_of_layer = self.vjp.forward_selected(gathered, x, here)
                saved = [x, *kept_of_layer]
            else:
                y, saved = self.vjp.forward(gathered, x, here)
            return (y, self._keep(kept, saved, place, layer)), {}

        return self.loop.run(step, (x, kept), place.chunk, weights=weights)[0]

    def backward(
        self, weights: Any, kept: Any, context: Context, dy: Array, grads: list[Array], place: Place
    ) -> tuple[Array, list[Array], Any]:
        """The gradient in the stage's input, `grads` with this microbatch's share added, and `kept`.

        With `split` only the share that costs no matrix product, and `kept` with what `weigh` will read.
        """
        again = self._recomputed(weights, kept, context, place) if self.remat == "stage" else None

        def step(carry, layer, number, gathered):
            (dy, kept), here = carry, self._at(context, number)
            saved = entry(again, layer) if again is not None else self._saved(gathered, kept, here, place, layer)
            if self.split:
                dx, shares, handed = self.vjp.input_backward(gathered, saved, here, dy)
                kept = kept | {"BW": put(kept["BW"], handed, place.slots["BW"], layer)}
            else:
                dw, dx = self.vjp.backward(gathered, saved, here, dy)
                shares = dict(enumerate(jax.tree.leaves(dw)))
            return (dx, kept), shares

        passed = dict(weights=weights, grads=grads, active=place.active)
        (dx, kept), grads = self.loop.run(step, (dy, kept), place.chunk, **passed, reverse=True)
        return dx, grads, kept

    def weigh(self, kept: Any, grads: list[Array], place: Place) -> list[Array]:
        """`grads` with this microbatch's share of what `backward` left out."""

        def step(carry, layer, number, gathered):
            read, handed = (entry(kept[pool], place.slots[pool], layer) for pool in ("FW", "BW"))
            return carry, self.vjp.weight_backward(read, handed)

        return self.loop.run(step, (), place.chunk, grads=grads, active=place.active)[1]

    # ---- one layer

    def _at(self, context: Context, number: Array) -> Context:
        """The context with a dropout key of this layer's own; 0 is the embedding's."""
        if context.key is None:
            return context
        return context._replace(key=jax.random.fold_in(context.key, 1 + self.loop.numbers[number]))

    def _keep(self, kept: Any, saved: list[Array], place: Place, layer: Array) -> Any:
        later = self.vjp.read_later if self.split and self.remat == "none" else ()
        apart = {"FB": [leaf for at, leaf in enumerate(saved) if at not in later], "FW": [saved[at] for at in later]}
        return kept | {
            pool: put(kept[pool], leaves, place.slots[pool], layer) for pool, leaves in apart.items() if leaves
        }

    def _saved(self, gathered: Any, kept: Any, context: Context, place: Place, layer: Array) -> list[Array]:
        """What the backward pass of a layer reads: as it was kept, or made again from the layer's input."""
        own = entry(kept["FB"], place.slots["FB"], layer)
        if self.remat == "layer":
            return self.vjp.forward(gathered, own[0], context)[1]
        if self.remat in KEPT:
            rest = [row_major(leaf) for leaf in own[1:]] if self.in_rows else own[1:]
            return self.vjp.saved_again(gathered, own[0], context, rest)
        if not self.split:
            return own
        later = dict(zip(self.vjp.read_later, entry(kept["FW"], place.slots["FW"], layer), strict=True))
        rest = iter(own)
        return [later[at] if at in later else next(rest) for at in range(len(own) + len(later))]

    def _recomputed(self, weights: Any, kept: Any, context: Context, place: Place) -> list[Array]:
        """What all layers of the stage save, `[layer, ...]`, made again from the stage's input."""
        (x,) = entry(kept["FB"], place.slots["FB"])
        _, saved = jax.eval_shape(lambda: self.vjp.forward(self.loop.gathered(weights, 0), x, self._at(context, 0)))
        empty = [zeros(leaf, self.loop.stage_layers) for leaf in saved]

        def step(carry, layer, number, gathered):
            x, saved = carry
            y, new = self.vjp.forward(gathered, x, self._at(context, number))
            return (y, put(saved, new, layer)), {}

        (_, saved), _ = self.loop.run(step, (x, empty), place.chunk, weights=weights)
        return saved

    def _whole_stage(self, pool: str) -> bool:
        return pool == "FB" and self.remat == "stage"
