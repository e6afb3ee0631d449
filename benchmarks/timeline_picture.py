"""When a device computes, sends and waits in a compiled step, as bars and as a picture: see timeline.py."""

import itertools
import math
import operator
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from docs.shapes import EMPTY, INK, PAPER, SOFT, line, page, text
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

COMPUTES, SENDS, WAITS, TOGETHER = "computes", "sends over ", "waits", "together"
# The palette of Okabe and Ito, which colour-blind people can tell apart.
PRODUCT, OTHER, KERNEL, WAIT, IDLE, BEHIND = "#0072b2", "#56b4e9", "#e69f00", "#d00000", "#f0e442", "#fbe3e3"
AXES = {"pp": "#cc79a7", "dp": "#009e73", "tp": "#8c6bb1"}
OTHER_AXES = "#777777"
LEGEND = {
    PRODUCT: "products, and what is fused with them",
    OTHER: "other compute",
    KERNEL: "attention kernels",
    **{colour: f"messages over {axis}" for axis, colour in AXES.items()},
    OTHER_AXES: "messages over other axes, or over several",
    WAIT: "waits for a message",
    IDLE: "pipeline bubble: waits for other ranks",
}
SPENT = {PRODUCT: "products", OTHER: "other compute", KERNEL: "attention kernels", WAIT: "waits", IDLE: "bubble"}
DARK = (PRODUCT, WAIT, AXES["dp"], AXES["tp"], OTHER_AXES)  # on which text is white
WIDTH, LEFT, RIGHT, TURNS_APART = 800, 126, 14, 26  # a page's column is as wide: texts are shown as large as they are
ACROSS = WIDTH - LEFT - RIGHT  # of a step
LANE, GAP, LINE = 20, 3, 16  # heights of a lane, of what is between two, and of a line of text
LETTER = 0.6  # width of a letter over its size, in DejaVu Sans, which is wider than Helvetica
SMALL = 11  # size of what stands on bars and beside axes
PASSES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weight gradients"}  # also those of a joint pass
NEAR = 0.5  # bars of a colour that are nearer to each other are one, and none is narrower
LEAST_WAIT, MOST_WAITS = 2, 6  # pixels of a wait that has a label, and of how many the longest have one
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
    step = Strip("a step", bars_of(clock, timeline), total(clock, timeline))
    turns = [
        Strip(
            f"{passes(loop.body)}, one of {loop.trips * times} turns",
            bars_of(clock, loop.body),
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


def spent_secs(strip: Strip) -> dict[str, float]:
    """Seconds by colour of what is not sent beside something else."""
    spent: Counter = Counter()
    for bar in strip.bars:
        if not bar.lane.startswith(SENDS):
            spent[bar.colour] += bar.end - bar.start
    return {colour: spent[colour] for colour in SPENT if colour in spent}


def in_milliseconds(strip: Strip) -> str:
    """What its time went into."""
    parts = ", ".join(f"{SPENT[colour]} {1e3 * secs:.1f}" for colour, secs in spent_secs(strip).items())
    return f"{strip.words}, {1e3 * strip.secs:.1f} ms: {parts}"


def together(strip: Strip) -> list[Bar]:
    """Bars for what its time went into, one after the other."""
    ends = itertools.accumulate((spent := spent_secs(strip)).values())
    return [
        Bar(TOGETHER, colour, end - secs, end, f"{1e3 * secs:.0f}")
        for (colour, secs), end in zip(spent.items(), ends, strict=True)
    ]


# ---- what happens when


def bars_of(clock: Clock, events: list) -> list[Bar]:
    """The bars of a timeline, loops turn by turn. A branch is as long as on the slowest rank, if the clock runs in
    lockstep; in the part of it that an average rank does not take, that rank waits for others."""
    sent: dict[str, str] = {}
    bars: list[Bar] = []
    for timed in clock.times(events):
        event, begin, end = timed.event, timed.start, timed.end
        if isinstance(event, CompiledCollective):
            axes = "+".join(event.axes)
            sent[event.op] = f"{event.kind} {module_path(event.source)}".strip()
            bars.append(Bar(SENDS + axes, AXES.get(axes, OTHER_AXES), begin, end, sent[event.op]))
        elif isinstance(event, LoopEvent):
            turn = bars_of(clock, event.body)
            for number in range(event.trips):
                bars += _placed(turn, begin + number * (end - begin) / event.trips)
        elif isinstance(event, BranchEvent):
            bars += _placed(_sides(clock, event), begin)
        elif isinstance(event, End) and end > begin:
            bars.append(Bar(WAITS, WAIT, begin, end, sent[event.op]))
        elif isinstance(event, Kernel):
            bars.append(Bar(COMPUTES, KERNEL if timed.spent.get(ATTENTION) else OTHER, begin, end))
        elif isinstance(event, Compute):
            bars.append(Bar(COMPUTES, PRODUCT if event.product else OTHER, begin, end, event.module))
    return bars


def _placed(bars: Iterable[Bar], start: float, scale: float = 1.0) -> Iterator[Bar]:
    return (bar._replace(start=start + scale * bar.start, end=start + scale * bar.end) for bar in bars)


def _sides(clock: Clock, branch: BranchEvent) -> Iterator[Bar]:
    secs = [total(clock, side) for side in branch.sides]
    slowest, average = (sum(map(operator.mul, shares, secs)) for shares in (branch.lockstep, branch.average))
    is_average = not clock.lockstep or average < slowest
    start = 0.0
    for share, side, of_side in zip(branch.average if is_average else branch.lockstep, branch.sides, secs, strict=True):
        if share:
            yield from _placed(bars_of(clock, side), start, share)
            start += share * of_side
    if clock.lockstep and average < slowest:
        yield Bar(WAITS, IDLE, start, slowest)


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


class Block(NamedTuple):
    """A part of the picture, and where the next one may begin."""

    parts: list[str]
    bottom: float


def picture(words: str, command: str, steps: list[Drawn]) -> str:
    """SVG of steps below each other, all at one scale, and turns of their loops, which fill the width."""
    head = text(16, 26, words, size=16, more="font-weight='bold'")
    longest = max(step.step.secs for step in steps)
    steps = [_without_specks(step, ACROSS / longest) for step in steps]
    legend = _legend({bar.colour for step in steps for bar in step.step.bars}, 48)
    parts, y = [head, *legend.parts], legend.bottom
    for step in steps:
        block = _step(step, longest, y + 26)
        parts, y = parts + block.parts, block.bottom
    last = _lines(command, 16, y + 26, WIDTH - 32, size=SMALL)
    spoken = "; ".join(f"{step.words}: {step.changes}: {in_milliseconds(step.step)}" for step in steps)
    return page(WIDTH, last.bottom, parts + last.parts, font=12, title=words, words=spoken)


def _without_specks(step: Drawn, scale: float) -> Drawn:
    """A step without the messages over axes that together fill no pixel of its picture."""
    pixels: Counter = Counter()
    for bar in step.step.bars:
        pixels[bar.lane] += (bar.end - bar.start) * scale
    specks = {lane for lane in pixels if lane.startswith(SENDS) and pixels[lane] < 1}
    whole_step, *turns = (
        strip._replace(bars=[bar for bar in strip.bars if bar.lane not in specks]) for strip in (step.step, *step.turns)
    )
    return step._replace(step=whole_step, turns=turns)


def letters(words: str, size: int) -> float:
    """Pixels that a text takes."""
    return LETTER * size * len(words)


def _lines(words: str, x: float, y: float, width: float, size: int = 12) -> Block:
    """A text in lines that are not wider."""
    lines = textwrap.wrap(words, max(int(width / letters("m", size)), 1), break_long_words=False)
    parts = [text(x, y + place * LINE, part, size=size, fill=SOFT) for place, part in enumerate(lines)]
    return Block(parts, y + len(lines) * LINE)


def _legend(used: set[str], y: float) -> Block:
    """The colours that occur."""
    parts, x = [], 16.0
    for colour, words in LEGEND.items():
        if colour in used:
            width = 36 + letters(words, 12)
            if x + width > WIDTH:
                x, y = 16.0, y + 18
            parts += [_boxes(colour, [(x, y - 10, 12, 12)]), text(x + 18, y, words)]
            x += width
    return Block(parts, y)


def _step(step: Drawn, longest: float, y: float) -> Block:
    """A step's words, the whole of it, and its turns."""
    lanes = lanes_of(step.step.bars)
    words = _lines(step.changes, 16, y + LINE + 2, WIDTH - 32)
    in_all = step.step._replace(bars=step.step.bars + together(step.step))
    whole_step = _strips([in_all], [*lanes, TOGETHER], words.bottom, ACROSS / longest, longest)
    parts = [text(16, y, step.words, size=13, more="font-weight='bold'"), *words.parts, *whole_step.parts]
    if not step.turns:
        return Block(parts, whole_step.bottom)
    scale = (ACROSS - TURNS_APART * (len(step.turns) - 1)) / sum(turn.secs for turn in step.turns)
    lanes = lanes_of([bar for turn in step.turns for bar in turn.bars])
    turns = _strips(step.turns, lanes, whole_step.bottom + 4, scale)
    return Block(parts + turns.parts, turns.bottom)


def lanes_of(bars: list[Bar]) -> list[str]:
    return [COMPUTES, *sorted({bar.lane for bar in bars if bar.lane.startswith(SENDS)}), WAITS]


def _strips(strips: list[Strip], lanes: list[str], top: float, scale: float, longest: float = 0.0) -> Block:
    """Stretches of time beside each other; labelled if no `longest` says that others follow at the same scale."""
    parts = [
        text(LEFT - 8, top + place * (LANE + GAP) + 14, lane, anchor="end", fill=SOFT)
        for place, lane in enumerate(lanes)
    ]
    starts = [LEFT + sum(strip.secs * scale + TURNS_APART for strip in strips[:n]) for n in range(len(strips))]
    bottom = top + len(lanes) * (LANE + GAP) - GAP
    labels = _labels_of_waits(strips, starts, scale, bottom) if not longest else Block([], bottom)
    below = labels.bottom
    for strip, x in zip(strips, starts, strict=True):
        parts += _strip(strip, lanes, x, top, scale, labelled=not longest)
        parts += _axis(x, labels.bottom + 4, longest or strip.secs, scale)
        said = in_milliseconds(strip._replace(bars=[bar for bar in strip.bars if bar.lane != TOGETHER]))
        words = _lines(said, x, labels.bottom + 35, (longest or strip.secs) * scale)
        parts, below = parts + words.parts, max(below, words.bottom)
    parts.append(text(LEFT - 8, labels.bottom + 19, "milliseconds", size=SMALL, anchor="end", fill=SOFT))
    return Block(parts + labels.parts, below)


def _strip(strip: Strip, lanes: list[str], x: float, top: float, scale: float, *, labelled: bool) -> Iterator[str]:
    """The lanes of a stretch of time; if labelled, with names on bars and red behind its waits."""
    width, height = strip.secs * scale, len(lanes) * (LANE + GAP) - GAP
    yield _boxes(EMPTY, [(x, top + place * (LANE + GAP), width, LANE) for place, _ in enumerate(lanes)])
    shades: dict[tuple[str, str], list[Bar]] = defaultdict(list)
    for bar in sorted(strip.bars, key=lambda bar: bar.start):
        shades[bar.lane, bar.colour].append(bar)
    if labelled:
        yield _boxes(BEHIND, [_box(bar, x, top, scale, height) for bar in _joined(shades[WAITS, WAIT], scale)])
    for (lane, colour), bars in shades.items():
        y = top + lanes.index(lane) * (LANE + GAP)
        yield _boxes(colour, [_box(bar, x, y, scale, LANE) for bar in _joined(bars, scale)])
        for bar in bars:
            if (
                (labelled or lane == TOGETHER)
                and lane != WAITS
                and bar.label
                and letters(bar.label, SMALL) < (bar.end - bar.start) * scale - 4
            ):
                middle, fill = x + (bar.start + bar.end) / 2 * scale, PAPER if colour in DARK else INK
                yield text(middle, y + 14, bar.label, size=SMALL, fill=fill, anchor="middle")


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


def _labels_of_waits(strips: list[Strip], starts: list[float], scale: float, top: float) -> Block:
    """What the longest waits are for, in rows below their lane, each with a line to its wait; where none has room for
    it, nothing."""
    waits = [(bar, x) for strip, x in zip(strips, starts, strict=True) for bar in strip.bars if bar.colour == WAIT]
    waits = [(bar, x) for bar, x in waits if (bar.end - bar.start) * scale > LEAST_WAIT]
    waits = sorted(waits, key=lambda wait: wait[0].start - wait[0].end)[:MOST_WAITS]
    parts, taken, rows = [], [], 0  # rows and pixels of labels and of the lines to them
    for bar, x in waits:
        label = f"{1e3 * (bar.end - bar.start):.2f} ms: {bar.label}"
        place = x + (bar.start + bar.end) / 2 * scale
        width = letters(label, SMALL) + 8
        for left, row in itertools.product((place, place - width), range(MOST_WAITS)):
            needs = [(row, left, left + width), *((above, place - 4, place + 4) for above in range(row))]
            if left >= LEFT and left + width <= WIDTH and not _overlap(needs, taken):
                taken, rows, y = taken + needs, max(rows, row + 1), top + (row + 1) * LINE - 2
                parts.append(line(place, top, place, y, WAIT, 1))
                anchor = "start" if left == place else "end"
                parts.append(text(place + 4 - 8 * (left < place), y, label, size=SMALL, fill=WAIT, anchor=anchor))
                break
    return Block(parts, top + rows * LINE)


def _overlap(needs: list[tuple[int, float, float]], taken: list[tuple[int, float, float]]) -> bool:
    pairs = itertools.product(needs, taken)
    return any(row == other and left < end and start < right for (row, left, right), (other, start, end) in pairs)


def _axis(x: float, y: float, secs: float, scale: float) -> Iterator[str]:
    step = tick_secs(secs)
    yield line(x, y, x + secs * scale, y, SOFT, 1)
    for tick in range(math.floor(secs / step) + 1):
        place = x + tick * step * scale
        yield line(place, y, place, y + 4, SOFT, 1)
        yield text(place, y + 15, f"{1e3 * tick * step:g}", size=SMALL, fill=SOFT, anchor="middle")


def tick_secs(secs: float) -> float:
    """Seconds between marks of an axis: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(secs / MOST_TICKS))
    return next(times * power for times in (1, 2, 5, 10) if secs / (times * power) <= MOST_TICKS)


def _boxes(fill: str, boxes: list[tuple[float, float, float, float]]) -> str:
    corners = "".join(f"M{x:.1f} {y:.1f}h{w:.2f}v{h:g}h{-w:.2f}z" for x, y, w, h in boxes)
    return f"<path fill='{fill}' d='{corners}'/>"
