"""SIGTERM and Ctrl-C: the first asks the run to stop after its step, the second ends the process."""

import os
import signal
import socket
import threading

STOPPING = (signal.SIGTERM, signal.SIGINT)
# EX_TEMPFAIL of sysexits.h: nothing is wrong, try again.
EXIT_AT_ONCE = 75


class StopRequest:
    """Whether the run has been asked to stop; a context that takes over the signals while it is open.

    A thread reads the signals as they arrive. Python itself would run a handler only after the compiler,
    which can take minutes, has returned.
    """

    def __init__(self):
        self.signal: str | None = None

    def __enter__(self) -> "StopRequest":
        # Only the main thread may handle signals; elsewhere nobody sends us any.
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._arrivals, writer = socket.socketpair()
            writer.setblocking(False)
            self._writer = writer
            self._before = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
            self._wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._read, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._active:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._writer.close()

    def _read(self) -> None:
        while arrived := self._arrivals.recv(1):
            if arrived[0] not in STOPPING:
                continue
            if self.signal is not None:
                os._exit(EXIT_AT_ONCE)
            self.signal = signal.Signals(arrived[0]).name
            os.write(2, f"{self.signal}: stopping after this step; once more to exit at once\n".encode())
        self._arrivals.close()
