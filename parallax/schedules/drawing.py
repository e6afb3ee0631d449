"""A schedule as a Gantt chart in SVG: a row for each rank, time from left to right."""

import math
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from parallax.runtime.svg import INK, PAPER, nice_step, svg, svg_text
from parallax.schedules.pricing import Costs, figures, start_times, tick_ends
from parallax.schedules.schedule import Action, Schedule

# The palette of Okabe and Ito, which colour-blind people can tell apart: blue, orange, bluish green.
ACTION_COLOURS = {"F": (0, 114, 178), "B": (230, 159, 0), "W": (0, 158, 115)}
FAINT = "#9a9a9a"
LIGHTEST = 0.62  # how far towards white a rank's last stage is

WIDTH, WIDEST_UNIT = 960, 44  # of the plot, and of the cost of one F, in pixels
LEFT, RIGHT, TOP, ROW, GAP, BOTTOM = 64, 16, 62, 30, 5, 84
DIGIT = 6.4  # width of a number in a cell, per digit
HATCH = (
    "<pattern id='idle' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
    "<rect width='6' height='6' fill='#f4f4f4'/><line x1='0' y1='0' x2='0' y2='6' stroke='#d9d9d9' stroke-width='2'/>"
    "</pattern>"
)


class Canvas(NamedTuple):
    """Positions in the picture: `end` is the last moment, `scale` pixels per unit of time."""

    ranks: int
    end: float
    scale: float

    def x(self, time: float) -> float:
        return LEFT + time * self.scale

    def y(self, rank: int) -> float:
        return TOP + rank * (ROW + GAP)

    @property
    def right(self) -> float:
        return self.x(self.end)

    @property
    def bottom(self) -> float:
        return self.y(self.ranks) - GAP


def gantt(schedule: Schedule, costs: Costs, *, asynchronous: bool = False) -> str:
    """A Gantt chart in SVG: in lockstep, where each tick is as wide as its slowest rank, or asynchronous.

    The stages of one rank are shades of the action's colour, the first darkest; hatched is a rank that is idle.

        >>> from parallax.schedules import gpipe
        >>> gantt(gpipe(2, 2), Costs()).count("class='action'")
        8
    """
    time_of = costs.of(schedule)
    starts = start_times(schedule, costs, asynchronous=asynchronous)
    separators = [] if asynchronous else tick_ends(schedule, costs).tolist()
    end = max([start + time_of[action.kind] for action, start in starts.items()] + separators)
    widest = WIDEST_UNIT * schedule.virtual / max(costs.forward, costs.backward / 2)
    plot = Canvas(schedule.ranks, end, min(WIDTH / end, widest))
    legend = 560 if schedule.virtual == 1 else 700 + 36 * schedule.virtual
    width, height = max(plot.right + RIGHT, LEFT + legend), plot.bottom + BOTTOM
    parts = [
        f"<defs>{HATCH}</defs>",
        *_heading(schedule, costs, asynchronous),
        *_rows(plot),
        *_cells(schedule, costs, starts, plot),
        *_separators(separators, plot),
        *_axis(schedule, costs, plot),
        *_legend(schedule, plot),
    ]
    return svg(parts, width, height)


def _heading(schedule: Schedule, costs: Costs, asynchronous: bool) -> Iterator[str]:
    priced = figures(schedule, costs)
    sizes = f"P = {schedule.ranks}, M = {schedule.microbatches}, v = {schedule.virtual}"
    drawn = "asynchronous" if asynchronous else "in lockstep"
    bubbles = f"bubble {priced.lockstep_bubble:.1%} in lockstep, {priced.asynchronous_bubble:.1%} asynchronous"
    name = f"<tspan font-weight='bold'>{escape(schedule.name)}</tspan>"
    yield f"<text x='{LEFT}' y='24' fill='{INK}' font-size='15'>{name}<tspan dx='10'>{sizes}</tspan></text>"
    yield svg_text(LEFT, 45, f"{bubbles}; drawn {drawn}", "font-size='12'", fill="#555555")


def _rows(plot: Canvas) -> Iterator[str]:
    for rank in range(plot.ranks):
        place = f"x='{LEFT}' y='{plot.y(rank)}' width='{plot.end * plot.scale:.2f}' height='{ROW}'"
        yield f"<rect class='rank' {place} fill='url(#idle)'/>"
        yield svg_text(LEFT - 8, plot.y(rank) + ROW / 2 + 4, f"rank {rank}", "text-anchor='end' font-size='12'")


def _cells(schedule: Schedule, costs: Costs, starts: dict[Action, float], plot: Canvas) -> Iterator[str]:
    time_of = costs.of(schedule)
    for action, start in starts.items():
        x, y = plot.x(start), plot.y(schedule.rank_of(action.stage))
        width = time_of[action.kind] * plot.scale
        fill, ink = _shade(schedule, action)
        place = f"x='{x:.3f}' y='{y}' width='{width:.3f}' height='{ROW}'"
        edge = f"stroke='{PAPER}' stroke-width='{min(1, width / 8):.2f}'"
        title = f"<title>{action}: {start:g} to {start + time_of[action.kind]:g}</title>"
        yield f"<rect class='action' {place} fill='{fill}' {edge}>{title}</rect>"
        if width >= DIGIT * len(str(action.microbatch)) + 3:
            yield svg_text(
                x + width / 2, y + ROW / 2 + 4, str(action.microbatch), "class='number' text-anchor='middle'", fill=ink
            )


def _shade(schedule: Schedule, action: Action) -> tuple[str, str]:
    """Colour of a cell and of the number in it."""
    to_white = LIGHTEST * schedule.chunks[action.stage] / max(schedule.virtual - 1, 1)
    mixed = [round(part + (255 - part) * to_white) for part in ACTION_COLOURS[action.kind]]
    bright = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), mixed)) > 140
    return "#{:02x}{:02x}{:02x}".format(*mixed), INK if bright else PAPER


def _separators(ends: list[float], plot: Canvas) -> Iterator[str]:
    if len(ends) * 6 > plot.end * plot.scale:
        return
    for end in ends[:-1]:
        x = plot.x(end)
        line = f"x1='{x:.2f}' x2='{x:.2f}' y1='{TOP - 4}' y2='{plot.bottom + 4:.2f}'"
        yield f"<line class='tick' {line} stroke='{INK}' stroke-opacity='0.35' stroke-dasharray='2 2'/>"


def _axis(schedule: Schedule, costs: Costs, plot: Canvas) -> Iterator[str]:
    y = plot.bottom + 8
    yield f"<line x1='{LEFT}' x2='{plot.right:.2f}' y1='{y}' y2='{y}' stroke='{INK}'/>"
    step = nice_step(plot.end / max(plot.end * plot.scale / 60, 1))
    for at in range(math.floor(plot.end / step + 1e-9) + 1):
        x = plot.x(at * step)
        yield f"<line x1='{x:.2f}' x2='{x:.2f}' y1='{y}' y2='{y + 4}' stroke='{INK}'/>"
        yield svg_text(x, y + 16, f"{at * step:g}", "text-anchor='middle'")
    whole = f"time; a microbatch in all stages of a rank takes F {costs.forward:g}, "
    backward = f"B {costs.backward:g}"
    if schedule.split:
        backward = f"B {costs.backward - costs.weights:g}, W {costs.weights:g}"
    send = f", a message {costs.send:g}" * (costs.send > 0)
    yield svg_text(LEFT, y + 34, whole + backward + send)


def _legend(schedule: Schedule, plot: Canvas) -> Iterator[str]:
    words = {"F": "forward", "B": "backward"}
    if schedule.split:
        words |= {"B": "backward to the inputs", "W": "backward to the weights"}
    x, y = float(LEFT), plot.bottom + 58
    first = {schedule.chunks[stage]: stage for stage in reversed(range(schedule.stages))}
    for kind, word in words.items():
        for chunk in range(schedule.virtual):
            fill, _ = _shade(schedule, Action(first[chunk], kind, 0))
            yield f"<rect x='{x:.1f}' y='{y}' width='12' height='12' fill='{fill}'/>"
            x += 12
        yield svg_text(x + 5, y + 10, f"{kind} {word}")
        x += 5 + 6 * (len(word) + 2) + 14
    yield f"<rect x='{x:.1f}' y='{y}' width='12' height='12' fill='url(#idle)' stroke='{FAINT}' stroke-width='0.5'/>"
    yield svg_text(x + 17, y + 10, "idle")
    if schedule.virtual > 1:
        yield svg_text(x + 52, y + 10, "shades: stages of a rank, the first darkest", fill="#555555")
