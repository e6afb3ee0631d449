"""A process that runs alone ends where a phase takes longer than its limit; one that only stood still goes on."""

import time

import pytest

from parallax.config.sections import DistributedConfig
from parallax.processes import deadline, job
from parallax.processes.deadline import Deadline

LIMITS = DistributedConfig(1, 1, 1, 2, 3, 1)


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_phase_that_takes_too_long_ends_the_process_with_its_stacks_and_75(exits, capfd):
    limits = Deadline(LIMITS)
    lines = []
    limits.log = lines.append
    limits.set_phase("step 7", "wait_secs")
    begun = time.monotonic()
    wait_until(lambda: exits)
    assert exits[0] == 75 and time.monotonic() - begun > 0.9
    expected = "LostError: waited 1 s (distributed.wait_secs) for 'step 7'; start the same command again to resume from"
    said = capfd.readouterr().err
    assert expected in said and "Thread MainThread:" in said and lines[0].startswith(expected)


def test_each_phase_has_its_own_time_and_none_is_limited_after_the_end(exits):
    limits = Deadline(LIMITS)
    time.sleep(1.2)  # before the first
    for step in range(4):
        limits.set_phase(f"step {step}", "wait_secs")
        time.sleep(0.4)
    limits.close()
    time.sleep(1.2)
    assert exits == []


def test_the_time_in_which_a_process_was_suspended_does_not_count(exits, monkeypatch):
    monkeypatch.setattr(deadline, "LONGEST_TICK_SECS", 0.1)
    monkeypatch.setattr(deadline, "TIMER_SECS", 0.9)  # the thread sleeps as the process would
    limits = Deadline(LIMITS)
    limits.set_phase("step 7", "wait_secs")
    time.sleep(2)
    limits.close()
    assert exits == []


def test_the_job_limits_a_process_alone_while_its_command_runs(monkeypatch):
    phases = []
    monkeypatch.setattr(Deadline, "set_phase", lambda self, *phase: phases.append(phase))
    with job.limited(LIMITS):
        job.set_phase("step 3")
        assert job.prepare_once(lambda: 5, "the prepared data") == 5
    job.set_phase("step 4")
    starting = ("starting the devices", "compile_secs")
    assert phases == [starting, ("step 3", "wait_secs"), ("the prepared data", "prepare_secs")]


def test_limits_end_with_an_error_too(monkeypatch):
    phases = []
    monkeypatch.setattr(Deadline, "set_phase", lambda self, *phase: phases.append(phase))
    with pytest.raises(KeyError), job.limited(LIMITS):
        raise KeyError
    job.set_phase("step 4")
    assert phases == [("starting the devices", "compile_secs")]
