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

from parallax.runtime.errors import EXIT_RESTART
from parallax.runtime.multihost.job import is_first

ENDING = (signal.SIGTERM, signal.SIGINT)  # where they come a second time
STOPPING = (*ENDING, signal.SIGHUP)
HEARD_SECS = 3.0  # JAX looks once a second whether a signal has come, and then tells the other processes
STEPS_TO_STOP = 2  # after the last one of the process that asks, until all have stopped


class StopRequest:
    """Whether the run has been asked to stop; a context that takes over the signals while it is open.

    A thread reads the signals as they arrive. Python itself would run a handler only after the compiler,
    which can take minutes, has returned. With several processes JAX's preemption service hears of the signal too, and
    has all of them stop after the same step.

    Args:
        max_runtime_secs: from now on; then the run is asked to stop as if by a signal. None is no limit.
    """

    def __init__(self, max_runtime_secs: float | None = None):
        self.signal: str | None = None
        self._signalled = False
        self._agreed, self._asked = False, 0
        self._deadline = float("inf") if max_runtime_secs is None else time.monotonic() + max_runtime_secs

    def __enter__(self) -> "StopRequest":
        # Only the main thread may handle signals; elsewhere nobody sends us any.
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
                # None: the handler was not set from Python, and cannot be set back from there.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._writer.close()

    def ask(self, reason: str) -> None:
        """Have the run stop as if by a signal; with several processes this comes back when they have agreed.

        Until then none gets further than one step beyond the last of this process, which takes no other: they agree on
        the one after that at the latest, `STEPS_TO_STOP` after its last.
        """
        if self.signal is None:
            self._ask(reason)
        if self._tell_jax is not None:
            time.sleep(HEARD_SECS)
            # While JAX asks for everybody's step it answers no process; the answer for a step of before is not wanted.
            multihost_utils.reached_preemption_sync_point(self._asked)

    def after(self, step: int) -> bool:
        """Whether the run stops after this step; with several processes, all ask for each step, and hear the same."""
        if time.monotonic() > self._deadline and self.signal is None and is_first():
            self._ask("--max-runtime")
        if jax.distributed.is_initialized():
            # JAX says yes to one number only, which may be of a step before a resume, or of one that cannot be saved.
            numbers = range(self._asked + 1, step + 1)
            self._agreed = self._agreed or any(map(multihost_utils.reached_preemption_sync_point, numbers))
            self._asked = step
            return self._agreed
        return self.signal is not None

    def _ask(self, reason: str) -> None:
        self.signal = reason
        if self._tell_jax is not None:
            self._tell_jax(signal.SIGTERM)

    def _read(self) -> None:
        while arrived := self._arrivals.recv(1):
            if arrived[0] not in STOPPING:
                continue
            ending = arrived[0] in ENDING  # of a terminal that is closed one hears from the system and from the shell
            if ending and self._signalled:
                os._exit(EXIT_RESTART)
            self._signalled = self._signalled or ending
            name = signal.Signals(arrived[0]).name
            if self.signal is None:
                self._ask(name)
            advice = "; once more to exit at once" if ending else ""
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, f"{name}: stopping after this step{advice}\n".encode())
        self._arrivals.close()


def _is_heard(number: int) -> bool:
    """Whether a signal is for us: nohup has SIGHUP ignored, and so it stays."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


def _handler_of_jax() -> Callable[[int], None]:
    """What JAX's preemption service does on SIGTERM: it hears of a signal no more once Python handles it."""
    action = ctypes.create_string_buffer(256)  # a struct sigaction, and room to spare: its first field is the handler
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    handler = ctypes.c_void_p.from_buffer(action).value
    assert handler not in (None, 1), "jax.distributed is on, but its preemption service does not listen to SIGTERM"
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
