"""A thread that prints stacks when a step takes far longer than usual."""

import statistics
import sys
import threading
import time
from collections import deque
from contextlib import AbstractContextManager

from parallax.errors import tell, thread_stacks

LEAST_STEPS = 5  # fewest steps for a meaningful median
REMEMBERED_STEPS = 100
LEAST_SECS = 5.0  # shorter steps are not reported
LOOK_SECS = 0.25


class Watchdog(AbstractContextManager):
    """Prints the stacks of all threads to stderr, once, when a step takes `factor` times the median; 0 is off.

    Use it as a context. It does not end the run; distributed.wait_secs does.
    """

    def __init__(self, factor: float, *, least_secs: float = LEAST_SECS):
        self._factor, self._least_secs = factor, least_secs
        self._durations: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._current: tuple[int, float] | None = None
        self._closed = threading.Event()
        if factor:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __exit__(self, *_) -> None:
        self._closed.set()

    def begin(self, step: int, *, compiles: bool = False) -> None:
        """Start watching a step, and end watching the previous one; a step that compiles is not watched."""
        now = time.monotonic()
        if self._current is not None:
            self._durations.append(now - self._current[1])
        self._current = None if compiles else (step, now)

    def pause(self) -> None:
        """Stop watching until the next step."""
        self._current = None

    def _watch(self) -> None:
        said = None
        while not self._closed.wait(LOOK_SECS):
            current = self._current
            if current is None or current == said or len(self._durations) < LEAST_STEPS:
                continue
            median = statistics.median(self._durations)
            taken = time.monotonic() - current[1]
            if taken > max(self._factor * median, self._least_secs):
                said = current
                times = f"has taken {taken:.1f} s so far, the median is {median:.2f} s"
                tell(f"step {said[0]} {times} (train.stall_factor={self._factor:g}); all threads:", sys.stderr)
                tell(thread_stacks(), sys.__stderr__)
