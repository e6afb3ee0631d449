"""The price of a layout in closed form, from parts of a step that many layouts share.

A step is put together from its parts (parallax/analysis/planned/parts.py), each as often as the schedule says:

    layers    for (tp, cp, ep): the passes of one layer of each kind, traced for two numbers of rows. What
              pipeline.remat saves and recomputes, and what a divided backward pass leaves to W, is read off
    moves     for (mesh, sharding policy): load, use, add_up and store of the sharding plan
    ends      for (tp, pp, rows of a microbatch): embedding and head
    ticks     from the schedule's tables: messages and slots

`estimate` makes a time of them, as of a traced step, and so there is one model of time.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from parallax.analysis.compiled.program import costs_of
from parallax.analysis.planned.layouts import (
    SECTION_OF,
    Choice,
    model_on_topology,
    ranks_beside,
    unchosen_sizes,
    with_keys,
)
from parallax.analysis.planned.moves import SentPerUse, read_by_update
from parallax.analysis.planned.parts import (
    GATHERS,
    Counts,
    Ends,
    HeldByPlan,
    LayerCosts,
    PassPrograms,
    Place,
    Rest,
    Sizes,
    TracedLayer,
    added,
    bytes_of,
    held_by_plan,
    layer_costs,
    messages_of_ticks,
    pass_programs,
    repeated,
    traced_ends,
    traced_layers,
    traced_rest,
    working_bytes,
)
from parallax.analysis.planned.step_time import Estimate, OpCost, TicksBeside, TracedWork, estimate, ticks_beside
from parallax.analysis.planned.topology import Topology
from parallax.analysis.traced.collectives import Sent
from parallax.analysis.traced.flops import flops_per_token
from parallax.analysis.traced.memory import (
    HostMemory,
    Memory,
    bytes_on_device,
    predicted_host_memory,
    predicted_state,
)
from parallax.config.sections import AUTO
from parallax.config.settings import Settings, check_settings
from parallax.errors import ConfigError
from parallax.model.batch import BATCH_ARRAYS
from parallax.model.experts.exchange_costs import exchange_of, sends_again
from parallax.pipeline import ShardedModel, repeats_of
from parallax.schedules import SCHEDULES, Schedule, by_name
from parallax.schedules.pricing import lockstep_bubble
from parallax.sharding.host import DEVICE
from parallax.sharding.layers_on_ranks import Arrangement, arrangements
from parallax.sharding.plan import DATA_AXES, FLOAT32_BYTES

# The part that follows from a key, if it is one.
PART_OF = dict.fromkeys(["fsdp.bucket", "fsdp.gather_dtype"], "moves")
PART_OF |= {f"optimizer.{key}": "moves" for key in ("m_dtype", "v_dtype", "states_on", "masters_on")}
KEYS_OF_LAYOUTS = {f"{section}.{name}" for name, section in SECTION_OF.items()}
ANCHORS = 2, 4  # rows of a microbatch for which a sweep traces layers


class Moves(NamedTuple):
    """What follows from the mesh and the sharding policy."""

    rest: Rest
    per_use: SentPerUse
    trained: float
    read_by_update: int


class Weights(NamedTuple):
    """Memory that follows from the mesh and the sharding policy."""

    by_plan: HeldByPlan
    parameters: int
    optimizer: int
    host: HostMemory


class WithoutMoves(NamedTuple):
    """A step without what the sharding plan adds: its operations, its messages, its bubble in lockstep, and ticks in
    which messages hide, as if one pass were long enough."""

    products: list[OpCost]
    sent: list[Sent]
    bubble: float
    ticks_beside: TicksBeside = TicksBeside()


class ClosedForm:
    """Prices layouts of some settings. What several layouts share is traced when the first of them is priced; traced
    `layers` may come from settings with another mesh and batch, on the same chips. Layers are traced for two numbers of
    rows of a microbatch, `anchors`; what layers of other rows cost is on a line through these."""

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        layers: dict[tuple, Any] | None = None,
        anchors: tuple[int, int] = ANCHORS,
    ):
        self.settings, self.topology, self.anchors, data = settings, topology, anchors, settings.data
        self.rows = data.global_batch // ranks_beside(settings.mesh)  # of one rank of axes that no sweep varies
        declared = model_on_topology(settings, topology).plan.declared
        tokens = data.global_batch * data.seq / topology.devices
        self.model_flops = flops_per_token(settings.model, declared, seq=data.seq) * tokens
        self._traced: dict[tuple, Any] = {}  # by what it follows from
        self.layers = {} if layers is None else layers  # the same

    def knows(self, choice: Choice) -> bool:
        """Whether a layout has a closed form: nothing that its passes write is in host memory."""
        return choice.grads_on == DEVICE and self.settings.pipeline.residuals_on == DEVICE

    def changed(self, values: Mapping[str, Any]) -> "ClosedForm | None":
        """The closed form with other values of keys, with all that is traced and does not follow from them; None if
        more than one part may do."""
        parts = {PART_OF.get(key) for key in values if key not in KEYS_OF_LAYOUTS}
        if None in parts:
            return None
        if not parts:
            return self
        other = copy.copy(self)
        other.settings = with_keys(self.settings, values)
        check_settings(other.settings)
        other._traced = {key: made for key, made in self._traced.items() if key[0] not in {*parts, "settings"}}
        return other

    def estimate(self, choice: Choice) -> Estimate:
        """The estimate of a layout's step. Raises ParallaxError for layouts that are not legal, but not for all."""
        if self.rows % (choice.dp * choice.ep * choice.microbatches):
            batch, many = self.settings.data.global_batch, choice.microbatches
            raise ConfigError(f"data.global_batch={batch} does not divide over {choice.mesh} and {many} microbatches.")
        timed = choice.as_timed
        settings = self._kept(("settings", timed), lambda: timed.applied(self.settings))
        return estimate(settings, self.topology, self.memory(choice), self.work(choice), self.weights(choice).host)

    def work(self, choice: Choice) -> TracedWork:
        """What `traced_work` finds in the step of a layout."""
        moves, many = self.moves(choice), choice.microbatches
        costs = [moves.rest.once, repeated(moves.rest.each_microbatch, many)]
        for kind in range(len(moves.rest.each_layer)):
            costs += self._moves_of_layers(choice, kind)
        products, sent = _apart([*self._without_moves(choice), *map(without_places, costs)])
        plan = moves.per_use, moves.trained, moves.read_by_update, ticks_beside(self.schedule(choice))
        return TracedWork(products, sent, self.model_flops, self.bubble(choice), {}, *plan)

    def without_moves(self, choice: Choice) -> WithoutMoves:
        """The same without what the sharding plan adds."""
        beside = ticks_beside(self.schedule(choice))._replace(passes=1)
        return WithoutMoves(*_apart(self._without_moves(choice)), self.bubble(choice), beside)

    def of_layers(self, choice: Choice) -> WithoutMoves:
        """That of the layers alone, for which neither ends nor a schedule of all microbatches are made: as if nothing
        waited."""
        layers = choice.microbatches, self.rows_of(choice), self.arrangement(choice).placement
        key = "of layers", *self._layer_key(choice), *layers
        return self._kept(key, lambda: WithoutMoves(*_apart(self._of_layers(choice)), 0.0))

    def _of_layers(self, choice: Choice) -> list[Counter]:
        layers = self.layers_of_first_rank(choice).items()
        return [repeated(self.layer(choice, *key).costs, choice.microbatches * count) for key, count in layers]

    def _without_moves(self, choice: Choice) -> list[Counter]:
        ends, schedule, many, x = self.ends(choice), self.schedule(choice), choice.microbatches, self.stream(choice)
        costs = [messages_of_ticks(schedule, x), ends.once, repeated(ends.each_microbatch, many)]
        if choice.remat == "stage":  # each saves its input
            costs.append({(OpCost(0, 2 * x, "forward", 0), Place("slot", "write")): many * schedule.virtual})
        return [*map(without_places, costs), *self._of_layers(choice)]

    def memory(self, choice: Choice) -> Memory:
        """About what `predicted_memory` finds: the largest buffers, as if all were held at once."""
        weights = self.weights(choice)
        return self.memory_without_weights(choice)._replace(
            parameters=weights.parameters,
            optimizer=weights.optimizer,
            gradients=weights.by_plan.grads,
            gathered_weights=weights.by_plan.gathered + weights.by_plan.resident,
        )

    def memory_without_weights(self, choice: Choice) -> Memory:
        """The same without parameters, states, sums of gradients and gathered weights."""
        schedule, placed, x = self.schedule(choice), self.arrangement(choice), self.stream(choice)
        layers = {key: self.layer(choice, *key) for key in self.layers_of_first_rank(choice)}
        saved = schedule.slots["F to B"] * x * (choice.remat == "stage")
        for kind, name in enumerate(self.settings.model.blocks):
            places = self._places(placed, name)
            saved += places * max(
                (held_in(schedule, layer) for (other, _), layer in layers.items() if other == kind), default=0
            )
        at_ends = 2 * choice.microbatches if schedule.head == "between" else schedule.exit_slots
        nothing = Memory(**dict.fromkeys(Memory._fields, 0))
        return nothing._replace(
            batch=len(BATCH_ARRAYS) * FLOAT32_BYTES * self.rows * self.settings.data.seq // choice.data_ranks,
            saved_activations=saved,
            pipeline_buffers=(at_ends + sum(schedule.message_slots.values()) + schedule.late_gradients) * x,
            working_activations=self.working(choice),
        )

    def certain_bytes(self, choice: Choice) -> int:
        """What the layout holds for certain: all but what a layer holds while it runs."""
        held = self.memory(choice)
        return held.peak - held.working_activations - held.gathered_weights

    # ---- parts that layouts share

    def moves(self, choice: Choice) -> Moves:
        """What the sharding plan of a layout moves."""
        moves = self._kept(("moves", *self._moved_as(choice)), lambda: self._moves(choice))
        if choice.prefetch and not (moves.per_use.weights and any(self.ahead(choice))):
            few = with_few_microbatches(choice)
            key = "ahead", *choice.sharding, self.schedule(few).placement
            self._kept(key, lambda: self._model(few))  # it may refuse them
        return moves

    def weights(self, choice: Choice) -> Weights:
        """What the sharding plan of a layout holds. Nothing that it moves is traced for that."""
        return self._kept(("moves", "weights", *self._moved_as(choice)), lambda: self._weights(choice))

    def _moved_as(self, choice: Choice) -> tuple:
        """All that follows from the sharding plan follows from this. Of the places of stages it is only how many layers
        a rank has, and whether they are those that it stores."""
        schedule, placed = self.schedule(with_few_microbatches(choice)), self.arrangement(choice)
        each = tuple((order.numbers.shape, order.in_order) for order in self._orders(placed).values())
        return *choice.sharding, choice.context, choice.order, schedule.head, each

    def model(self, choice: Choice) -> ShardedModel:
        """A model with the sharding plan of a layout. Raises ParallaxError if that is not legal."""
        few = with_few_microbatches(choice)._replace(prefetch=0)
        return self._kept(("moves", "model", *self._moved_as(choice)), lambda: self._model(few))

    def ahead(self, choice: Choice) -> list[int]:
        """Of each kind, the runs of layers in a stage in which the next layer can be gathered ahead."""
        placed = self.arrangement(choice)

        def runs() -> list[int]:
            every = [run for repeat in repeats_of(placed) for run in repeat.runs * repeat.times if run.can_prefetch]
            return [sum(run.kinds == (kind,) for run in every) for kind in range(len(self._orders(placed)))]

        return self._kept(("ahead", placed.placement), runs)

    def _places(self, placed: Arrangement, kind: str) -> int:
        """Most layers of a kind that a rank has in one stage."""
        key = "places", placed.placement, kind
        return self._kept(key, lambda: max(Arrangement(placed.placement, placed.kinds, kind).sizes))

    def _orders(self, placed: Arrangement) -> dict[str, Arrangement]:
        return self._kept(("orders", placed.placement), lambda: arrangements(placed.placement, placed.kinds))

    def stream(self, choice: Choice) -> int:
        """Bytes of a microbatch's residual stream."""

        def at_rows(rows: int) -> int:
            layer = self._passes(choice, rows)[0][0].layer
            return bytes_of([layer.forward.in_avals[layer.weights]])

        return self._on_line(at_rows, self.rows_of(choice))

    def uses_of_tables(self, choice: Choice) -> int:
        """How often a step uses them: for each microbatch, or for all together."""
        return 1 if self.schedule(choice).head == "between" else choice.microbatches

    def ends(self, choice: Choice) -> Ends:
        """Costs of embedding and head."""
        head, ranks = self.schedule(choice).head, (choice.pp, choice.cp, choice.ep, choice.tp)
        of_all = choice.microbatches if head == "between" else 0
        key = "ends", *ranks, choice.context, choice.order, head, self.rows_of(choice), of_all
        few = with_few_microbatches(choice) if head == "inside" else choice
        return self._kept(key, lambda: self._ends(few, self.rows_of(choice)))

    def layer(self, choice: Choice, kind: int, number: int) -> LayerCosts:
        """Costs of a layer of this kind, whose settings have this number."""
        key, rows = ("layer", *self._layer_key(choice), kind, number), self.rows_of(choice)

        def at_rows(rows: int) -> LayerCosts:
            passes, model = self._passes(choice, rows)[kind]
            return self._kept(
                (*key, rows, "traced"), lambda: layer_costs(passes, model, number, self._data_sizes(choice))
            )

        def line() -> LayerCosts:
            known = None
            if rows not in self.anchors:
                known = on_line(*map(at_rows, self.anchors), self._share(rows))
            costs, saved = known or at_rows(rows)
            return LayerCosts(without_places(costs), saved)

        return self._kept((*key, rows), line)

    def working(self, choice: Choice) -> int:
        """Most bytes that B of a layer holds at once besides what is saved."""
        key, layers = ("working", *self._layer_key(choice)), self.arrangement(choice).stage_layers

        def at_rows(rows: int) -> int:
            each = self._passes(choice, rows)
            return self._kept((*key, layers, rows), lambda: max(working_bytes(*kind, layers) for kind in each))

        return self._on_line(at_rows, self.rows_of(choice))

    def schedule(self, choice: Choice) -> Schedule:
        """The schedule of a layout."""
        sizes = choice.schedule, choice.pp, choice.microbatches, choice.virtual
        return self._kept(("schedule", *sizes), lambda: by_name(*sizes))

    def arrangement(self, choice: Choice) -> Arrangement:
        """Where the layers are."""
        placement = self.schedule(with_few_microbatches(choice)).placement
        return self._kept(("arrangement", placement), lambda: Arrangement(placement, self.settings.model.layer_kinds))

    def layers_of_first_rank(self, choice: Choice) -> Counter:
        """Number of layers of the first pipeline rank, by kind and by the number of their settings."""
        placed = self.arrangement(choice)
        return self._kept(("layers", placed.placement), lambda: self._layers_by_kind(placed))

    def bubble(self, choice: Choice) -> float:
        """The schedule's bubble in lockstep."""
        sizes = choice.schedule, choice.pp, choice.microbatches, choice.virtual, choice.remat
        costs = costs_of(self.settings.model, choice.remat, seq=self.settings.data.seq)
        return self._kept(("bubble", *sizes), lambda: lockstep_bubble(self.schedule(choice), costs))

    def rows_of(self, choice: Choice) -> int:
        """Rows of a microbatch on a device."""
        return self.rows // (choice.dp * choice.ep * choice.microbatches)

    def _on_line(self, at_rows: Callable[[int], int], rows: int) -> int:
        """Bytes at a number of rows, on a line through those at the anchors."""
        return at_rows(rows) if rows in self.anchors else _between(*map(at_rows, self.anchors), self._share(rows))

    def _share(self, rows: int) -> float:
        """How far a number of rows is on the way from the first anchor to the second."""
        first, second = self.anchors
        return (rows - first) / (second - first)

    def _kept(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._traced:
            self._traced[key] = make()
        return self._traced[key]

    # ---- how they are traced

    def _model(self, choice: Choice) -> ShardedModel:
        return model_on_topology(choice.applied(self.settings), self.topology)

    def _moves(self, choice: Choice) -> Moves:
        model = self.model(choice)
        data, plan = model.settings.data, model.plan
        rest = traced_rest(model, data.global_batch, data.seq)
        return Moves(rest, SentPerUse.of(plan), plan.trained, read_by_update(plan))

    def _weights(self, choice: Choice) -> Weights:
        model = self.model(choice)
        settings, state = model.settings, predicted_state(model)
        by_plan = held_by_plan(model, settings.data.global_batch, settings.data.seq)
        sizes = bytes_on_device(state.params), bytes_on_device(state.opt_state)
        return Weights(by_plan, *sizes, predicted_host_memory(model, settings))

    def _ends(self, choice: Choice, rows: int) -> Ends:
        """Those of a layout with so many rows of a microbatch on a device."""
        batch = rows * choice.microbatches * choice.dp * choice.ep * ranks_beside(self.settings.mesh)
        settings = with_keys(choice.applied(self.settings), {"data.global_batch": batch})
        return traced_ends(model_on_topology(settings, self.topology), batch, settings.data.seq)

    def _passes(self, choice: Choice, rows: int) -> list[tuple[PassPrograms, ShardedModel]]:
        """The passes of a layer of each kind, and the model in which they are traced."""

        def passes() -> list[tuple[PassPrograms, ShardedModel]]:
            traced_as = *self._traced_as(choice), rows
            if traced_as not in self.layers:
                self.layers[traced_as] = self._programs(choice, rows)
            model, programs = self.layers[traced_as]
            split = self._divides(choice)
            return [(pass_programs(layer, choice.remat, split=split), model) for layer in programs]

        return self._kept(("passes", *self._layer_key(choice), rows), passes)

    def _layer_key(self, choice: Choice) -> tuple:
        return *self._traced_as(choice), choice.remat, self._divides(choice), self._data_sizes(choice)

    def _traced_beside(self, choice: Choice) -> dict[str, int]:
        """Sizes with which layers are traced of axes that no layout varies: 1, of which a mesh has no axis, but where
        layers send over them."""
        sizes = unchosen_sizes(self.settings.mesh)
        return sizes if self._data_sizes(choice) else dict.fromkeys(sizes, 1)

    def _data_sizes(self, choice: Choice) -> Sizes:
        """The number of data ranks over which layers take maxima of their microbatch, though they are traced for one;
        empty where they take none. Layers are traced with the layout's own sizes of the other data axes."""
        if all(block.matmul_scales != "current" for block in self.settings.model.blocks.values()):
            return ()
        return ((DATA_AXES[0], choice.dp),)

    def _traced_as(self, choice: Choice) -> tuple:
        exchange = (choice.exchange, choice.exchange_hosts) if choice.ep > 1 else (AUTO, 1)
        beside = tuple(self._traced_beside(choice).values())
        again = self._sends_again(choice)
        return choice.tp, choice.cp, choice.ep, exchange, choice.context, choice.order, again, beside

    def _sends_again(self, choice: Choice) -> bool:
        """Whether the backward pass sends tokens once more, all that a layer's programs follow from of
        pipeline.remat."""
        if choice.ep == 1:
            return False
        exchange = exchange_of(choice.exchange, self.settings.model, choice.ep, ragged=self.topology.has_ragged)
        return sends_again(exchange, choice.remat, self.settings.layout, split=self._divides(choice))

    def _divides(self, choice: Choice) -> bool:
        """Whether the schedule divides the backward pass, with any number of microbatches."""
        return self.schedule(with_few_microbatches(choice)).split

    def _programs(self, choice: Choice, rows: int) -> tuple[ShardedModel, list[TracedLayer]]:
        alone = dict(pp=1, dp=1, microbatches=1, schedule="gpipe", virtual=1, policy="zero3", exceptions="", prefetch=0)
        remat = choice.remat if self._sends_again(choice) else "none"
        settings = choice._replace(remat=remat, **alone).applied(self.settings)
        sizes = self._traced_beside(choice)
        batch = rows * choice.ep * math.prod(sizes.values())
        beside = {f"mesh.{axis}": size for axis, size in sizes.items()}
        settings = with_keys(settings, beside | {"data.global_batch": batch})
        model = model_on_topology(settings, self.topology._replace(slices=1))
        return model, traced_layers(model, batch, settings.data.seq)

    def _layers_by_kind(self, placed: Arrangement) -> Counter:
        config = self.settings.model
        kinds, each = [*config.blocks], config.settings_of_layers
        numbers = each.numbers if each.differ else [0] * config.layers
        there = [layer for layer in placed.numbers[0] if layer >= 0]
        return Counter((kinds.index(config.layer_kinds[layer]), int(numbers[layer])) for layer in there)

    def _moves_of_layers(self, choice: Choice, kind: int) -> list[Counts]:
        """What the plan moves for the layers of a kind."""
        moves, schedule, many = self.moves(choice), self.schedule(choice), choice.microbatches
        of_layer, layers = moves.rest.each_layer[kind], self.layers_of_first_rank(choice)
        layers = sum(count for (other, _), count in layers.items() if other == kind)
        forward, back = (gathers(of_layer, direction) for direction in ("forward", "recompute"))
        again = choice.remat == "stage"
        costs = [repeated(of_layer, many * layers), repeated(back, many * layers * again)]
        if choice.prefetch:  # each run gathers one more, unless the pass before has; that of the last turn is not used
            runs = self.ahead(choice)[kind] * schedule.virtual
            given = schedule.virtual * (runs > 0 and (again or schedule.stages == 1))
            costs += [repeated(forward, many * runs), repeated(back, many * (runs * (1 + again) - given))]
        return costs


def with_few_microbatches(choice: Choice) -> Choice:
    """The layout with as many microbatches as ranks, if that divides its own, and no file has its schedule."""
    few = choice.microbatches % choice.pp == 0 and choice.schedule in SCHEDULES
    return choice._replace(microbatches=choice.pp) if few else choice


def without_places(costs: Counts) -> Counter:
    """How often each cost occurs, wherever."""
    counts: Counter = Counter()
    for (cost, _), count in costs.items():
        counts[cost] += count
    return counts


def _apart(costs: Iterable[Counter]) -> tuple[list[OpCost], list[Sent]]:
    """All of these costs, operations and messages."""
    total = [cost._replace(count=count) for cost, count in added(costs).items()]
    return [cost for cost in total if isinstance(cost, OpCost)], [cost for cost in total if isinstance(cost, Sent)]


def held_in(schedule: Schedule, layer: LayerCosts) -> int:
    """Bytes of the slots of a layer's residuals."""
    return sum(schedule.slots[pool] * size for pool, size in layer.saved.items())


def gathers(costs: Counts, direction: str) -> Counts:
    """Those of gathers of weights, with the copies that belong to them, in passes of this direction."""
    return {
        (cost, place): count
        for (cost, place), count in costs.items()
        if GATHERS in place.stack and cost.direction == direction
    }


def on_line(low: LayerCosts, high: LayerCosts, share: float) -> LayerCosts | None:
    """Costs on a line through those at two anchors, at this share of the way from `low` to `high`; None if the two are
    not of one program."""
    pairs = [*zip(low.costs.items(), high.costs.items())]
    if len(low.costs) != len(high.costs) or any(a[0][1] != b[0][1] or a[1] != b[1] for a, b in pairs):
        return None
    costs: Counter = Counter()
    for ((a, place), count), ((b, _), _) in pairs:
        costs[_cost_between(a, b, share), place] += count
    saved = {pool: _between(size, high.saved[pool], share) for pool, size in low.saved.items()}
    return LayerCosts(costs, saved)


def _cost_between(low: Any, high: Any, share: float) -> Any:
    sizes = ("flops", "bytes") if isinstance(low, OpCost) else ("bytes",)
    return low._replace(**{name: _between(getattr(low, name), getattr(high, name), share) for name in sizes})


def _between(low: int, high: int, share: float) -> int:
    return round(low + share * (high - low))
