"""Tables and sentences as lines of text; parallax/display/html.py writes the same as HTML."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

TEXT_WIDTH = 80  # columns of text
LEAST_CELL = 8  # characters that a shortened name keeps
BARS = "▁▂▃▄▅▆▇█"
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
    content: Sequence[Table | str]


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with sentences longer than TEXT_WIDTH wrapped; tables fit already."""
    for line in lines:
        long = len(line) > TEXT_WIDTH
        yield from textwrap.wrap(line, TEXT_WIDTH, break_long_words=False, break_on_hyphens=False) if long else [line]


def bars(values: Sequence[float]) -> str:
    """A bar for each number, from the smallest to the largest; a space for one that is not finite.

    >>> bars([3.0, 2.0, 1.0])
    '█▅▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    heights = [round((value - low) / span * (len(BARS) - 1)) if math.isfinite(value) else None for value in values]
    return "".join(" " if height is None else BARS[height] for height in heights)


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
    heads = [[cell[line - high] if len(cell) >= high - line else "" for cell in tops] for line in range(high)]
    lines = [*heads, *rows]
    widths = [max(map(len, column)) for column in zip(*(line for line in lines if not isinstance(line, str)))]
    gap = 2 if sum(widths) + 2 * len(widths) - 2 <= width else 1
    while sum(widths) + gap * (len(widths) - 1) > width and max(widths[:left]) > LEAST_CELL:
        widths[widths.index(max(widths[:left]))] -= 1
    for line in lines:
        if isinstance(line, str):
            yield line.rstrip()
        else:
            yield (" " * gap).join(_cell(line, widths, column, column < left) for column in range(len(line))).rstrip()


def _cell(line: Sequence[str], widths: Sequence[int], column: int, is_left: bool) -> str:
    cell, width = line[column], widths[column]
    if len(cell) > width:
        cell = f"{cell[: width // 2]}…{cell[len(cell) - (width - width // 2 - 1) :]}"
    return cell.ljust(width) if is_left else cell.rjust(width)


def section_text(section: TitledTables) -> Iterator[str]:
    """Lines of text."""
    yield from wrapped([section.title])
    yield from [""] * any(isinstance(part, Table) for part in section.content)
    yield from wrapped(content_text(section.content))


def content_text(content: Iterable[Table | str]) -> Iterator[str]:
    """Lines of text."""
    for part in content:
        yield from [part] if isinstance(part, str) else table_text(part)


def table_text(table: Table) -> Iterator[str]:
    """Lines of text."""
    return text_table(table.head, table.rows, left=table.left, width=TEXT_WIDTH)
