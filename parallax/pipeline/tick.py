"""The ticks of a schedule's tables: in each, a rank runs F, then B, then W, if its tables have them, and sends.

If the schedule says so, F and B of a rank are one pass, in which the messages of the one can travel while the other
computes.

Every rank sends its output to the next stage and its gradient to the previous one. A message depends only on the pass
that made it, so that it can be sent while the next pass computes. A received message is stored where the sender's entry
of the table for this tick says.

Scopes distinguish passes and messages in traces and profiles; the report reads them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.pipeline.embed_and_head import BatchedHead, LossOnly, MicrobatchHead
from parallax.pipeline.stage import (
    BACKWARD,
    FORWARD,
    JOINT,
    WEIGHTS,
    Layers,
    Pass,
    SaveLayers,
    SaveNothing,
    SaveObservations,
    SaveStageInput,
    weight_gradients,
)
from parallax.schedules import Schedule, Segment
from parallax.sharding.collectives import permute, vary_over_pp
from parallax.sharding.host import is_on_host
from parallax.sharding.plan import GRADIENTS
from parallax.sharding.slots import index, read_slot


class Pipeline(NamedTuple):
    """What every tick reads and none changes."""

    schedule: Schedule
    ends: MicrobatchHead | BatchedHead | LossOnly
    layers: Layers
    saves: SaveLayers | SaveStageInput | SaveNothing | SaveObservations
    # Otherwise each tick allocates its own, and XLA need not clear arrays that are fully overwritten.
    carries_residuals: bool


class State(NamedTuple):
    """The state that ticks carry."""

    messages: dict[str, Array]  # for F and for B, [slots, ...]: received and not read yet
    residuals: Any  # see SaveLayers; None between ticks that allocate their own
    grads: list[Any]  # a tree for each kind of layers, in the plan's summed layouts
    ends: Any


class Row(NamedTuple):
    """One tick of the tables on this rank: -1 where it has no entry. `tables` are those of all ticks of the loop."""

    values: dict[str, Array]
    tables: dict[str, np.ndarray]

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


def run_ticks(pipeline: Pipeline, state: State, segment: Segment, kinds: str) -> State:
    """Run the ticks of a segment, and in them actions of these kinds."""
    tables = tables_of(pipeline.schedule, segment)

    def body(state: State, values: dict[str, Array]) -> tuple[State, None]:
        here = {name: value[lax.axis_index("pp")] if value.ndim else value for name, value in values.items()}
        return tick(pipeline, state, Row(here, tables), kinds), None

    return lax.scan(body, state, tables)[0]


def tick(pipeline: Pipeline, state: State, row: Row, kinds: str) -> State:
    """One tick: F and the head, B, W, each if this rank has it, then messages. If F and B are one pass, the head comes
    after W, since ranks that run other passes would wait for each other there.

    All that a pass reads is read in its branch, so that idle ranks read nothing.
    """
    outputs, gathered = {}, None
    joint = pipeline.schedule.joint and "F" in kinds and "B" in kinds
    alone = {kind: f"{kind} alone" if joint else kind for kind in "FB"}  # entries of the table
    if not pipeline.carries_residuals:
        x = jax.eval_shape(lambda: state.messages["F"][0])
        state = state._replace(residuals=pipeline.saves.empty(pipeline.layers, x, pipeline.schedule.slots))
    if "F" in kinds:
        # Without other stages, the layer that ends F begins B.
        serves_backward = pipeline.schedule.stages == 1 and row.always(alone["F"])

        def forward() -> tuple[Array, Any, Any]:
            x = received(pipeline, state, row, "F")
            y, residuals, weights = pipeline.saves.forward(pass_of(pipeline, row, "F"), x, state.residuals)
            return vary_over_pp((y, residuals, weights if serves_backward else None))

        def idle() -> tuple[Array, Any, Any]:
            return vary_over_pp((jnp.zeros_like(state.messages["F"][0]), state.residuals, None))

        with jax.named_scope(FORWARD):
            outputs["F"], residuals, gathered = (
                forward() if row.always(alone["F"]) else lax.cond(row.acts(alone["F"]), forward, idle)
            )
        state = state._replace(residuals=residuals)

    def with_head(state: State, y: Array) -> State:

        def head() -> Any:
            return vary_over_pp(pipeline.ends.on_last_stage_output(state.ends, row["exit"], row["exit F"], y))

        # The condition is the same on every rank, so that no rank waits here for one in the other branch.
        after_head = (
            head() if row.always("exit") else lax.cond(row.acts("exit"), head, lambda: vary_over_pp(state.ends))
        )
        return state._replace(ends=after_head)

    if joint:
        outputs["F"], outputs["B"], state = joint_pass(pipeline, state, row, outputs["F"])
    elif "F" in kinds and row.ever("exit"):
        state = with_head(state, outputs["F"])
    if "B" in kinds:

        def backward() -> tuple[Array, list[Any], Any, Any]:
            dy, this = received(pipeline, state, row, "B"), pass_of(pipeline, row, "B")._replace(gathered=gathered)
            dx, residuals, grads = pipeline.saves.backward(this, dy, state.residuals, state.grads)
            return vary_over_pp((dx, grads, residuals, embedding_gradient(pipeline, state, row, dx)))

        def idle() -> tuple[Array, list[Any], Any, Any]:
            dx = outputs["B"] if joint else jnp.zeros_like(state.messages["B"][0])
            return vary_over_pp((dx, state.grads, state.residuals, state.ends))

        with jax.named_scope(BACKWARD):
            after_backward = backward() if row.always(alone["B"]) else lax.cond(row.acts(alone["B"]), backward, idle)
        outputs["B"], grads, residuals, of_ends = after_backward
        state = state._replace(grads=grads, residuals=residuals, ends=of_ends)
    if "W" in kinds:

        def weights() -> list[Any]:
            return vary_over_pp(weight_gradients(pass_of(pipeline, row, "W"), state.residuals, state.grads))

        with jax.named_scope(WEIGHTS):
            grads = (
                weights() if row.always("W") else lax.cond(row.acts("W"), weights, lambda: vary_over_pp(state.grads))
            )
        state = state._replace(grads=grads)
    if joint and row.ever("exit"):
        devices = pipeline.layers.model.devices
        state = with_head(state, devices.after(outputs["F"], made_last(pipeline, state, outputs)))
        outputs = {kind: devices.after(output, state.ends.loss) for kind, output in outputs.items()}
    if not pipeline.carries_residuals:
        state = state._replace(residuals=None)
    return send(pipeline, state, row, outputs)


def joint_pass(pipeline: Pipeline, state: State, row: Row, y: Array) -> tuple[Array, Array, State]:
    """F and B as one pass if this rank has both: outputs and the state after it. If it has not, the first is `y`."""

    def both() -> tuple[Array, ...]:
        with jax.named_scope(FORWARD):
            x, ahead = received(pipeline, state, row, "F"), pass_of(pipeline, row, "F")
        with jax.named_scope(BACKWARD):
            dy, back = received(pipeline, state, row, "B"), pass_of(pipeline, row, "B")
        y, dx, residuals, grads = pipeline.saves.both(ahead, back, x, dy, state.residuals, state.grads)
        with jax.named_scope(BACKWARD):
            return vary_over_pp((y, dx, residuals, grads, embedding_gradient(pipeline, state, row, dx)))

    def idle() -> tuple[Array, ...]:
        dx = jnp.zeros_like(state.messages["B"][0])
        return vary_over_pp((y, dx, state.residuals, state.grads, state.ends))

    with jax.named_scope(JOINT):
        y, dx, residuals, grads, ends = lax.cond(row.acts(JOINT), both, idle)
    return y, dx, state._replace(residuals=residuals, grads=grads, ends=ends)


def send(pipeline: Pipeline, state: State, row: Row, outputs: dict[str, Array]) -> State:
    """Send outputs and gradients to the ranks that read them; store what arrives."""
    messages, model = dict(state.messages), pipeline.layers.model
    for kind, shift in pipeline.schedule.arrival:
        name = f"arrival {kind} {shift}"
        if kind not in outputs or not row.ever(name):
            continue
        output = outputs[kind]
        if "B" in outputs:  # a tick's messages wait for all of its passes: see `after`
            output = model.devices.after(output, made_last(pipeline, state, outputs))
        with jax.named_scope(FORWARD if kind == "F" else GRADIENTS):
            arrived = permute(model.residual, output, axis="pp", shift=shift) if shift else output
        slots, slot = messages[kind], row[name]
        entry = jnp.where(row.acts(name), arrived, index(slots, slot))
        messages[kind] = lax.dynamic_update_index_in_dim(slots, entry, slot, 0)
    return state._replace(messages=messages)


def made_last(pipeline: Pipeline, state: State, outputs: dict[str, Array]) -> Array:
    """What the last pass of a tick with B has made."""
    grads, last = jax.tree.leaves(state.grads), pipeline.layers.passes[0].last_gradient
    # Those of parameters that are not trained are empty.
    made = next(array for array in (grads[last], *grads, outputs["B"]) if array.size)
    return read_slot(made, *(0,) * made.ndim) if is_on_host(made) else made


# ---- what a pass reads


def received(pipeline: Pipeline, state: State, row: Row, kind: str) -> Array:
    """What F or B begins with: embedded tokens in the first stage, the head's gradient in the last one, else a
    message."""

    def from_end() -> Array:
        if kind == "F":
            return vary_over_pp(pipeline.ends.first_stage_input(state.ends, row["F"]))
        return vary_over_pp(pipeline.ends.last_stage_gradient(state.ends, row["B"], row["exit B"]))

    if pipeline.schedule.stages == 1:
        return from_end()
    message = f"message {kind}"
    return lax.cond(row.values[message] < 0, from_end, lambda: vary_over_pp(index(state.messages[kind], row[message])))


def embedding_gradient(pipeline: Pipeline, state: State, row: Row, dx: Array) -> Any:
    """The ends' state after the gradient of the first stage's input, which is `dx` on the first stage's rank."""
    if pipeline.schedule.stages == 1:
        return pipeline.ends.on_first_stage_gradient(state.ends, row["B"], dx)
    in_first = (row["chunk B"] == 0) & row.acts("B") & (lax.axis_index("pp") == pipeline.schedule.placement[0])
    return lax.cond(
        in_first,
        lambda: vary_over_pp(pipeline.ends.on_first_stage_gradient(state.ends, row["B"], dx)),
        lambda: vary_over_pp(state.ends),
    )


def pass_of(pipeline: Pipeline, row: Row, kind: str) -> Pass:
    """This tick's pass of a kind: its context, stage and slots."""
    context = pipeline.layers.model.context(pipeline.ends.tokens, row[kind]) if kind in "FB" else None
    chunk = row[f"chunk {kind}"] if pipeline.schedule.virtual > 1 else 0
    slots = {pool: (row[f"{pool} {kind}"],) for pool, tables in pipeline.schedule.slot.items() if kind in tables}
    key = pipeline.layers.rounding
    return Pass(pipeline.layers, context, chunk, slots, None if key is None else jax.random.fold_in(key, row[kind]))


def tables_of(s: Schedule, segment: Segment) -> dict[str, np.ndarray]:
    """The tables' rows of these ticks: `[tick, rank]` for entries of single ranks, `[tick]` for those of all."""
    tables = {"exit": s.exit_microbatch} | {f"exit {kind}": table for kind, table in s.exit_slot.items()}
    tables |= s.microbatch | {f"chunk {kind}": table for kind, table in s.chunk.items()}
    tables |= {f"{pool} {kind}": table for pool in s.slot for kind, table in s.slot[pool].items()}
    tables |= {f"message {kind}": table for kind, table in s.message.items()}
    tables |= {f"arrival {kind} {shift}": table for (kind, shift), table in s.arrival.items()}
    if s.joint:
        tables |= {f"{kind} alone": np.where(s.both, -1, s.microbatch[kind]) for kind in "FB"}
        tables |= {JOINT: np.where(s.both, s.microbatch["F"], -1)}
    return {name: table[segment.start : segment.stop] for name, table in tables.items()}
