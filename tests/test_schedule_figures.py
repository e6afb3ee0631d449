"""What the named schedules cost: the closed forms of their papers, and our own for what papers leave out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.schedules import (
    SCHEDULES,
    Costs,
    accumulate,
    by_name,
    figures,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)

GRID = [(ranks, microbatches) for ranks in range(2, 9) for microbatches in range(1, 21)]
RANKS, MICROBATCHES, VIRTUAL = range(1, 9), range(1, 21), range(1, 5)
EQUAL = Costs(forward=1, backward=2, weights=1)  # F, B and W take 1 each


def idle(bubble: float, microbatches: int) -> float:
    """Time in which a rank does nothing; its work is 3 for each microbatch."""
    return 3 * microbatches * bubble / (1 - bubble)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_exists_for_any_sizes(name):
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            for virtual in VIRTUAL if name == "interleaved" else (1,):
                schedule = by_name(name, ranks, microbatches, virtual)
                assert (schedule.ranks, schedule.microbatches) == (ranks, microbatches)
                assert len(schedule.tick_of) == len(schedule.kinds) * schedule.stages * microbatches


@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
def test_gpipe_and_1f1b_have_the_bubble_of_the_papers_in_lockstep_too(build):
    for ranks, microbatches in GRID:
        priced = figures(build(ranks, microbatches))
        assert priced.asynchronous_bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        assert priced.lockstep_bubble == pytest.approx(priced.asynchronous_bubble)


@pytest.mark.parametrize("virtual", VIRTUAL)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(virtual):
    for ranks, microbatches in GRID:
        priced = figures(interleaved(ranks, microbatches, virtual))
        if microbatches >= ranks:
            expected = (ranks - 1) / (virtual * microbatches + ranks - 1)
        else:  # a stage waits until its rank's last one has been reached: P rounds, whatever M
            expected = 1 - microbatches / (ranks + (microbatches - 1) / virtual)
        assert priced.asynchronous_bubble == pytest.approx(expected)
        assert priced.lockstep_bubble == pytest.approx(expected)


def test_zero_bubble_idles_a_third_of_1f1b_and_twice_that_in_lockstep():
    for ranks, microbatches in GRID:
        priced = figures(zero_bubble(ranks, microbatches), EQUAL)
        too_few = max(ranks - microbatches, 0)
        assert idle(priced.asynchronous_bubble, microbatches) == pytest.approx(ranks - 1 + too_few)
        assert idle(priced.lockstep_bubble, microbatches) == pytest.approx(2 * (ranks - 1) + too_few)
        if microbatches >= ranks:
            assert priced.asynchronous_bubble == pytest.approx((ranks - 1) / (3 * microbatches + ranks - 1))
            alternating = figures(one_f_one_b(ranks, microbatches), EQUAL).asynchronous_bubble
            assert 3 * idle(priced.asynchronous_bubble, microbatches) == pytest.approx(idle(alternating, microbatches))


def test_the_v_idles_as_zero_bubble_does_and_a_quarter_more_in_lockstep():
    for ranks, microbatches in GRID:
        priced = figures(zero_bubble_v(ranks, microbatches), EQUAL)
        if microbatches >= ranks:
            assert idle(priced.asynchronous_bubble, microbatches) == pytest.approx(ranks - 1)
            assert idle(priced.lockstep_bubble, microbatches) == pytest.approx(2.5 * (ranks - 1))


def test_the_v_has_its_first_and_last_stage_on_rank_0_and_holds_as_much_on_every_rank():
    for ranks, microbatches in GRID:
        schedule = zero_bubble_v(ranks, microbatches)
        assert schedule.rank_of(0) == schedule.rank_of(2 * ranks - 1) == 0
        assert [schedule.placement.count(rank) for rank in range(ranks)] == [2] * ranks
        held = figures(schedule).activations
        assert max(held) == min(microbatches, 1.5 * ranks)
        if microbatches <= ranks or microbatches >= 2 * ranks:
            assert len(set(held)) == 1


def test_gpipe_keeps_every_microbatch_and_runs_its_head_between():
    for ranks, microbatches in GRID:
        schedule, each_way = gpipe(ranks, microbatches), microbatches + ranks - 1
        assert schedule.segments == [(0, each_way, "F"), (each_way, 2 * each_way, "B")]
        assert (schedule.slots, schedule.message_slots) == ({"FB": microbatches}, {"F": 1, "B": 1})
        assert schedule.head == "between"
        assert figures(schedule).activations == (microbatches,) * ranks


def test_1f1b_keeps_no_more_than_the_pipeline_is_long():
    for ranks, microbatches in GRID:
        schedule = one_f_one_b(ranks, microbatches)
        assert schedule.slots == {"FB": min(microbatches, 2 * (ranks - 1) + 1)}
        most = tuple(min(microbatches, 2 * (ranks - 1 - rank) + 1) for rank in range(ranks))
        assert figures(schedule).activations == most


def test_zero_bubble_keeps_for_w_what_1f1b_keeps_for_later_microbatches():
    for ranks, microbatches in GRID:
        most = tuple(min(microbatches, 2 * ranks - 1 - rank) for rank in range(ranks))
        assert figures(zero_bubble(ranks, microbatches)).activations == most


def test_each_stage_sends_what_it_made_to_its_neighbours():
    assert figures(one_f_one_b(4, 8)).sends == (8, 16, 16, 8)
    assert figures(interleaved(4, 8, 2)).sends == (24, 32, 32, 24)
    assert figures(zero_bubble_v(4, 8)).sends == (16, 32, 32, 16), "the V turns round inside the last rank"
    assert figures(accumulate(8)).sends == (0,)


@given(st.integers(1, 8))
def test_accumulation_keeps_one_microbatch_and_never_waits(microbatches):
    schedule = accumulate(microbatches)
    rows = [[m] for m in range(microbatches)]
    assert {kind: table.tolist() for kind, table in schedule.microbatch.items()} == {"F": rows, "B": rows}
    assert schedule.segments == [(0, microbatches, "FB")]
    assert (schedule.slots, schedule.head, schedule.arrival) == ({"FB": 1}, "inside", {})
    assert (schedule.message["F"] == -1).all() and (schedule.message["B"] == -1).all()
    assert figures(schedule, Costs(send=5)).lockstep_bubble == 0
