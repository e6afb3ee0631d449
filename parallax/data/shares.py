"""Which row of a mixture is of which source: in every prefix, each source has its share to within one row.

A source of weight w, of weights that sum to 1, must have more than w * n - 1 and less than w * n + 1 of the first n
rows. So each of its rows has a first and a last place. Steiner and Yeomans ("Level Schedules for Mixed-Model,
Just-in-Time Processes", Management Science, 1993) show that these can always be met, and the row whose last place comes
first goes first. After as many rows as the weights have parts, all shares are exact, and the order repeats: a table has
one period.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class RowShares:
    """One period of rows: the source of each, how many of that source come before it, and the parts of each source."""

    sources: np.ndarray
    earlier: np.ndarray
    parts: np.ndarray

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row, and how many of its rows come before.

        >>> [part.tolist() for part in share_rows([2, 1]).of(np.arange(6))]
        [[0, 0, 1, 0, 0, 1], [0, 1, 0, 2, 3, 1]]
        """
        periods, places = np.divmod(rows, len(self.sources))
        sources = self.sources[places]
        return sources, periods * self.parts[sources] + self.earlier[places]

    def counts(self, rows: int) -> np.ndarray:
        """Rows of each source among the first `rows`.

        >>> share_rows([2, 1]).counts(4).tolist()
        [3, 1]
        """
        periods, rest = divmod(rows, len(self.sources))
        return periods * self.parts + np.bincount(self.sources[:rest], minlength=len(self.parts))

    def row_of(self, source: int, number: int) -> int:
        """The row that is the `number`-th of a source, both from 0.

        >>> share_rows([2, 1]).row_of(1, 1)
        5
        """
        periods, rest = divmod(number, int(self.parts[source]))
        return periods * len(self.sources) + int(np.flatnonzero(self.sources == source)[rest])


def share_rows(parts: Sequence[int]) -> RowShares:
    """The order of rows for sources with these parts of a whole, each 1 or more."""
    period = sum(parts)
    waiting = [(0, source, 0) for source in range(len(parts))]  # first place, source, number of the row within it
    ready: list[tuple[int, int, int]] = []  # last place, source, number
    sources, earlier = np.zeros(period, np.int64), np.zeros(period, np.int64)
    for row in range(period):
        while waiting and waiting[0][0] <= row:
            _, source, number = heapq.heappop(waiting)
            last = -(-(number + 1) * period // parts[source]) - 1
            heapq.heappush(ready, (last, source, number))
        last, source, number = heapq.heappop(ready)
        assert last >= row, "every row can have its place"
        sources[row], earlier[row] = source, number
        heapq.heappush(waiting, ((number + 1) * period // parts[source], source, number + 1))
    return RowShares(sources, earlier, np.array(parts, np.int64))
