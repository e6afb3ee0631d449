"""Whole documents in windows, as many as fit: best fit, the longest first.

Ding et al. ("Fewer Truncations Improve Language Modeling", 2024) pack documents so.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Packing:
    """Pieces of documents by window: those of window `w` are `order[firsts[w] : firsts[w + 1]]`.

    A piece has the index in the stream of its first id, its number of ids, and the number of its document.
    """

    starts: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    order: np.ndarray
    firsts: np.ndarray

    @property
    def windows(self) -> int:
        return len(self.firsts) - 1

    def pieces_in(self, window: int) -> np.ndarray:
        """The numbers of the pieces of a window; none beyond the last."""
        if window >= self.windows:
            return self.order[:0]
        return self.order[self.firsts[window] : self.firsts[window + 1]]


def pack(starts: np.ndarray, lengths: np.ndarray, documents: np.ndarray, room: int) -> Packing:
    """Pack pieces, of `room` ids or fewer, into windows."""
    window_of = best_fit(lengths.tolist(), room)
    order = np.argsort(window_of, kind="stable")
    counts = np.bincount(window_of, minlength=1) if len(window_of) else np.zeros(0, np.int64)
    return Packing(starts, lengths, documents, order, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def best_fit(lengths: Sequence[int], room: int) -> np.ndarray:
    """The window of each piece: of the windows in which it fits, a fullest; the longest pieces come first.

    >>> best_fit([2, 5, 3, 4], 7).tolist()
    [0, 0, 1, 1]
    """
    window_of = np.zeros(len(lengths), np.int64)
    with_room: dict[int, list[int]] = {}  # windows, by how many ids still fit in them
    rooms: list[int] = []  # keys of `with_room`, sorted
    windows = 0
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        place = bisect.bisect_left(rooms, lengths[piece])
        if place == len(rooms):
            window, left = windows, room
            windows += 1
        else:
            left = rooms[place]
            window = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[place]
        window_of[piece] = window
        left -= lengths[piece]
        if left not in with_room:
            with_room[left] = []
            bisect.insort(rooms, left)
        with_room[left].append(window)
    return window_of


def parts_of_document(length: int, turns: Sequence[int], room: int) -> list[tuple[int, int]]:
    """First id and number of ids of parts that begin with turns, each of as many turns as fit; a turn that does not fit
    is cut.

    >>> parts_of_document(10, [4, 6], 6), parts_of_document(10, [3], 5)
    ([(0, 6), (6, 4)], [(0, 3), (3, 5)])
    """
    edges = [0, *turns, length]
    parts, begin = [], 0
    for end, following in zip(edges[1:], [*edges[2:], None]):
        if following is None or following - begin > room:
            parts.append((begin, min(end - begin, room)))
            begin = end
    return parts
