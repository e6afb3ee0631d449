"""What is saved on one topology is loaded on any other bit for bit, and the next batches are the same."""

import functools
import itertools
import json

import numpy as np
import pytest
from support.process_examples import launched
from support.state_digests import FOUND, STEP, TOPOLOGIES, components_on, load, save


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 20 to 60 tokens for windows of 32: most windows hold pieces of several."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(120):
        (folder / f"{number:03}.txt").write_text(f"Document {number:03} is " + "very, " * (number % 7) + "short.")
    return folder


@pytest.fixture(scope="module")
def components(corpus, tmp_path_factory):
    """By topology: a run on it in this process."""
    return functools.cache(lambda name: components_on(TOPOLOGIES[name], corpus, tmp_path_factory.mktemp("components")))


@pytest.fixture(scope="module")
def saved(components, tmp_path_factory):
    """By topology: a folder with a checkpoint that was saved on it, and its digests."""

    @functools.cache
    def saved_on(name):
        folder = tmp_path_factory.mktemp("saved") / f"{name} by 1"
        return folder, save(folder, components(name))

    return saved_on


# Each is saved and loaded once; the other pairs are slow.
ROUND = list(zip(TOPOLOGIES, [*TOPOLOGIES][1:] + [*TOPOLOGIES][:1]))
PAIRS = [
    pytest.param(*pair, marks=[] if pair in ROUND else pytest.mark.slow)
    for pair in itertools.product(TOPOLOGIES, repeat=2)
]


@pytest.mark.fast(1)
@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_state_and_next_batches_are_bitwise_the_same_on_another_topology(saved, components, there, here):
    folder, expected = saved(there)
    found = load(folder, components(here))
    assert found == expected
    assert sum("opt_state" in name for name in found) > 20 and sum("batch" in name for name in found) == 16


def by_processes(act, root, corpus, *names, processes):
    """What so many processes find together, with eight devices."""
    command = ["tests/support/state_digests.py", act, str(root), str(corpus), *names]
    with launched(*command, processes=processes, devices=8 // processes) as job:
        status, text = job.end()
    assert status == 0, text
    return json.loads(text.split(FOUND)[1].splitlines()[0])


@pytest.mark.slow
def test_what_one_process_has_saved_two_load(saved, corpus):
    folder, expected = saved("2·2·2")
    found = by_processes("load", folder.parent, corpus, "4·1·2", processes=2)
    assert found == {"2·2·2 by 1 on 4·1·2": expected}


@pytest.mark.slow
def test_state_and_next_batches_are_bitwise_the_same_by_any_number_of_processes(corpus, tmp_path):
    """All pairs: a topology and 1, 2 or 4 processes that save, and others that load. One device has one process."""
    several = [name for name, topology in TOPOLOGIES.items() if topology.devices == 8]
    jobs = {1: [*TOPOLOGIES], 2: several, 4: several}
    expected, found = {}, {}
    for processes, names in jobs.items():
        expected |= by_processes("save", tmp_path, corpus, *names, processes=processes)
    for processes, names in jobs.items():
        loaded = by_processes("load", tmp_path, corpus, *names, processes=processes)
        found |= {f"{pair} by {processes}": digests for pair, digests in loaded.items()}
    assert len(expected) == 19 and len(found) == 361
    different = [pair for pair, digests in found.items() if digests != expected[pair.split(" on ")[0]]]
    assert not different


def test_the_next_batches_hold_packed_documents(components):
    """Else the order of rows alone would be tested."""
    assert np.mean(components("1·1·1").train_data.batch(STEP)["segments"].max(axis=1) > 1) > 0.5
