"""Few cases in which every pair of settings meets: greedy, and the same each time."""

import itertools

import pytest


def pairs_of(case):
    """Every two settings of a case, as ((key, value), (key, value))."""
    return list(itertools.combinations(case.items(), 2))


def pairwise_cases(cases):
    """Take the case that has most pairs not seen yet, until every pair of the legal `cases` was seen."""
    return [cases[at] for at in _cover([pairs_of(case) for case in cases])]


def few_fast(cases, *keys):
    """The cases, slow but for a few in which every setting, or every one of these keys, is once."""
    fast = {*_cover([[(key, str(value)) for key, value in case.items() if key in keys or not keys] for case in cases])}
    return [case if at in fast else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]


def _cover(sets):
    """Of some sets the numbers of a few that hold what all hold."""
    number = {one: at for at, one in enumerate(dict.fromkeys(itertools.chain.from_iterable(sets)))}
    masks = [sum(1 << number[one] for one in own) for own in sets]
    left, chosen = (1 << len(number)) - 1, []
    while left:
        best = max(range(len(sets)), key=lambda at: ((masks[at] & left).bit_count(), _shuffled(at)))
        left &= ~masks[best]
        chosen.append(best)
    return chosen


def _shuffled(at):
    # Knuth's multiplicative hash: among equals, cases from all over the grid, not its first corner again and again.
    return at * 2654435761 % 2**32
