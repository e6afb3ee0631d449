"""What is saved on one topology is loaded on any other bit for bit, and the next batches are the same."""

import itertools

import numpy as np
import pytest
from topologies import STEP, TOPOLOGIES, load, parts_on, save

from parallax.loop.folder import RunFolder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 20 to 60 tokens for windows of 32: most windows hold pieces of several."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(120):
        (folder / f"{number:03}.txt").write_text(f"Document {number:03} is " + "very, " * (number % 7) + "short.")
    return folder


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """By topology: a folder with a checkpoint that was saved on it, and its digests."""
    done = {}

    def saved_on(name):
        if name not in done:
            folder = tmp_path_factory.mktemp("saved")
            done[name] = folder, save(folder, TOPOLOGIES[name], corpus)
        return done[name]

    return saved_on


# Each is saved and loaded once; the other pairs are slow.
ROUND = list(zip(TOPOLOGIES, [*TOPOLOGIES][1:] + [*TOPOLOGIES][:1]))
PAIRS = [
    pytest.param(*pair, marks=[] if pair in ROUND else pytest.mark.slow)
    for pair in itertools.product(TOPOLOGIES, repeat=2)
]


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_state_and_next_batches_are_bitwise_the_same_on_another_topology(saved, corpus, there, here):
    folder, expected = saved(there)
    found = load(folder, TOPOLOGIES[here], corpus)
    assert found == expected
    assert sum("opt_state" in name for name in found) > 20 and sum("batch" in name for name in found) == 16


def test_the_next_batches_hold_packed_documents(corpus, tmp_path):
    """Else the order of rows alone would be tested."""
    parts = parts_on(TOPOLOGIES["1·1·1"], corpus, RunFolder(tmp_path))
    assert np.mean(parts.train_data.batch(STEP)["segments"].max(axis=1) > 1) > 0.5
