"""Executes schedule tables: a scan over ticks, in each of which a rank runs its entry of the table.

A tick runs F, then B, then W, if the table has them. Every rank sends its output to the next stage and its gradient to
the previous one. A message depends only on the pass that produced it, so that it can be sent while the next pass
computes. A received message is stored according to the sender's entry of the table for this tick.

Scopes distinguish passes and messages in traces and profiles; the report reads them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from parallax.config.remat import LAYER_INPUT, is_moved, saved_parts
from parallax.model.context import Context
from parallax.pipeline.boundary import PipelineBoundary
from parallax.pipeline.buffers import host_slots, index, read_slot, row_major, write_slot, zeros
from parallax.pipeline.layer_order import LayerRun, Repeat
from parallax.pipeline.split_backward import SplitVjp
from parallax.schedules import Schedule, Segment
from parallax.sharding.collectives import after, permute, vary_all
from parallax.sharding.host import DEVICE
from parallax.sharding.plan import GRADIENTS

# `step(stack, carry, layer, number, gathered)` runs one layer of a kind: `layer` is its index in the stage, `number` in
# the rank's places, both among layers of the kind. It returns the carry and gradients of the gathered weights, by index
# of the leaf; gradients of a missing layer are not used.
Step = Callable[["LayerStack", Any, Array, Array, Any], tuple[Any, dict[int, Array]]]
# Input of a pass: the stage's input or the gradient of its output, the microbatch's context, and its slots. It is read
# within the pass, so that idle ranks do not read it, and only the first stage's rank embeds.
Read = Callable[[], tuple[Array, Context, "SlotIndex"]]
# The scopes of the passes in traces and profiles.
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


class State(NamedTuple):
    """The state that ticks carry."""

    messages: dict[str, Array]  # for F and for B, [slots, ...]: received and not read yet
    residuals: Any  # by pool: see Stage
    grads: list[Array]
    boundary: Any


class Executor(NamedTuple):
    """Runs a schedule on the stages of this rank.

    With `messages_last` a tick's messages wait for all of its passes, which simulated devices need: see `after`.
    Without `carries_residuals` each tick allocates its own residuals; then the schedule must not keep residuals across
    ticks.
    """

    schedule: Schedule
    stage: "Stage"
    weights: Any
    zero_grads: Callable[[], Any]  # in the plan's summed layouts
    context: Callable[[Array], Context]  # of a microbatch
    boundary: PipelineBoundary
    message: str  # layout of messages between stages
    messages_last: bool
    carries_residuals: bool

    def run(self, boundary_state: Any) -> State:
        """Run all ticks; returns the last state, which holds the gradients summed over microbatches."""
        pools, room = self.pools(boundary_state), None
        state = self.start(boundary_state, pools)
        if not self.carries_residuals:
            room = partial(self.stage.empty, pools, self.schedule.slots)
            state = state._replace(residuals=None)
        for segment in filter(lambda segment: segment.kinds, self.schedule.segments):  # a file may have empty ticks
            tick = partial(self.tick, segment, segment.kinds, room)
            state, _ = lax.scan(tick, state, self._tables(segment))
            if self.schedule.head == "between" and "F" in segment.kinds:
                state = state._replace(boundary=self.boundary.run_head(state.boundary))
        return state

    def run_forward(self, boundary_state: Any, residuals: Any = None) -> State:
        """Run only the forward passes; stages save no residuals, or carry `residuals` if given."""
        state = State(self._empty_messages(boundary_state), residuals, [], boundary_state)
        for segment in self.schedule.segments:
            if "F" in segment.kinds:
                state, _ = lax.scan(partial(self.tick, segment, "F", None), state, self._tables(segment))
        return state

    def pools(self, boundary_state: Any) -> dict[str, list[list[Any]]]:
        """Shapes of a layer's residuals; see Stage.plan."""
        x = self._empty_messages(boundary_state)["F"][0]
        return jax.eval_shape(lambda: self.stage.plan(self.weights, x, self.context(jnp.int32(0))))

    def start(self, boundary_state: Any, pools: dict[str, list[list[Any]]]) -> State:
        """The state before the first tick: empty slots and zero gradients."""
        residuals, grads = self.stage.empty(pools, self.schedule.slots), jax.tree.leaves(self.zero_grads())
        return State(self._empty_messages(boundary_state), residuals, grads, boundary_state)

    def _empty_messages(self, boundary_state: Any) -> dict[str, Array]:
        x = jax.eval_shape(lambda: self.boundary.first_stage_input(boundary_state, jnp.int32(0)))
        return {kind: zeros(x, count) for kind, count in self.schedule.message_slots.items()}

    def _tables(self, segment: Segment) -> dict[str, np.ndarray]:
        """The tables' rows of these ticks: `[tick, rank]` for entries of single ranks, `[tick]` for those of all."""
        s = self.schedule
        tables = {"exit": s.exit_microbatch} | {f"exit {kind}": table for kind, table in s.exit_slot.items()}
        tables |= s.microbatch | {f"chunk {kind}": table for kind, table in s.chunk.items()}
        tables |= {f"{pool} {kind}": table for pool in s.slot for kind, table in s.slot[pool].items()}
        tables |= {f"message {kind}": table for kind, table in s.message.items()}
        tables |= {f"arrival {kind} {shift}": table for (kind, shift), table in s.arrival.items()}
        return {name: table[segment.start : segment.stop] for name, table in tables.items()}

    def tick(
        self, segment: Segment, kinds: str, room: Callable[[], Any] | None, state: State, values: dict[str, Array]
    ) -> tuple[State, None]:
        """One tick: F, B and W if this rank's tables have them, then messages.

        With `room`, residuals exist only in this tick, which allocates them: XLA need not zero an array that is fully
        overwritten.
        """
        row = Row.of(self._tables(segment), values, alone=self.schedule.stages == 1)
        outputs = {}
        if room is not None:
            state = state._replace(residuals=room())
        if "F" in kinds:
            read, idle = partial(self.read_forward, state, row), partial(self.idle_forward, state)
            forward = partial(self.stage.forward, self.weights, read, state.residuals)
            with jax.named_scope(FORWARD):
                outputs["F"], residuals = forward() if row.always("F") else lax.cond(row.acts("F"), forward, idle)
            state = state._replace(residuals=residuals)
            if row.ever("exit"):
                head, wait = partial(self.head, state, row, outputs["F"]), partial(vary_all, state.boundary)
                # The condition is the same on every rank, so that no rank waits here for one in the other branch.
                boundary = head() if row.always("exit") else lax.cond(row.acts("exit"), head, wait)
                state = state._replace(boundary=boundary)
        if "B" in kinds:
            read, idle = partial(self.read_backward, state, row), partial(self.idle_backward, state)
            end = partial(self.end_backward, state, row)
            backward = partial(self.stage.backward, self.weights, read, state.residuals, state.grads, end)
            with jax.named_scope(BACKWARD):
                found = backward() if row.always("B") else lax.cond(row.acts("B"), backward, idle)
            outputs["B"], grads, residuals, boundary = found
            state = state._replace(grads=grads, residuals=residuals, boundary=boundary)
        if "W" in kinds:
            read, idle = partial(self.slot_index, "W", row), partial(vary_all, state.grads)
            weight_gradients = partial(self.stage.weight_gradients, read, state.residuals, state.grads)
            with jax.named_scope(WEIGHTS):
                grads = weight_gradients() if row.always("W") else lax.cond(row.acts("W"), weight_gradients, idle)
            state = state._replace(grads=grads)
        if room is not None:
            state = state._replace(residuals=None)
        return self._send(state, row, outputs), None

    def read_forward(self, state: State, row: "Row") -> tuple[Array, Context, "SlotIndex"]:
        """Input of this tick's F."""
        x = row.at_end(
            "F",
            lambda: self.boundary.first_stage_input(state.boundary, row["F"]),
            lambda: index(state.messages["F"], row["message F"]),
        )
        return x, self.context(row["F"]), self.slot_index("F", row)

    def idle_forward(self, state: State) -> tuple[Array, Any]:
        return vary_all((jnp.zeros_like(state.messages["F"][0]), state.residuals))

    def head(self, state: State, row: "Row", y: Array) -> Any:
        """The boundary's state after the last stage's output, which is `y` on the last stage's rank."""
        return vary_all(self.boundary.on_last_stage_output(state.boundary, row["exit"], row["exit F"], y))

    def read_backward(self, state: State, row: "Row") -> tuple[Array, Context, "SlotIndex"]:
        """Input of this tick's B."""
        dy = row.at_end(
            "B",
            lambda: self.boundary.last_stage_gradient(state.boundary, row["B"], row["exit B"]),
            lambda: index(state.messages["B"], row["message B"]),
        )
        return dy, self.context(row["B"]), self.slot_index("B", row)

    def end_backward(self, state: State, row: "Row", dx: Array) -> Any:
        """The boundary's state after the gradient of the first stage's input, which is `dx` on the first stage's
        rank."""
        in_first = (row["chunk B"] == 0) & row.acts("B")
        return row.select(
            in_first & (lax.axis_index("pp") == self.schedule.placement[0]),
            lambda: self.boundary.on_first_stage_gradient(state.boundary, row["B"], dx),
            lambda: state.boundary,
        )

    def idle_backward(self, state: State) -> tuple[Array, list[Array], Any, Any]:
        return vary_all((jnp.zeros_like(state.messages["B"][0]), state.grads, state.residuals, state.boundary))

    def _send(self, state: State, row: "Row", outputs: dict[str, Array]) -> State:
        messages = dict(state.messages)
        for kind, shift in self.schedule.arrival:
            name = f"arrival {kind} {shift}"
            if kind in outputs and row.ever(name):
                output = outputs[kind]
                if self.messages_last and "B" in outputs:
                    # Gradients of parameters that are not trained are empty.
                    last = state.grads[self.stage.last_weight], *state.grads, outputs["B"]
                    output = after(output, next(array for array in last if array.size))
                with jax.named_scope(FORWARD if kind == "F" else GRADIENTS):
                    arrived = permute(self.message, output, axis="pp", shift=shift) if shift else output
                messages[kind] = row.store(name, messages[kind], arrived)
        return state._replace(messages=messages)

    def slot_index(self, kind: str, row: "Row") -> "SlotIndex":
        chunk = row[f"chunk {kind}"] if self.schedule.virtual > 1 else 0
        slots = {pool: row[f"{pool} {kind}"] for pool, tables in self.schedule.slot.items() if kind in tables}
        return SlotIndex(chunk, slots)


class Row(NamedTuple):
    """One tick of the tables on this rank; `tables` are those of all ticks of its loop."""

    values: dict[str, Array]
    tables: dict[str, np.ndarray]
    alone: bool  # one stage is both the first and the last

    @staticmethod
    def of(tables: dict[str, np.ndarray], values: dict[str, Array], *, alone: bool) -> "Row":
        own = {name: value[lax.axis_index("pp")] if value.ndim else value for name, value in values.items()}
        return Row(own, tables, alone)

    def __getitem__(self, name: str) -> Array:
        return jnp.maximum(self.values[name], 0)

    def acts(self, name: str) -> Array:
        """Whether this rank has an entry in this tick."""
        return self.values[name] >= 0

    def always(self, name: str) -> bool:
        """Whether every rank has an entry in every tick, so that no branch is needed."""
        return bool((self.tables[name] >= 0).all())

    def ever(self, name: str) -> bool:
        """Whether any rank has an entry in any tick."""
        return bool((self.tables[name] >= 0).any())

    def at_end(self, kind: str, there: Callable, elsewhere: Callable) -> Any:
        """`there()` in the stage in which `kind` reads no message (first or last), `elsewhere()` in other stages."""
        return self.select(self.values[f"message {kind}"] < 0, there, elsewhere)

    def select(self, here: Array, there: Callable, elsewhere: Callable) -> Any:
        """`there()` on ranks where `here` holds, `elsewhere()` on the others."""
        if self.alone:
            return there()
        return lax.cond(here, lambda: vary_all(there()), lambda: vary_all(elsewhere()))

    def store(self, name: str, slots: Array, message: Array) -> Array:
        """Store a received message in its slot, if there is one."""
        slot = self[name]
        entry = jnp.where(self.acts(name), message, index(slots, slot))
        return lax.dynamic_update_index_in_dim(slots, entry, slot, 0)


@dataclasses.dataclass(frozen=True)
class SlotIndex:
    """Indices for a pass of a stage: which of the rank's stages, and which slot of each pool."""

    chunk: Array | int
    slots: dict[str, Array | int]


@dataclasses.dataclass
class LayerStack:
    """The layers of one kind on this rank.

    `layer(weights, x, context)` runs one of them on gathered weights. `gather` turns resident weights into gathered
    ones, `scatter` (one function for each leaf) turns their gradients into the summed layout; where `keeps_maximum` is
    true, the maximum is taken instead of the sum. `stage_layers` is the number of places in each of the rank's stages,
    `layers` the model's layer in each place of the rank, -1 for none.
    """

    layer: Callable[[Any, Array, Context], Array]
    gather: Callable[[Any], Any]
    scatter: Sequence[Callable[[Array], Array]]
    stage_layers: int
    layers: Array
    at: int = 0  # index among the kinds
    keeps_maximum: Sequence[bool] = ()  # for each leaf; empty: false for all
    constant: str = ""  # the entry of gathered weights that gets no gradient

    def __post_init__(self):
        self.vjp = SplitVjp()

    def save(self, weights: Any, x: Array, context: Context) -> tuple[Array, list[Array]]:
        """The output of one layer, and the arrays that its backward pass reads; traced to plan pools."""
        y, pull = jax.vjp(*self.for_vjp(weights, x, context))
        return y, self.vjp.saved(pull, weights, context)

    def for_vjp(self, weights: Any, x: Array, context: Context) -> tuple[Callable, Any, Array]:
        """Arguments of `jax.vjp` for one layer as a function of weights and x."""
        if not self.constant:
            return partial(self.layer, context=context), weights, x
        constant = {self.constant: weights[self.constant]}
        others = {name: entry for name, entry in weights.items() if name != self.constant}
        return lambda others, x: self.layer(others | constant, x, context), others, x

    def context(self, context: Context, number: Array | int) -> Context:
        """The context with this layer's own dropout key; 0 is the embedding's."""
        if context.key is None:
            return context
        return context._replace(key=jax.random.fold_in(context.key, 1 + self.layers[number]))

    def plan(self, remat: str, split: bool, gathered: Any, x: Array, context: Context) -> dict[str, list[Array]]:
        """The arrays that a layer saves in each pool. What is not saved, and not divided, is not traced here."""
        parts, in_place, whole = saved_parts(remat), remat == "none", (gathered, x, context)
        pools = {"FB": [x], "FW": [], "BW": []}
        self.parts = () if in_place else (LAYER_INPUT,)
        if parts is not None:
            forward = jax.make_jaxpr(self.save)(*whole)
            self.vjp.plan_selection(forward, parts)
            pools["FB"] += self.vjp.forward_selected(*whole)[1]
            self.parts += self.vjp.selection.names
            if split:
                y, *saved = jaxpr_as_fun(forward)(*jax.tree.leaves(whole))
        elif split or remat != "layer":
            y, saved = self.save(*whole)
            self.saved_shapes = jax.eval_shape(lambda: saved)
            if in_place:
                pools["FB"] = saved
        if split:
            self.vjp.plan_split(gathered, saved, context, y, saved_is_kept=in_place)
            pools["FW"] = [saved[at] for at in self.vjp.read_later]
            pools["BW"] = self.vjp.input_backward(gathered, saved, context, y)[2]
            if in_place:
                pools["FB"] = [leaf for at, leaf in enumerate(saved) if at not in self.vjp.read_later]
        return pools


@dataclasses.dataclass
class Stage:
    """The layers of one rank's stages. Weights are one tree for each kind of layers, with a leading dim of places, the
    same number for each stage; gradients are a list of the leaves of all trees, in float32.

    `loop` runs a stage's layers. With `split`, `backward` leaves the work of `weight_gradients` out. `residuals` are
    saved for later passes: by pool, for each kind a list of arrays `[slot, layer of stage, ...]`. With `in_rows`,
    residuals that replace recomputation are read in row-major memory layout (parallax/sharding/compiler.py says where
    that is needed). `residuals_on` says which of the residuals are in host memory, see PipelineConfig.
    """

    loop: "LayerLoop"
    remat: str
    split: bool
    in_rows: bool = False
    residuals_on: str = DEVICE

    def plan(self, weights: Sequence[Any], x: Array, context: Context) -> dict[str, list[list[Array]]]:
        """The arrays that a layer of each kind saves in each pool. Called once, for shapes, before passes are
        traced."""
        pools: dict[str, list[list[Array]]] = {"FB": [], "FW": [], "BW": []}
        for stack in self.loop.stacks:
            gathered, here = self.loop.gathered(stack, weights, 0), stack.context(context, 0)
            for pool, leaves in stack.plan(self.remat, self.split, gathered, x, here).items():
                pools[pool].append(leaves)
        return pools

    @property
    def last_weight(self) -> int:
        """A leaf of the gradients to which the last pass of a tick (W, if there is one) adds."""
        return next(iter(self.loop.stacks[0].vjp.backward_split.deferred), 0) if self.split else 0

    def empty(self, pools: dict[str, list[list[Any]]], slots: dict[str, int]) -> dict[str, list[list[Array]]]:
        """Empty slots for the arrays of `plan`."""

        def room(part: str | None, like: Any, *sizes: int) -> Array:
            return (host_slots if is_moved(self.residuals_on, part) else zeros)(like, *sizes)

        def empty(pool: str) -> list[list[Array]]:
            if pool == "FB" and self.remat == "stage":  # the stage's input
                return [[room(LAYER_INPUT, pools[pool][0][0], slots[pool])]]
            found = []
            for stack, leaves in zip(self.loop.stacks, pools[pool], strict=True):
                parts = itertools.chain(stack.parts if pool == "FB" else (), itertools.repeat(None))
                sizes = slots[pool], stack.stage_layers
                found.append([room(part, leaf, *sizes) for leaf, part in zip(leaves, parts)])
            return found

        return {pool: empty(pool) for pool in slots}

    def forward(self, weights: Sequence[Any], read: Read, residuals: Any) -> tuple[Array, Any]:
        """F of one microbatch: the stage's output, and `residuals` with those of this pass written; None if `residuals`
        is None."""
        (x, context, at), of_layers = read(), residuals
        if self.remat == "stage" and residuals is not None:
            of_layers, residuals = None, residuals | {"FB": [write_slot(residuals["FB"][0], [x], at.slots["FB"])]}

        def step(stack, carry, layer, number, gathered):
            (x, residuals), here = carry, stack.context(context, number)
            if residuals is None:
                return (stack.layer(gathered, x, here), None), {}
            if self.remat == "layer":
                saved, y = [x], stack.layer(gathered, x, here)
            elif saved_parts(self.remat) is not None:
                y, kept_of_layer = stack.vjp.forward_selected(gathered, x, here)
                saved = [x, *kept_of_layer]
            else:
                y, pull = jax.vjp(*stack.for_vjp(gathered, x, here))
                saved = stack.vjp.saved(pull, gathered, here)
            return (y, self._write_residuals(stack, residuals, saved, at, layer)), {}

        state: Any = (x, of_layers), []
        for turns in self.loop.turns(step, at.chunk, weights=weights):
            state = turns.end(lax.fori_loop(turns.start, turns.stop, turns.turn, turns.begin(state)))
        (y, of_layers), _ = state
        return vary_all((y, residuals if of_layers is None else of_layers))

    def backward(
        self, weights: Sequence[Any], read: Read, residuals: Any, grads: list[Array], end: Callable[[Array], Any]
    ) -> tuple[Array, list[Array], Any, Any]:
        """B of one microbatch: the gradient of the stage's input, `grads` plus this microbatch's share, `residuals`,
        and the result of `end` for that gradient.

        With `split` only the share that takes no matrix product is added, and those for `weight_gradients` are written
        to `residuals`.
        """
        dy, context, at = read()
        if self.remat == "stage":
            (x,) = read_slot(residuals["FB"][0], at.slots["FB"])
            empty = [[zeros(leaf, stack.stage_layers) for leaf in stack.saved_shapes] for stack in self.loop.stacks]
            state: Any = (x, empty), []
            for turns in self.loop.turns(partial(self._save, context), at.chunk, weights=weights):
                state = turns.end(lax.fori_loop(turns.start, turns.stop, turns.turn, turns.begin(state)))
            (_, recomputed), _ = state

        def step(stack, carry, layer, number, gathered):
            (dy, residuals), here = carry, stack.context(context, number)
            if self.remat == "stage":
                saved = read_slot(recomputed[stack.at], layer)
            elif self.remat == "layer":
                (x,) = read_slot(residuals["FB"][stack.at], at.slots["FB"], layer)
                _, pull = jax.vjp(*stack.for_vjp(gathered, x, here))
                saved = stack.vjp.saved(pull, gathered, here)
            else:
                saved = self._read_residuals(stack, gathered, residuals, here, at, layer)
            if self.split:
                dx, shares, b_residuals = stack.vjp.input_backward(gathered, saved, here, dy)
                residuals = self._written(stack, residuals, "BW", b_residuals, at, layer)
            else:
                dw, dx = stack.vjp.backward(gathered, saved, here, dy)
                shares = dict(enumerate(jax.tree.leaves(dw)))
            return (dx, residuals), shares

        state = (dy, residuals), grads
        for turns in self.loop.turns(step, at.chunk, weights=weights, reverse=True):
            state = turns.end(lax.fori_loop(turns.start, turns.stop, turns.turn, turns.begin(state)))
        (dx, residuals), grads = state
        return vary_all((dx, grads, residuals, end(dx)))

    def weight_gradients(self, read: Callable[[], SlotIndex], residuals: Any, grads: list[Array]) -> list[Array]:
        """W of one microbatch: `grads` plus the share that `backward` left out."""
        at = read()

        def step(stack, carry, layer, number, gathered):
            read_later = [read_slot(residuals[pool][stack.at], at.slots[pool], layer) for pool in ("FW", "BW")]
            return carry, stack.vjp.weight_backward(*read_later)

        state: Any = (), grads
        for turns in self.loop.turns(step, at.chunk):
            state = turns.end(lax.fori_loop(turns.start, turns.stop, turns.turn, turns.begin(state)))
        return vary_all(state[1])

    # ---- one layer

    def _written(
        self, stack: LayerStack, residuals: Any, pool: str, leaves: list[Array], at: SlotIndex, layer: Array
    ) -> Any:
        """`residuals` with those of one layer in one pool written."""
        of_kinds = list(residuals[pool])
        of_kinds[stack.at] = write_slot(of_kinds[stack.at], leaves, at.slots[pool], layer)
        return residuals | {pool: of_kinds}

    def _write_residuals(
        self, stack: LayerStack, residuals: Any, saved: list[Array], at: SlotIndex, layer: Array
    ) -> Any:
        later = stack.vjp.read_later if self.split and self.remat == "none" else ()
        apart = {"FB": [leaf for at, leaf in enumerate(saved) if at not in later], "FW": [saved[at] for at in later]}
        for pool, leaves in apart.items():
            if leaves:
                residuals = self._written(stack, residuals, pool, leaves, at, layer)
        return residuals

    def _read_residuals(
        self, stack: LayerStack, gathered: Any, residuals: Any, context: Context, at: SlotIndex, layer: Array
    ) -> list[Array]:
        """The arrays that the backward pass of a layer reads: saved, or recomputed from saved ones."""
        own = read_slot(residuals["FB"][stack.at], at.slots["FB"], layer)
        if saved_parts(self.remat) is not None:
            rest = [row_major(leaf) for leaf in own[1:]] if self.in_rows else own[1:]
            return stack.vjp.recompute(gathered, own[0], context, rest)
        if not self.split:
            return own
        read_later = read_slot(residuals["FW"][stack.at], at.slots["FW"], layer)
        later = dict(zip(stack.vjp.read_later, read_later, strict=True))
        rest = iter(own)
        return [later[at] if at in later else next(rest) for at in range(len(own) + len(later))]

    def _save(
        self, context: Context, stack: LayerStack, carry: Any, layer: Array, number: Array, gathered: Any
    ) -> tuple[Any, dict]:
        """One layer forward, with its residuals written."""
        (x, saved), here = carry, stack.context(context, number)
        y, pull = jax.vjp(*stack.for_vjp(gathered, x, here))
        of_kinds = list(saved)
        of_kinds[stack.at] = write_slot(saved[stack.at], stack.vjp.saved(pull, gathered, here), layer)
        return (y, of_kinds), {}


@dataclasses.dataclass
class LayerLoop:
    """Loops over a stage's layers: one for each of `repeats`, see Arrangement.

    Without `prefetch` a layer is gathered, run and released. With it, while a layer computes, the weights of the next
    one are gathered and the gradients of the previous one are scattered; at most two whole layers exist, and the
    arithmetic is the same. The first and the last layer are then peeled off the loop, so that nothing is sent for a
    missing layer; XLA may fuse them differently, which rounds gradients differently.

    `serialized` runs work before a layer, its compute and its communication one after the other, which simulated
    devices need: see `after`. With several kinds, `places` are Arrangement.own_turns.
    """

    stacks: Sequence[LayerStack]
    stage_layers: int
    repeats: Sequence[Repeat]
    prefetch: bool
    serialized: bool
    places: Array | None = None

    def turns(
        self, step: Step, chunk: Array | int, *, weights: Any = None, reverse: bool = False
    ) -> list["Turns | RepeatedTurns"]:
        """The loops over the layers of one of the rank's stages, in order. `turns.end(lax.fori_loop(turns.start,
        turns.stop, turns.turn, turns.begin(state)))` runs `step` for every layer of one loop; the state is a carry and
        gradients, to which those of the steps are added. Without `weights` nothing is gathered."""
        how = self, step, chunk, weights, reverse

        def loops(repeat: Repeat, turn: Array | int = 0) -> list[Turns]:
            found = [self._kind_of(run)(*how, repeat.at(run, turn)) for run in repeat.runs]
            return found[::-1] if reverse else found

        each = [[RepeatedTurns(loops, one, reverse)] if one.times > 1 else loops(one) for one in self.repeats]
        return [*itertools.chain(*(each[::-1] if reverse else each))]

    def _kind_of(self, run: LayerRun) -> "type[Turns]":
        if len(run.kinds) > 1:
            return MixedTurns
        if self.prefetch and run.can_prefetch:
            return PrefetchTurns
        return UnevenTurns if run.uneven else Turns

    def gathered(self, stack: LayerStack, weights: Any, number: Array | int, earlier: Sequence[Array] = ()) -> Any:
        """The whole weights of the kind's layer in this place; None if `weights` is None. See `_after` for
        `earlier`."""
        if weights is None:
            return None
        resident = read_slot(weights[stack.at], number)
        return stack.gather(jax.tree.map(lambda weight: self._after(weight, earlier), resident))

    def add(self, stack: LayerStack, grads: list[Array], number: Array, shares: dict[int, Array]) -> list[Array]:
        """Add the gradients of the kind's layer in this place to summed gradients or maxima."""
        first = sum(len(other.scatter) for other in self.stacks[: stack.at])
        grads = list(grads)
        for at, share in shares.items():
            total = grads[first + at]
            own, share = total.at[number], stack.scatter[at](share).astype(total.dtype)
            grads[first + at] = own.max(share) if any(stack.keeps_maximum[at : at + 1]) else own.add(share)
        return grads

    def _after(self, x: Array, earlier: Sequence[Array]) -> Array:
        """Return `x`; if `serialized`, only after `earlier`."""
        return functools.reduce(after, earlier, x) if self.serialized else x

    def carry_after(self, carry: Any, grads: list[Array]) -> Any:
        if not jax.tree.leaves(carry):  # W sends only gradients
            return carry
        (x, *rest), structure = jax.tree.flatten(carry)
        return jax.tree.unflatten(structure, [self._after(x, grads), *rest])


@dataclasses.dataclass(frozen=True)
class Turns:
    """A loop over a run of places with layers of one kind."""

    loop: LayerLoop
    step: Step
    chunk: Array | int
    weights: Any
    reverse: bool
    run: LayerRun
    start: ClassVar[int] = 0

    @property
    def stop(self) -> int:
        return self.run.places

    @property
    def stack(self) -> LayerStack:
        return self.loop.stacks[self.run.kinds[0]]

    def begin(self, state: Any) -> Any:
        return state

    def turn(self, at: Array | int, state: Any, stack: LayerStack | None = None) -> Any:
        """Gather a layer of this kind, run it and add its gradients."""
        (carry, grads), stack = state, stack or self.stack
        layer, number = self.place_of(at, stack)
        gathered = self.loop.gathered(stack, self.weights, number, _first(carry))
        carry, shares = self.step(stack, carry, layer, number, gathered)
        return vary_all((carry, self.loop.add(stack, grads, number, shares)))

    def end(self, state: Any) -> Any:
        return state

    def place_of(self, at: Any, stack: LayerStack) -> tuple[Any, Any]:
        """Indices of this turn's layer among those of its kind: in the stage, and in the rank's places.

        They are computed from the loop's counter and looked up only if stages differ: so XLA sees that a loop writes
        the whole array and does not clear it first."""
        layer = self.run.layer + self._place(at) if self.run.layer is not None else self.look_up(1, at)
        return layer, self.chunk * stack.stage_layers + layer

    def look_up(self, row: int, at: Any) -> Array:
        """The entry of Arrangement.turns for this turn's place."""
        return self.loop.places[row][self.chunk * self.loop.stage_layers + self.run.place + self._place(at)]

    def is_there(self, at: Any) -> Array:
        """Whether this turn's place has a layer; its layers are all of this kind."""
        if self.loop.places is None:
            return self.stack.layers[self.place_of(at, self.stack)[1]] >= 0
        return self.look_up(0, at) == self.stack.at

    def _place(self, at: Any) -> Any:
        """The place of this turn."""
        return self.run.places - 1 - at if self.reverse else at


class UnevenTurns(Turns):
    """The same for places that may have no layer."""

    def turn(self, at: Array | int, state: Any) -> Any:
        return lax.cond(self.is_there(at), partial(super().turn, at, state), partial(vary_all, state))


class MixedTurns(Turns):
    """The same if stages have layers of different kinds: a turn runs the layer in its place, if any."""

    def turn(self, at: Array | int, state: Any) -> Any:
        turns = [partial(Turns.turn, self, at, state, stack) for stack in self.loop.stacks]
        return lax.switch(self.look_up(0, at), [*turns, partial(vary_all, state)])


@dataclasses.dataclass(frozen=True)
class RepeatedTurns:
    """A sequence of runs that repeats: a loop whose body contains a loop for each run."""

    loops: Callable[[Repeat, Array], list[Turns]]
    repeat: Repeat
    reverse: bool
    start: ClassVar[int] = 0

    @property
    def stop(self) -> int:
        return self.repeat.times

    def begin(self, state: Any) -> Any:
        return state

    def turn(self, at: Array, state: Any) -> Any:
        for turns in self.loops(self.repeat, self.repeat.times - 1 - at if self.reverse else at):
            state = turns.end(lax.fori_loop(turns.start, turns.stop, turns.turn, turns.begin(state)))
        return state

    def end(self, state: Any) -> Any:
        return state


class PrefetchTurns(Turns):
    """The same, with the next layer's weights gathered and the previous one's gradients scattered during a layer."""

    start = 1

    @property
    def stop(self) -> int:
        return self.run.places - 1

    def begin(self, state: Any) -> Any:
        carry, grads = state
        gathered = self.loop.gathered(self.stack, self.weights, self.place_of(0, self.stack)[1], _first(carry))
        return self.turn(0, (carry, gathered, {}, list(grads)))

    def turn(self, at: Array | int, state: Any, *, is_last: bool = False) -> Any:
        carry, gathered, shares, grads = state
        layer, number = self.place_of(at, self.stack)
        if shares:
            grads = self.loop.add(self.stack, grads, self.place_of(at - 1, self.stack)[1], shares)
            carry = self.loop.carry_after(carry, grads)
        run = partial(self.step, self.stack, carry, layer, number, gathered)
        if self.run.uneven:
            empty = jax.tree.map(jnp.zeros_like, jax.eval_shape(run)[1])
            carry, shares = lax.cond(self.is_there(at), run, partial(vary_all, (carry, empty)))
        else:
            carry, shares = run()
        coming = gathered
        if not is_last:
            after = self.place_of(at + 1, self.stack)[1]
            coming = self.loop.gathered(self.stack, self.weights, after, _first(carry))
        return carry, coming, shares, grads

    def end(self, state: Any) -> Any:
        carry, _, shares, grads = self.turn(self.stop, state, is_last=True)
        return carry, self.loop.add(self.stack, grads, self.place_of(self.stop, self.stack)[1], shares)


def _first(carry: Any) -> list[Array]:
    """The arrays that a layer reads first; they are ready when the previous layer, or the work before, has ended."""
    return jax.tree.leaves(carry)[:1]


def at_rank(rank: int, ranks: int, there: Callable, elsewhere: Callable) -> Any:
    """`there()` on one pipeline rank, `elsewhere()` on the others."""
    if ranks == 1:
        return there()
    return lax.cond(lax.axis_index("pp") == rank, lambda: vary_all(there()), lambda: vary_all(elsewhere()))
