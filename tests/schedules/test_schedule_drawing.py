"""Drawings of schedules, read as XML: everything is drawn once, to scale, and inside the picture."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_schedules import random_schedules

from parallax.schedules import SCHEDULES, Costs, Schedule, accumulate, by_name, figures, gantt, gpipe
from parallax.schedules.pricing import times

COSTS = [Costs(), Costs(forward=1, backward=2.5, weights=0.5, send=0.25), Costs(forward=3, backward=1, weights=1)]
any_schedule = st.one_of(
    random_schedules(),
    st.builds(by_name, st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12)),
)


SVG = "{http://www.w3.org/2000/svg}"


class Rect:
    """A rectangle, as numbers."""

    def __init__(self, path: ElementTree.Element, title: str):
        corners = [tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", path.get("d"))]
        (self.x, self.y), (right, bottom) = (tuple(pick(line) for line in zip(*corners)) for pick in (min, max))
        self.width, self.height = right - self.x, bottom - self.y
        self.fill, self.title = re.search("fill: ([^;]*)", path.get("style"))[1], title


def parse(text: str) -> tuple[ElementTree.Element, dict[str, list[Rect]]]:
    """The root, and the rectangles of actions, which have titles, and of ranks, which are hatched."""
    root = ElementTree.fromstring(text)
    rects: dict[str, list[Rect]] = {"action": [], "rank": []}
    for group in root.iter(f"{SVG}g"):
        path, title = group.find(f"{SVG}path"), group.find(f"{SVG}title")
        if title is not None:
            rects["action"].append(Rect(path, title.text))
        elif path is not None and "clip-path" in path.attrib and "fill: url(#h" in path.get("style", ""):
            rects["rank"].append(Rect(path, ""))
    return root, rects


@pytest.mark.slow
@settings(max_examples=10)
@given(any_schedule, st.sampled_from(COSTS), st.booleans())
def test_each_action_is_one_rectangle_to_scale_and_none_overlap(schedule, costs, asynchronous):
    _, rects = parse(gantt(schedule, costs, asynchronous=asynchronous))
    time_of = {str(action): time for action, time in times(schedule, costs).items()}
    assert sorted(rect.title.split(":")[0] for rect in rects["action"]) == sorted(map(str, schedule.tick_of))
    priced = figures(schedule, costs)
    end = priced.asynchronous_time if asynchronous else priced.lockstep_time
    assert len(rects["rank"]) == schedule.ranks
    scale = rects["rank"][0].width / end
    for rect in rects["action"]:
        assert rect.width == pytest.approx(time_of[rect.title.split(":")[0]] * scale, rel=1e-3, abs=2e-3)
    for row in rects["rank"]:
        # F and B that are one pass are each half as high as the row.
        for y in (row.y + row.height / 4, row.y + row.height * 3 / 4):
            cells = sorted((rect.x, rect.width) for rect in rects["action"] if rect.y < y < rect.y + rect.height)
            edges = [row.x, *(edge for x, width in cells for edge in (x, x + width)), row.x + row.width]
            assert all(b >= a - 0.02 for a, b in zip(edges, edges[1:]))


@settings(max_examples=10)
@given(any_schedule, st.sampled_from(COSTS), st.booleans())
def test_everything_is_inside_the_picture(schedule, costs, asynchronous):
    root, rects = parse(gantt(schedule, costs, asynchronous=asynchronous))
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in [*rects["action"], *rects["rank"]]:
        assert rect.x >= 0 and rect.x + rect.width <= width
        assert rect.y >= 0 and rect.y + rect.height <= height
    for text in root.iter(f"{SVG}text"):
        moved = re.search(r"translate\((\S+) (\S+)\)", text.get("transform", ""))
        x, y = moved.groups() if moved else (text.get("x"), text.get("y"))
        assert 0 <= float(x) <= width and 0 <= float(y) <= height


@pytest.mark.slow
def test_the_idle_part_of_the_picture_is_the_bubble():
    for name in SCHEDULES:
        schedule = by_name(name, 4, 8)
        for asynchronous in (False, True):
            _, rects = parse(gantt(schedule, Costs(), asynchronous=asynchronous))
            areas = (sum(rect.width * rect.height for rect in rects[what]) for what in ("action", "rank"))
            busy = next(areas) / next(areas)
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
        ticks = [group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("xtick")]
        of_ticks = {text for tick in ticks for text in tick.iter(f"{SVG}text")}
        return [text.text for text in root.iter(f"{SVG}text") if text not in of_ticks and text.text.isdigit()]

    assert sorted(numbers(gpipe(2, 3))) == sorted("012" * 4)
    assert numbers(gpipe(2, 200)) == []


def test_a_tick_is_marked_in_lockstep_alone():
    root, _ = parse(gantt(gpipe(4, 8), Costs()))
    (lines,) = (group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("LineCollection"))
    assert len(lines.findall(f"{SVG}path")) == gpipe(4, 8).ticks - 1
    assert "LineCollection" not in gantt(gpipe(4, 8), Costs(), asynchronous=True)


def test_any_name_is_a_good_title():
    odd = Schedule("a<b>&'c' $x_$", (0,), 2, accumulate(2).orders)
    root, _ = parse(gantt(odd, Costs()))
    assert any("a<b>&'c' $x_$" in "".join(text.itertext()) for text in root)
