"""The prefetcher delivers batches in order, hands errors over, and always closes."""

import threading
import time

import numpy as np
import pytest

from parallax.data import Prefetcher


class Counting:
    """A reader whose batch of step n holds n."""

    def __init__(self, fail_at=None, secs=0.0):
        self.fail_at, self.secs, self.steps = fail_at, secs, []

    def batch(self, step):
        time.sleep(self.secs)
        if step == self.fail_at:
            raise ValueError(f"no batch {step}")
        self.steps.append(step)
        return {"tokens": np.full((2, 3), step)}


def running():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_batches_come_in_order_from_the_first_step():
    with Prefetcher(Counting(), lambda batch: int(batch["tokens"][0, 0]) * 10, 7) as prefetcher:
        assert [prefetcher.get(step)[0] for step in range(7, 30)] == [10 * step for step in range(7, 30)]
    assert not running()


def test_put_runs_in_the_thread():
    with Prefetcher(Counting(), lambda batch: threading.current_thread().name, 0) as prefetcher:
        assert prefetcher.get(0)[0] == "prefetch"


def test_only_a_few_batches_are_read_ahead():
    reader = Counting()
    with Prefetcher(reader, lambda batch: batch, 0) as prefetcher:
        prefetcher.get(0)
        time.sleep(0.2)
        assert max(reader.steps) <= 5


def test_the_wait_is_measured():
    with Prefetcher(Counting(secs=0.1), lambda batch: batch, 0) as prefetcher:
        assert prefetcher.get(0)[1] > 0.05
        time.sleep(0.3)
        assert prefetcher.get(1)[1] < 0.05


def test_an_error_is_raised_where_its_batch_is_asked_for():
    with Prefetcher(Counting(fail_at=2), lambda batch: batch, 0) as prefetcher:
        prefetcher.get(0)
        prefetcher.get(1)
        for _ in range(2):
            with pytest.raises(ValueError, match="no batch 2"):
                prefetcher.get(2)
    assert not running()


@pytest.mark.parametrize("fail_at", [7, 8, 9, 12])
def test_who_has_a_reserve_hears_of_an_error_with_so_many_batches_left(fail_at):
    """However slow the reading is, and whoever asks for batches as fast as can be."""
    reader, heard = Counting(fail_at=fail_at, secs=0.01), []
    with Prefetcher(reader, lambda batch: int(batch["tokens"][0, 0]), 7, reserve=2) as prefetcher:
        for step in range(7, fail_at):
            assert prefetcher.get(step)[0] == step
            assert prefetcher.failure_before(fail_at) is None, "steps before it do not need what cannot be read"
            if prefetcher.failure_before(fail_at + 1):
                heard.append(step)
        assert heard == list(range(max(fail_at - 2, 7), fail_at))
        with pytest.raises(ValueError, match=f"no batch {fail_at}"):
            prefetcher.get(fail_at)
        assert str(prefetcher.failure_before(fail_at + 1)) == f"no batch {fail_at}"


def test_an_error_of_put_is_raised_too():
    def put(batch):
        raise RuntimeError("no room on the device")

    with Prefetcher(Counting(), put, 0) as prefetcher:
        with pytest.raises(RuntimeError, match="no room"):
            prefetcher.get(0)


def test_closing_does_not_wait_for_batches_that_nobody_takes():
    prefetcher = Prefetcher(Counting(), lambda batch: batch, 0)
    time.sleep(0.05)
    began = time.perf_counter()
    prefetcher.close()
    prefetcher.close()
    assert time.perf_counter() - began < 2
    assert not running()


def test_closing_gives_up_on_a_put_that_hangs(monkeypatch):
    monkeypatch.setattr("parallax.data.prefetch.CLOSE_SECS", 0.1)
    release = threading.Event()
    prefetcher = Prefetcher(Counting(), lambda batch: release.wait(10), 0)
    began = time.perf_counter()
    prefetcher.close()
    assert time.perf_counter() - began < 2
    release.set()


def test_what_is_read_after_the_end_is_not_put(monkeypatch):
    """The run may have ended long ago, and Python with it, inside which JAX would abort."""
    monkeypatch.setattr("parallax.data.prefetch.CLOSE_SECS", 0.0)
    put = []
    prefetcher = Prefetcher(Counting(secs=0.2), put.append, 0)
    prefetcher.close()
    (thread,) = running()
    thread.join(10)
    assert not thread.is_alive() and put == []


def test_steps_are_not_skipped():
    with Prefetcher(Counting(), lambda batch: batch, 0) as prefetcher:
        with pytest.raises(AssertionError, match="step 0 is next, not 1"):
            prefetcher.get(1)
