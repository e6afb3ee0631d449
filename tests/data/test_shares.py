"""Shares of a mixture: each source's rows, in every prefix, and one period for all rows."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.config.mixture import parts_of
from parallax.data.shares import share_rows

ROWS = 10_000
weights = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def worst_share(parts: list[int], sources: np.ndarray) -> Fraction:
    """The largest distance of a count from its share, over all prefixes, exactly."""
    period, rows = sum(parts), np.arange(1, len(sources) + 1)
    counts = [np.cumsum(sources == source) for source in range(len(parts))]
    return max(Fraction(int(np.abs(count * period - rows * part).max()), period) for count, part in zip(counts, parts))


@settings(max_examples=60, deadline=None)
@given(weights)
def test_in_every_prefix_each_source_is_within_a_row_of_its_share(whole):
    parts = parts_of([Fraction(weight) for weight in whole])
    sources, _ = share_rows(parts).of(np.arange(ROWS))
    assert worst_share(parts, sources) < 1


@settings(max_examples=30, deadline=None)
@given(weights, st.integers(0, 10**12))
def test_a_row_is_the_same_whichever_row_came_before(whole, start):
    """In closed form: far along the run as near its start, and numbered without gaps within its source."""
    shares = share_rows(whole)
    sources, numbers = shares.of(np.arange(start, start + 50))
    before = shares.counts(start)
    for source, number, row in zip(sources.tolist(), numbers.tolist(), range(start, start + 50)):
        assert number == before[source] and shares.row_of(source, number) == row
        before[source] += 1
    np.testing.assert_array_equal(shares.counts(start + 50), before)


@pytest.mark.parametrize("parts", [[1], [1, 1, 1], [7, 2, 1], [99_989, 10, 1]])
def test_a_period_has_the_parts_of_each_source(parts):
    assert np.bincount(share_rows(parts).sources).tolist() == parts
