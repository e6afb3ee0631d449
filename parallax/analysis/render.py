"""Rendering of reports and plans: tables of text, and bars and tables of HTML."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from parallax.display.html import html_table
from parallax.display.units import percent

TEXT_WIDTH = 80  # columns of text
LEAST_CELL = 8  # characters that a shortened name keeps
LEAST_SHOWN = 0.0005  # share of a step; smaller parts have no line

BarPart = tuple[str, float]  # a colour's class, and a share of the whole bar


class Table(NamedTuple):
    """A table for text or a page. A row that is a string is a separate line; the first `left` columns are flush left.
    On a page the first rows have `bars`."""

    head: Sequence[str]
    rows: Sequence[Sequence[str] | str]
    left: int
    bars: Sequence[Sequence[BarPart]] = ()


class TitledTables(NamedTuple):
    """Tables and sentences under a title; `name` is the id on a page."""

    name: str
    title: str
    parts: Sequence[Table | str]


# ---- text


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with sentences longer than TEXT_WIDTH wrapped; tables fit already."""
    for line in lines:
        long = len(line) > TEXT_WIDTH
        yield from textwrap.wrap(line, TEXT_WIDTH, break_long_words=False, break_on_hyphens=False) if long else [line]


def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str] | str], *, left: int, width: float = math.inf
) -> Iterator[str]:
    """Columns as wide as their cells, two spaces apart; the first `left` columns are flush left, the others right.

    A row that is a string is a separate line. If the table is wider than `width`, columns are one space apart, and then
    names in the widest of the first columns are shortened in the middle.

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


def section_text(section: TitledTables) -> Iterator[str]:
    """Lines of text."""
    yield from wrapped([section.title])
    yield from [""] * any(isinstance(part, Table) for part in section.parts)
    yield from wrapped(parts_text(section.parts))


def parts_text(parts: Iterable[Table | str]) -> Iterator[str]:
    """Lines of text."""
    for part in parts:
        yield from [part] if isinstance(part, str) else table_text(part)


def table_text(table: Table) -> Iterator[str]:
    """Lines of text."""
    return text_table(table.head, table.rows, left=table.left, width=TEXT_WIDTH)


def time_parts(parts: Mapping[str, float], secs: float) -> Table:
    """The parts of a step's time."""
    shown = {name: part for name, part in parts.items() if part / secs > LEAST_SHOWN}
    rows = [[name, f"{part:.3f} s", percent(part / secs)] for name, part in (shown | {"step": secs}).items()]
    return Table(["time of a step", "", "share"], rows, 1, [[("compiler", part / secs)] for part in shown.values()])


def _aligned(side: Callable[[str, int], str], cell: str, width: int) -> str:
    if len(cell) > width:
        cell = f"{cell[: width // 2]}…{cell[len(cell) - (width - width // 2 - 1) :]}"
    return side(cell, width)


# ---- HTML

BAR_COLOURS = {"forward": "#3c7dc4", "recompute": "#d8a63a", "backward": "#389c88", "update": "#9b7dc0"}
BAR_COLOURS |= {"predicted": BAR_COLOURS["forward"], "compiler": "#858e96"}
STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #1d2126; --soft: #5c6670; --line: #dfe2e3; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e7e9ea; --soft: #98a2ab; --line: #2d3338; }
}
body {
  max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-variant-numeric: tabular-nums;
}
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.1rem; margin: 3rem 0 0.25rem; }
p { margin: 0.5rem 0; max-width: 46rem; }
p, dt, th { color: var(--soft); font-weight: 400; }
.facts { display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin: 1.75rem 0 0; }
dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
.wide { overflow-x: auto; margin-top: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
th, td { padding: 0.28rem 0.9rem 0.28rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.group { font-weight: 600; padding-top: 0.9rem; }
"""


def html_page(title: str, body: Iterable[str]) -> str:
    """A self-contained page."""
    lines = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n{lines}\n</body>\n</html>\n"
    )


def section_html(section: TitledTables) -> Iterator[str]:
    """Elements of a page."""
    yield f"<h2>{escape(section.title)}</h2>"
    yield f'<div id="{section.name}">'
    yield from parts_html(section.parts)
    yield "</div>"


def parts_html(parts: Iterable[Table | str]) -> Iterator[str]:
    """Elements of a page, or of a notebook, which has no style sheet."""
    for part in filter(None, parts):
        yield from [f"<p>{escape(part)}</p>"] if isinstance(part, str) else table_html(part)


def table_html(table: Table) -> Iterator[str]:
    """A table, which scrolls if it is wider than the page, with a key if its bars have several colours."""
    bars, drawn = iter(table.bars), [""] * bool(table.bars)
    rows = (
        escape(row) if isinstance(row, str) else [*map(escape, row), *(_bar(next(bars, ())) for _ in drawn)]
        for row in table.rows
    )
    yield f'<div class="wide">{html_table(rows, left=table.left, head=[*map(escape, table.head), *drawn])}</div>'
    colours = dict.fromkeys(colour for parts in table.bars for colour, _ in parts)
    if len(colours) > 1:
        items = (f'<span style="color:{BAR_COLOURS[name]}">&#9632;</span> {name}' for name in colours)
        yield f"<p>{' &ensp; '.join(items)}</p>"


def _bar(parts: Sequence[BarPart]) -> str:
    """Adjacent parts, each as wide as its share."""
    styles = (f"width:{100 * share:.3f}%;background:{BAR_COLOURS[name]}" for name, share in parts if share)
    pieces = "".join(f'<i style="{style}"></i>' for style in styles)
    return f'<div class="bar" style="display:flex;min-width:10rem;height:0.85rem">{pieces}</div>' if parts else ""
