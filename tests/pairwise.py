"""Few cases in which every pair of settings meets: greedy, and the same each time."""

import itertools


def pairs_of(case):
    """Every two settings of a case, as ((key, value), (key, value))."""
    return list(itertools.combinations(case.items(), 2))


def pairwise_cases(cases):
    """Take the case that has most pairs not seen yet, until every pair of the legal `cases` was seen."""
    number = {pair: at for at, pair in enumerate(dict.fromkeys(pair for case in cases for pair in pairs_of(case)))}
    masks = [sum(1 << number[pair] for pair in pairs_of(case)) for case in cases]
    left, chosen = (1 << len(number)) - 1, []
    while left:
        best = max(range(len(cases)), key=lambda at: ((masks[at] & left).bit_count(), _shuffled(at)))
        left &= ~masks[best]
        chosen.append(cases[best])
    return chosen


def _shuffled(at):
    # Knuth's multiplicative hash: among equals, cases from all over the grid, not its first corner again and again.
    return at * 2654435761 % 2**32
