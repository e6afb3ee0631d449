"""A thread that keeps the next batches ready, so that a step does not wait for data."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from parallax.data.reader import Reader

BATCHES_AHEAD = 4
CLOSE_SECS = 5.0  # limit of the wait for the batch in flight; the thread is a daemon and may outlive it


class Prefetcher(AbstractContextManager):
    """Batches from `start_step` on, in order; a context manager that closes itself.

    Args:
        put: applied to each batch in the thread, for example to send it to the devices. Every batch has its own
            arrays, so `put` may keep them.
        reserve: a batch is returned only when this many later ones are ready, or one of them cannot be read. So an
            error is known while `reserve` batches are left.
    """

    def __init__(
        self, reader: Reader, put: Callable[[dict[str, np.ndarray]], Any], start_step: int, *, reserve: int = 0
    ):
        self._reader, self._put, self._reserve = reader, put, reserve
        self._next = start_step
        self._held: deque[Any] = deque()
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(BATCHES_AHEAD)
        self._is_closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(start_step,), name="prefetch", daemon=True)
        self._thread.start()

    def get(self, step: int) -> tuple[Any, float]:
        """The batch of `step`, and the seconds of waiting for it.

        Raises:
            Exception: the error of reading this batch.
        """
        assert step == self._next, f"batches come in order: step {self._next} is next, not {step}"
        assert self._failure or not self._is_closed, "the prefetcher is closed"
        began = time.perf_counter()
        while self._failure is None and len(self._held) <= self._reserve:
            batch, self._failure = self._ready.get()
            self._room.release()
            if self._failure is None:
                self._held.append(batch)
        if not self._held:
            raise self._failure
        self._next += 1
        return self._held.popleft(), time.perf_counter() - began

    def failure_before(self, step: int) -> BaseException | None:
        """The error of reading a batch before `step`; None while all of the reserve could be read."""
        return self._failure if self._next + len(self._held) < step else None

    def close(self) -> None:
        """Stop the thread; batches that are ready are dropped."""
        self._is_closed = True
        self._room.release()
        self._thread.join(CLOSE_SECS)

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self, step: int) -> None:
        while self._room.acquire() and not self._is_closed:
            try:
                batch = self._reader.batch(step)
                if self._is_closed:  # perhaps long ago: Python may be at its end, and JAX would abort there
                    return
                self._ready.put((self._put(batch), None))
            except BaseException as error:  # raised by `get`
                self._ready.put((None, error))
                return
            step += 1
