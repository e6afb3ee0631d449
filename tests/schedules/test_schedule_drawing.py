"""Drawings of schedules, read as XML: everything is drawn once, to scale, and inside the picture."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedules

from parallax.schedules import SCHEDULES, Costs, Schedule, accumulate, by_name, figures, gantt, gpipe

COSTS = [Costs(), Costs(forward=1, backward=2.5, weights=0.5, send=0.25), Costs(forward=3, backward=1, weights=1)]
any_schedule = st.one_of(
    random_schedules(),
    st.builds(by_name, st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12)),
)


class Rect:
    """A rectangle, as numbers."""

    def __init__(self, element: ElementTree.Element):
        self.x, self.y, self.width, self.height = (float(element.get(key)) for key in ("x", "y", "width", "height"))
        self.fill = element.get("fill")
        self.title = "".join(element.itertext())


def parse(text: str) -> tuple[ElementTree.Element, dict[str, list[Rect]]]:
    """The root, and the rectangles by their class."""
    root = ElementTree.fromstring(text)
    rects: dict[str, list[Rect]] = {}
    for element in root.iter("{http://www.w3.org/2000/svg}rect"):
        if element.get("class"):
            rects.setdefault(element.get("class"), []).append(Rect(element))
    return root, rects


@given(any_schedule, st.sampled_from(COSTS), st.booleans())
def test_each_action_is_one_rectangle_to_scale_and_none_overlap(schedule, costs, asynchronous):
    _, rects = parse(gantt(schedule, costs, asynchronous=asynchronous))
    time_of = costs.of(schedule)
    assert sorted(rect.title.split(":")[0] for rect in rects["action"]) == sorted(map(str, schedule.tick_of))
    priced = figures(schedule, costs)
    end = priced.asynchronous_time if asynchronous else priced.lockstep_time
    assert len(rects["rank"]) == schedule.ranks
    scale = rects["rank"][0].width / end
    for rect in rects["action"]:
        kind = next(letter for letter in rect.title if letter in "FBW")
        assert rect.width == pytest.approx(time_of[kind] * scale, rel=1e-3, abs=2e-3)
    for row in rects["rank"]:
        cells = sorted((rect.x, rect.width) for rect in rects["action"] if rect.y == row.y)
        edges = [row.x, *(edge for x, width in cells for edge in (x, x + width)), row.x + row.width]
        assert all(b >= a - 0.02 for a, b in zip(edges, edges[1:]))


@given(any_schedule, st.sampled_from(COSTS), st.booleans())
def test_everything_is_inside_the_picture(schedule, costs, asynchronous):
    root, rects = parse(gantt(schedule, costs, asynchronous=asynchronous))
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in [*rects["action"], *rects["rank"]]:
        assert rect.x >= 0 and rect.x + rect.width <= width
        assert rect.y >= 0 and rect.y + rect.height <= height
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(text.get("x")) <= width and 0 <= float(text.get("y")) <= height


def test_the_idle_part_of_the_picture_is_the_bubble():
    for name in SCHEDULES:
        schedule = by_name(name, 4, 8)
        for asynchronous in (False, True):
            _, rects = parse(gantt(schedule, Costs(), asynchronous=asynchronous))
            busy = sum(rect.width for rect in rects["action"]) / sum(rect.width for rect in rects["rank"])
            priced = figures(schedule)
            bubble = priced.asynchronous_bubble if asynchronous else priced.lockstep_bubble
            assert 1 - busy == pytest.approx(bubble, abs=1e-3)


def test_kinds_and_stages_of_a_rank_have_colours_of_their_own():
    for name, virtual, colours in [("gpipe", 1, 2), ("interleaved", 3, 6), ("zero_bubble", 1, 3)]:
        _, rects = parse(gantt(by_name(name, 2, 4, virtual), Costs()))
        assert len({rect.fill for rect in rects["action"]}) == colours


def test_numbers_are_left_out_where_they_do_not_fit():
    def numbers(schedule: Schedule) -> list[str]:
        root, _ = parse(gantt(schedule, Costs()))
        rows = [text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "number"]
        return [text.text for text in rows]

    assert sorted(numbers(gpipe(2, 3))) == sorted("012" * 4)
    assert numbers(gpipe(2, 900)) == []


def test_a_tick_is_marked_in_lockstep_alone():
    assert gantt(gpipe(4, 8), Costs()).count("class='tick'") == gpipe(4, 8).ticks - 1
    assert "class='tick'" not in gantt(gpipe(4, 8), Costs(), asynchronous=True)


def test_any_name_is_a_good_title():
    odd = Schedule("a<b>&'c'", (0,), 2, accumulate(2).orders)
    root, _ = parse(gantt(odd, Costs()))
    assert any("a<b>&'c'" in "".join(text.itertext()) for text in root)
