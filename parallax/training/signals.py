"""SIGTERM, Ctrl-C and SIGHUP ask the run to stop after its step; the second SIGTERM or Ctrl-C ends the process."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from parallax.errors import EXIT_RESTART
from parallax.processes.exit import EXIT_LIMIT_SECS, exit_within
from parallax.processes.job import is_first

ENDING = (signal.SIGTERM, signal.SIGINT)  # these end the process when they come a second time
STOPPING = (*ENDING, signal.SIGHUP)
HEARD_SECS = 3.0  # JAX checks once a second for a signal, and then informs the other processes
STEPS_TO_STOP = 2  # steps after the last one of the asking process until all have stopped


class StopRequest:
    """Whether the run has been asked to stop; a context that takes over the signals while it is open.

    A thread reads the signals when they arrive. Python itself would run a handler only after the compiler has returned,
    which can take minutes. With several processes JAX's preemption service gets the signal, too, and makes all of them
    stop after the same step.

    Args:
        max_runtime_secs: time from now after which the run is asked to stop as by a signal; None means no limit.
    """

    def __init__(self, max_runtime_secs: float | None = None):
        self.signal: str | None = None
        self.last_words: Callable[[str], None] = lambda why: None  # called before a second signal ends the process
        self._signalled = False
        self._signalled_at: float | None = None
        self._agreed, self._asked = False, 0
        self._deadline = float("inf") if max_runtime_secs is None else time.monotonic() + max_runtime_secs

    def __enter__(self) -> "StopRequest":
        # Only the main thread may handle signals.
        self._active = threading.current_thread() is threading.main_thread()
        self._tell_jax = _handler_of_jax() if self._active and jax.distributed.is_initialized() else None
        if self._active:
            self._arrivals, writer = socket.socketpair()
            writer.setblocking(False)
            self._writer = writer
            self._before = {number: signal.signal(number, lambda *_: None) for number in STOPPING if _is_heard(number)}
            self._wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._read, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._active:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                # None: the handler was not set from Python and cannot be restored from there.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._writer.close()

    def ask(self, reason: str) -> None:
        """Make the run stop as by a signal; with several processes this returns when they have agreed on a step.

        This process runs no further step meanwhile, so others get at most one step beyond its last one. They agree on
        the step after that at the latest, `STEPS_TO_STOP` after its last one.
        """
        if self.signal is None:
            self._ask(reason)
        if self._tell_jax is not None:
            time.sleep(HEARD_SECS)
            # While JAX collects the steps of all processes, it does not answer; an answer for an earlier step is
            # useless.
            multihost_utils.reached_preemption_sync_point(self._asked)

    def after(self, step: int) -> bool:
        """Whether the run stops after this step; with several processes all must ask for each step and agree."""
        if time.monotonic() > self._deadline and self.signal is None and is_first():
            self._ask("--max-runtime")
        if jax.distributed.is_initialized():
            # JAX confirms only one step, which may be before a resume, or one that cannot be saved.
            numbers = range(self._asked + 1, step + 1)
            self._agreed = self._agreed or any(map(multihost_utils.reached_preemption_sync_point, numbers))
            self._asked = step
            return self._agreed
        return self.signal is not None

    def secs_since_signal(self) -> float:
        """Seconds since the first signal came to this process; 0 if none has."""
        return 0.0 if self._signalled_at is None else time.monotonic() - self._signalled_at

    def _ask(self, reason: str) -> None:
        self.signal = reason
        if self._tell_jax is not None:
            self._tell_jax(signal.SIGTERM)

    def _read(self) -> None:
        while arrived := self._arrivals.recv(1):
            if arrived[0] not in STOPPING:
                continue
            ending, name = arrived[0] in ENDING, signal.Signals(arrived[0]).name
            if ending and self._signalled:  # a closed terminal sends SIGHUP twice, from the system and from the shell
                self._end(name)
            self._signalled = self._signalled or ending
            if self._signalled_at is None:
                self._signalled_at = time.monotonic()
            if self.signal is None:
                self._ask(name)
            advice = "; once more to exit at once" if ending else ""
            _say(f"{name}: stopping after this step{advice}")
        self._arrivals.close()

    def _end(self, name: str) -> None:
        """End the process, with a word about it; a disk that stands still does not delay the end for long."""
        exit_within(EXIT_LIMIT_SECS, EXIT_RESTART)
        why = f"{name} again: the run ends at once; the same command goes on from the last saved step"
        _say(why)
        with contextlib.suppress(Exception):  # nothing may keep the process
            self.last_words(why)
        os._exit(EXIT_RESTART)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, f"{text}\n".encode())


def _is_heard(number: int) -> bool:
    """Whether a signal should be handled: nohup ignores SIGHUP, and that is respected."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


def _handler_of_jax() -> Callable[[int], None]:
    """The SIGTERM handler of JAX's preemption service, which gets no signals once Python handles them."""
    action = ctypes.create_string_buffer(256)  # large enough for a struct sigaction, whose first field is the handler
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    handler = ctypes.c_void_p.from_buffer(action).value
    assert handler not in (None, 1), "jax.distributed is on, but its preemption service does not listen to SIGTERM"
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
