"""A schedule as a Gantt chart in SVG: a row for each rank, time from left to right."""

from typing import Any

from parallax.display.svg import INK, PAPER, TIP, svg
from parallax.schedules.pricing import Costs, figures, start_times, tick_ends, times
from parallax.schedules.timetable import Timetable

# The palette of Okabe and Ito, which colour-blind people can tell apart: blue, orange, bluish green.
ACTION_COLOURS = {"F": (0, 114, 178), "B": (230, 159, 0), "W": (0, 158, 115)}
LIGHTEST = 0.62  # lightness of a rank's last stage, from its colour (0) to white (1)
PLOT_WIDTH, WIDEST_UNIT, ROW = 720, 33, 26  # in points: width of the plot, of the cost of one F, height of a rank
DIGIT = 5  # width of a number in a cell, per digit
BAR = 0.86  # of a cell, as a share of a rank's height


def gantt(schedule: Timetable, costs: Costs, *, asynchronous: bool = False) -> str:
    """A Gantt chart in SVG: in lockstep, with each tick as wide as its slowest rank, or asynchronous.

    The stages of one rank are shades of the action's colour, the first one darkest; idle ranks are hatched. Of F and B
    that are one pass, F is drawn above B.

        >>> from parallax.schedules import gpipe
        >>> gantt(gpipe(2, 2), Costs()).count("<title>")
        8
    """
    time_of, ranks = times(schedule, costs), range(schedule.ranks)
    starts = start_times(schedule, costs, asynchronous=asynchronous)
    ends = [] if asynchronous else tick_ends(schedule, costs).tolist()
    end = max([start + time_of[action] for action, start in starts.items()] + ends)
    scale = min(PLOT_WIDTH / end, WIDEST_UNIT * schedule.virtual / max(costs.forward, costs.backward / 2))
    stages = {(kind, schedule.chunks[stage]): [] for kind in schedule.kinds for stage in range(schedule.stages)}
    for action in starts:
        stages[action.kind, schedule.chunks[action.stage]].append(action)

    backward = "backward to the inputs" if schedule.split else "backward"
    words = {"F": "forward", "B": backward, "W": "backward to the weights"}

    def draw(axes: Any) -> None:
        for (kind, chunk), actions in stages.items():
            fill, ink = _shade(kind, chunk / max(schedule.virtual - 1, 1))
            lefts, widths = [starts[a] for a in actions], [time_of[a] for a in actions]
            shared = [kind != "W" and schedule.both[schedule.tick_of[a], schedule.rank_of(a.stage)] for a in actions]
            above = {"F": -BAR / 4, "B": BAR / 4}.get(kind, 0)
            rows = [schedule.rank_of(a.stage) + above * half for a, half in zip(actions, shared)]
            label = None if chunk else f"{kind} {words[kind]}"  # in the legend, once
            style = {"color": fill, "edgecolor": PAPER, "linewidth": min(0.8, min(widths) * scale / 8)}
            heights = [BAR / (1 + half) for half in shared]
            bars = axes.barh(rows, widths, height=heights, left=lefts, label=label, **style)
            for bar, action, width in zip(bars, actions, widths):
                bar.set_gid(f"{TIP}{action}: {starts[action]:g} to {starts[action] + width:g}")
            numbers = [str(a.microbatch) for a in actions]
            numbers = [text if width * scale >= DIGIT * len(text) + 2 else "" for text, width in zip(numbers, widths)]
            if any(numbers):
                axes.bar_label(bars, numbers, label_type="center", color=ink)
        idle = {"height": BAR, "color": "#f4f4f4", "edgecolor": "#d9d9d9", "hatch": "////", "zorder": 0}
        axes.barh(ranks, end, label="idle", **idle)
        if 0 < len(ends) * 5 <= end * scale:
            axes.vlines(ends[:-1], -0.6, len(ranks) - 0.4, INK, "dashed", linewidth=0.7, alpha=0.35)
        axes.set(xlim=(0, end), ylim=(len(ranks) - 0.4, -0.6), yticks=ranks)
        axes.set_yticklabels([f"rank {rank}" for rank in ranks])
        axes.set_title(_heading(schedule, costs, asynchronous), loc="left")
        axes.set_xlabel(_costs_text(schedule, costs), loc="left")
        shades = "shades: stages of a rank, the first darkest" if schedule.virtual > 1 else None
        below = {"loc": "upper left", "bbox_to_anchor": (0, -40 / (ROW * len(ranks))), "ncols": 4}
        axes.legend(title=shades, alignment="left", frameon=False, **below)

    return svg(draw, end * scale, ROW * len(ranks))


def _heading(schedule: Timetable, costs: Costs, asynchronous: bool) -> str:
    priced = figures(schedule, costs)
    sizes = f"P = {schedule.ranks}, M = {schedule.microbatches}, v = {schedule.virtual}"
    drawn = "asynchronous" if asynchronous else "in lockstep"
    bubbles = f"bubble {priced.lockstep_bubble:.1%} in lockstep, {priced.asynchronous_bubble:.1%} asynchronous"
    return f"{schedule.name}   {sizes}\n{bubbles}; drawn {drawn}"


def _costs_text(schedule: Timetable, costs: Costs) -> str:
    """The times of a microbatch in words."""
    backward = f"B {costs.backward:g}"
    if schedule.split:
        backward = f"B {costs.backward - costs.weights:g}, W {costs.weights:g}"
    send = f", a message {costs.send:g}" * (costs.send > 0)
    hidden = f", of which F&B hides {costs.hidden:g}" * (costs.hidden > 0)
    return f"time; a microbatch in all stages of a rank takes F {costs.forward:g}, {backward}{hidden}{send}"


def _shade(kind: str, share: float) -> tuple[str, str]:
    """Colours of a cell and of its number; `share` goes from a rank's first stage (0) to its last (1)."""
    mixed = [round(part + (255 - part) * LIGHTEST * share) for part in ACTION_COLOURS[kind]]
    bright = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), mixed)) > 140
    return "#{:02x}{:02x}{:02x}".format(*mixed), INK if bright else PAPER
