"""The shuffled order is a permutation, another one for each seed and epoch, and the same for ever."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from parallax.data.shuffle import shuffled

sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**63)


@given(size=sizes, seed=seeds, epoch=st.integers(0, 1000))
def test_every_position_goes_to_a_place_of_its_own(size, seed, epoch):
    places = shuffled(np.arange(size), size, seed=seed, epoch=epoch)
    np.testing.assert_array_equal(np.sort(places), np.arange(size))


@given(size=sizes, seed=seeds, data=st.data())
def test_a_place_does_not_depend_on_what_else_is_asked(size, seed, data):
    asked = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    places = shuffled(np.arange(size), size, seed=seed, epoch=3)
    np.testing.assert_array_equal(shuffled(np.array(asked, int), size, seed=seed, epoch=3), places[asked])


def test_seeds_and_epochs_give_orders_of_their_own():
    orders = {
        tuple(shuffled(np.arange(50), 50, seed=seed, epoch=epoch).tolist()) for seed in range(20) for epoch in range(20)
    }
    assert len(orders) == 400


def test_the_order_is_the_same_for_ever():
    # Written down once: a change would give every run that is resumed other batches.
    assert shuffled(np.arange(10), 10, seed=0, epoch=0).tolist() == GOLDEN_10
    large = 10**12 + 1
    assert shuffled(np.array([0, 1, large - 1]), large, seed=7, epoch=2).tolist() == GOLDEN_LARGE


def test_the_order_is_as_irregular_as_a_random_one():
    size = 2000
    orders = [shuffled(np.arange(size), size, seed=seed, epoch=0) for seed in range(40)]
    # For random orders the squared correlations times `size` have mean 1 and, over 40 orders, deviation 0.22.
    with_place = [np.corrcoef(order, np.arange(size))[0, 1] ** 2 * size for order in orders]
    with_next = [np.corrcoef(order[1:], order[:-1])[0, 1] ** 2 * size for order in orders]
    assert 0.3 < np.mean(with_place) < 1.9
    assert 0.3 < np.mean(with_next) < 1.9
    # One fixed point, and one pair of neighbours each way, on average.
    assert 0.4 < np.mean([(order == np.arange(size)).sum() for order in orders]) < 1.7
    assert 1.2 < np.mean([(np.abs(np.diff(order)) == 1).sum() for order in orders]) < 2.9


@pytest.mark.parametrize("stride", [2**bit for bit in range(12)])
def test_neighbours_at_any_stride_go_to_unrelated_places(stride):
    size = 2**12
    order = shuffled(np.arange(size), size, seed=0, epoch=0)
    distances = (np.roll(order, stride) - order) % size
    # Among 4096 random distances some value comes about 7 times.
    assert np.bincount(distances).max() <= 20


GOLDEN_10 = [5, 9, 0, 6, 7, 4, 2, 3, 8, 1]
GOLDEN_LARGE = [646908727667, 81619971116, 479035718547]
