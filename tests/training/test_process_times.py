"""What each process of a job spends for itself is kept, and a slow one is named, with what it is slow in."""

import jax
import numpy as np
import pytest

from parallax.processes.coordinator import ProcessReport
from parallax.storage.run_files import PROCESS_STEP_SECS, process_key
from parallax.training.process_times import SAVING, OwnTimes, ProcessTimes
from parallax.training.slow_processes import slow_processes

USUAL = {"data": 0.01, "host": 0.02, "copy": 0.0, "write": 0.0, "wall": 1.0}


def test_the_time_of_a_step_is_divided_into_own_parts_and_what_was_spent_apart():
    now = [0.0]
    times = OwnTimes(lambda: now[0])
    now[0] += 3.0
    times.begin()  # what came before is forgotten
    now[0] += 0.5
    times.waited_for_data(0.5)
    now[0] += 0.25
    with times.apart():  # for results
        now[0] += 2.0
    for event, secs in zip(SAVING, (0.125, 1.5)):
        jax.monitoring.record_event_duration_secs(event, secs)
    assert times.take() == {"data": 0.5, "host": 0.25, "copy": 0.125, "write": 1.5, "wall": 2.75}
    now[0] += 1.0
    assert times.take() == {"data": 0.0, "host": 1.0, "copy": 0.0, "write": 0.0, "wall": 1.0}


def told_of(*arriving, steps=4, share=0.2, processes=3):
    """What is said, and the table, after reports of (rank, step, changes) arrived in this order."""
    said = []
    reports = [ProcessReport(rank, f"host{rank}", {"step": step} | USUAL | own) for rank, step, own in arriving]
    times = ProcessTimes(share, steps, said.append, lambda: [reports.pop(0)], lambda: processes)
    while reports:
        times.update()
    return said, times.table()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("data", "waiting for its data"),
        ("host", "on the host"),
        ("copy", "copying checkpoints"),
        ("write", "writing checkpoints"),
    ],
)
def test_a_slow_process_is_named_once_with_what_it_is_slow_in_and_again_when_it_is_not(part, words):
    arriving = [
        (rank, step, {part: 0.41} if rank == 1 and step < 10 else {}) for step in range(2, 14) for rank in (2, 0, 1)
    ]
    said, table = told_of(*arriving)
    assert said == [
        f"process 1 on host1 is slow: of 1 s a step it spends 0.41 s {words}, the median is {USUAL[part]:.3g} s "
        "(steps 2 to 5)",
        "process 1 on host1 is no longer slow (steps 10 to 13)",
    ]
    mean = (8 * 0.41 + 4 * USUAL[part]) / 12
    assert table[process_key(part)] == pytest.approx([USUAL[part], mean, USUAL[part]], abs=1e-6)
    assert table[PROCESS_STEP_SECS] == [1.0, 1.0, 1.0]


def test_below_the_share_over_fewer_steps_or_with_no_steps_none_is_named():
    late = [(rank, step, {"data": 0.2} if rank == 1 else {}) for step in range(2, 6) for rank in range(3)]
    assert told_of(*late, share=0.18)[0] and not told_of(*late, share=0.2)[0]
    assert not told_of(*late, share=0.1, steps=5)[0] and not told_of(*late, share=0.1, steps=0)[0]


def test_of_two_processes_the_slower_one_is_compared_with_the_other():
    means = np.array([[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.3, 0.0, 0.0, 1.0]])
    assert slow_processes(means, 0.2) == {1: "host"} and slow_processes(means[::-1], 0.2) == {0: "host"}


def test_a_step_counts_when_all_have_reported_it_and_is_left_out_if_one_never_does():
    arriving = [(rank, step, {}) for step in range(2, 40) for rank in range(3) if (rank, step) != (2, 5)]
    said, table = told_of(*arriving[:2])
    assert not said and not table
    times = ProcessTimes(0.2, 4, print, lambda: [ProcessReport(*each) for each in reports], lambda: 3)
    reports = [(rank, "", {"step": step} | USUAL) for rank, step, _ in arriving]
    times.update()
    assert len(times._logged.steps) == 37 and not times._begun
    assert times.table() and not times.table()  # of the steps since the last one
