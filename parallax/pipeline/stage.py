"""A stage on this rank: F, B and W of one microbatch, and the one loop over layers that they all run.

A layer's weights are gathered when it runs and released after it; its gradients are added to their sums at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.config.remat import LAYER_INPUT, is_moved
from parallax.model.context import Context
from parallax.pipeline.layer_passes import LayerPasses, Pools
from parallax.pipeline.layer_runs import LayerRun, Repeat
from parallax.pipeline.layer_weights import LayerWeights, RoundedWeights
from parallax.pipeline.model_on_mesh import ModelOnMesh
from parallax.pipeline.observations import no_observations, with_observation
from parallax.sharding.collectives import updated_over_pp, vary_over_pp
from parallax.sharding.slots import host_slots, read_slot, unset, write_slot, zeros

# The scopes of the passes in traces and profiles; JOINT is around those of F and B that are one pass.
FORWARD, BACKWARD, WEIGHTS, JOINT = "F", "B", "W", "FB"


class Layers(NamedTuple):
    """The layers of this rank; each sequence has an entry for each kind of layers."""

    model: ModelOnMesh
    passes: Sequence[LayerPasses]
    weights: Sequence[LayerWeights | RoundedWeights]
    numbers: Sequence[Array]  # the model's layer in each place of this rank, -1 for none
    kinds: Array | None  # Arrangement.own_kinds; None if all layers are of one kind
    rounding: Array | None = None  # key of the step's random bits; None if no sum of gradients is rounded
    changes_in_loops: bool = False  # as the model's, in training; JAX cannot differentiate such loops

    def per_stage(self, kind: int) -> int:
        """The number of places of a stage for layers of this kind."""
        return self.model.orders[self.weights[kind].stack].stage_layers


class Pass(NamedTuple):
    """One pass of a stage."""

    layers: Layers
    context: Context | None  # of the microbatch; None in W
    chunk: Array | int  # which of the rank's stages
    slots: dict[str, tuple]  # for each pool, the indices of the microbatch's slot
    rounding: Array | None = None  # key of the microbatch's random bits
    work: str = ""  # set by what runs it: "run", "forward", "backward", "weight_gradients" or "observe"
    gathered: Any = None  # the first layer's weights, if the pass before this one has gathered them
    hands_on: bool = True  # whether it returns the last layer's weights, for a pass that begins there

    @property
    def from_last(self) -> bool:
        """Whether layers run from the last to the first."""
        return self.work == "backward"


class Both(NamedTuple):
    """What F and B carry as one pass."""

    x: Array  # the residual stream, in F
    dy: Array  # its gradient, in B
    saved: Any
    grads: list


# ---- what F saves, and with what B begins


class SaveNothing:
    """There is no B."""

    work = "run"  # of layers in F

    def empty(self, layers: Layers, x: Array, counts: dict[str, int]) -> Any:
        """Empty slots, so many in each pool; `x` is like a stage's input."""
        return None

    def zero_grads(self, layers: Layers) -> list[Any]:
        """Zero gradients of the layers of each kind."""
        return []

    def forward(self, this: Pass, x: Array, saved: Any) -> tuple[Array, tuple[Any, Any]]:
        """F of one microbatch: the stage's output; `saved` with what is saved of it written, and the last layer's
        weights, as `each_layer` returns them."""
        (y, saved), _, gathered = each_layer(this._replace(work=self.work), (x, saved), [])
        return y, (saved, gathered)


class SaveObservations(SaveNothing):
    """There is no B; F records what parallax/pipeline/observations.py says of each layer."""

    work = "observe"

    def empty(self, layers: Layers, x: Array, counts: dict[str, int]) -> Array:
        return no_observations(layers.model.config.layers)


class SaveLayers(SaveNothing):
    """F saves the residuals of each layer: by pool, for each kind a list of arrays [slot, layer of the stage, ...]."""

    work = "forward"

    def empty(self, layers: Layers, x: Array, counts: dict[str, int]) -> dict[str, list[list[Array]]]:
        return {pool: self._slots(layers, x, pool, count) for pool, count in counts.items()}

    def zero_grads(self, layers: Layers) -> list[Any]:
        return [layers.model.plan.zero_grads(weights.stack, weights.resident) for weights in layers.weights]

    def backward(self, this: Pass, dy: Array, saved: Any, grads: list) -> tuple[Array, Any, list]:
        """B of one microbatch: the gradient of the stage's input, `saved` with those for W written, and `grads`
        plus its share."""
        (dx, saved), grads, _ = each_layer(this._replace(work="backward"), (dy, saved), grads)
        return dx, saved, grads

    def both(self, ahead: Pass, back: Pass, state: Both) -> Both:
        """F of one microbatch and B of another as one pass.

        What B reads is read before: beside writes of F, XLA would copy all slots.
        """
        pools = [pool for pool in ("F to B", "F to W") if pool in back.slots]
        with jax.named_scope(BACKWARD):
            read = {pool: read_slot(state.saved[pool], *back.slots[pool]) for pool in pools}
        back = back._replace(work="backward", slots=back.slots | dict.fromkeys(pools, ()))
        return both_ways(ahead._replace(work=self.work), back, state, read)

    def _slots(self, layers: Layers, x: Array, pool: str, count: int) -> list[list[Array]]:
        slots = []
        for kind, passes in enumerate(layers.passes):
            names = itertools.chain(passes.names if pool == "F to B" else (), itertools.repeat(None))
            like = zip(passes.saved.get(pool, ()), names)
            slots.append([_new_slots(layers, name, leaf, count, layers.per_stage(kind)) for leaf, name in like])
        return slots


class SaveStageInput(SaveLayers):
    """F saves the stage's input, and B runs the stage's layers again first."""

    def forward(self, this: Pass, x: Array, saved: Any) -> tuple[Array, tuple[Any, Any]]:
        saved = saved | {"F to B": [write_slot(saved["F to B"][0], [x], *this.slots["F to B"])]}
        y, (_, gathered) = SaveNothing().forward(this, x, None)
        return y, (saved, gathered)

    def backward(self, this: Pass, dy: Array, saved: Any, grads: list) -> tuple[Array, Any, list]:
        here, _, recomputed = self._again(this._replace(gathered=None), saved, dy)
        dx, after, grads = super().backward(here, dy, saved | recomputed, grads)
        return dx, after | {"F to B": saved["F to B"]}, grads

    def both(self, ahead: Pass, back: Pass, state: Both) -> Both:
        with jax.named_scope(BACKWARD):
            dy = back.layers.model.devices.after(state.dy, state.x)  # the embedding may send in a branch
            here, y, recomputed = self._again(back, state.saved, dy)
        x = back.layers.model.devices.after(state.x, y)
        with jax.named_scope(FORWARD):
            inputs = [write_slot(state.saved["F to B"][0], [x], *ahead.slots["F to B"])]
        ahead, here = ahead._replace(work="run"), here._replace(work="backward")
        read = state.saved | recomputed
        after = both_ways(ahead, here, state._replace(x=x, saved=read), read)
        return after._replace(saved=after.saved | {"F to B": inputs})

    def _again(self, this: Pass, saved: Any, dy: Array) -> tuple[Pass, Array, Any]:
        """The stage's layers once more, before B, which reads `dy`: the pass, their output, and what they save."""
        (x,) = read_slot(saved["F to B"][0], *this.slots["F to B"])
        x = this.layers.model.devices.after(x, dy)
        kinds = enumerate(this.layers.passes)
        empty = [
            [zeros(leaf, this.layers.per_stage(kind)) for leaf in passes.saved["F to B"]] for kind, passes in kinds
        ]
        here = this._replace(slots=this.slots | {"F to B": ()})  # for this pass alone: one slot
        y, (recomputed, gathered) = super().forward(here, x, {"F to B": empty})
        return here._replace(gathered=gathered), y, recomputed

    def _slots(self, layers: Layers, x: Array, pool: str, count: int) -> list[list[Array]]:
        if pool == "F to B":
            return [[_new_slots(layers, LAYER_INPUT, x, count)]]
        return super()._slots(layers, x, pool, count)


def weight_gradients(this: Pass, saved: Any, grads: list) -> list:
    """W of one microbatch: `grads` plus the share that B left out."""
    return each_layer(this._replace(work="weight_gradients"), (None, saved), grads)[1]


def _new_slots(layers: Layers, name: str | None, like: Any, *leading: int) -> Array:
    """Slots for residuals of this name, in the memory that `pipeline.residuals_on` says. F writes each before B reads
    it. Where a tick allocates slots, XLA for TPU sees that and clears nothing."""
    if is_moved(layers.model.pipeline.residuals_on, name):
        return host_slots(like, *leading)
    return (unset if layers.model.carries_residuals else zeros)(like, *leading)


# ---- the loop over layers


def each_layer(
    this: Pass, carry: Any, grads: list, read: Any = None, repeat: Repeat | None = None, count: Array | int = 0
) -> tuple[Any, list, Any]:
    """Do the work of a pass for each layer of the stage. `carry` is the residual stream, or its gradient, and what is
    saved; `read` is as in `one_layer`. Returns both after the last layer, `grads` plus the layers' gradients, and the
    last layer's weights, if they are gathered ahead.

    Neighbouring places with layers of one kind are a run with a loop of its own. Runs that repeat have a loop around
    theirs, whose turn number `count` is a call with that `repeat`. So a program does not grow with the number of
    layers.

    With `fsdp.prefetch` the next layer is gathered while one computes: a turn carries the weights of its own layer. The
    last turn gathers its own layer once more: these are the weights that are returned.
    """
    model, state, gathered = this.layers.model, (carry, grads), None
    for each in in_order(this, model.repeats if repeat is None else [repeat]):
        if each.times > 1 and repeat is None:
            turn = partial(each_layer, this, read=read, repeat=each)
            state = lax.fori_loop(0, each.times, lambda n, state, turn=turn: turn(*state, count=n)[:2], state)
            this, gathered = this._replace(gathered=None), None
            continue
        time = each.times - 1 - count if this.from_last else count
        for run in in_order(this, each.runs):
            run, gathered = each.run_in(run, time), None
            if model.prefetches(run) and this.work != "weight_gradients":
                gathered = gathered_place(this, run, 0, state[0][0]) if this.gathered is None else this.gathered
            turn = partial(one_place, this, run, read)
            state, gathered = lax.fori_loop(0, run.places, turn, (state, gathered))
            this = this._replace(gathered=None)
    return *state, gathered if this.hands_on else None


def one_place(this: Pass, run: LayerRun, read: Any, count: Array | int, carried: Any) -> tuple[Any, Any]:
    """The same for one place of a run, and the weights of the next place, if the turns of its loop carry them. Stages
    may differ in the kind of layer in a place, and in whether there is one."""
    (state, weights), place = carried, _place_of(this, run, count)
    kinds = range(len(this.layers.passes)) if len(run.kinds) > 1 else run.kinds
    layer = partial(one_layer, this, run, place=place, weights=weights, read=read)
    if len(run.kinds) == 1 and not run.uneven:
        state = layer(*kinds, state=state)
    elif this.layers.changes_in_loops:
        for kind in kinds:
            is_here = _looked_up(this, run, place, 0) == kind if len(run.kinds) > 1 else _is_there(this, run, place)
            state = updated_over_pp(is_here, lambda kept, kind=kind: layer(kind, state=kept), state, in_loop=True)
    else:
        branches = [partial(layer, kind, state=state) for kind in kinds]
        branches.append(lambda: vary_over_pp(state))  # where a stage has no layer
        if len(run.kinds) > 1:
            state = lax.switch(_looked_up(this, run, place, 0), branches)
        else:
            state = lax.cond(_is_there(this, run, place), *branches)
    if weights is None:
        return state, None
    return state, gathered_place(this, run, jnp.minimum(count + 1, run.places - 1), state[0][0])


def one_layer(
    this: Pass,
    run: LayerRun,
    kind: int,
    place: Array | int,
    state: Any,
    weights: Any = None,
    read: Any = None,
) -> Any:
    """The same for a layer that is there: gather its weights, run it, and add its gradients. B reads `saved`, or `read`
    if it is given."""
    ((x, saved), grads), layers, context, gradients = state, this.layers, this.context, None
    in_stage = _in_stage(this, run, place)
    in_turn = layers.model.devices.in_turn
    on_rank, passes, numbers = _on_rank(this, kind, in_stage), layers.passes[kind], layers.numbers[kind]
    if this.work != "weight_gradients":
        weights = layers.weights[kind].gathered(on_rank, x) if weights is None else weights
        config, name = layers.model.config, list(layers.model.parts.blocks)[kind]
        context = context.of_layer(config, numbers[on_rank]).of_kind(config, name)
        if context.key is not None:  # 0 is the embedding's
            context = context._replace(key=jax.random.fold_in(context.key, 1 + numbers[on_rank]))
    match this.work:
        case "run":
            x = in_turn(x, passes.run, weights, x, context)
        case "forward":
            x, residuals = in_turn(x, passes.forward, weights, x, context)
            saved = _written(this, kind, in_stage, saved, residuals)
        case "backward":
            residuals = _read(this, kind, in_stage, saved if read is None else read, ("F to B", "F to W"))
            x, gradients, residuals = in_turn(x, passes.backward, weights, context, residuals, x)
            saved = _written(this, kind, in_stage, saved, residuals)
        case "weight_gradients":
            gradients = in_turn(None, passes.weight_gradients, _read(this, kind, in_stage, saved, ("F to W", "B to W")))
        case "observe":
            saved = with_observation(saved, jnp.int32(0), x, numbers[on_rank] == 0)  # the embedding's output
            x = in_turn(x, passes.run, weights, x, context)
            saved = with_observation(saved, numbers[on_rank] + 1, x, numbers[on_rank] >= 0)
    if gradients is not None:
        at_layer = dict(layer=numbers[on_rank], key=this.rounding)
        added = layers.model.plan.add_up(layers.weights[kind].stack, grads[kind], on_rank, gradients, **at_layer)
        grads = [*grads[:kind], added, *grads[kind + 1 :]]
    return vary_over_pp(((x, saved), grads))


# ---- F and B as one pass


def both_ways(ahead: Pass, back: Pass, state: Both, read: Any) -> Both:
    """F of one microbatch, from the first layer to the last, and B of another, from the last to the first, a layer of
    each in a turn: so the compiler can send what the one has to send while the other computes. B reads `read`.

    Where layers of several kinds alternate, and do so beside others, the turns of F and B do not meet, and all of F
    comes first.
    """
    repeats, (x, dy, saved, grads) = ahead.layers.model.repeats, state
    if len(repeats) > 1 and any(repeat.times > 1 for repeat in repeats):
        with jax.named_scope(FORWARD):
            (x, saved), *_ = each_layer(ahead, (x, saved), [])
        dy = back.layers.model.devices.after(dy, x)
        with jax.named_scope(BACKWARD):
            (dy, saved), grads, _ = each_layer(back, (dy, saved), grads, read)
        return Both(x, dy, saved, grads)
    whole = repeats[0] if len(repeats) == 1 else Repeat(1, tuple(run for repeat in repeats for run in repeat.runs))

    def turn(count: Array | int, state: Both) -> Both:
        for run, run_back in whole.paired():
            runs = whole.run_in(run, count), whole.run_in(run_back, whole.times - 1 - count)
            state = each_place_of_both((ahead, back), runs, state, read)
        return state

    return lax.fori_loop(0, whole.times, turn, state) if whole.times > 1 else turn(0, state)


def each_place_of_both(passes: tuple[Pass, Pass], runs: tuple[LayerRun, LayerRun], state: Both, read: Any) -> Both:
    """The same for a run of each, with as many places. With `fsdp.prefetch` a turn carries the weights of its own
    layers."""
    (ahead, back), (run, run_back), model = passes, runs, passes[0].layers.model
    plain = all(len(each.kinds) == 1 and not each.uneven for each in runs)
    prefetch = plain and model.prefetches(run)

    def layer(this: Pass, run: LayerRun, place: Array | int, state: Any, weights: Any, read: Any = None) -> Any:
        if plain:
            return one_layer(this, run, *run.kinds, place, state, weights, read)
        here = partial(one_place, this, run.part(place, 1), read)
        return lax.fori_loop(0, 1, here, (state, None))[0]

    def gathered(count: Array | int, x: Array, dy: Array) -> tuple[Any, Any]:
        if prefetch:
            return gathered_place(ahead, run, count, x), gathered_place(back, run_back, count, dy)
        return None, None

    def turn(count: Array | int, carried: Any) -> Any:
        (x, dy, saved, grads), (weights, weights_back) = carried
        place_back = _place_of(back, run_back, count)
        with jax.named_scope(FORWARD):
            (x, saved), _ = layer(ahead, run, count, ((x, saved), []), weights)
        dy = model.devices.after(dy, x)
        with jax.named_scope(BACKWARD):
            (dy, saved), grads = layer(back, run_back, place_back, ((dy, saved), grads), weights_back, read)
        # On simulated devices nothing may be gathered beside a layer's own loops.
        following = gathered(jnp.minimum(count + 1, run.places - 1), dy, dy)
        return Both(x, dy, saved, grads), following

    first = gathered(0, state.x, model.devices.after(state.dy, state.x))
    return lax.fori_loop(0, run.places, turn, (state, first))[0]


# ---- a layer's weights and places


def in_order(this: Pass, places: Sequence) -> Sequence:
    """Parts of a stage in the order in which a pass comes to them."""
    return places[::-1] if this.from_last else places


def gathered_place(this: Pass, run: LayerRun, count: Array | int, x: Array) -> Any:
    """The weights, gathered, of the layer that a run of one kind reaches in this turn."""
    in_stage = _in_stage(this, run, _place_of(this, run, count))
    (kind,) = run.kinds
    return this.layers.weights[kind].gathered(_on_rank(this, kind, in_stage), x)


def _place_of(this: Pass, run: LayerRun, count: Array | int) -> Array | int:
    """The place that a pass through a run reaches in this turn."""
    return run.places - 1 - count if this.from_last else count


def _in_stage(this: Pass, run: LayerRun, place: Array | int) -> Array | int:
    """The place of a layer among those of its kind in the stage.

    It is computed from the loop's counter and looked up only if stages differ: so XLA sees that a loop writes the
    whole array and does not clear it first.
    """
    return run.layer + place if run.layer is not None else _looked_up(this, run, place, 1)


def _on_rank(this: Pass, kind: int, in_stage: Array | int) -> Array | int:
    """The place among those of its kind on the rank."""
    return this.chunk * this.layers.per_stage(kind) + in_stage


def _looked_up(this: Pass, run: LayerRun, place: Array | int, row: int) -> Array:
    """An entry of Arrangement.kinds_in_places."""
    return this.layers.kinds[row][this.chunk * this.layers.model.arrangement.stage_layers + run.place + place]


def _is_there(this: Pass, run: LayerRun, place: Array | int) -> Array:
    """Whether this place of a run of one kind has a layer."""
    (kind,) = run.kinds
    if this.layers.kinds is None:
        return this.layers.numbers[kind][_on_rank(this, kind, _in_stage(this, run, place))] >= 0
    return _looked_up(this, run, place, 0) == kind


def _read(this: Pass, kind: int, in_stage: Array | int, saved: Any, pools: Sequence[str]) -> Pools:
    """A layer's residuals in those of these pools that the schedule has."""
    return {pool: read_slot(saved[pool][kind], *this.slots[pool], in_stage) for pool in pools if pool in this.slots}


def _written(this: Pass, kind: int, in_stage: Array | int, saved: Any, residuals: Pools) -> Any:
    """`saved` with the residuals of one layer written."""
    for pool, leaves in residuals.items():
        if leaves:
            of_kinds = list(saved[pool])
            of_kinds[kind] = write_slot(of_kinds[kind], leaves, *this.slots[pool], in_stage)
            saved = saved | {pool: of_kinds}
    return saved
