"""The one executor of schedule tables: a scan over ticks, in each what the table says for this rank.

A tick runs F, then B, where the table has them; then every rank passes its output on and its gradient back. What
arrives is stored by looking up what the neighbour did in this tick, in the same table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.collectives import as_varying, permute, varying_axes
from parallax.layers.context import Context
from parallax.pipeline.stage import Stage
from parallax.schedules import Schedule, Segment


class Ends(Protocol):
    """What the pipeline's first stage reads and its last stage feeds; `state` is carried from tick to tick."""

    def enter(self, state: Any, microbatch: Array) -> Array:
        """The first stage's input."""

    def leave(self, state: Any, microbatch: Array, slot: Array, y: Array) -> Any:
        """Take the last stage's output."""

    def between(self, state: Any) -> Any:
        """Once, after the last F and before the first B, where the schedule has its head between."""

    def enter_backward(self, state: Any, microbatch: Array, slot: Array) -> Array:
        """The gradient in the last stage's output."""

    def leave_backward(self, state: Any, microbatch: Array, dx: Array) -> Any:
        """Take the gradient in the first stage's input."""


class State(NamedTuple):
    """What a tick hands to the next."""

    arrived_forward: Array  # [input slots, ...] messages that no F has read yet
    arrived_backward: Array
    kept: Any  # [slots, ...] what F kept for B
    grads: Any
    ends: Any


class Executor(NamedTuple):
    """Runs a schedule on the stage that this rank holds."""

    schedule: Schedule
    stage: Stage
    weights: Any
    context: Callable[[Array], Context]  # of a microbatch
    ends: Ends
    message: str  # layout of what stages send each other

    def run(self, ends_state: Any) -> State:
        """All ticks; returns the last state, gradients summed over microbatches in it."""
        state = self._start(ends_state)
        last_forward = max(s.stop for s in self.schedule.segments if "F" in s.kinds)
        for segment in self.schedule.segments:
            state, _ = lax.scan(self._tick(segment), state, self._rows(segment))
            if self.schedule.head == "between" and segment.stop == last_forward:
                state = state._replace(ends=self.ends.between(state.ends))
        return state

    def run_forward(self, ends_state: Any) -> Any:
        """The forward ticks alone, keeping nothing; returns the state of the ends."""
        forward = self._replace(stage=ForwardOnly(self.stage))
        state = forward._start(ends_state)
        for segment in self.schedule.segments:
            if segment.kinds == "F":
                state, _ = lax.scan(forward._tick(segment), state, self._rows(segment))
        return state.ends

    def _start(self, ends_state: Any) -> State:
        x = jax.eval_shape(lambda: self.ends.enter(ends_state, jnp.int32(0)))
        _, kept = jax.eval_shape(lambda x: self.stage.forward(self.weights, x, self.context(jnp.int32(0))), x)
        messages = zeros_of(x, self.schedule.input_slots)
        grads = jax.tree.map(lambda w: as_varying(jnp.zeros(w.shape, jnp.float32)), self.weights)
        slots = jax.tree.map(lambda leaf: zeros_of(leaf, self.schedule.slots), kept)
        return State(messages, messages, slots, grads, ends_state)

    def _rows(self, segment: Segment) -> dict[str, np.ndarray]:
        return {name: getattr(self.schedule, name)[segment.start : segment.stop] for name in TABLES}

    def _tick(self, segment: Segment) -> Callable:
        rows = self._rows(segment)
        busy = {name: bool((row >= 0).all()) for name, row in rows.items()}  # no rank ever idle: no branch
        used = {name: bool((row >= 0).any()) for name, row in rows.items()}

        def tick(state: State, row: dict[str, Array]) -> tuple[State, None]:
            row = Row({name: _own(value) for name, value in row.items()}, busy)
            if used["forward"]:
                state, y = self._forward(state, row)
            if used["backward"]:
                state, dx = self._backward(state, row)
            if used["receive_forward"]:
                arrived = permute(self.message, y, axis="pp", shift=1)
                state = state._replace(arrived_forward=row.store("arrive_slot_forward", state.arrived_forward, arrived))
            if used["receive_backward"]:
                arrived = permute(self.message, dx, axis="pp", shift=-1)
                state = state._replace(
                    arrived_backward=row.store("arrive_slot_backward", state.arrived_backward, arrived)
                )
            return state, None

        return tick

    def _forward(self, state: State, row: "Row") -> tuple[State, Array]:
        microbatch, slot = row["forward"], row["forward_slot"]

        def run():
            x = at_rank(
                0,
                self._ranks,
                lambda: self.ends.enter(state.ends, microbatch),
                lambda: read(state.arrived_forward, row["use_slot_forward"]),
            )
            return self.stage.forward(self.weights, x, self.context(microbatch))

        def idle():
            return jnp.zeros_like(state.arrived_forward[0]), read(state.kept, slot)

        y, kept = row.when("forward", run, idle)
        ends = row.when(
            "forward",
            lambda: at_rank(
                self._ranks - 1,
                self._ranks,
                lambda: self.ends.leave(state.ends, microbatch, slot, y),
                lambda: state.ends,
            ),
            lambda: state.ends,
        )
        return state._replace(kept=write(state.kept, slot, kept), ends=ends), y

    def _backward(self, state: State, row: "Row") -> tuple[State, Array]:
        microbatch, slot = row["backward"], row["backward_slot"]

        def run():
            dy = at_rank(
                self._ranks - 1,
                self._ranks,
                lambda: self.ends.enter_backward(state.ends, microbatch, slot),
                lambda: read(state.arrived_backward, row["use_slot_backward"]),
            )
            # One slot is read as it is, so that XLA sees that what F wrote in this tick is what B reads.
            kept, at = (read(state.kept, slot), None) if self.schedule.slots == 1 else (state.kept, slot)
            context = self.context(microbatch)
            dx, grads = self.stage.backward(self.weights, kept, context, dy, state.grads, at)
            ends = at_rank(
                0,
                self._ranks,
                lambda: self.ends.leave_backward(state.ends, microbatch, dx),
                lambda: state.ends,
            )
            return dx, grads, ends

        def idle():
            return jnp.zeros_like(state.arrived_backward[0]), state.grads, state.ends

        dx, grads, ends = row.when("backward", run, idle)
        return state._replace(grads=grads, ends=ends), dx

    @property
    def _ranks(self) -> int:
        return self.schedule.ranks


class ForwardOnly(NamedTuple):
    """A stage that keeps nothing for a backward pass."""

    stage: Stage

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, tuple]:
        return self.stage.forward(weights, x, context)[0], ()


TABLES = (
    "forward", "backward", "forward_slot", "backward_slot", "receive_forward", "receive_backward",
    "use_slot_forward", "use_slot_backward", "arrive_slot_forward", "arrive_slot_backward",
)  # fmt: skip


class Row(NamedTuple):
    """One tick of the tables for this rank, and which of them are never idle."""

    values: dict[str, Array]
    busy: dict[str, bool]

    def __getitem__(self, name: str) -> Array:
        return jnp.maximum(self.values[name], 0)

    def when(self, name: str, run: Callable, idle: Callable) -> Any:
        """`run()` where this rank acts, else `idle()`: skipped, not computed and masked."""
        if self.busy[name]:
            return run()
        return lax.cond(self.values[name] >= 0, lambda: vary_all(run()), lambda: vary_all(idle()))

    def store(self, name: str, slots: Array, message: Array) -> Array:
        """Put what arrived into its slot, if anything did."""
        return jnp.where(self.values[name] >= 0, write(slots, self[name], message), slots)


def _own(row: Array) -> Array:
    return row[lax.axis_index("pp")]


def at_rank(rank: int, ranks: int, there: Callable, elsewhere: Callable) -> Any:
    """`there()` on one pipeline rank, `elsewhere()` on the others."""
    if ranks == 1:
        return there()
    return lax.cond(lax.axis_index("pp") == rank, lambda: vary_all(there()), lambda: vary_all(elsewhere()))


def vary_all(tree: Any) -> Any:
    """The branches of a cond must agree on where their results vary; over pp they all do."""
    return jax.tree.map(lambda leaf: as_varying(leaf, ["pp"]), tree)


def read(slots: Any, slot: Array) -> Any:
    """The entry of a slot. With one slot the index is static, and XLA sees that nothing is moved."""
    return jax.tree.map(
        lambda leaf: leaf[0] if len(leaf) == 1 else lax.dynamic_index_in_dim(leaf, slot, keepdims=False),
        slots,
    )


def write(slots: Any, slot: Array, value: Any) -> Any:
    """Slots with one entry replaced."""
    return jax.tree.map(
        lambda leaf, new: new[None] if len(leaf) == 1 else lax.dynamic_update_index_in_dim(leaf, new, slot, 0),
        slots,
        value,
    )


def zeros_of(like: jax.ShapeDtypeStruct, count: int) -> Array:
    """`count` slots for arrays like this one, varying where it does and over pp."""
    zeros = jnp.zeros((count, *like.shape), like.dtype)
    return as_varying(zeros, varying_axes(like) | {"pp"})
