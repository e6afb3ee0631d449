"""Schedules: the laws that any of them keeps, the closed forms of those we have, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_schedules import needs, random_schedules

from parallax.errors import ConfigError
from parallax.schedules import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    ScheduleError,
    accumulate,
    by_name,
    dualpipe_v,
    figures,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)

sizes = st.integers(1, 8)
POOLS = {"F to B": "FB", "F to W": "FBW", "B to W": "BW"}  # who uses a slot, from when it is taken to when it is free

any_schedule = st.one_of(
    random_schedules(),
    st.builds(accumulate, sizes),
    st.builds(interleaved, sizes, st.integers(1, 12), st.integers(1, 4)),
    st.builds(
        lambda build, ranks, microbatches: build(ranks, microbatches),
        st.sampled_from((gpipe, one_f_one_b, zero_bubble, zero_bubble_v, dualpipe_v)),
        sizes,
        st.integers(1, 12),
    ),
)


def orders(text: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, line.split())) for line in text.strip().splitlines())


class Rank:
    """What one rank holds while the tables are executed: stages, slots of each pool, messages."""

    def __init__(self, schedule: Schedule, rank: int):
        self.stages = [stage for stage, at in enumerate(schedule.placement) if at == rank]
        self.pools = {pool: [None] * count for pool, count in schedule.slots.items()}
        self.messages = {kind: [None] * count for kind, count in schedule.message_slots.items()}


def run_action(schedule: Schedule, rank: Rank, column: int, tick: int, kind: str, made: dict) -> str | None:
    """Do what the tables say for one rank, tick and kind; what it made is sent on."""
    microbatch = schedule.microbatch[kind][tick, column]
    if microbatch < 0:
        return None
    stage = rank.stages[schedule.chunk[kind][tick, column]]
    slot = {pool: schedule.slot[pool][kind][tick, column] for pool in schedule.pools if kind in POOLS[pool]}
    if kind == "W":
        x, dy = rank.pools["F to W"][slot["F to W"]], rank.pools["B to W"][slot["B to W"]]
        made[stage, "W", microbatch] = f"d{stage}({x};{dy})"
        return None
    at = schedule.message[kind][tick, column]
    read = rank.messages[kind][at] if at >= 0 else f"{'embed' if kind == 'F' else 'head'}{microbatch}"
    for pool in {"F to B", "F to W"} & set(slot) if kind == "F" else {"B to W"} & set(slot):
        rank.pools[pool][slot[pool]] = read
    x = rank.pools["F to B"][slot["F to B"]]
    made[stage, kind, microbatch] = f"{stage}({x})" if kind == "F" else f"{stage}'({x};{read})"
    return made[stage, kind, microbatch]


def execute(schedule: Schedule) -> dict[tuple, str]:
    """Run the tables alone, on names instead of arrays: what each action made of what it read. If F and B are one pass,
    B comes first here: together with the order of `needs` that shows that neither reads what the other writes."""
    ranks = [Rank(schedule, rank) for rank in range(schedule.ranks)]
    made: dict[tuple, str] = {}
    sent: dict[str, list] = {}

    def send(kinds: str, tick: int) -> None:
        for (kind, shift), slots in schedule.arrival.items():
            for column in np.flatnonzero(slots[tick] >= 0) if kind in kinds else ():
                ranks[column].messages[kind][slots[tick, column]] = sent[kind][(column - shift) % schedule.ranks]

    for tick in range(schedule.ticks):
        for kind in "BFW" if schedule.joint else schedule.kinds:
            if kind == "B" and schedule.late_gradients:
                send("B", tick)
            if kind in schedule.kinds:
                sent[kind] = [run_action(schedule, rank, column, tick, kind, made) for column, rank in enumerate(ranks)]
        send("F" if schedule.late_gradients else "FB", tick)
    return made


@given(any_schedule)
def test_executing_the_tables_gives_what_a_loop_over_stages_gives(schedule):
    made = {}
    for m in range(schedule.microbatches):
        inputs, x = {}, f"embed{m}"
        for stage in range(schedule.stages):
            inputs[stage] = x
            x = made[stage, "F", m] = f"{stage}({x})"
        dy = f"head{m}"
        for stage in reversed(range(schedule.stages)):
            if schedule.split:
                made[stage, "W", m] = f"d{stage}({inputs[stage]};{dy})"
            dy = made[stage, "B", m] = f"{stage}'({inputs[stage]};{dy})"
    assert execute(schedule) == made


@given(any_schedule)
def test_every_action_runs_once_and_after_what_it_needs(schedule):
    tick = schedule.tick_of
    assert len(tick) == len(schedule.kinds) * schedule.stages * schedule.microbatches
    cells = {(t, schedule.rank_of(a.stage), a.kind) for a, t in tick.items()}
    assert len(cells) == len(tick), "a tick holds at most one action of each kind per rank"
    for action, t in tick.items():
        for need in needs(action, schedule.stages):
            same_rank = schedule.rank_of(need.stage) == schedule.rank_of(action.stage)
            in_one_tick = same_rank and "FBW".index(need.kind) < "FBW".index(action.kind)
            in_one_tick &= not (schedule.joint and action.kind == "B")
            assert t >= tick[need] + (not in_one_tick)
            if need.stage != action.stage:
                assert t > tick[need], "what comes from another stage comes at the end of its tick"


@given(any_schedule)
def test_no_slot_is_taken_before_it_is_free_and_none_is_superfluous(schedule):
    tick = schedule.tick_of
    assert set(schedule.slots) == (set(POOLS) if schedule.split else {"F to B"})
    for pool, (first, *_, last) in {pool: POOLS[pool] for pool in schedule.slots}.items():
        held = np.zeros((schedule.ticks, schedule.ranks), int)
        holder = {}
        for action, start in tick.items():
            if action.kind == first:
                rank, stop = schedule.rank_of(action.stage), tick[action._replace(kind=last)]
                held[start : stop + 1, rank] += 1
                slot = schedule.slot[pool][first][start, rank]
                assert schedule.slot[pool][last][stop, rank] == slot
                taken = {(t, rank, slot) for t in range(start, stop + 1)}
                assert not taken & holder.keys()
                holder |= dict.fromkeys(taken, action)
        assert schedule.slots[pool] == held.max()


@given(any_schedule)
def test_the_head_reads_each_output_of_the_last_stage_when_it_is_there(schedule):
    last = schedule.stages - 1
    exits = {t: a.microbatch for a, t in schedule.tick_of.items() if (a.stage, a.kind) == (last, "F")}
    assert schedule.exit_microbatch.tolist() == [exits.get(t, -1) for t in range(schedule.ticks)]
    waiting = [None] * schedule.exit_slots
    for tick in range(schedule.ticks):
        if (slot := schedule.exit_slot["F"][tick]) >= 0:
            waiting[slot] = exits[tick]
        if (slot := schedule.exit_slot["B"][tick]) >= 0:
            assert schedule.tick_of[Action(last, "B", waiting[slot])] == tick


@given(any_schedule)
def test_segments_cover_all_ticks_and_compile_each_kind_once(schedule):
    ticks = [(t, kinds) for start, stop, kinds in schedule.segments for t in range(start, stop)]
    assert [t for t, _ in ticks] == list(range(schedule.ticks))
    for t, kinds in ticks:
        assert {kind for kind in schedule.kinds if (schedule.microbatch[kind][t] >= 0).any()} <= set(kinds)
    assert sorted("".join(segment.kinds for segment in schedule.segments)) == sorted(schedule.kinds)


part, send_time = st.sampled_from([0, 1e-3, 0.3, 1]), st.sampled_from([0, 1e-6, 0.1, 2])


@given(any_schedule, st.floats(0.5, 3), st.floats(0.5, 3), part, send_time)
def test_waiting_less_and_sending_faster_never_takes_longer(schedule, forward, backward, part, send):
    costs = Costs(forward, backward, part * backward, send)
    priced, free = figures(schedule, costs), figures(schedule, costs._replace(send=0))
    work = schedule.microbatches * (forward + backward)
    rounding = 1e-9 * priced.lockstep_time
    assert work <= free.asynchronous_time + rounding
    assert free.asynchronous_time <= priced.asynchronous_time + rounding <= priced.lockstep_time + 2 * rounding
    assert priced.lockstep_time == pytest.approx(free.lockstep_time + schedule.ticks * send * (schedule.ranks > 1))


def test_in_gpipe_a_message_delays_the_first_microbatch_on_each_link_both_ways():
    for ranks, microbatches in [(2, 1), (4, 8), (5, 3)]:
        priced = figures(gpipe(ranks, microbatches), Costs(send=0.25))
        assert priced.asynchronous_time == 3 * (microbatches + ranks - 1) + 2 * (ranks - 1) * 0.25


@given(any_schedule)
def test_gradients_wait_for_the_next_tick_where_its_f_can_hide_them_and_nothing_else_does(schedule):
    beside = any({"F", "B"} <= set(kinds) for *_, kinds in schedule.segments)
    assert schedule.late_gradients == (beside and schedule.ranks > 1 and not schedule.split and not schedule.joint)
    for (kind, shift), slots in schedule.arrival.items():
        for tick, column in np.argwhere(slots >= 0):
            sender = (column - shift) % schedule.ranks
            made_in = tick - (kind == "B" and schedule.late_gradients)
            assert schedule.microbatch[kind][made_in, sender] >= 0


def test_tables_of_a_small_1f1b():
    schedule = one_f_one_b(2, 2)
    assert schedule.late_gradients
    assert schedule.microbatch["B"].T.tolist() == [[-1, -1, 0, 1], [-1, 0, 1, -1]]
    assert {route: table.T.tolist() for route, table in schedule.arrival.items()} == {
        ("F", 1): [[-1] * 4, [0, 0, -1, -1]],
        ("B", 1): [[-1, -1, 0, 0], [-1] * 4],
    }


def test_tables_of_a_small_gpipe():
    schedule = gpipe(2, 2)
    assert schedule.microbatch["F"].T.tolist() == [[0, 1, -1, -1, -1, -1], [-1, 0, 1, -1, -1, -1]]
    assert schedule.microbatch["B"].T.tolist() == [[-1, -1, -1, -1, 0, 1], [-1, -1, -1, 0, 1, -1]]
    assert {route: table.T.tolist() for route, table in schedule.arrival.items()} == {
        ("F", 1): [[-1] * 6, [0, 0, -1, -1, -1, -1]],
        ("B", 1): [[-1, -1, -1, 0, 0, -1], [-1] * 6],
    }
    assert schedule.message["F"].T.tolist() == [[-1] * 6, [-1, 0, 0, -1, -1, -1]]
    assert schedule.microbatch["F"].dtype == np.int32 and not schedule.microbatch["F"].flags.writeable


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F1 0B0\n1F0 1F1 1B0 1B1", "missing: 0B1 on rank 0"),
        ("0F0 0F1 0B0 0B1 0W0 0W1\n1F0 1F1 1B0 1B1 1W1", "missing: 1W0 on rank 1"),
        ("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 >1B1< >1B1<", "repeated: 1B1 on rank 1"),
        ("0F0 0F1 >0B0< 0B1 >0F2<\n1F0 1F1 >0B0< 1B0 1B1", "not of this schedule, or on another rank"),
        ("0F0 >0B0< 0F1 0B1\n1F0 >1F1< 1B0 1B1", "deadlock: 0B0 waits for 1B0, 1F1 waits for 0F1"),
        ("0F0 0F1 >0B0< 0B1\n>1B0< 1F0 1F1 1B1", "deadlock: 0B0 waits for 1B0, 1B0 waits for 1F0"),
        ("0F0 0F1 >0W0< 0B0 0B1 0W1\n1F0 1F1 1B0 1B1 1W0 1W1", "deadlock: 0W0 waits for 0B0"),
    ],
)
def test_orders_that_cannot_run_are_refused_with_their_grid(text, message):
    with pytest.raises(ScheduleError) as caught:
        Schedule("broken", (0, 1), 2, orders(text.replace(">", "").replace("<", "")))
    assert f"schedule 'broken': {message}" in str(caught.value)
    grid = [line.split()[2:] for line in str(caught.value).splitlines()[2:]]
    assert [[cell for cell in row if cell != "."] for row in grid] == [line.split() for line in text.splitlines()]


def test_what_one_pass_reads_it_cannot_make():
    order = orders("0F0 0B0 0F1 0B1")
    assert str(Schedule("two", (0,), 2, order)).endswith("rank 0 0F0+0B0 0F1+0B1")
    later = Schedule("one", (0,), 2, orders("0F0 0F1 0B0 0B1"), joint=True)
    assert str(later).endswith("rank 0     0F0 0F1&0B0     0B1") and later.both.T.tolist() == [[False, True, False]]
    assert Schedule("one", (0,), 2, order, joint=True).ticks == 4
    with pytest.raises(ScheduleError, match="0B0 in tick 0 reads 0F0 of tick 0, so tick 1 is its soonest") as caught:
        Schedule("one", (0,), 2, order, starts=((0, 0, 1, 2),), joint=True)
    assert "0F0&>0B0<" in str(caught.value)


def test_sizes_and_texts_that_are_no_schedule_are_refused():
    with pytest.raises(ScheduleError, match="2 stages and 0 microbatches do not fit 2 ranks"):
        gpipe(2, 0)
    with pytest.raises(ScheduleError, match="'0X1' is not an action"):
        Action.parse("0X1")
    with pytest.raises(ScheduleError, match="'0f1' is not an action"):
        Action.parse("0f1")


def test_an_unknown_name_is_refused_with_the_nearest_and_with_what_else_can_be_written():
    with pytest.raises(ConfigError, match="pipeline.schedule='gpip' is unknown; did you mean 'gpipe'.*a .csv file"):
        by_name("gpip", 2, 4)
    with pytest.raises(ConfigError, match="pipeline.virtual=2 does nothing with pipeline.schedule='gpipe'"):
        by_name("gpipe", 2, 4, virtual=2)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=-1), "forward=-1 is not a valid time"),
        (Costs(send=float("nan")), "send=nan is not a valid time"),
        (Costs(backward=float("inf")), "backward=inf is not a valid time"),
        (Costs(weights=3), "weights=3 is more than backward=2"),
        (Costs(0, 0, 0), "there is no work"),
        (Costs(hidden=1.5), "hidden=1.5 is more than the shorter of F, 1, and B, 2"),
    ],
)
def test_costs_that_cannot_be_are_refused(costs, message):
    with pytest.raises(ConfigError, match=message):
        figures(gpipe(2, 2), costs)


@given(st.sampled_from(sorted(SCHEDULES)), sizes)
def test_with_one_rank_every_name_is_accumulation(name, microbatches):
    assert by_name(name, 1, microbatches) == accumulate(microbatches)


def test_equal_schedules_are_one_key():
    assert by_name("gpipe", 2, 4) == gpipe(2, 4)
    assert hash(gpipe(2, 4)) == hash(gpipe(2, 4))


@given(st.builds(Action, stage=st.integers(0, 99), kind=st.sampled_from("FBW"), microbatch=st.integers(0, 999)))
def test_an_action_reads_what_it_prints(action):
    assert Action.parse(str(action)) == action
