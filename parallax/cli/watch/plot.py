"""A curve in a terminal, as dots of braille or, without Unicode, stars; `rich`, which draws the rest, has no plots."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, by row and column
WIDE, HIGH = 2, 4
POINT, STAR = "◆", "o"
NEIGHBOURS = 2  # on each side: what lasts no longer than they is a spike
LARGEST = 1e99  # sums and differences of them are finite
OUTLIER = 0.5  # a spike is drawn up to so much of the range of all others above them


class Points(NamedTuple):
    """A curve; values that are None or not finite are left out."""

    xs: Sequence[float]
    ys: Sequence[float | None]

    def finite(self) -> "Points":
        """Without them; what is absurdly large is drawn at the edge."""
        pairs = ((x, y) for x, y in zip(self.xs, self.ys) if y is not None and math.isfinite(y))
        kept = [(x, min(max(y, -LARGEST), LARGEST)) for x, y in pairs]
        return Points([x for x, _ in kept], [y for _, y in kept])


class Plot(NamedTuple):
    """Lines of equal width, of which `marks` are (row, column) of the single points; and the ends of both axes."""

    lines: list[str]
    marks: list[tuple[int, int]]
    low: float
    high: float
    first: float
    last: float


def plot(curve: Points, points: Points, *, width: int, height: int, unicode: bool = True) -> Plot | None:
    """A curve, and single points on top of it, in so many characters; None where there is nothing to draw.

    >>> print("\\n".join(plot(Points([0, 1, 2, 3], [3, 2, 1, 0]), Points([], []), width=2, height=1).lines))
    ⠑⢄
    """
    curve, points = curve.finite(), points.finite()
    if not curve.xs and not points.xs:
        return None
    wide, high = (WIDE, HIGH) if unicode else (1, 1)
    first, last = _range([*curve.xs, *points.xs])
    columns = _averaged(curve, first, last, width * wide)
    low, top = _bounds([y for y in columns if y is not None], points.ys)

    def row_of(y: float, rows: int) -> int:
        share = (min(y, top) - low) / (top - low) if top > low else 0.5
        return round((1 - share) * (rows - 1))

    dots = _connected([None if y is None else row_of(y, height * high) for y in columns])
    cells = _braille(dots, width, height) if unicode else _stars(dots, width, height)
    marks = []
    for x, y in zip(points.xs, points.ys):
        at = row_of(y, height), _column(x, first, last, width)
        cells[at[0]][at[1]] = POINT if unicode else STAR
        marks.append(at)
    return Plot(["".join(line) for line in cells], marks, low, top, first, last)


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _column(x: float, first: float, last: float, columns: int) -> int:
    return round((x - first) / (last - first) * (columns - 1)) if last > first else 0


def _averaged(curve: Points, first: float, last: float, columns: int) -> list[float | None]:
    """The mean of the values in each column; a column without any is None."""
    sums, counts = [0.0] * columns, [0] * columns
    for x, y in zip(curve.xs, curve.ys):
        at = _column(x, first, last, columns)
        sums[at] += y
        counts[at] += 1
    return [total / count if count else None for total, count in zip(sums, counts)]


def _bounds(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value to draw: a spike far above all others does not flatten the rest."""
    low, highest = min(*values, *others, math.inf), max(*values, *others, -math.inf)
    around = (values[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1] for at in range(len(values)))
    usual = max([*map(statistics.median, around), *others])
    return low, min(highest, usual + OUTLIER * (usual - low)) if usual > low else highest


def _connected(rows: Sequence[int | None]) -> list[tuple[int, int]]:
    """(row, column) of dots, with those between neighbouring columns; over empty columns goes a straight line."""
    dots, before = [], None
    for column, row in enumerate(rows):
        if row is None:
            continue
        dots.append((row, column))
        if before is not None:
            dots += _between(before, (row, column))
        before = row, column
    return dots


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(end[0] - start[0]), end[1] - start[1])
    way = range(1, steps)
    return [tuple(round(a + (b - a) * at / steps) for a, b in zip(start, end)) for at in way]


def _braille(dots: Sequence[tuple[int, int]], width: int, height: int) -> list[list[str]]:
    cells = [[0] * width for _ in range(height)]
    for row, column in dots:
        cells[row // HIGH][column // WIDE] |= DOTS[row % HIGH][column % WIDE]
    return [[chr(BRAILLE + bits) if bits else " " for bits in line] for line in cells]


def _stars(dots: Sequence[tuple[int, int]], width: int, height: int) -> list[list[str]]:
    cells = [[" "] * width for _ in range(height)]
    for row, column in dots:
        cells[row][column] = "*"
    return cells
