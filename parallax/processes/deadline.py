"""The time limits of a process's phases: nobody else would end it if a collective of its devices hangs."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from parallax.config.sections import DistributedConfig
from parallax.errors import EXIT_RESTART
from parallax.processes.exit import EXIT_LIMIT_SECS, exit_now, exit_within, print_stacks, report_lost

NEVER = float("inf")
TIMER_SECS = 0.2  # between two looks at the time limits
LONGEST_TICK_SECS = 5.0  # of the time between two looks no more counts: a process that was suspended has not waited


@dataclass
class LimitedPhase:
    """What a process does, and the time that is left for it, limited by a setting of `distributed`."""

    name: str = "starting"
    setting: str = ""
    left_secs: float = NEVER


class Deadline:
    """Prints the stacks of all threads and ends the process, with 75, when a phase takes longer than its limit."""

    def __init__(self, config: DistributedConfig):
        self.log: Callable[[str], None] = no_log  # gets the last message in addition to stderr
        self._config, self._closed = config, threading.Event()
        self._phase = LimitedPhase()
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    @property
    def phase(self) -> str:
        """What this process does."""
        return self._phase.name

    def set_phase(self, phase: str, setting: str) -> None:
        """Set the phase of this process, limited by a setting of `distributed` in seconds."""
        self._phase = LimitedPhase(phase, setting, getattr(self._config, setting))

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
                limit = f"{getattr(self._config, phase.setting):.0f} s (distributed.{phase.setting})"
                return self._on_limit(f"waited {limit} for {phase.name!r}")

    def _on_limit(self, text: str) -> None:
        """End this process because a wait has taken too long."""
        exit_within(EXIT_LIMIT_SECS, EXIT_RESTART)
        print_stacks()
        report_lost(text, EXIT_RESTART, self.log)
        exit_now(EXIT_RESTART)


def no_log(text: str) -> None:
    """The log of a process that has none."""
