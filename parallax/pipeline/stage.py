"""A stage on this rank: F, B and W of one microbatch, and the one loop over layers that they all run.

A layer's weights are gathered when it runs and released after it; its gradients are added to their sums at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.config.remat import LAYER_INPUT, is_moved
from parallax.model.context import Context
from parallax.model.products import apart, rounded_kernels
from parallax.pipeline.layer_passes import Divided, Pools, SaveAll
from parallax.pipeline.layers_on_ranks import LayerRun, Repeat
from parallax.pipeline.model_on_mesh import ModelOnMesh
from parallax.pipeline.observations import with_observation
from parallax.pipeline.slots import host_slots, read_slot, write_slot, zeros
from parallax.sharding.collectives import after, vary_all


class Layers(NamedTuple):
    """The layers of this rank; each sequence has an entry for each kind of layers."""

    model: ModelOnMesh
    stacks: Sequence[str]  # names in the tree of parameters, as in ShardedModel.orders
    passes: Sequence[SaveAll | Divided]
    weights: Sequence[Any]  # resident, with a leading dim of places
    numbers: Sequence[Array]  # the model's layer in each place of this rank, -1 for none
    kinds: Array | None  # Arrangement.own_kinds; None if all layers are of one kind

    @staticmethod
    def of(model: ModelOnMesh, weights: Any) -> Layers:
        """The layers of this rank on resident weights, with passes that only run them."""
        numbers = [order.own_layers() for order in model.orders.values()]
        kinds = model.arrangement.own_kinds() if len(numbers) > 1 else None
        blocks = zip(model.parts.blocks.values(), model.orders, strict=True)
        passes = [SaveAll(block, model.plan.constant(stack), None, {}) for block, stack in blocks]
        return Layers(model, [*model.orders], passes, model.parts.by_kind(weights), numbers, kinds)

    def per_stage(self, kind: int) -> int:
        """The number of places of a stage for layers of this kind."""
        return self.model.orders[self.stacks[kind]].stage_layers


class Pass(NamedTuple):
    """One pass of a stage."""

    layers: Layers
    context: Context | None  # of the microbatch; None in W
    chunk: Array | int  # which of the rank's stages
    slots: dict[str, tuple]  # for each pool, the indices of the microbatch's slot
    work: str = ""  # set by what runs it: "run", "forward", "backward", "weight_gradients" or "observe"

    @property
    def from_last(self) -> bool:
        """Whether layers run from the last to the first."""
        return self.work == "backward"


# ---- what F saves, and with what B begins


class SaveLayers:
    """F saves the residuals of each layer: by pool, for each kind a list of arrays [slot, layer of the stage, ...]."""

    def empty(self, layers: Layers, x: Array, counts: dict[str, int]) -> dict[str, list[list[Array]]]:
        """Empty slots, so many in each pool; `x` is like a stage's input."""
        return {pool: self._slots(layers, x, pool, count) for pool, count in counts.items()}

    def forward(self, this: Pass, x: Array, residuals: Any) -> tuple[Array, Any]:
        """F of one microbatch: the stage's output, and `residuals` with its own written."""
        return each_layer(this._replace(work="forward"), (x, residuals), [])[0]

    def backward(self, this: Pass, dy: Array, residuals: Any, grads: list) -> tuple[Array, Any, list]:
        """B of one microbatch: the gradient of the stage's input, `residuals` with those for W written, and `grads`
        plus its share."""
        (dx, residuals), grads = each_layer(this._replace(work="backward"), (dy, residuals), grads)
        return dx, residuals, grads

    def _slots(self, layers: Layers, x: Array, pool: str, count: int) -> list[list[Array]]:
        found = []
        for kind, passes in enumerate(layers.passes):
            names = itertools.chain(passes.names if pool == "FB" else (), itertools.repeat(None))
            like = zip(passes.saved.get(pool, ()), names)
            found.append([_new_slots(layers, name, leaf, count, layers.per_stage(kind)) for leaf, name in like])
        return found


class SaveStageInput(SaveLayers):
    """F saves the stage's input, and B runs the stage's layers again first."""

    def forward(self, this: Pass, x: Array, residuals: Any) -> tuple[Array, Any]:
        residuals = residuals | {"FB": [write_slot(residuals["FB"][0], [x], *this.slots["FB"])]}
        return each_layer(this._replace(work="run"), x, [])[0], residuals

    def backward(self, this: Pass, dy: Array, residuals: Any, grads: list) -> tuple[Array, Any, list]:
        (x,) = read_slot(residuals["FB"][0], *this.slots["FB"])
        kinds = enumerate(this.layers.passes)
        empty = [[zeros(leaf, this.layers.per_stage(kind)) for leaf in passes.saved["FB"]] for kind, passes in kinds]
        here = this._replace(slots=this.slots | {"FB": ()})  # for this pass alone: one slot
        _, recomputed = super().forward(here, x, {"FB": empty})
        dx, found, grads = super().backward(here, dy, residuals | recomputed, grads)
        return dx, found | {"FB": residuals["FB"]}, grads

    def _slots(self, layers: Layers, x: Array, pool: str, count: int) -> list[list[Array]]:
        return [[_new_slots(layers, LAYER_INPUT, x, count)]] if pool == "FB" else super()._slots(layers, x, pool, count)


class SaveNothing:
    """There is no B."""

    def forward(self, this: Pass, x: Array, residuals: None) -> tuple[Array, None]:
        """F of one microbatch."""
        return each_layer(this._replace(work="run"), x, [])[0], None


class SaveObservations:
    """There is no B; F records what parallax/pipeline/observations.py says of each layer."""

    def forward(self, this: Pass, x: Array, seen: Array) -> tuple[Array, Array]:
        """F of one microbatch, and what was seen in it."""
        return each_layer(this._replace(work="observe"), (x, seen), [])[0]


def weight_gradients(this: Pass, residuals: Any, grads: list) -> list:
    """W of one microbatch: `grads` plus the share that B left out."""
    return each_layer(this._replace(work="weight_gradients"), residuals, grads)[1]


def _new_slots(layers: Layers, name: str | None, like: Any, *leading: int) -> Array:
    """Slots for residuals of this name, in the memory that `pipeline.residuals_on` says."""
    return (host_slots if is_moved(layers.model.pipeline.residuals_on, name) else zeros)(like, *leading)


# ---- the loop over layers


def each_layer(this: Pass, carry: Any, grads: list) -> tuple[Any, list]:
    """Do the work of a pass for each layer of the stage; returns the carry, and `grads` plus the layers' gradients.

    Neighbouring places with layers of one kind are a run with a loop of its own. Runs that repeat have a loop around
    theirs. So a program does not grow with the number of layers.
    """
    repeats, state = this.layers.model.arrangement.repeats, (carry, grads)
    for repeat in reversed(repeats) if this.from_last else repeats:

        def turn(count: Array | int, state: Any, repeat: Repeat = repeat) -> Any:
            count = repeat.times - 1 - count if this.from_last else count
            for run in reversed(repeat.runs) if this.from_last else repeat.runs:
                state = each_place(this, repeat.at(run, count), state)
            return state

        state = lax.fori_loop(0, repeat.times, turn, state) if repeat.times > 1 else turn(0, state)
    return state


def each_place(this: Pass, run: LayerRun, state: Any) -> Any:
    """The same for one run. Stages may differ in the kind of layer in a place, and in whether there is one.

    With `fsdp.prefetch` the next layer is gathered while one computes: a turn carries the weights of its own layer.
    What the last turn gathers is not used.
    """
    kinds = range(len(this.layers.passes)) if len(run.kinds) > 1 else run.kinds

    def place_of(count: Array | int) -> Array | int:
        return run.places - 1 - count if this.from_last else count

    def turn(count: Array | int, state: Any, weights: Any = None) -> Any:
        place = place_of(count)
        branches = [lambda kind=kind: one_layer(this, run, kind, place, state, weights) for kind in kinds]
        if len(run.kinds) > 1:
            return lax.switch(_looked_up(this, run, place, 0), [*branches, lambda: vary_all(state)])
        return (
            lax.cond(_is_there(this, run, place), *branches, lambda: vary_all(state)) if run.uneven else branches[0]()
        )

    def turn_with_gathered(count: Array | int, carried: Any) -> Any:
        state = turn(count, *carried)
        return state, gathered_in(this, run, place_of(jnp.minimum(count + 1, run.places - 1)), state)

    if not this.layers.model.fsdp.prefetch or not run.can_prefetch or this.work == "weight_gradients":
        return lax.fori_loop(0, run.places, turn, state)
    first = gathered_in(this, run, place_of(0), state)
    return lax.fori_loop(0, run.places, turn_with_gathered, (state, first))[0]


def one_layer(this: Pass, run: LayerRun, kind: int, place: Array | int, state: Any, weights: Any = None) -> Any:
    """The same for a layer that is there: gather its weights, run it, and add its gradients."""
    (carry, grads), layers, context, gradients = state, this.layers, this.context, None
    in_stage, on_rank = _places_of_kind(this, run, kind, place)
    passes, numbers = layers.passes[kind], layers.numbers[kind]
    if this.work != "weight_gradients":
        weights = gathered_layer(layers, kind, on_rank, carry) if weights is None else weights
        if context.key is not None:  # 0 is the embedding's
            context = context._replace(key=jax.random.fold_in(context.key, 1 + numbers[on_rank]))
    match this.work:
        case "run":
            carry = passes.run(weights, carry, context)
        case "forward":
            x, residuals = carry
            y, saved = passes.forward(weights, x, context)
            carry = y, _written(this, kind, in_stage, residuals, saved)
        case "backward":
            dy, residuals = carry
            saved = {pool: _read(this, kind, in_stage, residuals, pool) for pool in ("FB", "FW") if pool in this.slots}
            dx, gradients, for_w = passes.backward(weights, context, saved, dy)
            carry = dx, _written(this, kind, in_stage, residuals, for_w)
        case "weight_gradients":
            saved = {pool: _read(this, kind, in_stage, carry, pool) for pool in ("FW", "BW")}
            gradients = passes.weight_gradients(saved)
        case "observe":
            x, seen = carry
            seen = with_observation(seen, jnp.int32(0), x, numbers[on_rank] == 0)  # the embedding's output
            y = passes.run(weights, x, context)
            carry = y, with_observation(seen, numbers[on_rank] + 1, y, numbers[on_rank] >= 0)
    if gradients is not None:
        added = layers.model.plan.add_up(layers.stacks[kind], grads[kind], on_rank, gradients)
        grads = [*grads[:kind], added, *grads[kind + 1 :]]
    return vary_all((carry, grads))


def gathered_in(this: Pass, run: LayerRun, place: Array | int, state: Any) -> Any:
    """The weights of the layer in one place of a run of one kind, after what `state` holds."""
    (kind,) = run.kinds
    return gathered_layer(this.layers, kind, _places_of_kind(this, run, kind, place)[1], state[0])


def gathered_layer(layers: Layers, kind: int, on_rank: Array | int, carry: Any = ()) -> dict[str, Any]:
    """The collections of a layer's weights, gathered; on simulated devices only after the arrays that its pass reads
    first. Kernels of 8-bit products are rounded before, and sent in 8 bits."""
    model, stack, weights = layers.model, layers.stacks[kind], read_slot(layers.weights[kind], on_rank)
    if model.is_simulated:
        earlier = jax.tree.leaves(carry)[:1]
        weights = jax.tree.map(lambda weight: functools.reduce(after, earlier, weight), weights)
    if not model.rounds_kernels:
        return {"params": model.plan.use(weights, stack)}
    dtype, scales = model.model.dtype, model.plan.scales(stack)
    return apart(model.plan.use(rounded_kernels(weights, scales, dtype, model.model.matmul), stack), scales, dtype)


def _places_of_kind(this: Pass, run: LayerRun, kind: int, place: Array | int) -> tuple[Any, Any]:
    """Of a layer, its place among those of its kind in the stage, and on the rank.

    They are computed from the loop's counter and looked up only if stages differ: so XLA sees that a loop writes the
    whole array and does not clear it first.
    """
    in_stage = run.layer + place if run.layer is not None else _looked_up(this, run, place, 1)
    return in_stage, this.chunk * this.layers.per_stage(kind) + in_stage


def _looked_up(this: Pass, run: LayerRun, place: Array | int, row: int) -> Array:
    """An entry of Arrangement.kinds_in_places."""
    return this.layers.kinds[row][this.chunk * this.layers.model.arrangement.stage_layers + run.place + place]


def _is_there(this: Pass, run: LayerRun, place: Array | int) -> Array:
    """Whether this place of a run of one kind has a layer."""
    (kind,) = run.kinds
    if this.layers.kinds is None:
        return this.layers.numbers[kind][_places_of_kind(this, run, kind, place)[1]] >= 0
    return _looked_up(this, run, place, 0) == kind


def _read(this: Pass, kind: int, in_stage: Array, residuals: Any, pool: str) -> list[Array]:
    """A layer's residuals in a pool."""
    return read_slot(residuals[pool][kind], *this.slots[pool], in_stage)


def _written(this: Pass, kind: int, in_stage: Array, residuals: Any, saved: Pools) -> Any:
    """`residuals` with those of one layer written."""
    for pool, leaves in saved.items():
        if leaves:
            of_kinds = list(residuals[pool])
            of_kinds[kind] = write_slot(of_kinds[kind], leaves, *this.slots[pool], in_stage)
            residuals = residuals | {pool: of_kinds}
    return residuals
