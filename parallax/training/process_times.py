"""What each process of a job spends for itself, and which one is slower than the others.

Collectives have every process wait for the slowest, so a step takes equally long everywhere. What tells processes apart
is the time in which they wait for no other one: for data, on the host before a step is dispatched, and while they copy
and write checkpoints. The slow process has most of it, and waits least for results.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from parallax.processes import job
from parallax.processes.coordinator import ProcessReport
from parallax.storage.run_files import OWN_PARTS, PROCESS_STEP_SECS, process_key
from parallax.training.slow_processes import SLOW_IN, median, slow_processes

IN_DATA, ON_HOST, COPY, WRITE = OWN_PARTS
# Orbax says so of each process, without the barriers in which it waits for others.
SAVING = {
    "/jax/orbax/write/blocking_d2h_duration_secs": COPY,
    "/jax/checkpoint/write/async/commit_duration_sec": WRITE,
}
WALL = "wall"
SECS_DIGITS = 6
LATE_STEPS = 8  # a step that some process has not reported when another has reported so many more is left out

_saving: collections.deque[tuple[str, float]] = collections.deque(maxlen=1024)  # parts and seconds, from any thread


class OwnTimes:
    """A stopwatch for the steps of this process: what it spends for itself, by part.

    What is neither said to be of a part nor spent `apart`, where it waits for devices or other processes, is the
    host's.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        listen_to_saves()
        self.begin()

    def begin(self) -> None:
        """Forget what was spent so far."""
        self._began, self._apart, self._data = self._clock(), 0.0, 0.0
        _saving.clear()

    def waited_for_data(self, secs: float) -> None:
        """Count seconds of a wait for data."""
        self._data += secs

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Leave out the time of the block, in which this process may wait for others."""
        began = self._clock()
        try:
            yield
        finally:
            self._apart += self._clock() - began

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call, and all of them; the next step begins now."""
        wall = self._clock() - self._began
        host = max(wall - self._apart - self._data, 0.0)
        secs = {IN_DATA: self._data, ON_HOST: host, COPY: 0.0, WRITE: 0.0, WALL: wall}
        for part, spent in [_saving.popleft() for _ in range(len(_saving))]:
            secs[part] += spent
        self.begin()
        return secs


@functools.cache  # once in a process, since a listener cannot be removed
def listen_to_saves() -> None:
    """Keep what is said of how long this process copies and writes checkpoints."""

    def keep(event: str, secs: float, **_: object) -> None:
        if event in SAVING:
            _saving.append((SAVING[event], secs))

    jax.monitoring.register_event_duration_secs_listener(keep)


@dataclass
class StepsSeen:
    """Sums over steps: a row for each process, a column for each part and one for the whole."""

    steps: list[int] = field(default_factory=list)
    sums: np.ndarray | float = 0.0

    def add(self, step: int, secs: np.ndarray) -> None:
        """Add a step."""
        self.steps.append(step)
        self.sums = self.sums + secs

    def means(self) -> np.ndarray:
        """Means over the steps."""
        return self.sums / len(self.steps)


@dataclass
class ProcessTimes:
    """Of all processes, in process 0: what each spends for itself, and which is slow.

    Args:
        share: of a step's time that a process needs more than the median in one part to be slow.
        steps: over whose mean processes are compared; 0 names none.
        say: prints a line.
    """

    share: float
    steps: int
    say: Callable[[str], None]
    take_reports: Callable[[], Sequence[ProcessReport]] = job.take_reports
    processes: Callable[[], int] = jax.process_count
    _hosts: dict[int, str] = field(init=False, default_factory=dict)
    _begun: dict[int, dict[int, Mapping[str, float]]] = field(init=False, default_factory=dict)
    _window: StepsSeen = field(init=False, default_factory=StepsSeen)
    _logged: StepsSeen = field(init=False, default_factory=StepsSeen)
    _slow: dict[int, str] = field(init=False, default_factory=dict)

    def update(self) -> None:
        """Take what has arrived, and name a process that has become slow, or is no longer."""
        for rank, host, numbers in self.take_reports():
            step = int(numbers.get("step", 0))
            self._hosts[rank] = host
            self._begun.setdefault(step, {})[rank] = numbers
            if len(self._begun[step]) == self.processes():
                self._add(step, self._begun.pop(step))
            for late in [other for other in self._begun if other < step - LATE_STEPS]:
                del self._begun[late]

    def table(self) -> dict[str, list[float]]:
        """The mean seconds of each process in a step by part, over the steps since the last call; empty if nothing has
        arrived."""
        if not self._logged.steps:
            return {}
        *parts, wall = self._logged.means().T.round(SECS_DIGITS).tolist()
        self._logged = StepsSeen()
        return {process_key(part): secs for part, secs in zip(OWN_PARTS, parts)} | {PROCESS_STEP_SECS: wall}

    def _add(self, step: int, reports: Mapping[int, Mapping[str, float]]) -> None:
        secs = np.array([[reports[rank].get(part, 0.0) for part in (*OWN_PARTS, WALL)] for rank in sorted(reports)])
        self._logged.add(step, secs)
        if self.steps:
            self._window.add(step, secs)
        if self.steps and len(self._window.steps) == self.steps:
            self._judge()
            self._window = StepsSeen()

    def _judge(self) -> None:
        means, steps = self._window.means(), f"steps {self._window.steps[0]} to {self._window.steps[-1]}"
        slow = slow_processes(means, self.share)
        for rank in sorted({*self._slow} - {*slow}):
            self.say(f"process {rank} on {self._hosts[rank]} is no longer slow ({steps})")
        for rank, part in slow.items():
            if self._slow.get(rank) != part:
                spent, usual = (secs[OWN_PARTS.index(part)] for secs in (means[rank], median(means)))
                self.say(
                    f"process {rank} on {self._hosts[rank]} is slow: of {means[rank, -1]:.3g} s a step it spends "
                    f"{spent:.3g} s {SLOW_IN[part]}, the median is {usual:.3g} s ({steps})"
                )
        self._slow = slow
