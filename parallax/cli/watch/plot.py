"""A curve in a terminal, as dots of braille; `rich`, which draws the rest, has no plots."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, by row and column
WIDE, HIGH = 2, 4
POINT = "◆"
NEIGHBOURS = 2  # on each side: what lasts no longer than they is a spike
LARGEST = 1e99  # sums and differences of them are finite
OUTLIER = 0.5  # a spike is drawn up to so much of the range of all others above them

Dot = tuple[int, int]  # column and row


class Plot(NamedTuple):
    """Lines of equal width, of which `marks` are (row, column) of the single points; and the ends of both axes."""

    lines: list[str]
    marks: list[tuple[int, int]]
    low: float
    high: float
    first: float
    last: float


def plot(
    curve: Iterable[tuple[float, float | None]],
    points: Iterable[tuple[float, float | None]],
    *,
    width: int,
    height: int,
) -> Plot | None:
    """A curve, and single points on top of it, in so many characters; None where there is nothing to draw.

    Both are pairs of x and y; those whose y is None or not finite are left out. A column of dots has the mean of its
    values, and a straight line goes over columns without any.

    >>> print("\\n".join(plot(enumerate([3, 2, 1, 0]), [], width=2, height=1).lines))
    ⠑⢄
    """
    curve, points = _finite(curve), _finite(points)
    if not curve and not points:
        return None
    xs = [x for x, _ in curve + points]
    first, last = min(xs), max(xs)

    def column_of(x: float, columns: int) -> int:
        return round((x - first) / (last - first) * (columns - 1)) if last > first else 0

    def row_of(y: float, rows: int) -> int:
        share = (min(y, top) - low) / (top - low) if top > low else 0.5
        return round((1 - share) * (rows - 1))

    values = defaultdict(list)
    for x, y in curve:
        values[column_of(x, width * WIDE)].append(y)
    means = {column: statistics.fmean(values[column]) for column in sorted(values)}
    low, top = _bounds([*means.values()], [y for _, y in points])
    dots = [(column, row_of(mean, height * HIGH)) for column, mean in means.items()]
    cells = [[0] * width for _ in range(height)]
    for start, end in zip(dots[:1] + dots, dots):
        for column, row in _between(start, end):
            cells[row // HIGH][column // WIDE] |= DOTS[row % HIGH][column % WIDE]
    lines = [[chr(BRAILLE + bits) if bits else " " for bits in line] for line in cells]
    marks = [(row_of(y, height), column_of(x, width)) for x, y in points]
    for row, column in marks:
        lines[row][column] = POINT
    return Plot(["".join(line) for line in lines], marks, low, top, first, last)


def _finite(pairs: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The pairs that can be drawn; what is absurdly large is drawn at the edge."""
    return [(x, min(max(y, -LARGEST), LARGEST)) for x, y in pairs if y is not None and math.isfinite(y)]


def _bounds(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value to draw: a spike far above all others does not flatten the rest."""
    low, highest = min(*values, *others, math.inf), max(*values, *others, -math.inf)
    around = (values[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1] for at in range(len(values)))
    usual = max([*map(statistics.median, around), *others])
    return low, min(highest, usual + OUTLIER * (usual - low)) if usual > low else highest


def _between(start: Dot, end: Dot) -> Iterator[Dot]:
    """The dots of a straight line, both ends included."""
    steps = max(end[0] - start[0], abs(end[1] - start[1]), 1)
    for at in range(steps + 1):
        column, row = (round(a + (b - a) * at / steps) for a, b in zip(start, end))
        yield column, row
