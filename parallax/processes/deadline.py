"""The time limits of a process that runs alone: nobody else would end it if a collective of its devices hangs."""

import threading
import time
from collections.abc import Callable

from parallax.config.sections import DistributedConfig
from parallax.errors import EXIT_RESTART
from parallax.processes.control_line import (
    CLOCK_SECS,
    LAST_WORDS_SECS,
    NEVER,
    end_now,
    end_within,
    say_lost,
    show_stacks,
    waited,
)

LONGEST_TICK_SECS = 5.0  # of the time between two looks no more counts: a process that was suspended has not waited


class Deadline:
    """Prints the stacks of all threads and ends the process, with 75, when a phase takes longer than its limit."""

    def __init__(self, config: DistributedConfig):
        self.log: Callable[[str], None] = lambda text: None  # gets the last message in addition to stderr
        self._config, self._closed = config, threading.Event()
        self._phase = _Phase("", "", NEVER)
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def set_phase(self, what: str, setting: str) -> None:
        """Set the phase of this process to `what`, limited by a setting of `distributed` in seconds."""
        self._phase = _Phase(what, setting, getattr(self._config, setting))

    def close(self) -> None:
        """End all limits."""
        self._closed.set()

    def _watch(self) -> None:
        seen = time.monotonic()
        while not self._closed.wait(CLOCK_SECS):
            now, phase = time.monotonic(), self._phase
            phase.left_secs -= min(now - seen, LONGEST_TICK_SECS)
            seen = now
            if phase.left_secs < 0:
                return self._end(phase)

    def _end(self, phase: "_Phase") -> None:
        end_within(LAST_WORDS_SECS, EXIT_RESTART)
        show_stacks()
        say_lost(waited(self._config, phase.setting, phase.what), EXIT_RESTART, self.log)
        end_now(EXIT_RESTART)


class _Phase:
    def __init__(self, what: str, setting: str, left_secs: float):
        self.what, self.setting, self.left_secs = what, setting, left_secs
