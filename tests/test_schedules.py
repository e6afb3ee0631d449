"""Schedules: the laws that any of them keeps, the closed forms of those we have, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.schedules import Action, Schedule, ScheduleError, accumulate, by_name, gpipe

sizes = st.integers(1, 8)


def orders(text: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, line.split())) for line in text.strip().splitlines())


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Another order, with so many forwards first that each later tick holds F and B."""
    rows = []
    for stage in range(stages):
        first = min(2 * (stages - 1 - stage), microbatches)
        row = [Action(stage, "F", m) for m in range(first)]
        for m in range(microbatches):
            row += [Action(stage, "F", first + m)] * (first + m < microbatches) + [Action(stage, "B", m)]
        rows.append(tuple(row))
    return Schedule("1f1b", stages, microbatches, tuple(rows))


def interleaved(ranks: int, microbatches: int) -> Schedule:
    """Two stages on each rank, one after the other: not a good order, but one with chunks."""
    rows = []
    for rank in range(ranks):
        forward = [Action(stage, "F", m) for stage in (rank, rank + ranks) for m in range(microbatches)]
        backward = [Action(stage, "B", m) for stage in (rank + ranks, rank) for m in range(microbatches)]
        rows.append(tuple(forward + backward))
    return Schedule("interleaved", 2 * ranks, microbatches, tuple(rows))


any_schedule = st.one_of(
    st.builds(gpipe, sizes, sizes),
    st.builds(accumulate, sizes),
    st.builds(one_f_one_b, sizes, sizes),
    st.builds(interleaved, st.integers(1, 4), sizes),
)


def execute(schedule: Schedule) -> tuple[dict, dict]:
    """Run the tables alone, on names instead of arrays: what each stage made of what it read."""
    ranks = range(schedule.ranks)
    outputs, gradients = {}, {}
    saved = [[None] * schedule.slots for _ in ranks]
    waiting = {kind: [[None] * schedule.input_slots for _ in ranks] for kind in "FB"}
    for tick in range(schedule.ticks):
        sent_forward, sent_backward = [None] * schedule.ranks, [None] * schedule.ranks
        for rank in ranks:
            if (m := schedule.forward[tick, rank]) >= 0:
                stage = rank + schedule.ranks * schedule.forward_chunk[tick, rank]
                use = schedule.use_slot_forward[tick, rank]
                x = waiting["F"][rank][use] if use >= 0 else f"embed{m}"
                sent_forward[rank] = outputs[stage, m] = f"{stage}({x})"
                saved[rank][schedule.forward_slot[tick, rank]] = x
            if (m := schedule.backward[tick, rank]) >= 0:
                stage = rank + schedule.ranks * schedule.backward_chunk[tick, rank]
                use = schedule.use_slot_backward[tick, rank]
                dy = waiting["B"][rank][use] if use >= 0 else f"head{m}"
                x = saved[rank][schedule.backward_slot[tick, rank]]
                sent_backward[rank] = gradients[stage, m] = f"{stage}'({x};{dy})"
        for rank in ranks:
            if schedule.receive_forward[tick, rank] >= 0:
                waiting["F"][rank][schedule.arrive_slot_forward[tick, rank]] = sent_forward[rank - 1]
            if schedule.receive_backward[tick, rank] >= 0:
                sender = (rank + 1) % schedule.ranks
                waiting["B"][rank][schedule.arrive_slot_backward[tick, rank]] = sent_backward[sender]
    return outputs, gradients


@given(any_schedule)
def test_executing_the_tables_gives_what_a_loop_over_stages_gives(schedule):
    outputs, gradients = {}, {}
    for m in range(schedule.microbatches):
        inputs, x = {}, f"embed{m}"
        for stage in range(schedule.stages):
            inputs[stage] = x
            x = outputs[stage, m] = f"{stage}({x})"
        dy = f"head{m}"
        for stage in reversed(range(schedule.stages)):
            dy = gradients[stage, m] = f"{stage}'({inputs[stage]};{dy})"
    assert execute(schedule) == (outputs, gradients)


@given(any_schedule)
def test_every_action_runs_once_and_after_what_it_needs(schedule):
    tick = schedule.tick_of
    assert len(tick) == 2 * schedule.stages * schedule.microbatches
    cells = {(t, schedule.rank_of(a.stage), a.kind) for a, t in tick.items()}
    assert len(cells) == len(tick), "a tick holds at most one action of each kind per rank"
    last = schedule.stages - 1
    for (stage, kind, m), t in tick.items():
        if kind == "F" and stage > 0:
            assert t > tick[stage - 1, "F", m]
        if kind == "B" and stage < last:
            assert t > tick[stage + 1, "B", m]
        if kind == "B":
            assert t >= tick[stage, "F", m]


@given(any_schedule)
def test_no_slot_is_taken_before_it_is_free_and_none_is_superfluous(schedule):
    tick = schedule.tick_of
    in_flight = np.zeros((schedule.ticks, schedule.ranks), int)
    for (stage, kind, m), start in tick.items():
        if kind == "F":
            in_flight[start : tick[stage, "B", m] + 1, schedule.rank_of(stage)] += 1
    assert schedule.slots == in_flight.max()


@given(any_schedule)
def test_segments_cover_all_ticks_and_name_what_runs_in_them(schedule):
    ticks = [(t, kinds) for start, stop, kinds in schedule.segments for t in range(start, stop)]
    assert [t for t, _ in ticks] == list(range(schedule.ticks))
    for t, kinds in ticks:
        assert ("F" in kinds) == (schedule.forward[t] >= 0).any()
        assert ("B" in kinds) == (schedule.backward[t] >= 0).any()
    names = [segment.kinds for segment in schedule.segments]
    assert all(a != b for a, b in zip(names, names[1:]))


@given(st.integers(2, 8), sizes)
def test_gpipe_has_the_bubble_of_the_paper_and_keeps_every_microbatch(stages, microbatches):
    schedule = gpipe(stages, microbatches)
    ticks_each_way = microbatches + stages - 1
    assert schedule.segments == [(0, ticks_each_way, "F"), (ticks_each_way, 2 * ticks_each_way, "B")]
    assert schedule.price() == schedule.asynchronous_price() == 3 * ticks_each_way
    assert schedule.bubble() == pytest.approx((stages - 1) / ticks_each_way)
    assert (schedule.slots, schedule.input_slots, schedule.head) == (microbatches, 1, "between")


@given(sizes)
def test_accumulation_keeps_one_microbatch_and_never_waits(microbatches):
    schedule = accumulate(microbatches)
    assert schedule.forward.tolist() == schedule.backward.tolist() == [[m] for m in range(microbatches)]
    assert schedule.segments == [(0, microbatches, "FB")]
    assert (schedule.slots, schedule.input_slots, schedule.head) == (1, 1, "inside")
    assert (schedule.receive_forward == -1).all() and (schedule.use_slot_backward == -1).all()
    assert schedule.bubble() == 0


@given(st.integers(1, 6), st.integers(1, 24))
def test_another_order_of_actions_needs_no_other_code(stages, microbatches):
    schedule = one_f_one_b(stages, microbatches)
    assert schedule.slots == min(microbatches, 2 * (stages - 1) + 1)
    assert schedule.price() == 3 * (microbatches + stages - 1)


def test_tables_of_a_small_gpipe():
    schedule = gpipe(2, 2)
    assert schedule.forward.T.tolist() == [[0, 1, -1, -1, -1, -1], [-1, 0, 1, -1, -1, -1]]
    assert schedule.backward.T.tolist() == [[-1, -1, -1, -1, 0, 1], [-1, -1, -1, 0, 1, -1]]
    assert schedule.receive_forward.T.tolist() == [[-1] * 6, [0, 1, -1, -1, -1, -1]]
    assert schedule.receive_backward.T.tolist() == [[-1, -1, -1, 0, 1, -1], [-1] * 6]
    assert schedule.use_slot_forward.T.tolist() == [[-1] * 6, [-1, 0, 0, -1, -1, -1]]
    assert schedule.forward.dtype == np.int32 and not schedule.forward.flags.writeable


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F1 0B0\n1F0 1F1 1B0 1B1", "missing: 0B1 on rank 0"),
        ("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1 1B1", "repeated: 1B1 on rank 1"),
        ("0F0 0F1 1B0 0B1\n1F0 1F1 0B0 1B1", "missing: 0B0 on rank 0, 1B0 on rank 1"),
        (
            "0F0 0F1 0B0 0B1 0F2\n1F0 1F1 1B0 1B1",
            "not of this schedule, or on another rank than its stage: 0F2",
        ),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "deadlock: 0B0 waits for 1B0, 1F1 waits for 0F1"),
        ("0F0 0F1 0B0 0B1\n1B0 1F0 1F1 1B1", "deadlock: 0B0 waits for 1B0, 1B0 waits for 1F0"),
    ],
)
def test_orders_that_cannot_run_are_refused_with_their_grid(text, message):
    with pytest.raises(ScheduleError) as caught:
        Schedule("broken", 2, 2, orders(text))
    assert f"schedule 'broken': {message}" in str(caught.value)
    assert f"rank 1: {text.splitlines()[1]}" in str(caught.value)


def test_sizes_and_texts_that_are_no_schedule_are_refused():
    with pytest.raises(ScheduleError, match="2 stages and 0 microbatches do not fit 2 ranks"):
        gpipe(2, 0)
    with pytest.raises(ScheduleError, match="'0W1' is not an action"):
        Action.parse("0W1")
    with pytest.raises(ConfigError, match="pipeline.schedule='gpip' is unknown; did you mean 'gpipe'"):
        by_name("gpip", 2, 4)


def test_with_one_stage_every_name_is_accumulation():
    assert by_name("gpipe", 1, 4) == accumulate(4)
    assert by_name("gpipe", 2, 4) == gpipe(2, 4)
    assert hash(gpipe(2, 4)) == hash(gpipe(2, 4))


@given(st.builds(Action, stage=st.integers(0, 99), kind=st.sampled_from("FB"), microbatch=st.integers(0, 999)))
def test_an_action_reads_what_it_prints(action):
    assert Action.parse(str(action)) == action
