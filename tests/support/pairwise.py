"""Few cases in which every pair of settings meets: greedy, and the same each time."""

import itertools

import numpy as np
import pytest


def pairs_of(case):
    """Every two settings of a case, as ((key, value), (key, value))."""
    return list(itertools.combinations(case.items(), 2))


def pairwise_cases(cases):
    """Take the case that has most pairs not seen yet, until every pair of the legal `cases` was seen."""
    settings = _numbered([[*case.items()] for case in cases])
    first, second = np.triu_indices(settings.shape[1], 1)
    pairs = settings[:, first] * (settings.max() + 1) + settings[:, second]
    return [cases[at] for at in _cover(pairs)]


def few_fast(cases, *keys):
    """The cases, slow but for a few in which every setting, or every one of these keys, is once."""
    settings = [[(key, str(value)) for key, value in case.items() if key in keys or not keys] for case in cases]
    fast = {*_cover(_numbered(settings))}
    return [case if at in fast else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]


def _numbered(rows):
    """Each value of some rows as its number, from 1; 0 fills up shorter rows."""
    number = {None: 0}
    columns = itertools.zip_longest(*rows)
    return np.array([[number.setdefault(value, len(number)) for value in column] for column in columns]).T


def _cover(rows):
    """The numbers of a few rows that hold what all rows hold; in a row, no value is twice."""
    missing, chosen, among_equals = np.ones(rows.max() + 1, bool), [], _shuffled(np.arange(len(rows)))
    missing[0] = False
    while (counts := missing[rows].sum(1)).any():
        chosen.append(int(np.argmax((counts << 32) + among_equals)))
        missing[rows[chosen[-1]]] = False
    return chosen


def _shuffled(at):
    # Knuth's multiplicative hash: among equals, cases from all over the grid, not its first corner again and again.
    return at * 2654435761 % 2**32
