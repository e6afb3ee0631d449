"""Shares of a mixture: each source's rows, in every prefix, and one period for all rows."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.config.mixture import Phase, SourceConfig, parts_of
from parallax.data.mixture import segments_of
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


def over_phases(phases: list[list[int]], rows: list[int]) -> list[Fraction]:
    """The largest distance from its share of a source's rows, in all prefixes that end in each phase: of all rows from
    the run's first on, where the share is that of each row's phase. Each phase has so many rows."""
    names = [f"source{number}" for number in range(len(phases[0]))]
    first, of_run = 0, []
    for weights, count in zip(phases, rows):
        shares = {name: Fraction(weight) for name, weight in zip(names, weights)}
        of_run.append(Phase(name="", first_step=first, seq=1, global_batch=1, weights=shares))
        first += count
    sources = [SourceConfig(name=name, path=(name,)) for name in names]
    segments, _, _ = segments_of(of_run, sources, [{1: 7} for _ in names])
    counts, wanted, worst = [0] * len(names), [Fraction(0)] * len(names), []
    for weights, count, segment in zip(phases, rows, segments):
        of_rows, _ = segment.of(np.arange(segment.row, segment.row + count))
        worst.append(Fraction(0))
        for source in of_rows.tolist():
            counts[source] += 1
            wanted = [before + Fraction(weight, sum(weights)) for before, weight in zip(wanted, weights)]
            worst[-1] = max(worst[-1], *(abs(here - there) for here, there in zip(counts, wanted)))
    return worst


phases_of_sources = st.integers(1, 5).flatmap(
    lambda sources: st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=sources, max_size=sources).filter(any), st.integers(2, 40)),
        min_size=1,
        max_size=4,
    )
)


@settings(max_examples=60, deadline=None)
@given(phases_of_sources)
def test_over_several_phases_each_source_is_within_as_many_rows_of_its_share(phases):
    worst = over_phases(*map(list, zip(*phases)))
    assert all(distance < number for number, distance in enumerate(worst, 1))


def test_over_phases_no_order_that_does_not_know_the_next_one_stays_within_a_row():
    """After three rows of five sources, two have had none: 3/5 of a row behind, whichever they are. The next phase
    gives each of them half of its rows, and only one of them has the first."""
    behind = [1, 1, 1, 0, 0]
    phases = [[1] * 5, [1 - each for each in behind]]
    assert over_phases(phases, [3, 4])[1] > 1
