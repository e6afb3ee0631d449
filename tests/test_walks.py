"""What happens to a value in a step is found by "go to definition", in few functions and without going to and fro."""

import pytest
import walks

# The most functions of the shortest chain of each way.
STOPS = {"labels": 10, "weight": 17, "gradient": 10, "mesh.tp": 16}
# The functions that each value passes, and returns to a file that was left.
PASSED = {"labels": (15, 2), "weight": (19, 2), "gradient": (15, 2), "mesh.tp": (17, 0)}


@pytest.mark.parametrize("name", STOPS)
def test_each_function_of_a_way_is_found_from_one_before_it(name):
    walk = walks.WALKS[name]
    stops, _, returns = walks.counts(walk)
    assert walks.lost(walk, walks.KNOWN) == []
    assert stops <= STOPS[name] and returns <= 2


@pytest.mark.parametrize("name", PASSED)
def test_a_value_passes_so_many_functions(name):
    stops, _, returns = walks.counts(walks.PASSED[name])
    assert walks.lost(walks.PASSED[name], walks.KNOWN) == []
    assert (stops, returns) == PASSED[name]


def test_a_function_that_nothing_leads_to_is_lost():
    walk = ["pipeline/stage.py each_layer", "pipeline/stage.py one_place", "model/loss.py cross_entropy"]
    assert walks.lost(walk) == walk[-1:]
    assert walks.counts([walk[0], walk[2], walk[1]]) == (3, 2, 1)
