"""What one stage does with one microbatch: forward, backward from what forward kept, and the weights' part apart."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.collectives import as_varying, varying_axes
from parallax.layers.context import Context
from parallax.pipeline.saved import SplitVjp


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
    """The layers of one rank's stages. Weights are trees with a leading dim of places, `stage_layers` for each stage;
    gradients are lists of their leaves in float32.

    `layer(weights, x, context)` is one layer on gathered weights; `gather` makes those of what is stored, `scatter`
    (one function for each leaf) turns their gradients into those of what is stored. Forward of a layer: gather,
    compute, release. `numbers` is the model's layer in each place, -1 for none; `uneven` says whether there are such
    places, which are skipped, or, if `masked`, computed and thrown away. With `split`, `backward` leaves out what
    `weigh` does. `kept` is what passes leave for later ones: by pool, lists of arrays `[slot, layer of stage, ...]`.
    """

    layer: Callable[[Any, Array, Context], Array]
    gather: Callable[[Any], Any]
    scatter: Sequence[Callable[[Array], Array]]
    remat: str
    stage_layers: int
    numbers: Array
    uneven: bool = False
    split: bool = False
    masked: bool = False

    def __post_init__(self):
        self.vjp = SplitVjp(self.layer)

    def plan(self, weights: Any, x: Array, context: Context) -> dict[str, list[Array]]:
        """What a layer keeps in each pool. Called once, for its shapes, before the passes below are traced."""
        gathered, context = self.gather(_entry(weights, 0)), self._at(context, 0)
        y, saved = self.vjp.forward(gathered, x, context)
        in_place = self.remat == "none"
        pools = {"FB": saved if in_place else [x], "FW": [], "BW": []}
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

        def zeros(pool: str, leaf: Any) -> Array:
            layers = () if self._whole_stage(pool) else (self.stage_layers,)
            return _zeros(leaf, slots[pool], *layers)

        return {pool: [zeros(pool, leaf) for leaf in pools[pool]] for pool in slots}

    def run(self, weights: Any, x: Array, context: Context, chunk: Array | int) -> Array:
        """The stage's output; nothing is kept."""

        def step(x, number):
            return self.layer(self._gathered(weights, number), x, self._at(context, number))

        return self._over_layers(lambda x, layer, number: step(x, number), x, chunk)

    def forward(self, weights: Any, x: Array, context: Context, kept: Any, place: Place) -> tuple[Array, Any]:
        """The stage's output, and `kept` with what the backward pass will read."""
        if self.remat == "stage":
            kept = kept | {"FB": _put(kept["FB"], [x], place.slots["FB"])}
            return self.run(weights, x, context, place.chunk), kept

        def step(carry, layer, number):
            x, kept = carry
            gathered, here = self._gathered(weights, number), self._at(context, number)
            if self.remat == "layer":
                saved, y = [x], self.layer(gathered, x, here)
            else:
                y, saved = self.vjp.forward(gathered, x, here)
            return y, self._keep(kept, saved, place, layer)

        return self._over_layers(step, (x, kept), place.chunk)

    def backward(
        self, weights: Any, kept: Any, context: Context, dy: Array, grads: list[Array], place: Place
    ) -> tuple[Array, list[Array], Any]:
        """The gradient in the stage's input, `grads` with this microbatch's share added, and `kept`.

        With `split` only the share that costs no matrix product, and `kept` with what `weigh` will read.
        """
        again = self._recomputed(weights, kept, context, place) if self.remat == "stage" else None

        def step(carry, layer, number):
            dy, grads, kept = carry
            gathered, here = self._gathered(weights, number), self._at(context, number)
            saved = _entry(again, layer) if again is not None else self._saved(gathered, kept, here, place, layer)
            if self.split:
                dx, shares, handed = self.vjp.input_backward(gathered, saved, here, dy)
                kept = kept | {"BW": _put(kept["BW"], handed, place.slots["BW"], layer)}
            else:
                dw, dx = self.vjp.backward(gathered, saved, here, dy)
                shares = dict(enumerate(jax.tree.leaves(dw)))
            return dx, self._add(grads, number, shares, place.active), kept

        return self._over_layers(step, (dy, grads, kept), place.chunk, reverse=True)

    def weigh(self, kept: Any, grads: list[Array], place: Place) -> list[Array]:
        """`grads` with this microbatch's share of what `backward` left out."""

        def step(grads, layer, number):
            read, handed = (_entry(kept[pool], place.slots[pool], layer) for pool in ("FW", "BW"))
            return self._add(grads, number, self.vjp.weight_backward(read, handed), place.active)

        return self._over_layers(step, grads, place.chunk)

    # ---- one layer

    def _over_layers(self, step: Callable, carry: Any, chunk: Array | int, *, reverse: bool = False) -> Any:
        """`step(carry, layer, number)` for each layer of a stage, `number` being its place on the rank."""

        def scanned(carry, layer):
            number = chunk * self.stage_layers + layer
            if not self.uneven:
                return step(carry, layer, number), None
            return self._where_layer(number, lambda: step(carry, layer, number), carry), None

        carry, _ = lax.scan(scanned, carry, jnp.arange(self.stage_layers), reverse=reverse)
        return carry

    def _where_layer(self, number: Array, run: Callable, carry: Any) -> Any:
        vary = lambda tree: jax.tree.map(lambda leaf: as_varying(leaf, ["pp"]), tree)  # noqa: E731
        there = self.numbers[number] >= 0
        if self.masked:
            return jax.tree.map(lambda new, old: jnp.where(there, new, old), vary(run()), vary(carry))
        return lax.cond(there, lambda: vary(run()), lambda: vary(carry))

    def _gathered(self, weights: Any, number: Array) -> Any:
        return self.gather(_entry(weights, number))

    def _at(self, context: Context, number: Array) -> Context:
        """The context with a dropout key of this layer's own; 0 is the embedding's."""
        if context.key is None:
            return context
        return context._replace(key=jax.random.fold_in(context.key, 1 + self.numbers[number]))

    def _keep(self, kept: Any, saved: list[Array], place: Place, layer: Array) -> Any:
        later = self.vjp.read_later if self.split and self.remat == "none" else ()
        apart = {"FB": [leaf for at, leaf in enumerate(saved) if at not in later], "FW": [saved[at] for at in later]}
        return kept | {
            pool: _put(kept[pool], leaves, place.slots[pool], layer) for pool, leaves in apart.items() if leaves
        }

    def _saved(self, gathered: Any, kept: Any, context: Context, place: Place, layer: Array) -> list[Array]:
        """What the backward pass of a layer reads: as it was kept, or made again from the layer's input."""
        own = _entry(kept["FB"], place.slots["FB"], layer)
        if self.remat == "layer":
            return self.vjp.forward(gathered, own[0], context)[1]
        if not self.split:
            return own
        later = dict(zip(self.vjp.read_later, _entry(kept["FW"], place.slots["FW"], layer), strict=True))
        rest = iter(own)
        return [later[at] if at in later else next(rest) for at in range(len(own) + len(later))]

    def _recomputed(self, weights: Any, kept: Any, context: Context, place: Place) -> list[Array]:
        """What all layers of the stage save, `[layer, ...]`, made again from the stage's input."""
        (x,) = _entry(kept["FB"], place.slots["FB"])
        _, saved = jax.eval_shape(lambda: self.vjp.forward(self._gathered(weights, 0), x, self._at(context, 0)))
        empty = [_zeros(leaf, self.stage_layers) for leaf in saved]

        def step(carry, layer, number):
            x, saved = carry
            y, new = self.vjp.forward(self._gathered(weights, number), x, self._at(context, number))
            return y, _put(saved, new, layer)

        return self._over_layers(step, (x, empty), place.chunk)[1]

    def _whole_stage(self, pool: str) -> bool:
        return pool == "FB" and self.remat == "stage"

    def _add(self, grads: list[Array], number: Array, shares: dict[int, Array], active: Array | None) -> list[Array]:
        def add(total: Array, share: Array) -> Array:
            share = share.astype(total.dtype)
            return total.at[number].add(share if active is None else jnp.where(active, share, 0))

        return [add(total, self.scatter[at](shares[at])) if at in shares else total for at, total in enumerate(grads)]


def _zeros(like: Any, *leading: int) -> Array:
    """Room for arrays like this one, varying where it does and over pp."""
    return as_varying(jnp.zeros((*leading, *like.shape), like.dtype), varying_axes(like) | {"pp"})


def _entry(stacked: Any, *numbers: Array | int) -> Any:
    """The entry at these indices of the leading dims; nothing else is copied."""

    def entry(leaf: Array) -> Array:
        at = _indices(leaf, numbers)
        rest = leaf.shape[len(numbers) :]
        return lax.dynamic_slice(leaf, at, (*(1 for _ in numbers), *rest)).reshape(rest)

    return jax.tree.map(entry, stacked)


def _put(stacked: Any, values: Any, *numbers: Array | int) -> Any:
    """The same with that entry replaced."""

    def put(leaf: Array, value: Array) -> Array:
        piece = as_varying(value, ["pp"]).reshape(*(1 for _ in numbers), *value.shape)
        return lax.dynamic_update_slice(leaf, piece, _indices(leaf, numbers))

    return jax.tree.map(put, stacked, values)


def _indices(leaf: Array, numbers: Sequence[Array | int]) -> tuple:
    """Start of an entry. A dim of one has a static index: XLA sees that what was written is what is read."""
    at = tuple(jnp.int32(0) if size == 1 else jnp.int32(number) for size, number in zip(leaf.shape, numbers))
    return (*at, *(jnp.int32(0) for _ in leaf.shape[len(numbers) :]))
