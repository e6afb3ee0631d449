"""How reports and plans are drawn: tables of text, bars and tables of HTML, and points in an SVG."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from parallax.runtime.units import percent

WIDTH = 80  # columns of text
LEAST_CELL = 8  # letters that are left of a name in a column that is too wide
LEAST_SHOWN = 0.0005  # of a step: parts that take less have no line
# The palette of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9", "#009e73", "#f0e442", "#222222", "#999999")

# ---- text


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with sentences that are longer than WIDTH in several; tables fit by themselves."""
    for line in lines:
        long = len(line) > WIDTH
        yield from textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) if long else [line]


def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str] | str], *, left: int, width: float = math.inf
) -> Iterator[str]:
    """Columns as wide as their cells, two spaces apart; the first `left` of them are flush left, the others right.

    A row that is a string is a line of its own. Where the table is wider than `width`, columns are one space apart,
    and then names in the widest of the first columns are cut in the middle.

    >>> print("\\n".join(text_table(["axis", "bytes"], ["all", ["  pp", "8"], ["  dp", "128"]], left=1)))
    axis  bytes
    all
      pp      8
      dp    128
    """
    tops = [cell.split("\n") for cell in head]
    high = max(map(len, tops))
    heads = [[cell[at - high] if len(cell) >= high - at else "" for cell in tops] for at in range(high)]
    lines = [*heads, *rows]
    cells = [line for line in lines if not isinstance(line, str)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    gap = 2 if sum(widths) + 2 * len(widths) - 2 <= width else 1
    while sum(widths) + gap * (len(widths) - 1) > width and max(widths[:left]) > LEAST_CELL:
        widths[widths.index(max(widths[:left]))] -= 1
    for line in lines:
        sides = (str.ljust if at < left else str.rjust for at in range(len(widths)))
        shown = [line] if isinstance(line, str) else map(_aligned, sides, line, widths)
        yield (" " * gap).join(shown).rstrip()


def time_table(parts: Mapping[str, float], secs: float) -> Iterator[str]:
    """The parts of a step's time as a table."""
    rows = [[name, f"{part:.3f} s", percent(part / secs)] for name, part in parts.items() if part / secs > LEAST_SHOWN]
    yield from text_table(["time of a step", "", "share"], [*rows, ["step", f"{secs:.3f} s", percent(1)]], left=1)


def _aligned(side: Callable[[str, int], str], cell: str, width: int) -> str:
    if len(cell) > width:
        cell = f"{cell[: width // 2]}…{cell[len(cell) - (width - width // 2 - 1) :]}"
    return side(cell, width)


# ---- HTML

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --ink: #1d2126; --soft: #5c6670; --line: #dfe2e3; --track: #eef0f0;
  --forward: #2f6db5; --recompute: #d19a2a; --backward: #2b8a78; --theirs: #8a939b;
  --model: #2f6db5; --masked: #8c6bb1; --padding: #b9688e; --repeated: #c0583a; --recomputed: #d19a2a;
  --waiting: #b7bec4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --ink: #e7e9ea; --soft: #98a2ab; --line: #2d3338; --track: #22272b;
    --forward: #5b9be0; --recompute: #e0b04f; --backward: #4cb5a0; --theirs: #7c868f;
    --model: #5b9be0; --masked: #ab8ed0; --padding: #d387ab; --repeated: #df7f61; --recomputed: #e0b04f;
    --waiting: #59636b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; letter-spacing: -0.015em; }
h2 { font-size: 1.1rem; margin: 3rem 0 0.25rem; letter-spacing: -0.005em; }
p { margin: 0 0 1rem; color: var(--soft); max-width: 46rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1px; margin: 1.75rem 0 0;
  padding: 0; background: var(--line); border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
.facts div { background: var(--paper); padding: 0.8rem 1rem; }
.facts dt { color: var(--soft); font-size: 0.8rem; }
.facts dd { margin: 0; font-size: 1.35rem; font-weight: 600; letter-spacing: -0.01em; }
.bars { display: grid; grid-template-columns: max-content minmax(4rem, 1fr) max-content max-content;
  grid-auto-flow: dense; gap: 0.35rem 0.9rem; align-items: center; margin-top: 1rem; }
.bars > .group { grid-column: 1 / -1; font-weight: 600; margin-top: 0.6rem; }
.bars > .value, .bars > .beside { text-align: right; white-space: nowrap; }
.bars > .beside { color: var(--soft); font-size: 0.82rem; }
.bars > .label { grid-column: 1; } .bars > .bar { grid-column: 2; }
.bars > .value { grid-column: 3; } .bars > .beside { grid-column: 4; }
.bars > .sum { font-weight: 600; }
.bar { display: flex; height: 0.85rem; background: var(--track); border-radius: 3px; overflow: hidden; }
.bar i { display: block; height: 100%; flex: none; }
.bar.tall { height: 1.6rem; margin-top: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.25rem; margin: 0.6rem 0 0; padding: 0; list-style: none;
  color: var(--soft); font-size: 0.85rem; }
.legend i, .split i { display: inline-block; width: 0.7rem; height: 0.7rem; border-radius: 2px; margin-right: 0.45rem; }
.forward { background: var(--forward); } .recompute { background: var(--recompute); }
.backward { background: var(--backward); } .theirs { background: var(--theirs); }
.model { background: var(--model); } .masked { background: var(--masked); }
.padding { background: var(--padding); } .repeated { background: var(--repeated); }
.recomputed { background: var(--recomputed); } .waiting { background: var(--waiting); }
.wide { overflow-x: auto; margin-top: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
th { text-align: left; font-weight: 500; color: var(--soft); }
th, td { padding: 0.28rem 0.9rem 0.28rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
th.number, td.number { text-align: right; }
td.source { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 0.82rem; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  .bars { grid-template-columns: minmax(0, 1fr) max-content max-content; grid-auto-flow: row; gap: 0 0.75rem; }
  .bars > .value { grid-column: 2; } .bars > .beside { grid-column: 3; }
  .bars > .bar { grid-column: 1 / -1; margin-bottom: 0.6rem; }
}
"""

BarPart = tuple[str, float]  # a colour's class, and a share of the whole bar


def html_page(title: str, body: Iterable[str]) -> str:
    """A page that needs no other file."""
    lines = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{lines}\n</main>\n</body>\n</html>\n"
    )


def bar_row(label: str, parts: Sequence[BarPart], value: str, beside: str = "", kind: str = "") -> Iterator[str]:
    """A label, a bar and its value."""
    yield f'<div class="label {kind}">{escape(label)}</div><div class="value {kind}">{escape(value)}</div>'
    yield f'<div class="beside {kind}">{escape(beside)}</div>{bar(parts)}'


def bar(parts: Iterable[BarPart], kind: str = "", name: str = "") -> str:
    """Parts beside one another, each as wide as its share."""
    pieces = "".join(f'<i class="{colour}" style="width:{100 * share:.3f}%"></i>' for colour, share in parts if share)
    named = f' id="{name}"' if name else ""
    return f'<div class="bar {kind}"{named}>{pieces}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What colours mean."""
    items = "".join(f'<li><i class="{colour}"></i>{escape(label)}</li>' for colour, label in entries)
    yield f'<ul class="legend">{items}</ul>'


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int, source: int = -1) -> Iterator[str]:
    """A table that scrolls by itself where it is wider than the page."""
    yield '<div class="wide"><table><thead>'
    yield html_row(head, left=left, tag="th")
    yield "</thead><tbody>"
    yield from (html_row(row, left=left, source=source) for row in rows)
    yield "</tbody></table></div>"


def html_row(cells: Sequence[str], *, left: int, tag: str = "td", source: int = -1, raw: bool = False) -> str:
    """One row; cells after the first `left` are numbers."""

    def cell(at: int, text: str) -> str:
        kind = ' class="source"' if at == source else ' class="number"' if at >= left else ""
        return f"<{tag}{kind}>{text if raw else escape(text)}</{tag}>"

    return f"<tr>{''.join(cell(at, text) for at, text in enumerate(cells))}</tr>"


def stacked_bar(title: str, parts: Mapping[str, float], written: Callable[[float], str]) -> str:
    """One bar with its legend, for a notebook: it needs no style sheet. `written` formats a value."""
    whole = sum(parts.values())
    shown = {name: value for name, value in parts.items() if value > 0.005 * whole}
    colours = dict(zip(shown, COLOURS * 2))
    pieces = "".join(
        f'<div style="background:{colours[name]};width:{100 * value / whole:.2f}%"></div>'
        for name, value in shown.items()
    )
    key = " &ensp; ".join(
        f'<span style="white-space:nowrap"><span style="color:{colours[name]}">&#9632;</span> {escape(name)} '
        f"{written(value)}</span>"
        for name, value in shown.items()
    )
    joined = f'<div style="display:flex;height:1.1em;max-width:52em">{pieces}</div>'
    return f"<p><b>{title}: {written(whole)}</b></p>{joined}<p>{key}</p>"


# ---- SVG

INK, PAPER = "#222222", "#ffffff"
SVG_WIDTH, SVG_HEIGHT = 860, 500
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 60, 86
MARGIN = 0.08  # of the range, left free around the points
TICKS = 6


class Frame(NamedTuple):
    """The axes of a plot: the range of x, then that of y."""

    left: float
    right: float
    bottom: float
    top: float

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> "Frame":
        """A frame with room around these points."""
        return cls(*_range(xs), *_range(ys))

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (SVG_WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return SVG_HEIGHT - BOTTOM - (value - self.bottom) / (self.top - self.bottom) * (SVG_HEIGHT - TOP - BOTTOM)

    def axes(self, x_title: str, y_title: str, x_unit: float = 1) -> Iterator[str]:
        """Both axes with their ticks; those along x are numbers of `x_unit`."""
        bottom, right = SVG_HEIGHT - BOTTOM, SVG_WIDTH - RIGHT
        for at in nice_ticks(self.left / x_unit, self.right / x_unit):
            x = self.x(at * x_unit)
            yield f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{bottom}' stroke='#eeeeee'/>"
            yield svg_text(x, bottom + 16, f"{at:g}", "text-anchor='middle'")
        for at in nice_ticks(self.bottom, self.top):
            y = self.y(at)
            yield f"<line x1='{LEFT}' x2='{right}' y1='{y:.1f}' y2='{y:.1f}' stroke='#eeeeee'/>"
            yield svg_text(LEFT - 8, y + 4, f"{at:g}", "text-anchor='end'")
        yield f"<path d='M{LEFT} {TOP} V{bottom} H{right}' fill='none' stroke='{INK}'/>"
        yield svg_text((LEFT + right) / 2, bottom + 34, x_title, "text-anchor='middle' font-size='12'")
        middle = (TOP + bottom) / 2
        turned = f"text-anchor='middle' font-size='12' transform='rotate(-90 20 {middle:.0f})'"
        yield svg_text(20, middle, y_title, turned)


def svg(body: Iterable[str], height: int = SVG_HEIGHT) -> str:
    """A whole picture on white."""
    size = f"width='{SVG_WIDTH}' height='{height}' viewBox='0 0 {SVG_WIDTH} {height}'"
    style = "font-family='Helvetica, Arial, sans-serif' font-size='11'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}>\n<rect width='100%' height='100%' fill='{PAPER}'/>"
    return "\n".join([head, *body, "</svg>\n"])


def svg_text(x: float, y: float, text: str, more: str = "", fill: str = INK) -> str:
    """A line of text; `more` are attributes."""
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{fill}' {more}>{escape(text)}</text>"


def nice_ticks(least: float, most: float) -> list[float]:
    """Round numbers between two.

    >>> nice_ticks(0.93, 2.1)
    [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    """
    rough = (most - least) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power, 2 * power, 5 * power, 10 * power), key=lambda step: abs(step - rough))
    return [round(n * step, 10) for n in range(math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9) + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    values = values or [0]
    room = MARGIN * (max(values) - min(values)) or 0.5 * max(values) or 1
    return max(min(values) - room, 0), max(values) + room
