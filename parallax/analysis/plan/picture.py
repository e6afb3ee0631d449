"""Layouts as a picture: memory against time in SVG, the Pareto front marked."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from parallax.analysis.plan.layouts import Choice
from parallax.analysis.plan.sweep import Row
from parallax.analysis.report.place import Place
from parallax.runtime.units import in_bytes, percent

# The palette of Okabe and Ito, which colour-blind people can tell apart: by what the mesh uses.
COLOURS = {"dp": "#0072b2", "tp": "#009e73", "pp": "#e69f00", "pp tp": "#cc79a7"}
LABELS = {"dp": "data alone", "tp": "data and tensor", "pp": "with a pipeline", "pp tp": "pipeline and tensor"}
LIGHT = (COLOURS["pp"], COLOURS["pp tp"])  # on which ink is dark
INK, PAPER = "#222222", "#ffffff"
WIDTH, HEIGHT = 860, 500  # without the key
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 60, 86
MARGIN = 0.08  # of the range, left free around the points
TICKS = 6
LINE = 17  # of the key


class Frame(NamedTuple):
    """Ranges of the axes: bytes along, seconds up."""

    least_bytes: float
    most_bytes: float
    least_secs: float
    most_secs: float

    def x(self, size: float) -> float:
        share = (size - self.least_bytes) / (self.most_bytes - self.least_bytes)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, secs: float) -> float:
        share = (secs - self.least_secs) / (self.most_secs - self.least_secs)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def front(rows: Sequence[Row]) -> list[Choice]:
    """The layouts than which no other is faster in as little memory, the fastest first.

    Times that differ by less than three digits show are the same.
    """
    found, least = [], math.inf
    for choice, estimate in sorted(rows, key=lambda row: (float(f"{row.estimate.secs:.3g}"), row.estimate.peak_bytes)):
        if estimate.peak_bytes < least:
            found.append(choice)
            least = estimate.peak_bytes
    return found


def draw(title: str, rows: Sequence[Row], place: Place, own: Choice) -> str:
    """SVG with a point for each layout; `own` has a ring around it."""
    frame, marked = _frame(rows), front(rows)
    row_of = {row.choice: row for row in rows}
    on_front = [row_of[choice] for choice in marked]
    under = f"{len(rows)} layouts, predicted; a chip holds {in_bytes(place.chip.usable_bytes)}"
    parts = [
        _text(LEFT, 26, title, "font-size='15' font-weight='bold'"),
        _text(LEFT, 44, under, fill="#555555"),
        *_axes(frame),
        *_front_line(on_front, frame),
        *(_point(row, row.choice in marked, row.choice == own, frame) for row in reversed(rows)),
        *_legend(rows),
        *_key(on_front, frame),
    ]
    height = HEIGHT + LINE * (len(on_front) + 1)
    size = f"width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'"
    style = "font-family='Helvetica, Arial, sans-serif' font-size='11'"
    body = "\n".join(parts)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}>\n<rect width='100%' height='100%' fill='{PAPER}'/>"
    return f"{head}\n{body}\n</svg>\n"


def _frame(rows: Sequence[Row]) -> Frame:
    sizes = [row.estimate.peak_bytes for row in rows] or [0]
    secs = [row.estimate.secs for row in rows] or [0]
    return Frame(*_range(sizes), *_range(secs))


def _range(values: Sequence[float]) -> tuple[float, float]:
    room = MARGIN * (max(values) - min(values)) or 0.5 * max(values) or 1
    return max(min(values) - room, 0), max(values) + room


def _axes(frame: Frame) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for at in _nice_ticks(frame.least_bytes / 2**30, frame.most_bytes / 2**30):
        x = frame.x(at * 2**30)
        yield f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{bottom}' stroke='#eeeeee'/>"
        yield _text(x, bottom + 16, f"{at:g}", "text-anchor='middle'")
    for at in _nice_ticks(frame.least_secs, frame.most_secs):
        y = frame.y(at)
        yield f"<line x1='{LEFT}' x2='{right}' y1='{y:.1f}' y2='{y:.1f}' stroke='#eeeeee'/>"
        yield _text(LEFT - 8, y + 4, f"{at:g}", "text-anchor='end'")
    yield f"<path d='M{LEFT} {TOP} V{bottom} H{right}' fill='none' stroke='{INK}'/>"
    yield _text((LEFT + right) / 2, bottom + 34, "memory of a chip, GiB", "text-anchor='middle' font-size='12'")
    middle = (TOP + bottom) / 2
    turned = f"text-anchor='middle' font-size='12' transform='rotate(-90 20 {middle:.0f})'"
    yield _text(20, middle, "time of a step, s", turned)


def _nice_ticks(least: float, most: float) -> list[float]:
    """Round numbers between two.

    >>> _nice_ticks(0.93, 2.1)
    [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    """
    rough = (most - least) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power, 2 * power, 5 * power, 10 * power), key=lambda step: abs(step - rough))
    return [round(n * step, 10) for n in range(math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9) + 1)]


def _front_line(on_front: Sequence[Row], frame: Frame) -> Iterator[str]:
    at = [(frame.x(row.estimate.peak_bytes), frame.y(row.estimate.secs)) for row in on_front]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    yield f"<polyline class='front' points='{points}' fill='none' stroke='{INK}' stroke-dasharray='4 3'/>"


def _point(row: Row, marked: bool, own: bool, frame: Frame) -> str:
    x, y = frame.x(row.estimate.peak_bytes), frame.y(row.estimate.secs)
    colour = COLOURS[_kind(row.choice)]
    radius, opacity = (9, 1) if marked else (4, 0.55)
    edge = f"stroke='{INK}' stroke-width='1.2'" if marked else f"stroke='{PAPER}' stroke-width='0.5'"
    at, fill = f"cx='{x:.2f}' cy='{y:.2f}'", f"fill='{colour}' fill-opacity='{opacity}'"
    ring = f"<circle {at} r='13' fill='none' stroke='{INK}' stroke-width='1.5'/>" if own else ""
    figures = f"{in_bytes(row.estimate.peak_bytes)}, {row.estimate.secs:.3f} s, MFU {percent(row.estimate.mfu)}"
    title = f"<title>{escape(_name(row.choice))}: {figures}</title>"
    return f"{ring}<circle class='layout' {at} r='{radius}' {fill} {edge}>{title}</circle>"


def _key(on_front: Sequence[Row], frame: Frame) -> Iterator[str]:
    """Numbers on the points of the front, and what they stand for."""
    for number, row in enumerate(on_front, 1):
        x, y = frame.x(row.estimate.peak_bytes), frame.y(row.estimate.secs)
        ink = INK if COLOURS[_kind(row.choice)] in LIGHT else PAPER
        yield _text(x, y + 4, str(number), "text-anchor='middle' font-weight='bold'", fill=ink)
        line = HEIGHT + LINE * number
        yield _text(LEFT + 12, line, str(number), "text-anchor='end' font-weight='bold'")
        yield _text(LEFT + 22, line, _name(row.choice))
        yield _text(LEFT + 470, line, in_bytes(row.estimate.peak_bytes), "text-anchor='end'")
        yield _text(LEFT + 540, line, f"{row.estimate.secs:.3f} s", "text-anchor='end'")
        yield _text(LEFT + 630, line, f"MFU {percent(row.estimate.mfu)}", "text-anchor='end'")


def _legend(rows: Sequence[Row]) -> Iterator[str]:
    x, y = float(LEFT), HEIGHT - 18
    kinds = {_kind(row.choice) for row in rows}
    for kind in (kind for kind in COLOURS if kind in kinds):
        yield f"<circle cx='{x + 5:.1f}' cy='{y - 4}' r='5' fill='{COLOURS[kind]}'/>"
        yield _text(x + 15, y, LABELS[kind])
        x += 15 + 6.2 * len(LABELS[kind]) + 14
    yield f"<circle cx='{x + 5:.1f}' cy='{y - 4}' r='5' fill='none' stroke='{INK}' stroke-width='1.2'/>"
    yield _text(x + 15, y, "numbered: Pareto front; ringed: the config")


def _kind(choice: Choice) -> str:
    return " ".join(axis for axis in ("pp", "tp") if getattr(choice, axis) > 1) or "dp"


def _name(choice: Choice) -> str:
    """A layout in few letters.

    >>> _name(Choice(4, 8, 2, 16, "one_f_one_b", 1, "layer", "step", 0))
    '4·8·2 M=16 one_f_one_b remat layer gather step'
    """
    schedule = f" {choice.schedule}" if choice.pp > 1 else ""
    return (
        f"{choice.pp}·{choice.dp}·{choice.tp} M={choice.microbatches}{schedule} "
        f"remat {choice.remat} gather {choice.gather}" + " ahead" * choice.prefetch
    )


def _text(x: float, y: float, text: str, more: str = "", fill: str = INK) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{fill}' {more}>{escape(text)}</text>"
