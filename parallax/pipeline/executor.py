"""The one executor of schedule tables: a scan over ticks, in each what the table says for this rank.

A tick runs F, then B, then W, where the table has them; every rank passes its output on and its gradient back. A
message depends on the pass that made it alone, so that it can travel while the next one computes. What arrives is
stored by looking up what its sender did in this tick, in the same table.

Scopes tell passes and messages apart in traces and profiles; the report reads them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.model.context import Context
from parallax.pipeline.ends import take
from parallax.pipeline.simulated import after
from parallax.pipeline.slots import zeros
from parallax.pipeline.stage import Place, Stage
from parallax.schedules import Schedule, Segment
from parallax.sharding.collectives import permute, vary_all


class Ends(Protocol):
    """What the pipeline's first stage reads and its last stage feeds; `state` is carried from tick to tick."""

    def start(self, slots: int) -> Any:
        """The state before the first tick; `slots` are those of outputs of the last stage."""

    def enter(self, state: Any, microbatch: Array) -> Array:
        """The first stage's input."""

    def leave(self, state: Any, microbatch: Array, slot: Array, y: Array) -> Any:
        """Take the last stage's output, which is `y` on its rank; all ranks call this together."""

    def between(self, state: Any) -> Any:
        """Once, after the last F and before the first B, where the schedule has its head between."""

    def enter_backward(self, state: Any, microbatch: Array, slot: Array) -> Array:
        """The gradient in the last stage's output."""

    def leave_backward(self, state: Any, microbatch: Array, dx: Array) -> Any:
        """Take the gradient in the first stage's input."""

    def finish(self, state: Any) -> Any:
        """Once, after the last tick."""


class State(NamedTuple):
    """What a tick hands to the next."""

    messages: dict[str, Array]  # for F and for B, [slots, ...]: what has arrived and was not read yet
    kept: Any  # what passes leave for later ones, by pool: see Stage
    grads: list[Array]
    ends: Any


class Executor(NamedTuple):
    """Runs a schedule on the stages that this rank holds.

    `branches` is "skip" or "mask": see PipelineConfig. With `messages_last` a tick's messages wait for all of its
    passes; simulated devices need that, see `after`.
    """

    schedule: Schedule
    stage: Stage
    weights: Any
    zero_grads: Callable[[], Any]  # as the plan's summed gradients are cut
    context: Callable[[Array], Context]  # of a microbatch
    ends: Ends
    message: str  # layout of what stages send each other
    branches: str
    messages_last: bool

    def run(self, ends_state: Any) -> State:
        """All ticks; returns the last state, gradients summed over microbatches in it."""
        state, room = self.start(ends_state), None
        if not self.schedule.keeps_across_ticks:
            room = jax.eval_shape(lambda: state.kept)
            state = state._replace(kept=None)
        for segment in filter(lambda segment: segment.kinds, self.schedule.segments):  # a file may have empty ticks
            state, _ = lax.scan(self._tick(segment, segment.kinds, room), state, self._rows(segment))
            if self.schedule.head == "between" and "F" in segment.kinds:
                state = state._replace(ends=self.ends.between(state.ends))
        return state

    def run_forward(self, ends_state: Any, kept: Any = None) -> State:
        """The forward passes alone; a stage keeps nothing, or hands on `kept` if it is given some."""
        state = State(self._empty_messages(ends_state), kept, [], ends_state)
        for segment in self.schedule.segments:
            if "F" in segment.kinds:
                state, _ = lax.scan(self._tick(segment, "F"), state, self._rows(segment))
        return state

    def start(self, ends_state: Any) -> State:
        """The state before the first tick: empty slots, gradients of zero."""
        messages = self._empty_messages(ends_state)
        # To the pass of a rank that is idle, "mask" gives a slot in which nobody looks.
        slots = {pool: count + (self.branches == "mask") for pool, count in self.schedule.slots.items()}
        pools = jax.eval_shape(lambda: self.stage.plan(self.weights, messages["F"][0], self.context(jnp.int32(0))))
        return State(messages, self.stage.empty(pools, slots), jax.tree.leaves(self.zero_grads()), ends_state)

    def _empty_messages(self, ends_state: Any) -> dict[str, Array]:
        x = jax.eval_shape(lambda: self.ends.enter(ends_state, jnp.int32(0)))
        return {kind: zeros(x, count) for kind, count in self.schedule.message_slots.items()}

    def _rows(self, segment: Segment) -> dict[str, np.ndarray]:
        """The tables' rows of these ticks: what is a rank's own `[tick, rank]`, what is everybody's `[tick]`."""
        s = self.schedule
        tables = {"exit": s.exit_microbatch} | {f"exit {kind}": table for kind, table in s.exit_slot.items()}
        tables |= s.microbatch | {f"chunk {kind}": table for kind, table in s.chunk.items()}
        tables |= {f"{pool} {kind}": table for pool in s.slot for kind, table in s.slot[pool].items()}
        tables |= {f"message {kind}": table for kind, table in s.message.items()}
        tables |= {f"arrival {kind} {shift}": table for (kind, shift), table in s.arrival.items()}
        return {name: table[segment.start : segment.stop] for name, table in tables.items()}

    def _tick(self, segment: Segment, kinds: str, room: Any = None) -> Callable:
        """One tick. With `room`, what passes keep is for this tick alone, and gets room of these shapes in it: XLA need
        not empty what it sees written whole."""
        rows = self._rows(segment)
        busy = {name: bool((row >= 0).all()) for name, row in rows.items()}  # nobody ever idle: no branch
        used = {name: bool((row >= 0).any()) for name, row in rows.items()}

        def tick(state: State, values: dict[str, Array]) -> tuple[State, None]:
            own = {name: value[lax.axis_index("pp")] if value.ndim else value for name, value in values.items()}
            row = Row(own, busy, self.branches, alone=self.schedule.stages == 1)
            outputs = {}
            if room is not None:
                state = state._replace(kept=jax.tree.map(zeros, room))
            if "F" in kinds:
                with jax.named_scope("F"):
                    state, outputs["F"] = self._forward(state, row)
                if used["exit"]:
                    state = self._exit(state, row, outputs["F"])
            if "B" in kinds:
                with jax.named_scope("B"):
                    state, outputs["B"] = self._backward(state, row)
            if "W" in kinds:
                with jax.named_scope("W"):
                    state = self._weigh(state, row)
            if room is not None:
                state = state._replace(kept=None)
            return self._send(state, row, outputs, used), None

        return tick

    def _forward(self, state: State, row: "Row") -> tuple[State, Array]:
        def run(active):
            x = row.at_end(
                "F",
                lambda: self.ends.enter(state.ends, row["F"]),
                lambda: take(state.messages["F"], row["message F"]),
            )
            context, place = self.context(row["F"]), self._place("F", row, active)
            if state.kept is None:
                return self.stage.run(self.weights, x, context, place.chunk), None
            return self.stage.forward(self.weights, x, context, state.kept, place)

        y, kept = row.when("F", run, lambda: (jnp.zeros_like(state.messages["F"][0]), state.kept))
        return state._replace(kept=kept), y

    def _exit(self, state: State, row: "Row", y: Array) -> State:
        leave = lambda: self.ends.leave(state.ends, row["exit"], row["exit F"], y)  # noqa: E731
        if row.busy["exit"]:
            return state._replace(ends=leave())
        # The same on every rank, so that no hardware has a rank wait here for one that takes the other branch.
        ends = lax.cond(row.values["exit"] >= 0, lambda: vary_all(leave()), lambda: vary_all(state.ends))
        return state._replace(ends=ends)

    def _backward(self, state: State, row: "Row") -> tuple[State, Array]:
        def run(active):
            dy = row.at_end(
                "B",
                lambda: self.ends.enter_backward(state.ends, row["B"], row["exit B"]),
                lambda: take(state.messages["B"], row["message B"]),
            )
            context, place = self.context(row["B"]), self._place("B", row, active)
            dx, grads, kept = self.stage.backward(self.weights, state.kept, context, dy, state.grads, place)
            in_first = (row["chunk B"] == 0) & (row.values["B"] >= 0)
            first = in_first & (lax.axis_index("pp") == self.schedule.placement[0])
            ends = row.select(first, lambda: self.ends.leave_backward(state.ends, row["B"], dx), lambda: state.ends)
            return dx, grads, kept, ends

        dx, grads, kept, ends = row.when(
            "B", run, lambda: (jnp.zeros_like(state.messages["B"][0]), state.grads, state.kept, state.ends)
        )
        return state._replace(grads=grads, kept=kept, ends=ends), dx

    def _weigh(self, state: State, row: "Row") -> State:
        def run(active):
            return self.stage.weigh(state.kept, state.grads, self._place("W", row, active))

        return state._replace(grads=row.when("W", run, lambda: state.grads))

    def _send(self, state: State, row: "Row", outputs: dict[str, Array], used: dict[str, bool]) -> State:
        messages = dict(state.messages)
        for kind, shift in self.schedule.arrival:
            name = f"arrival {kind} {shift}"
            if kind in outputs and used[name]:
                output = outputs[kind]
                if self.messages_last and "B" in outputs:
                    output = after(output, state.grads[self.stage.last_weight])
                with jax.named_scope("activations" if kind == "F" else "gradients"):
                    arrived = permute(self.message, output, axis="pp", shift=shift) if shift else output
                messages[kind] = row.store(name, messages[kind], arrived)
        return state._replace(messages=messages)

    def _place(self, kind: str, row: "Row", active: Array | None) -> Place:
        chunk = row[f"chunk {kind}"] if self.schedule.virtual > 1 else 0
        slots = {}
        for pool, tables in self.schedule.slot.items():
            if kind in tables:
                slot = row[f"{pool} {kind}"]
                slots[pool] = slot if active is None else jnp.where(active, slot, self.schedule.slots[pool])
        return Place(chunk, slots, active)


class Row(NamedTuple):
    """One tick of the tables for this rank, and which of them are never idle."""

    values: dict[str, Array]
    busy: dict[str, bool]
    branches: str
    alone: bool  # one stage is both ends of the pipeline

    def __getitem__(self, name: str) -> Array:
        return jnp.maximum(self.values[name], 0)

    def when(self, kind: str, run: Callable[[Array | None], Any], idle: Callable[[], Any]) -> Any:
        """`run(None)` where this rank acts, else `idle()`; masked, `run(whether it acts)` everywhere."""
        if self.busy[kind]:
            return run(None)
        active = self.values[kind] >= 0
        if self.branches == "mask":
            return run(active)
        return lax.cond(active, lambda: vary_all(run(None)), lambda: vary_all(idle()))

    def at_end(self, kind: str, there: Callable, elsewhere: Callable) -> Any:
        """`there()` at the end of the pipeline where `kind` reads no message, `elsewhere()` in other stages."""
        return self.select(self.values[f"message {kind}"] < 0, there, elsewhere)

    def select(self, here: Array, there: Callable, elsewhere: Callable) -> Any:
        """`there()` on ranks where `here` holds, `elsewhere()` on the others."""
        if self.alone:
            return there()
        if self.branches == "mask":
            return jax.tree.map(lambda a, b: jnp.where(here, a, b), vary_all(there()), vary_all(elsewhere()))
        return lax.cond(here, lambda: vary_all(there()), lambda: vary_all(elsewhere()))

    def store(self, name: str, slots: Array, message: Array) -> Array:
        """Put what arrived into its slot, if anything did."""
        slot = jnp.maximum(self.values[name], 0)
        kept = jnp.where(self.values[name] >= 0, message, take(slots, slot))
        return lax.dynamic_update_index_in_dim(slots, kept, slot, 0)


def at_rank(rank: int, ranks: int, there: Callable, elsewhere: Callable) -> Any:
    """`there()` on one pipeline rank, `elsewhere()` on the others."""
    if ranks == 1:
        return there()
    return lax.cond(lax.axis_index("pp") == rank, lambda: vary_all(there()), lambda: vary_all(elsewhere()))
