"""When a device computes, sends and waits in a compiled step, as bars and as a picture: see timeline.py."""

import math
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from parallax.analysis.compiled.program import (
    BranchEvent,
    CompiledCollective,
    Compute,
    End,
    Kernel,
    LoopEvent,
    executed,
    module_path,
    weight,
)
from parallax.analysis.planned.step_time import Clock
from parallax.config.sections import ATTENTION
from parallax.pipeline import BACKWARD, FORWARD, WEIGHTS

COMPUTES, SENDS, WAITS = "computes", "sends over ", "waits"
# The palette of Okabe and Ito, which colour-blind people can tell apart.
PRODUCT, OTHER, KERNEL, WAIT, BEHIND = "#0072b2", "#56b4e9", "#e69f00", "#d00000", "#fbe3e3"
AXES = {"pp": "#cc79a7", "dp": "#009e73", "tp": "#8c6bb1"}
OTHER_AXES = "#777777"
INK, SOFT, LANE, PAPER = "#1d2126", "#5c6670", "#f1f3f4", "#ffffff"
LEGEND = {
    PRODUCT: "products, and what is fused with them",
    OTHER: "other compute",
    KERNEL: "attention kernels",
    **{colour: f"messages over {axis}" for axis, colour in AXES.items()},
    OTHER_AXES: "messages over other axes, or over several",
    WAIT: "waits: nothing is computed until a message has come",
}
DARK = (PRODUCT, WAIT, AXES["dp"], AXES["tp"], OTHER_AXES)  # on which text is white
WIDTH, LEFT, RIGHT, TURNS_APART = 1080, 112, 18, 24
ROW, GAP, BELOW = 18, 3, 46  # heights of a lane, of what is between two, and of an axis
LETTER = 5.2  # width of a label's letter
PASSES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weight gradients"}  # also those of a joint pass
NEAR = 0.5  # bars of a colour that are nearer to each other are one, and none is narrower
LEAST_WAIT = 2  # that has a label
MOST_TICKS = 10  # of a time axis


class Bar(NamedTuple):
    """What fills a lane between two times in seconds."""

    lane: str
    colour: str
    start: float
    end: float
    label: str = ""


class Strip(NamedTuple):
    """A stretch of time, from 0 to `secs`."""

    words: str
    bars: list[Bar]
    secs: float


class Drawn(NamedTuple):
    """A compiled step: as a whole, and turns of its loops."""

    words: str
    changes: str  # of the config
    step: Strip
    turns: list[Strip]


def drawn(clock: Clock, timeline: list, words: str, changes: str) -> Drawn:
    step = Strip("a step", list(bars_of(clock, timeline)), total(clock, timeline))
    turns = [
        Strip(
            f"{passes(loop.body)}, one of {loop.trips * times} turns",
            list(bars_of(clock, loop.body)),
            total(clock, loop.body),
        )
        for loop, times in layer_loops(whole(timeline))
    ]
    return Drawn(words, changes, step, turns)


def passes(events: list) -> str:
    """The passes that these events belong to."""
    sources = [event.source for event in _all(events) if isinstance(event, Kernel | CompiledCollective)]
    parts = {part for source in sources for part in source.split("/")}
    return " and ".join(words for scope, words in PASSES.items() if scope in parts)


def total(clock: Clock, events: list) -> float:
    return sum(clock.run(events).values())


def in_milliseconds(strip: Strip) -> str:
    waits = sum(bar.end - bar.start for bar in strip.bars if bar.lane == WAITS)
    return f"{strip.words}: {1e3 * strip.secs:.1f} ms, of which waits {1e3 * waits:.1f}"


# ---- what happens when


def bars_of(clock: Clock, events: list, start: float = 0.0, scale: float = 1.0) -> Iterator[Bar]:
    """The bars of a timeline, loops turn by turn; sides of branches are shorter by the share of runs that take them."""
    sent: dict[str, str] = {}
    for timed in clock.times(events):
        event, begin, end = timed.event, start + scale * timed.start, start + scale * timed.end
        if isinstance(event, CompiledCollective):
            axes = "+".join(event.axes)
            sent[event.op] = f"{event.kind} {module_path(event.source)}".strip()
            yield Bar(SENDS + axes, AXES.get(axes, OTHER_AXES), begin, end, sent[event.op])
        elif isinstance(event, LoopEvent):
            for turn in range(event.trips):
                yield from bars_of(clock, event.body, begin + turn * (end - begin) / event.trips, scale)
        elif isinstance(event, BranchEvent):
            yield from _sides(clock, event, begin, scale)
        elif isinstance(event, End) and end > begin:
            yield Bar(WAITS, WAIT, begin, end, sent[event.op])
        elif isinstance(event, Kernel):
            yield Bar(COMPUTES, KERNEL if timed.spent.get(ATTENTION) else OTHER, begin, end)
        elif isinstance(event, Compute):
            yield Bar(COMPUTES, PRODUCT if event.product else OTHER, begin, end, event.module)


def _sides(clock: Clock, branch: BranchEvent, start: float, scale: float) -> Iterator[Bar]:
    for share, side in zip(branch.lockstep, branch.sides, strict=True):
        if share:
            yield from bars_of(clock, side, start, scale * share)
            start += scale * share * total(clock, side)


def whole(events: list) -> list:
    """The same timeline with the dearest side of each branch taken."""
    return [_whole(event) for event in events]


def _whole(event: object) -> object:
    if isinstance(event, LoopEvent):
        return event._replace(body=whole(event.body))
    if isinstance(event, BranchEvent):
        sides = [whole(side) for side in event.sides]
        dearest = max(range(len(sides)), key=lambda side: weight(sides[side]))
        only = tuple(float(side == dearest) for side in range(len(sides)))
        return BranchEvent(only, only, sides)
    return event


def layer_loops(events: list, times: int = 1) -> Iterator[tuple[LoopEvent, int]]:
    """The innermost loops that hold attention kernels, in their order, and how often each is begun in a step."""
    for event in events:
        if isinstance(event, BranchEvent):
            for share, side in zip(event.lockstep, event.sides, strict=True):
                yield from layer_loops(side, times) if share else ()
        if isinstance(event, LoopEvent):
            inner = list(layer_loops(event.body, times * event.trips))
            yield from inner or ([(event, times)] if any(map(_is_attention, _all(event.body))) else ())


def _all(events: list) -> Iterator:
    return (event for event, *_ in executed(events))


def _is_attention(event: object) -> bool:
    return isinstance(event, Kernel) and event.flops > 0 and not event.grouped


# ---- the picture


def picture(words: str, command: str, steps: list[Drawn]) -> str:
    """SVG of steps below each other, all at one scale, and turns of their loops at another."""
    across = WIDTH - LEFT - RIGHT
    step_scale = across / max(step.step.secs for step in steps)
    turn_scale = min(map(_turn_scale, steps), default=0.0)
    parts = [_text(16, 26, words, size=16, more="font-weight='bold'"), *_legend(steps)]
    y = 84.0
    for step in steps:
        lanes = lanes_of(step.step.bars)
        parts.append(_text(16, y, step.words, size=13, more="font-weight='bold'"))
        parts.append(_text(16, y + 17, step.changes, fill=SOFT))
        parts += _strips([step.step], lanes, y + 28, step_scale)
        y += 28 + len(lanes) * (ROW + GAP) + BELOW
        if step.turns:
            parts += _strips(step.turns, lanes, y, turn_scale, labels=True)
            y += len(lanes) * (ROW + GAP) + BELOW
        y += 22
    parts.append(_text(16, y, command, size=10, fill=SOFT))
    size = f"width='{WIDTH}' height='{y + 12:.0f}' viewBox='0 0 {WIDTH} {y + 12:.0f}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='Helvetica, Arial, sans-serif' font-size='11'>"
    return "\n".join([head, f"<rect width='100%' height='100%' fill='{PAPER}'/>", *parts, "</svg>\n"])


def _turn_scale(step: Drawn) -> float:
    """Pixels of a second with which the turns of a step fill the picture's width."""
    across = WIDTH - LEFT - RIGHT - TURNS_APART * (len(step.turns) - 1)
    return across / sum(turn.secs for turn in step.turns) if step.turns else math.inf


def lanes_of(bars: list[Bar]) -> list[str]:
    return [COMPUTES, *sorted({bar.lane for bar in bars if bar.lane.startswith(SENDS)}), WAITS]


def _legend(steps: list[Drawn]) -> Iterator[str]:
    """The colours that occur."""
    used, x = {bar.colour for step in steps for bar in step.step.bars}, 16.0
    for colour, words in LEGEND.items():
        if colour in used:
            yield _path(colour, [(x, 38, 12, 12)])
            yield _text(x + 17, 48, words)
            x += 40 + LETTER * len(words)


def _strips(strips: list[Strip], lanes: list[str], top: float, scale: float, *, labels: bool = False) -> Iterator[str]:
    """Stretches of time beside each other, with the names of their lanes."""
    for place, lane in enumerate(lanes):
        yield _text(LEFT - 8, top + place * (ROW + GAP) + 13, lane, anchor="end", fill=SOFT)
    x = float(LEFT)
    for strip in strips:
        yield from _strip(strip, lanes, x, top, scale)
        if labels:
            yield from _labels(strip.bars, lanes, x, top, scale)
        x += strip.secs * scale + TURNS_APART


def _strip(strip: Strip, lanes: list[str], x: float, top: float, scale: float) -> Iterator[str]:
    """The lanes of a stretch of time, with red behind its waits, and an axis in milliseconds."""
    width, bottom = strip.secs * scale, top + len(lanes) * (ROW + GAP) - GAP
    yield _path(LANE, [(x, top + place * (ROW + GAP), width, ROW) for place, _ in enumerate(lanes)])
    shades: dict[tuple[str, str], list[Bar]] = defaultdict(list)
    for bar in sorted(strip.bars, key=lambda bar: bar.start):
        shades[bar.lane, bar.colour].append(bar)
    yield _path(BEHIND, [_box(bar, x, top, scale, bottom - top) for bar in _joined(shades[WAITS, WAIT], scale)])
    for (lane, colour), bars in shades.items():
        y = top + lanes.index(lane) * (ROW + GAP)
        yield _path(colour, [_box(bar, x, y, scale, ROW) for bar in _joined(bars, scale)])
    yield from _axis(strip, x, bottom + 3, width, scale)


def _box(bar: Bar, x: float, y: float, scale: float, height: float) -> tuple[float, float, float, float]:
    return x + bar.start * scale, y, max((bar.end - bar.start) * scale, NEAR), height


def _joined(bars: list[Bar], scale: float) -> list[Bar]:
    """Bars of one colour, in their order, those that touch as one."""
    joined: list[Bar] = []
    for bar in bars:
        if joined and (bar.start - joined[-1].end) * scale < NEAR:
            joined[-1] = joined[-1]._replace(end=max(joined[-1].end, bar.end))
        else:
            joined.append(bar)
    return joined


def _labels(bars: list[Bar], lanes: list[str], x: float, top: float, scale: float) -> Iterator[str]:
    """What bars are, where there is room: on a bar, and beside a wait."""
    free = x
    for bar in bars:
        y, start, end = top + lanes.index(bar.lane) * (ROW + GAP) + 13, x + bar.start * scale, x + bar.end * scale
        if bar.lane == WAITS and end - start > LEAST_WAIT:
            label = f"{1e3 * (bar.end - bar.start):.2f} ms for {bar.label}"
            width = LETTER * len(label) + 4
            if free < end < WIDTH - width:
                yield _text(end + 4, y, label, size=10, fill=WAIT)
                free = end + width
            elif free < start - width:
                yield _text(start - 4, y, label, size=10, fill=WAIT, anchor="end")
        elif bar.lane != WAITS and LETTER * len(bar.label) < end - start - 4:
            colour = PAPER if bar.colour in DARK else INK
            yield _text((start + end) / 2, y, bar.label, size=10, fill=colour, anchor="middle")


def _axis(strip: Strip, x: float, y: float, width: float, scale: float) -> Iterator[str]:
    step = tick_secs(strip.secs)
    yield f"<path d='M{x:.1f} {y:.1f}h{width:.1f}' stroke='{SOFT}' fill='none'/>"
    for tick in range(math.floor(strip.secs / step) + 1):
        place = x + tick * step * scale
        yield f"<path d='M{place:.1f} {y:.1f}v4' stroke='{SOFT}'/>"
        yield _text(place, y + 15, f"{1e3 * tick * step:g}", size=10, fill=SOFT, anchor="middle")
    yield _text(x, y + 29, in_milliseconds(strip), fill=SOFT)


def tick_secs(secs: float) -> float:
    """Seconds between marks of an axis: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(secs / MOST_TICKS))
    return next(times * power for times in (1, 2, 5, 10) if secs / (times * power) <= MOST_TICKS)


def _path(fill: str, boxes: list[tuple[float, float, float, float]]) -> str:
    corners = "".join(f"M{x:.1f} {y:.1f}h{w:.2f}v{h:g}h{-w:.2f}z" for x, y, w, h in boxes)
    return f"<path fill='{fill}' d='{corners}'/>"


def _text(x: float, y: float, text: str, *, size: int = 11, fill: str = INK, anchor: str = "start", more="") -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}'"
    return f"<text {place} fill='{fill}' {more}>{escape(text)}</text>"
