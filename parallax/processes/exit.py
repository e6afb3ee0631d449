"""How a process of a job ends: at once, with its last message, whatever its threads or a disk are doing."""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from parallax.errors import EXIT_RESTART, LostError, tell, thread_stacks

EXIT_LIMIT_SECS = 10.0  # for the last messages and for the others to end; then the process ends anyway


def exit_now(status: int) -> NoReturn:
    """End the process at once: JAX's own exit waits for processes that may never come."""
    exit_within(EXIT_LIMIT_SECS, status)
    for stream in (sys.stdout, sys.stderr):
        with ignoring_write_errors():
            stream.flush()
    os._exit(status)


def exit_within(secs: float, status: int) -> None:
    """End the process after this time, even if a disk or a pipe blocks it."""
    timer = threading.Timer(secs, os._exit, (status,))
    timer.daemon = True
    timer.start()


def print_stacks() -> None:
    """Print the stacks of all threads to stderr."""
    with ignoring_write_errors():
        tell(thread_stacks(), sys.__stderr__)


def report_lost(text: str, status: int, log: Callable[[str], None]) -> None:
    """Write a process's last line, to stderr and its log, with what to do if a restart helps."""
    hint = "; start the same command again to resume from the last checkpoint" if status == EXIT_RESTART else ""
    for write in (functools.partial(print, file=sys.stderr, flush=True), log):
        with ignoring_write_errors():
            write(f"{LostError.__name__}: {text}{hint}")


def ignoring_write_errors() -> contextlib.AbstractContextManager:
    """Ignore a full disk or a closed stderr while the process ends."""
    return contextlib.suppress(OSError, ValueError)
