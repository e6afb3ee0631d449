"""What a training step is put together from, each part traced alone: layers, moves of weights, embedding and head.

Many layouts share a part. Equations are priced by `costs_in_equation`, as those of a whole step are.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec as P

from parallax.analysis.planned.step_time import OpCost, costs_in_equation, gpu_passes, passes_of
from parallax.analysis.traced.collectives import PLAN, Sent
from parallax.analysis.traced.memory import DATA, Liveness, Program, Value, inline
from parallax.analysis.traced.trace import Invocation, Origin, Walk, in_local_view, step_arguments
from parallax.config.remat import saved_parts
from parallax.jaxprs import aval_bytes
from parallax.model.products import ROUNDED
from parallax.pipeline import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    BatchedHead,
    MicrobatchHead,
    SaveAll,
    ShardedModel,
    arguments_of_layers,
    inlined,
    pipeline_of,
    select_inlined,
    split_inlined,
    traced_vjp,
)
from parallax.schedules import Schedule
from parallax.sharding.collectives import as_varying, sum_over
from parallax.sharding.mesh import is_for_gpus
from parallax.sharding.plan import entry


class Place(NamedTuple):
    """Where a cost comes from: the scopes and the primitive of its equation, and whether the sharding plan has it."""

    stack: str
    primitive: str
    of_plan: bool = False


# Sizes of mesh axes, by name.
Sizes = tuple[tuple[str, int], ...]

# How often each cost occurs. The programs of other rows of a microbatch have theirs in the same order.
Counts = dict[tuple[OpCost | Sent, Place], float]

# Scopes that say how often something runs in a step, of embedding and head, of gathers of a layer, and of what is not
# counted.
EACH_LAYER, EACH_MICROBATCH = "each layer", "each microbatch"
OF_ENDS, GATHERS, NOT_COUNTED = "ends", "gathers", "not counted"
MARKS = EACH_LAYER, EACH_MICROBATCH, OF_ENDS, GATHERS, NOT_COUNTED


def counted(
    program: ClosedJaxpr,
    model: ShardedModel,
    scope: str = "",
    known: dict[int, Any] | None = None,
    sizes: Sizes = (),
) -> Counts:
    """Costs of a program that runs in a scope; `known` are values of its arguments, `sizes` those of axes on which the
    model was not traced."""
    passes = passes_of(program, model)

    def count(equation: JaxprEqn, origin: Origin) -> Counter:
        if NOT_COUNTED in origin.stack:
            return Counter()
        plain = origin._replace(stack=_without_marks(origin.stack))
        costs = costs_in_equation(equation, plain, model=model, passes=passes, sizes=model.axis_sizes | dict(sizes))
        if not costs:
            return costs
        place = Place(origin.stack, equation.primitive.name, origin.source.startswith(PLAN))
        return Counter({(cost, place): count for cost, count in costs.items()})

    device = Walk(dict.fromkeys(model.axis_sizes, 0), count)
    values = [(known or {}).get(place) for place in range(len(program.jaxpr.invars))]
    device.call(program, Invocation(scope, set()), values)
    return device.total


@functools.cache
def _without_marks(stack: str) -> str:
    return "/".join(name for name in stack.split("/") if not name.startswith(MARKS))


# ---- layers


class TracedLayer(NamedTuple):
    """The programs of a layer of one kind, as in `traced_vjp`: `forward` from (weights, x, context) to (y, *residuals),
    `backward` from (weights, context, residuals, dy) to (*dw, dx)."""

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    weights: int  # arrays of its weights
    context: int  # arrays of its context
    which: int | None  # the place of the layer's number among the arguments of `forward`


class PassPrograms(NamedTuple):
    """The passes of a layer for a value of pipeline.remat, and whether the backward pass is divided: in B `recompute`,
    if there is one, and `backward`, in W `later`. `saved` is what F saves for each layer, `passed` what B leaves to W;
    `pools` are the bytes of what is saved."""

    layer: TracedLayer
    forward: ClosedJaxpr
    recompute: ClosedJaxpr | None
    backward: ClosedJaxpr
    later: ClosedJaxpr | None
    saved: list[Any]
    passed: list[Any]
    pools: dict[str, int]
    of_stage: bool  # whether B runs the layers of a stage again, and saves all of each for itself

    @property
    def given(self) -> int:
        """Arguments of `backward` before the residuals."""
        return self.layer.weights + self.layer.context

    @property
    def read_again(self) -> ClosedJaxpr | None:
        """What B computes of a layer's residuals from what is saved of it."""
        return None if self.of_stage else self.recompute


class LayerCosts(NamedTuple):
    """The costs of a layer's passes of one microbatch, F, B and W together, and bytes of what it saves, by pool."""

    costs: Counts
    saved: dict[str, int]


def traced_layers(model: ShardedModel, rows: int, seq: int) -> list[TracedLayer]:
    """The programs of the layers of each kind, for a global batch of so many rows."""

    def traced(params: Any, batch: Any, noise: Array) -> list[TracedLayer]:
        pipeline = pipeline_of(model, params, batch, noise, "parts")
        layers = pipeline.layers
        kinds = zip(layers.passes, model.orders, arguments_of_layers(layers, pipeline.ends), strict=True)
        return [_traced_layer(model, passes.block, stack, *given) for passes, stack, given in kinds]

    return in_local_view(model, traced, rows, seq)


def _traced_layer(model: ShardedModel, block: Any, stack: str, weights: Any, x: Any, context: Any) -> TracedLayer:
    *vjp, program = traced_vjp(block, model.plan, stack, weights, x, context)
    saves_all = SaveAll(block, *vjp, program, {})
    y, residuals = jax.eval_shape(saves_all.output_and_residuals, weights, x, context)

    def backward(weights: Any, context: Any, residuals: Any, dy: Array) -> tuple[Any, Array]:
        dx, dw, _ = saves_all.backward(weights, context, {"F to B": residuals}, dy)
        return dw, dx

    made = jax.make_jaxpr(backward)(weights, context, residuals, y)
    before, leaves = len(jax.tree.leaves(weights)), jax.tree.leaves(context)
    which = [place for place, leaf in enumerate(leaves) if leaf is context.mask.which]
    return TracedLayer(inlined(program), inlined(made), before, len(leaves), before + 1 + which[0] if which else None)


def pass_programs(layer: TracedLayer, remat: str, *, split: bool) -> PassPrograms:
    """The passes of a layer for a value of pipeline.remat; with `split` the backward pass is divided."""
    selection = select_inlined(layer.forward, now=[0], names=saved_parts(remat) or ())
    everything, of_stage, back = remat == "none", remat == "stage", layer.backward
    x, residuals = layer.forward.in_avals[layer.weights], layer.forward.out_avals[1:]
    saved = residuals if everything else [] if of_stage else [x, *selection.make.out_avals[1:]]
    forward = layer.forward if everything else selection.make
    recompute = None if everything else layer.forward if of_stage else selection.recompute
    if not split:
        pools = {"F to B": bytes_of(saved)}
        return PassPrograms(layer, forward, recompute, back, None, saved, [], pools, of_stage)
    given = layer.weights + layer.context
    readable = range(given, given + len(residuals)) if everything else ()
    halves = split_inlined(back, wanted=[len(back.out_avals) - 1], readable=readable)
    passed = halves.first.out_avals[len(back.out_avals) - len(halves.deferred) :]
    later = bytes_of([back.in_avals[place] for place in halves.reads])
    pools = {"F to B": bytes_of(saved) - later, "F to W": later, "B to W": bytes_of(passed)}
    return PassPrograms(layer, forward, recompute, halves.first, halves.second, saved, passed, pools, of_stage)


def layer_costs(passes: PassPrograms, model: ShardedModel, number: int, sizes: Sizes = ()) -> LayerCosts:
    """The costs of a layer whose settings have this number, with `sizes` of axes on which the model was not traced."""
    which = passes.layer.which
    which_back = None if which is None else which - 1
    costs = [_counted_pass(passes.forward, model, FORWARD, which, number, sizes)]
    costs.append(copies_of_slots(passes.saved, "forward"))
    if passes.recompute is not None:
        costs.append(_counted_pass(passes.recompute, model, BACKWARD, which, number, sizes))
    costs.append(_counted_pass(passes.backward, model, BACKWARD, which_back, number, sizes))
    costs.append(copies_of_slots([*_held_again(passes), *passes.passed], "recompute"))
    if passes.later is not None:
        costs.append(counted(passes.later, model, WEIGHTS, sizes=sizes))
    if is_for_gpus(model.mesh):
        costs.append(copies_of_slots(_residuals_read(passes), "recompute"))
        costs.append(copies_of_slots(_read_by_products(passes.later), "backward"))
    return LayerCosts(added(costs), passes.pools)


@functools.lru_cache(maxsize=32)
def _counted_pass(
    program: ClosedJaxpr, model: ShardedModel, scope: str, which: int | None, number: int, sizes: Sizes
) -> Counts:
    return counted(program, model, scope, {} if which is None else {which: np.int32(number)}, sizes)


def _held_again(passes: PassPrograms) -> list[Any]:
    """What B saves for itself where it runs a stage again."""
    return passes.layer.forward.out_avals[1:] if passes.of_stage else []


def added(costs: Iterable[Counts]) -> Counts:
    """All of these costs."""
    total: Counter = Counter()
    for each in costs:
        total.update(each)
    return total


def repeated(costs: Counts, count: float) -> Counts:
    """So many times these costs."""
    return {key: each * count for key, each in costs.items()}


def copies_of_slots(arrays: Iterable[Any], direction: str) -> Counts:
    """Costs of writing arrays into slots, or of copying them out for products, which read whole arrays."""
    counts: Counter = Counter()
    for number, aval in enumerate(arrays):
        counts[OpCost(0, 2 * aval_bytes(aval), direction, 0), Place(f"slot {number}", "copy")] += 1
    return counts


def _read_by_products(program: ClosedJaxpr | None) -> list[Any]:
    """The arguments that products read, on GPUs."""
    if program is None:
        return []
    read = gpu_passes(program).for_products
    return [var.aval for var in program.jaxpr.invars if var in read]


def _residuals_read(passes: PassPrograms) -> list[Any]:
    """What B reads from slots for products, on GPUs."""
    given, recompute, read = passes.given, passes.read_again, gpu_passes(passes.backward).for_products
    residuals = passes.backward.jaxpr.invars[given:-1]
    if recompute is None:
        return [var.aval for var in residuals if var in read]
    outs = zip(recompute.jaxpr.outvars, residuals, strict=True)
    read_again = {out for out, var in outs if var in read and not isinstance(out, Literal)}
    read_again |= gpu_passes(recompute).for_products
    saved = [recompute.jaxpr.invars[passes.layer.weights], *recompute.jaxpr.invars[given + 1 :]]
    return [var.aval for var in saved if var in read_again]


def working_bytes(passes: PassPrograms, model: ShardedModel, layers: int) -> int:
    """Most bytes that B of a layer holds at once besides its arguments, in a stage of so many layers."""
    recompute, backward, ops = passes.read_again, passes.backward, []
    inputs = [Value.of(var.aval) for var in backward.jaxpr.invars]
    given = [*inputs]
    if recompute is not None:
        given = [Value.of(var.aval) for var in recompute.jaxpr.invars]
        inputs = [*inputs[: passes.given], *inline(recompute, given, ops), inputs[-1]]
    whole = Program(given, ops, inline(backward, inputs, ops))
    held = Liveness(model, [], dict.fromkeys(given, DATA)).peak(whole).total()
    return held + layers * bytes_of(_held_again(passes))


# ---- moves of weights and gradients, embedding and head


class Ends(NamedTuple):
    """The costs of embedding and head: for each microbatch, and once."""

    each_microbatch: Counts
    once: Counts


class Rest(NamedTuple):
    """The costs of a step besides those of layers' passes and of its ends: of what the plan moves for a layer of each
    kind and a microbatch, for each microbatch, and once."""

    each_layer: list[Counts]
    each_microbatch: Counts
    once: Counts


class HeldByPlan(NamedTuple):
    """Bytes on a device that the plan holds during a step."""

    grads: int  # sums of gradients
    resident: int  # weights that are gathered or cast for all of a step
    gathered: int  # weights of a layer


def traced_ends(model: ShardedModel, rows: int, seq: int) -> Ends:
    """The costs of embedding and head for a global batch of so many rows."""

    def step(params: Any, batch: Any, noise: Array) -> list[Array]:
        schedule, ends, *_ = pipeline_of(model, params, batch, noise, "parts")
        return jax.tree.leaves(_ends(ends, schedule))

    by_scope = _counted_by_scope(step, model, rows, seq, lambda place: OF_ENDS in place.stack and not place.of_plan)
    return Ends(by_scope[EACH_MICROBATCH], by_scope[""])


def traced_rest(model: ShardedModel, rows: int, seq: int) -> Rest:
    """What the plan moves, for the same batch."""

    def step(params: Any, batch: Any, noise: Array) -> list[Array]:
        schedule, ends, layers, *_ = pipeline_of(model, params, batch, noise, "parts")
        out, grads = [], {}
        for kind, (weights, stack) in enumerate(zip(layers.weights, model.orders, strict=True)):
            with jax.named_scope(f"{EACH_LAYER} {kind}"):
                used, grads[stack] = _moved(model, weights, stack, layers.rounding)
            out += used
        of_ends, metrics = _ends(ends, schedule)
        return [*out, *jax.tree.leaves([metrics, model.plan.store(of_ends | grads)])]

    by_scope = _counted_by_scope(step, model, rows, seq, lambda place: place.of_plan or OF_ENDS not in place.stack)
    each_layer = [by_scope[f"{EACH_LAYER} {kind}"] for kind in range(len(model.orders))]
    return Rest(each_layer, by_scope[EACH_MICROBATCH], by_scope[""])


def held_by_plan(model: ShardedModel, rows: int, seq: int) -> HeldByPlan:
    """What the plan holds, for the same batch."""

    def held(params: Any, batch: Any, noise: Array) -> HeldByPlan:
        _, ends, layers, *_ = pipeline_of(model, params, batch, noise, "parts")
        grads, resident, gathered = [ends.zero_grads()], 0, 0
        for weights, stack in zip(layers.weights, model.orders, strict=True):
            grads.append(model.plan.zero_grads(stack, weights.resident))
            resident += _copied_bytes(weights.resident, entry(params, stack))
            gathered = max(gathered, bytes_of(weights.gathered(jnp.int32(0))["params"]))
        resident += sum(_copied_bytes(part, params[name]) for name, part in ends.weights.items())
        return HeldByPlan(bytes_of(grads), resident, gathered)

    return in_local_view(model, held, rows, seq)


def _counted_by_scope(
    step: Callable[..., list[Array]], model: ShardedModel, rows: int, seq: int, which: Callable[[Place], bool]
) -> dict[str, Counts]:
    """The costs of these places, by the scope that says how often they occur."""

    def varying(*args: Any) -> list[Array]:
        return [as_varying(leaf)[None] for leaf in step(*args)]

    local = jax.shard_map(varying, out_specs=P(tuple(model.mesh.axis_names)), **model.on_mesh)
    program = jax.make_jaxpr(local)(*step_arguments(model, rows, seq))
    by_scope: dict[str, Counts] = defaultdict(dict)
    for key, count in counted(program, model).items():
        if which(key[1]):
            names = (name for name in key[1].stack.split("/") if name.startswith((EACH_LAYER, EACH_MICROBATCH)))
            by_scope[next(names, "")][key] = count
    return by_scope


def _moved(model: ShardedModel, weights: Any, stack: str, rounding: Any) -> tuple[list[Array], Any]:
    """A layer's weights gathered for F and for B, with what its products read, and its gradients added to zeros."""
    arrays = []
    for scope in (FORWARD, BACKWARD):
        with jax.named_scope(scope), jax.named_scope(GATHERS):
            gathered = weights.gathered(jnp.int32(0))
        arrays += jax.tree.leaves(gathered["params"])
        with jax.named_scope(NOT_COUNTED):
            arrays += jax.tree.leaves(jax.tree.map(_by_product, gathered["params"]))
            arrays += map(_multiplied, jax.tree.leaves(gathered.get(ROUNDED)))
    with jax.named_scope(NOT_COUNTED):
        gradients = jax.tree.map(_by_product, model.plan.trained_of(gathered["params"], stack))
    zeros = model.plan.zero_grads(stack, weights.resident)
    with jax.named_scope(BACKWARD):
        grads = model.plan.add_up(stack, zeros, 0, gradients, layer=jnp.int32(0), key=rounding)
    return arrays, grads


def _by_product(weight: Array) -> Array:
    """A product that reads a weight, and whose result has its shape: as passes read weights and make gradients."""
    return _multiplied(weight) if jnp.issubdtype(weight.dtype, jnp.floating) else weight


def _multiplied(weight: Array) -> Array:
    return weight @ jnp.ones((weight.shape[-1], weight.shape[-1]), weight.dtype) if weight.ndim > 1 else weight


def _ends(ends: MicrobatchHead | BatchedHead, schedule: Schedule) -> tuple[Any, list[Array]]:
    """The gradients and metrics of embedding and head of one microbatch; where they are outside of the ticks, of
    all."""
    zero = jnp.int32(0)
    with jax.named_scope(OF_ENDS):
        state = ends.start(schedule.exit_slots)
        with jax.named_scope(EACH_MICROBATCH):
            with jax.named_scope(FORWARD):
                x = ends.first_stage_input(state, zero)
            state = ends.on_last_stage_output(state, zero, zero, x)
        if isinstance(ends, BatchedHead):
            state = ends.run_head(state)
        with jax.named_scope(EACH_MICROBATCH), jax.named_scope(BACKWARD):
            dx = ends.last_stage_gradient(state, zero, zero)
            state = ends.on_first_stage_gradient(state, zero, dx)
        ended = ends.finish(state)
        return ended.grads, [sum_over(ended.loss, ends.loss_axes), ends.tokens.count()]


def bytes_of(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    return sum(map(aval_bytes, jax.tree.leaves(tree)))


def _copied_bytes(weights: Any, at_rest: Any) -> int:
    """Bytes of those weights that are not the arrays at rest."""

    def size(array: Any, weight: Any) -> int:
        is_same = isinstance(weight, Array) and (weight.shape, weight.dtype) == (array.shape, array.dtype)
        return 0 if is_same else bytes_of(weight)

    return sum(jax.tree.leaves(jax.tree.map(size, at_rest, weights)))


def messages_of_ticks(schedule: Schedule, x: int) -> Counts:
    """Messages of the ticks between pipeline ranks, and writes into their slots; a residual stream has `x` bytes."""
    counts: Counter = Counter()
    for (kind, shift), arrives in schedule.arrival.items():
        direction = "forward" if kind == "F" else "backward"
        for segment in schedule.segments:
            if kind in segment.kinds and (arrives[segment.start : segment.stop] >= 0).any():
                number = segment.stop - segment.start
                counts[OpCost(0, 2 * x, "forward", 0), Place("message", "write")] += number
                if shift:
                    message = Sent("permute", ("pp",), x, 0, direction, "pipeline/tick", "")
                    counts[message, Place("message", kind)] += number
    return counts
