"""F of one microbatch and B of another as one pass, a layer of each in a turn.

What the one has to send can be sent while the other computes. Schedules with `joint` have such passes (DualPipeV).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.pipeline.layers_on_ranks import LayerRun, Repeat
from parallax.pipeline.stage import (
    BACKWARD,
    FORWARD,
    Pass,
    SaveLayers,
    SaveStageInput,
    each_layer,
    each_place,
    gathered_layer,
    layer_context,
    place_in_stage,
    place_on_rank,
    read_pools,
    with_residuals,
)
from parallax.sharding.collectives import after, vary_over_pp
from parallax.sharding.slots import write_slot

Both = tuple[Array, Array, Any, list]  # outputs of F and B, what is saved, and gradients


def both_ways(saves: SaveLayers, ahead: Pass, back: Pass, x: Array, dy: Array, residuals: Any, grads: list) -> Both:
    """F of the stage's input `x` and B of its output's gradient `dy`: what `saves.forward` and `saves.backward`
    return."""
    back = back._replace(work="backward")
    if not isinstance(saves, SaveStageInput):
        return each_layer_of_both(ahead._replace(work="forward"), back, (x, dy, residuals, grads))
    with jax.named_scope(BACKWARD):
        here, y, recomputed = saves.again(back, residuals)
    x = after(x, y) if back.layers.model.is_simulated else x
    inputs = [write_slot(residuals["FB"][0], [x], *ahead.slots["FB"])]
    state = x, dy, residuals | recomputed, grads
    y, dx, written, grads = each_layer_of_both(ahead._replace(work="run"), here, state)
    return y, dx, written | {"FB": inputs}, grads


def each_layer_of_both(ahead: Pass, back: Pass, state: Both) -> Both:
    """F from the first layer to the last, and B from the last to the first. Where layers of several kinds alternate,
    and do so beside others, the turns of F and B do not meet, and all of F comes first."""
    repeats = ahead.layers.model.arrangement.repeats
    if len(repeats) > 1 and any(repeat.times > 1 for repeat in repeats):
        x, dy, saved, grads = state
        (x, saved), _ = each_layer(ahead, (x, saved), [])
        dy = after(dy, x) if back.layers.model.is_simulated else dy
        (dy, saved), grads = each_layer(back, (dy, saved), grads)
        return x, dy, saved, grads
    whole = repeats[0] if len(repeats) == 1 else Repeat(1, tuple(run for repeat in repeats for run in repeat.runs))

    def turn(count: Array | int, state: Both) -> Both:
        for run, run_back in whole.paired():
            runs = whole.run_in(run, count), whole.run_in(run_back, whole.times - 1 - count)
            state = each_place_of_both((ahead, back), runs, state)
        return state

    return lax.fori_loop(0, whole.times, turn, state) if whole.times > 1 else turn(0, state)


def each_place_of_both(passes: tuple[Pass, Pass], runs: tuple[LayerRun, LayerRun], state: Both) -> Both:
    """The same for a run of each, with as many places. With `fsdp.prefetch` a turn carries the weights of its own
    layers, where both runs have one kind of layer in every place."""
    alike = not any(len(run.kinds) > 1 or run.uneven for run in runs)
    prefetch, last = alike and passes[0].layers.model.fsdp.prefetch and runs[0].places > 1, runs[0].places - 1

    def gathered(count: Array | int, streams: tuple[Array, Array]) -> tuple | None:
        of_each = zip(passes, runs, (count, last - count), streams)
        return tuple(gathered_place(this, run, place, x) for this, run, place, x in of_each) if prefetch else None

    def turn(count: Array | int, carried: Any) -> Any:
        state, weights = carried
        if not alike:
            return places_in_turn(passes, runs, count, state), None
        state = one_layer_of_both(passes, runs, count, state, weights)
        # On simulated devices nothing may be gathered beside a layer's own loops.
        return state, gathered(jnp.minimum(count + 1, last), (state[1], state[1]))

    return lax.fori_loop(0, runs[0].places, turn, (state, gathered(0, state[:2])))[0]


def places_in_turn(passes: tuple[Pass, Pass], runs: tuple[LayerRun, LayerRun], count: Array | int, state: Both) -> Both:
    """One place of F, then one of B, whose stages differ in what they have there."""
    (ahead, back), (x, dy, saved, grads), last = passes, state, runs[0].places - 1
    with jax.named_scope(FORWARD):
        (x, saved), _ = each_place(ahead, _single(runs[0], count), ((x, saved), []))
    dy = after(dy, x) if back.layers.model.is_simulated else dy
    with jax.named_scope(BACKWARD):
        (dy, saved), grads = each_place(back, _single(runs[1], last - count), ((dy, saved), grads))
    return vary_over_pp((x, dy, saved, grads))


def one_layer_of_both(
    passes: tuple[Pass, Pass],
    runs: tuple[LayerRun, LayerRun],
    count: Array | int,
    state: Both,
    weights: tuple | None,
) -> Both:
    """A layer of F and one of B. What B reads is read before F writes, and B writes last."""
    (ahead, back), (run, run_back), (x, dy, saved, grads) = passes, runs, state
    layers, (kind,), (kind_back,), residuals = ahead.layers, run.kinds, run_back.kinds, {}
    place, place_back = place_in_stage(ahead, run, count), place_in_stage(back, run_back, run.places - 1 - count)
    with jax.named_scope(FORWARD):
        of_layer = weights[0] if weights else gathered_place(ahead, run, count, x)
        context = layer_context(ahead, layers.numbers[kind][place_on_rank(ahead, kind, place)])
        if ahead.work == "forward":
            y, residuals = layers.passes[kind].forward(of_layer, x, context)
        else:
            y = layers.passes[kind].run(of_layer, x, context)
    dy = after(dy, y) if layers.model.is_simulated else dy
    on_rank = place_on_rank(back, kind_back, place_back)
    number = layers.numbers[kind_back][on_rank]
    with jax.named_scope(BACKWARD):
        of_layer = weights[1] if weights else gathered_place(back, run_back, run.places - 1 - count, dy)
        read = read_pools(back, kind_back, place_back, saved, ("FB", "FW"))
        dx, gradients, waiting = layers.passes[kind_back].backward(of_layer, layer_context(back, number), read, dy)
    with jax.named_scope(FORWARD):
        saved = with_residuals(ahead, kind, place, saved, residuals)
    with jax.named_scope(BACKWARD):
        saved = with_residuals(back, kind_back, place_back, saved, waiting)
        totals, at_layer = grads[kind_back], dict(layer=number, key=back.rounding)
        added = layers.model.plan.add_up(layers.stacks[kind_back], totals, on_rank, gradients, **at_layer)
    return vary_over_pp((y, dx, saved, [*grads[:kind_back], added, *grads[kind_back + 1 :]]))


def gathered_place(this: Pass, run: LayerRun, place: Array | int, x: Array) -> Any:
    """The weights, gathered, of the layer in a place of a run of one kind."""
    return gathered_layer(this.layers, *run.kinds, place_on_rank(this, *run.kinds, place_in_stage(this, run, place)), x)


def _single(run: LayerRun, place: Array | int) -> LayerRun:
    """The run with this place alone."""
    layer = None if run.layer is None else run.layer + place
    return run._replace(place=run.place + place, places=1, layer=layer)
