"""What the named schedules cost: the closed forms of their papers, and our own for what papers leave out."""

import functools
import itertools
import json
import pathlib
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.schedules import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
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
from parallax.schedules.pricing import least_bubble, least_held, start_times

ROOT = pathlib.Path(__file__).parents[2]
# A schedule does not change, and several tests look at the same ones.
gpipe, one_f_one_b, interleaved, zero_bubble, zero_bubble_v, dualpipe_v = (
    functools.cache(build) for build in (gpipe, one_f_one_b, interleaved, zero_bubble, zero_bubble_v, dualpipe_v)
)
GRID = [(ranks, microbatches) for ranks in range(2, 9) for microbatches in range(1, 21)]
RANKS, MICROBATCHES, VIRTUAL = range(1, 9), range(1, 21), range(1, 5)
EQUAL = Costs(forward=1, backward=2, weights=1)  # F, B and W take 1 each


def idle(bubble: float, microbatches: int) -> float:
    """Time in which a rank does nothing; its work is 3 for each microbatch."""
    return 3 * microbatches * bubble / (1 - bubble)


@pytest.mark.fast(3)
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


@pytest.mark.parametrize("name", SCHEDULES)
def test_closed_forms_are_lower_bounds_of_the_bubble_and_of_the_slots(name):
    """Those of GPipe and 1F1B are exact, as are the slots of both zero bubbles."""
    for ranks, microbatches in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 5, 8, 17)):
        for virtual in (2, 4) if name == "interleaved" else (1,):
            sizes = name, ranks, microbatches, virtual
            schedule = by_name(*sizes)
            held = [schedule.slots.get(pool, 0) / schedule.virtual for pool in ("F to B", "B to W")]
            bounds = least_held(*sizes)
            assert bounds[1] <= held[1] and (bounds[0] <= held[0] if name == "interleaved" else bounds[0] == held[0])
            for costs in (Costs(), EQUAL, Costs(1, 3, 1.2), Costs(3, 2, 2), Costs(1, 2, 0)):
                found, bound = figures(schedule, costs).lockstep_bubble, least_bubble(*sizes, costs)
                exact = name in ("gpipe", "one_f_one_b") or ranks == 1
                assert bound == pytest.approx(found, abs=1e-12) if exact else bound <= found + 1e-12


@pytest.mark.fast(2)
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


def idle_of_zero_bubble_v(ranks):
    """In lockstep, for as many microbatches as ranks or more."""
    return (5 * ranks - 2 - ranks % 2) / 4


def test_the_v_idles_half_of_what_it_idles_with_w_at_fixed_moments():
    for ranks, microbatches in GRID:
        priced = figures(zero_bubble_v(ranks, microbatches), EQUAL)
        if microbatches >= ranks:
            assert idle(priced.lockstep_bubble, microbatches) == pytest.approx(idle_of_zero_bubble_v(ranks))
        if microbatches >= 2 * ranks:
            assert idle(priced.asynchronous_bubble, microbatches) <= (3 * ranks - 2) / 4 + 1e-9


def test_the_v_has_its_first_and_last_stage_on_rank_0_and_holds_at_most_three_halves_of_its_ranks():
    for ranks, microbatches in GRID:
        schedule = zero_bubble_v(ranks, microbatches)
        assert schedule.rank_of(0) == schedule.rank_of(2 * ranks - 1) == 0
        assert [schedule.placement.count(rank) for rank in range(ranks)] == [2] * ranks
        assert max(figures(schedule).activations) <= min(microbatches, 1.5 * ranks - 0.5)
        slots = {"F to B": 2 * ranks, "F to W": 3 * ranks - 1, "B to W": ranks}
        assert all(count <= min(2 * microbatches, slots[pool]) for pool, count in schedule.slots.items())
        if microbatches >= 2 * ranks:
            assert schedule.slots == slots
        assert schedule.message_slots == {"F": 1, "B": 1} and schedule.exit_slots == 1


def test_dualpipe_v_idles_least_of_all_with_two_stages_in_lockstep():
    for ranks, microbatches in GRID:
        schedule = dualpipe_v(ranks, microbatches)
        priced = figures(schedule, EQUAL)
        assert schedule.slots["F to B"] == min(2 * microbatches, 2 * ranks + 1)
        assert schedule.slots["B to W"] == min(2 * microbatches, ranks)
        assert max(priced.activations) <= min(microbatches, 1.5 * ranks)
        assert schedule.message_slots == {"F": 1, "B": 1} and schedule.exit_slots == 1
        if microbatches > ranks:
            assert idle(priced.lockstep_bubble, microbatches) == pytest.approx(ranks - 0.5)
            assert idle(priced.asynchronous_bubble, microbatches) == pytest.approx(ranks - 1)
            others = (one_f_one_b, zero_bubble, zero_bubble_v, lambda *sizes: interleaved(*sizes, 2))
            least = min(figures(build(ranks, microbatches), EQUAL).lockstep_time for build in others)
            assert priced.lockstep_time <= least and (ranks == 2 or priced.lockstep_time < least)


def test_in_dualpipe_v_forward_and_backward_of_a_tick_are_of_the_two_stages_of_a_rank_and_of_two_microbatches():
    for ranks, microbatches in GRID:
        schedule = dualpipe_v(ranks, microbatches)
        where, (forward, backward) = schedule.both, (schedule.microbatch[kind] for kind in "FB")
        assert where.any() == (microbatches > ranks)
        assert (forward[where] > backward[where]).all()
        assert (schedule.chunk["F"][where] != schedule.chunk["B"][where]).all()


def test_what_one_pass_hides_is_saved_in_each_of_its_ticks():
    schedule, hidden = dualpipe_v(4, 8), 0.5
    plain, priced = (figures(schedule, EQUAL._replace(hidden=saved)) for saved in (0, hidden))
    ticks = schedule.both.any(axis=1).sum()  # in each of them a rank with both is the slowest, but for those with W
    longest = start_times(schedule, EQUAL, asynchronous=False)
    assert len(longest) == len(schedule.tick_of) and priced.lockstep_time < plain.lockstep_time
    assert plain.lockstep_time - priced.lockstep_time <= ticks * hidden / 2 + 1e-9
    work = 3 * 8 - hidden / 2 * schedule.both.sum() / 4
    assert priced.lockstep_bubble == pytest.approx(1 - work / priced.lockstep_time)
    apart = figures(zero_bubble_v(4, 8), EQUAL)
    assert figures(zero_bubble_v(4, 8), EQUAL._replace(hidden=hidden)) == apart, "nothing of it is one pass"


def test_gpipe_keeps_every_microbatch_and_runs_its_head_between():
    for ranks, microbatches in GRID:
        schedule, each_way = gpipe(ranks, microbatches), microbatches + ranks - 1
        assert schedule.segments == [(0, each_way, "F"), (each_way, 2 * each_way, "B")]
        assert (schedule.slots, schedule.message_slots) == ({"F to B": microbatches}, {"F": 1, "B": 1})
        assert schedule.head == "between"
        assert figures(schedule).activations == (microbatches,) * ranks


def test_1f1b_keeps_no_more_than_the_pipeline_is_long():
    for ranks, microbatches in GRID:
        schedule = one_f_one_b(ranks, microbatches)
        assert schedule.slots == {"F to B": min(microbatches, 2 * (ranks - 1) + 1)}
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
    assert (schedule.slots, schedule.head, schedule.arrival) == ({"F to B": 1}, "inside", {})
    assert (schedule.message["F"] == -1).all() and (schedule.message["B"] == -1).all()
    assert figures(schedule, Costs(send=5)).lockstep_bubble == 0


# ---- against the order of the paper


def zb_v_as_published(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2023, section 6): forwards until each rank has work of every kind, then F, B and W of its first
    and its second stage in turn; at the end B alone until nobody waits, then every W that is left."""
    orders = []
    for rank in range(ranks):
        stages, done, order = (rank, 2 * ranks - 1 - rank), dict.fromkeys(("F0", "F1", "B0", "B1", "W0", "W1"), 0), []

        def run(*passes, own=stages, done=done, order=order):
            for one in passes:
                order.append(Action(own[int(one[1])], one[0], done[one]))
                done[one] += 1

        last = max(microbatches, 2 * ranks - 1)  # fewer microbatches run as the first of so many
        run(*["F0"] * (2 * (ranks - rank) - 1), *["F1", "F0"] * rank, *["F1", "B1", "W1"] * (ranks - rank))
        while done["F1"] < last:
            run(*["F0"] * (done["F0"] < last), "B0", "W0", "F1", "B1", "W1")
        run(*["B0", "B1"] * rank, *["B0", "W0"] * (ranks - rank))
        run(*["W1"] * (last - done["W1"]), *["W0"] * (last - done["W0"]))
        orders.append(tuple(action for action in order if action.microbatch < microbatches))
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule("zb_v", placement, microbatches, tuple(orders))


def test_zb_v_as_published_holds_less_than_ours_and_idles_less_asynchronous_but_more_as_executed():
    for ranks in range(2, 9):
        for microbatches in range(2 * ranks - 1, 21):
            published, ours = (
                figures(build(ranks, microbatches), EQUAL) for build in (zb_v_as_published, zero_bubble_v)
            )
            assert published.activations == (ranks,) * ranks and max(ours.activations) <= 1.5 * ranks - 0.5
            assert idle(published.asynchronous_bubble, microbatches) == pytest.approx((ranks - 1) / 2)
            assert ours.asynchronous_time >= published.asynchronous_time - 1e-9
            assert idle(published.lockstep_bubble, microbatches) == pytest.approx(3.5 * (ranks - 1))
            assert idle(ours.lockstep_bubble, microbatches) == pytest.approx(idle_of_zero_bubble_v(ranks))


def test_zb_v_as_published_never_idles_between_a_ranks_first_action_and_its_last():
    """The property that gives it its name, and that makes the order above the paper's."""
    schedule = zb_v_as_published(4, 8)
    starts = start_times(schedule, EQUAL, asynchronous=True)
    for rank in range(4):
        own = [start for action, start in starts.items() if schedule.rank_of(action.stage) == rank]
        assert max(own) + 0.5 - min(own) == 3 * 8  # two stages, each of half the cost


def dualpipe_v_as_published(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV in the order of its authors' repository, which PyTorch has, too: a whole backward pass is B, then W."""
    orders = []
    for rank in range(ranks):
        stages, done, order, later = (rank, 2 * ranks - 1 - rank), Counter(), [], []

        def run(*passes, own=stages, done=done, order=order, later=later):
            for kind, chunk in passes:
                if kind == "W" and later:
                    order.append(later.pop(0))
                if kind == "W":
                    continue
                order.append(Action(own[int(chunk)], kind.upper()[0], done[kind.upper()[0], chunk]))
                done[kind.upper()[0], chunk] += 1
                weights = order[-1]._replace(kind="W")
                if kind == "b":  # W of it comes later
                    later.append(weights)
                elif kind == "B":
                    order.append(weights)

        left, half = ranks - rank - 1, (rank + 1) // 2
        run(*["F0"] * (2 * left), *["F0", "F1"] * (rank + 1), *["b1", "W.", "F1"] * left)
        run(*["F0", "B1", "F1", "B0"] * (microbatches - 2 * ranks + rank + 1), *["B1", "F1", "B0"] * left)
        whole = 2 * half + (rank + 1) % 2
        turns = ["1", "0"] * (rank + 1)
        run(*("B" + chunk for chunk in turns[:whole]), *("b" + chunk for chunk in turns[whole:]))
        run(*["W.", "b0"] * left, *["W."] * (rank + 1))
        orders.append(tuple(order))
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule("dualpipe_v", placement, microbatches, tuple(orders), joint=True)


def test_dualpipe_v_as_published_holds_less_than_ours_and_idles_more_as_executed():
    for ranks in range(2, 9):
        for microbatches in range(2 * ranks, 21):
            published, ours = (
                figures(build(ranks, microbatches), EQUAL) for build in (dualpipe_v_as_published, dualpipe_v)
            )
            assert max(published.activations) == ranks + 0.5, "PP+1 stages' of 2P stages"
            assert max(ours.activations) == min(microbatches, 1.5 * ranks)
            for bubble, theirs, own in (("asynchronous_bubble", (ranks - 1) / 2, ranks - 1),
                                        ("lockstep_bubble", 2.5 * (ranks - 1), ranks - 0.5)):  # fmt: skip
                assert idle(getattr(published, bubble), microbatches) == pytest.approx(theirs)
                assert idle(getattr(ours, bubble), microbatches) == pytest.approx(own)


def test_where_both_schedules_of_the_v_are_quoted_the_figures_are_these():
    shown = []
    for build in (zero_bubble_v, zb_v_as_published):
        priced = figures(build(4, 8), EQUAL)
        bubbles = priced.lockstep_bubble, priced.asynchronous_bubble
        shown.append([f"{100 * bubble:.1f} %" for bubble in bubbles] + [f"{max(priced.activations):g}"])
    assert shown == [["15.8 %", "9.4 %", "5.5"], ["30.4 %", "5.9 %", "4"]]
    page = (ROOT / "docs" / "measured" / "pipeline.md").read_text()
    for lockstep, free, held in shown:
        assert f"| {lockstep} | {free} | {held} |" in page


# ---- what pages lead with


def texts() -> dict[str, str]:
    """All pages, and the notebooks' cells with what they print."""
    found = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))}
    found["benchmarks/README.md"] = (ROOT / "benchmarks" / "README.md").read_text()
    for path in ROOT.glob("notebooks/*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        printed = [output.get("text", "") for cell in cells for output in cell.get("outputs", ())]
        markdown = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
        found[path.name] = "\n\n".join("".join(text) for text in markdown + printed)
    return found


def test_pages_lead_with_the_bubble_that_is_executed():
    """A row or paragraph that speaks of asynchronous schedules, as papers count, speaks of lockstep before."""
    looked_at = 0
    for name, text in texts().items():
        for unit in re.split(r"\n\s*\n|\n(?=\|)", text):
            words = unit.lower()
            if "asynchronous" in words and re.search(r"bubble|lockstep", words):
                looked_at += 1
                assert "lockstep" in words.partition("asynchronous")[0], (name, unit)
    assert looked_at >= 8
