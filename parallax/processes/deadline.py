"""The time limits of a process that runs alone: nobody else would end it if a collective of its devices hangs."""

import threading
import time
from collections.abc import Callable

from parallax.config.sections import DistributedConfig
from parallax.errors import EXIT_RESTART
from parallax.processes.client import no_log
from parallax.processes.coordinator import NEVER, TIMER_SECS
from parallax.processes.exit import EXIT_LIMIT_SECS, exit_now, exit_within, limit_exceeded, print_stacks, report_lost

LONGEST_TICK_SECS = 5.0  # of the time between two looks no more counts: a process that was suspended has not waited


class Deadline:
    """Prints the stacks of all threads and ends the process, with 75, when a phase takes longer than its limit."""

    def __init__(self, config: DistributedConfig):
        self.log: Callable[[str], None] = no_log  # gets the last message in addition to stderr
        self._config, self._closed = config, threading.Event()
        self._phase = _Phase("", "", NEVER)
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def set_phase(self, phase: str, setting: str) -> None:
        """Set the phase of this process, limited by a setting of `distributed` in seconds."""
        self._phase = _Phase(phase, setting, getattr(self._config, setting))

    def close(self) -> None:
        """End all limits."""
        self._closed.set()

    def _watch(self) -> None:
        seen = time.monotonic()
        while not self._closed.wait(TIMER_SECS):
            now, phase = time.monotonic(), self._phase
            phase.left_secs -= min(now - seen, LONGEST_TICK_SECS)
            seen = now
            if phase.left_secs < 0:
                return self._exit(phase)

    def _exit(self, phase: "_Phase") -> None:
        exit_within(EXIT_LIMIT_SECS, EXIT_RESTART)
        print_stacks()
        report_lost(limit_exceeded(self._config, phase.setting, phase.name), EXIT_RESTART, self.log)
        exit_now(EXIT_RESTART)


class _Phase:
    def __init__(self, name: str, setting: str, left_secs: float):
        self.name, self.setting, self.left_secs = name, setting, left_secs
