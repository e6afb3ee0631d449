"""The ticks of a schedule's tables: in each, a rank runs F, then B, then W, if its tables have them, and sends.

If the schedule says so, F and B of a rank are one pass, in which the messages of the one can travel while the other
computes.

Every rank sends its output to the next stage and its gradient to the previous one. A message depends only on the pass
that made it, so that it can be sent while the next pass computes: F's while B does, B's while W does. Without W, B's is
sent in the next tick, while its F computes. A received message is stored where the table says.

Scopes distinguish passes and messages in traces and profiles; the report reads them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.model.context import Context
from parallax.pipeline.embed_and_head import BatchedHead, EndsState, LossOnly, MicrobatchHead
from parallax.pipeline.stage import (
    BACKWARD,
    FORWARD,
    JOINT,
    WEIGHTS,
    Both,
    Layers,
    Pass,
    SaveLayers,
    SaveNothing,
    SaveObservations,
    SaveStageInput,
    weight_gradients,
)
from parallax.schedules import Schedule, Segment
from parallax.sharding.collectives import changed_over_pp, cond_over_pp, permute, updated_over_pp
from parallax.sharding.host import is_on_host
from parallax.sharding.plan import GRADIENTS
from parallax.sharding.slots import read_slot, unset


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
    saved: Any  # residuals, see SaveLayers; None between ticks that allocate their own
    grads: list[Any]  # a tree for each kind of layers, in the plan's summed layouts
    ends: EndsState
    unsent: Array | None  # what the last tick's B has made; None if a tick sends it itself


class Row(NamedTuple):
    """One tick of the tables on this rank: -1 where it has no entry. `tables` are those of all ticks of the loop."""

    values: dict[str, Array]
    tables: dict[str, np.ndarray]
    contexts: dict[str, Context]  # of the passes whose branches do not read their own

    def __getitem__(self, name: str) -> Array:
        return jnp.maximum(self.values[name], 0)

    def acts(self, name: str) -> Array | bool:
        """Whether this rank has an entry in this tick; True if every rank has one in every tick."""
        return self.always(name) or self.values[name] >= 0

    def always(self, name: str) -> bool:
        """Whether every rank has an entry in every tick."""
        return bool((self.tables[name] >= 0).all())

    def ever(self, name: str) -> bool:
        """Whether any rank has an entry in any tick."""
        return bool((self.tables[name] >= 0).any())


def tick(
    pipeline: Pipeline, tables: dict[str, np.ndarray], kinds: str, state: State, values: dict[str, Array]
) -> tuple[State, None]:
    """One tick, with actions of these kinds, as the body of a scan over `tables`, in which `values` are its row.

    First F and the head, then B, then W, each if this rank has it, then messages; the last tick's gradient, if it was
    not sent there, before B, which may read it. If F and B are one pass, the head comes after W, since ranks that run
    other passes would wait for each other there.

    All that a pass reads is read in its branch, so that idle ranks read nothing; but not the context of simulated
    devices, see `contexts_before_branches`. Outputs of idle ranks are unset, since no rank takes them.
    """
    here = {name: value[lax.axis_index("pp")] if value.ndim else value for name, value in values.items()}
    outputs, gathered, row, devices = {}, None, Row(here, tables, {}), pipeline.layers.model.devices
    row = row._replace(contexts=contexts_before_branches(pipeline, row, kinds))
    in_loop = pipeline.layers.changes_in_loops
    joint = pipeline.schedule.joint and "F" in kinds and "B" in kinds
    alone = {kind: f"{kind} alone" if joint else kind for kind in "FB"}  # entries of the table
    if not pipeline.carries_residuals:
        x = jax.eval_shape(lambda: state.messages["F"][0])
        state = state._replace(saved=pipeline.saves.empty(pipeline.layers, x, pipeline.schedule.slots))
    if "F" in kinds:
        with jax.named_scope(FORWARD):
            outputs["F"], (saved, gathered) = changed_over_pp(
                row.acts(alone["F"]),
                lambda kept: pipeline.saves.forward(
                    x=received(pipeline, state, row, "F"),
                    this=pass_of(pipeline, row, "F"),
                    saved=kept[0],
                ),
                lambda: unset(state.messages["F"][0]),
                (state.saved, None),
                in_loop=in_loop,
            )
        state = state._replace(saved=saved)
    if joint:
        outputs["F"], outputs["B"], state = joint_pass(pipeline, state, row, outputs["F"])
    elif "F" in kinds and row.ever("exit"):
        ends = updated_over_pp(
            row.acts("exit"),  # the same on every rank, so that no rank waits here for one that does not act
            lambda ends: pipeline.ends.on_last_stage_output(ends, row["exit"], row["exit F"], outputs["F"]),
            state.ends,
            in_loop=in_loop,
        )
        state = state._replace(ends=ends)
    if state.unsent is not None:  # on simulated devices after F and the head; else nothing of this tick comes before
        state = send(pipeline, state, row, {"B": devices.after(state.unsent, state.ends.loss)})
    if "B" in kinds:
        with jax.named_scope(BACKWARD):
            outputs["B"], changed = changed_over_pp(
                row.acts(alone["B"]),
                lambda kept: backward(pipeline, with_changed(state, kept), row, gathered),
                lambda: outputs["B"] if joint else unset(state.messages["B"][0]),
                (state.grads, state.saved, state.ends),
                in_loop=in_loop,
            )
        state = with_changed(state, changed)
    if "W" in kinds:
        with jax.named_scope(WEIGHTS):
            grads = updated_over_pp(
                row.acts("W"),
                lambda grads: weight_gradients(pass_of(pipeline, row, "W"), state.saved, grads),
                state.grads,
                in_loop=in_loop,
            )
        state = state._replace(grads=grads)
    if joint and row.ever("exit"):
        outputs, state = head_of_joint_tick(pipeline, state, row, outputs)
    if not pipeline.carries_residuals:
        state = state._replace(saved=None)
    if "B" in kinds and pipeline.schedule.arrival:  # a tick's messages wait for all of its passes: see `after`
        outputs = devices.after(outputs, made_last(pipeline, state, outputs))
    if state.unsent is not None:
        state = state._replace(unsent=outputs.pop("B"))
    return send(pipeline, state, row, outputs), None


Changed = tuple[list[Any], Any, EndsState]  # by B: gradients, what is saved, and both ends


def with_changed(state: State, changed: Changed) -> State:
    """The state with what B changes."""
    grads, saved, ends = changed
    return state._replace(grads=grads, saved=saved, ends=ends)


def backward(pipeline: Pipeline, state: State, row: Row, gathered: Any) -> tuple[Array, Changed]:
    """B: the gradient of the stage's input, and what it changes."""
    dy, this = received(pipeline, state, row, "B"), pass_of(pipeline, row, "B")._replace(gathered=gathered)
    dx, saved, grads = pipeline.saves.backward(this, dy, state.saved, state.grads)
    return dx, (grads, saved, embedding_gradient(pipeline, state, row, dx))


def joint_pass(pipeline: Pipeline, state: State, row: Row, y: Array) -> tuple[Array, Array, State]:
    """F and B as one pass if this rank has both: outputs and the state after it. If it has not, the first is `y`."""

    def both(kept: tuple[Any, list, EndsState]) -> tuple[tuple[Array, Array], tuple[Any, list, EndsState]]:
        saved, grads, ends = kept
        here = state._replace(ends=ends)
        with jax.named_scope(FORWARD):
            x, ahead = received(pipeline, here, row, "F"), pass_of(pipeline, row, "F")
        with jax.named_scope(BACKWARD):
            dy, back = received(pipeline, here, row, "B"), pass_of(pipeline, row, "B")
        after = pipeline.saves.both(ahead, back, Both(x, dy, saved, grads))
        with jax.named_scope(BACKWARD):
            ends = embedding_gradient(pipeline, here, row, after.dy)
        return (after.x, after.dy), (after.saved, after.grads, ends)

    with jax.named_scope(JOINT):
        outputs, (saved, grads, ends) = changed_over_pp(
            row.values["F and B"] >= 0,
            both,
            lambda: (y, unset(state.messages["B"][0])),
            (state.saved, state.grads, state.ends),
            in_loop=pipeline.layers.changes_in_loops,
        )
    return *outputs, state._replace(saved=saved, grads=grads, ends=ends)


def head_of_joint_tick(
    pipeline: Pipeline, state: State, row: Row, outputs: dict[str, Array]
) -> tuple[dict[str, Array], State]:
    """The head after all passes of a tick: the outputs, which wait for it, and the state after it."""
    devices = pipeline.layers.model.devices
    y = devices.after(outputs["F"], made_last(pipeline, state, outputs))
    ends = updated_over_pp(
        row.acts("exit"),
        lambda ends: pipeline.ends.on_last_stage_output(ends, row["exit"], row["exit F"], y),
        state.ends,
        in_loop=pipeline.layers.changes_in_loops,
    )
    return {kind: devices.after(output, ends.loss) for kind, output in outputs.items()}, state._replace(ends=ends)


def send(pipeline: Pipeline, state: State, row: Row, outputs: dict[str, Array]) -> State:
    """Send outputs and gradients to the ranks that read them; store what arrives."""
    messages, model = dict(state.messages), pipeline.layers.model
    for kind, shift in pipeline.schedule.arrival:
        name = f"arrival {kind} {shift}"
        if kind not in outputs or not row.ever(name):
            continue
        output = outputs[kind]
        with jax.named_scope(FORWARD if kind == "F" else GRADIENTS):
            arrived = permute(model.residual, output, axis="pp", shift=shift) if shift else output
        slots, slot, arrives = messages[kind], row[name], row.values[name] >= 0
        entry = jnp.where(arrives, arrived, lax.dynamic_index_in_dim(slots, slot, keepdims=False))
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
            return pipeline.ends.first_stage_input(state.ends, row["F"])
        return pipeline.ends.last_stage_gradient(state.ends, row["B"], row["exit B"])

    message = f"message {kind}"
    return cond_over_pp(
        pipeline.schedule.stages == 1 or row.values[message] < 0,
        from_end,
        lambda: lax.dynamic_index_in_dim(state.messages[kind], row[message], keepdims=False),
    )


def embedding_gradient(pipeline: Pipeline, state: State, row: Row, dx: Array) -> Any:
    """The ends' state after the gradient of the first stage's input, which is `dx` on the first stage's rank."""
    first = pipeline.schedule.placement[0]
    return updated_over_pp(
        pipeline.schedule.stages == 1
        or (row["chunk B"] == 0) & (row.values["B"] >= 0) & (lax.axis_index("pp") == first),
        lambda ends: pipeline.ends.on_first_stage_gradient(ends, row["B"], dx),
        state.ends,
        in_loop=pipeline.layers.changes_in_loops,
    )


def contexts_before_branches(pipeline: Pipeline, row: Row, kinds: str) -> dict[str, Context]:
    """The contexts of F and B on simulated devices. XLA for CPUs fuses what is read in a branch with what reads it: of
    a stage with one layer it would compute attention's mask for each score of each head, from segments in a slot."""
    if not pipeline.layers.model.is_simulated:
        return {}
    return {kind: microbatch_context(pipeline, row, kind) for kind in "FB" if kind in kinds}


def microbatch_context(pipeline: Pipeline, row: Row, kind: str) -> Context:
    """What layers read of the microbatch of this tick's F or B."""
    return pipeline.layers.model.context(pipeline.ends.tokens, row[kind])


def pass_of(pipeline: Pipeline, row: Row, kind: str) -> Pass:
    """This tick's pass of a kind: its context, stage and slots."""
    context = row.contexts.get(kind) or microbatch_context(pipeline, row, kind) if kind in "FB" else None
    chunk = row[f"chunk {kind}"] if pipeline.schedule.virtual > 1 else 0
    slots = {pool: (row[f"{pool} {kind}"],) for pool, tables in pipeline.schedule.slot.items() if kind in tables}
    key = pipeline.layers.rounding
    key = None if key is None else jax.random.fold_in(key, row[kind])
    # Without other stages, the layer that ends F begins B.
    hands_on = kind != "F" or (pipeline.schedule.stages == 1 and row.always(kind))
    return Pass(pipeline.layers, context, chunk, slots, key, hands_on=hands_on)


def tables_of(s: Schedule, segment: Segment) -> dict[str, np.ndarray]:
    """The tables' rows of these ticks: `[tick, rank]` for entries of single ranks, `[tick]` for those of all."""
    tables = {"exit": s.exit_microbatch} | {f"exit {kind}": table for kind, table in s.exit_slot.items()}
    tables |= s.microbatch | {f"chunk {kind}": table for kind, table in s.chunk.items()}
    tables |= {f"{pool} {kind}": table for pool in s.slot for kind, table in s.slot[pool].items()}
    tables |= {f"message {kind}": table for kind, table in s.message.items()}
    tables |= {f"arrival {kind} {shift}": table for (kind, shift), table in s.arrival.items()}
    if s.joint:
        tables |= {f"{kind} alone": np.where(s.both, -1, s.microbatch[kind]) for kind in "FB"}
        tables |= {"F and B": np.where(s.both, s.microbatch["F"], -1)}
    return {name: table[segment.start : segment.stop] for name, table in tables.items()}
