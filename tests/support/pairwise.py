"""Few cases in which every pair of settings meets: greedy, and the same each time."""

import itertools

import numpy as np
import pytest


def pairs_of(case):
    """Every two settings of a case, as ((key, value), (key, value))."""
    return list(itertools.combinations(case.items(), 2))


def pairwise_cases(cases):
    """Take the case that has most pairs not seen yet, until every pair of the legal `cases` was seen."""
    number = {}
    rows = [[number.setdefault(setting, len(number)) for setting in case.items()] for case in cases]
    pairs = [[a * len(number) + b for a, b in itertools.combinations(row, 2)] for row in rows]
    return [cases[at] for at in _cover(pairs)]


def few_fast(cases, *keys):
    """The cases, slow but for a few in which every setting, or every one of these keys, is once."""
    fast = {*_cover([[(key, str(value)) for key, value in case.items() if key in keys or not keys] for case in cases])}
    return [case if at in fast else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]


def _cover(sets):
    """Of some sets the numbers of a few that hold what all hold."""
    number = {one: at for at, one in enumerate(dict.fromkeys(itertools.chain.from_iterable(sets)))}
    left = np.zeros((len(number), len(sets)), np.uint8)  # 1 where a set holds what no chosen set does
    for at, own in enumerate(sets):
        left[[number[one] for one in own], at] = 1
    counts, chosen, among_equals = left.sum(0, dtype=np.int64), [], _shuffled(np.arange(len(sets)))
    while counts.any():
        chosen.append(int(np.argmax((counts << 32) + among_equals)))
        new = np.flatnonzero(left[:, chosen[-1]])
        counts -= left[new].sum(0, dtype=np.int64)
        left[new] = 0
    return chosen


def _shuffled(at):
    # Knuth's multiplicative hash: among equals, cases from all over the grid, not its first corner again and again.
    return at * 2654435761 % 2**32
