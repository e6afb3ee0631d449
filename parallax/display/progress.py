"""Progress messages for long operations.

A command installs a `ProgressPrinter`; long operations use `waiting`, which does nothing without one:

    with waiting("compiling the training step"):
        program = lowered.compile()

PARALLAX_PROGRESS=off in the environment turns it off. It does not use `rich.progress`, because it starts before any
library is loaded and writes lines to logs and pipes.
"""

import contextlib
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from parallax.display.units import duration
from parallax.errors import INTERRUPTED, discard_output, encodable, printable, tell

FIRST_SECS = 1.0  # silence before the first message of a wait
LONG_SECS = 5.0  # least duration of a wait with a final message
TICK_SECS = 0.25
COLUMNS = 80  # for terminals that do not report their width
ERASE = "\x1b[K"  # erases from the cursor to the end of the line
VARIABLE = "PARALLAX_PROGRESS"
# New objects after which Python looks for garbage, and rounds after which it looks at older ones. Traced programs are
# many objects that live long and form few cycles: with Python's own numbers a tenth of the time is spent on that.
SEARCHED_AFTER = (100_000, 20, 100)
# Variables with the number of a process in its job, before JAX knows it: ours, SLURM's, Open MPI's, of a TPU host.
RANKS = ("PARALLAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TPU_WORKER_ID")

Show = Callable[[float, float | None], None]
Log = Callable[[str], None]


@dataclass(eq=False)
class Task:
    """A long operation: `done` of `total`, if known, formatted by `unit`."""

    what: str
    begun: float
    patience_secs: float
    unit: Callable[[float], str]
    done: float = 0
    total: float | None = None
    is_named: bool = False

    def silence_secs(self, now: float) -> float:
        """Seconds between messages; shorter at the beginning."""
        if not self.is_named:
            return self.patience_secs
        secs = now - self.begun
        return 4.0 if secs < 10 else 10.0 if secs < 60 else 30.0

    def line(self, now: float) -> str:
        """The current progress message."""
        secs = now - self.begun
        facts = [f"{self.unit(self.done)} of {self.unit(self.total)}"] if self.total else []
        facts += [f"{duration(secs)} so far"] if secs >= 1 else []
        if self.total and self.done and (left := secs * (self.total / self.done - 1)) >= 1:
            facts.append(f"about {duration(left)} left")
        return f"{self.what}: {', '.join(facts)}" if facts else f"{self.what} ..."

    def last_line(self, now: float) -> str:
        """The final message, with the duration."""
        secs = now - self.begun
        return f"{self.what}: done in {f'{secs:.1f} s' if secs < 60 else duration(secs)}"


class ProgressPrinter:
    """Prints progress: one changing line on a terminal; separate lines to a file, pipe or notebook.

    Args:
        stream: where to print; if it is None or closed, nothing is printed.
        log: also gets the lines that a file would get.
    """

    def __init__(
        self, stream: TextIO | None, log: Log = lambda line: None, *, clock: Callable[[], float] = time.monotonic
    ):
        self._stream, self._log, self._clock = stream, log, clock
        self._is_terminal = _has_cursor(stream)
        self._tasks: list[Task] = []
        self._printed_at = clock()
        self._is_drawn = False
        self._lock = threading.RLock()
        self._closed = threading.Event()

    def start(self) -> "ProgressPrinter":
        """Start a thread that calls `tick` until `close`."""
        threading.Thread(target=self._tick_on, name="progress", daemon=True).start()
        return self

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def clear(self) -> None:
        """Clear the progress line for other output, which counts as a message."""
        with self._lock:
            self._erase()
            self._printed_at = self._clock()

    def begin(self, what: str, patience_secs: float, unit: Callable[[float], str]) -> Task:
        """Start a task, possibly inside another one, which is shown again afterwards."""
        with self._lock:
            self._tasks.append(Task(what, self._clock(), patience_secs, unit))
            return self._tasks[-1]

    def end(self, task: Task, *, failed: bool) -> None:
        """End a task; print its duration if it was long and did not fail."""
        with self._lock:
            self._tasks.remove(task)
            self._erase()
            now = self._clock()
            if task.is_named and now - task.begun >= LONG_SECS and not failed:
                self._log(task.last_line(now))
                self._print(task.last_line(now))
                self._printed_at = now

    def tick(self) -> None:
        """Print a message if one is due."""
        with self._lock:
            if not self._tasks:
                return
            task, now = self._tasks[-1], self._clock()
            if now - self._printed_at >= task.silence_secs(now):
                task.is_named, self._printed_at = True, now
                self._log(task.line(now))
                if not self._is_terminal:
                    self._print(task.line(now))
            if self._is_terminal and task.is_named:
                self._draw(task.line(now))

    def _tick_on(self) -> None:
        while not self._closed.wait(TICK_SECS):
            self.tick()

    def _print(self, line: str) -> None:
        with contextlib.suppress(ValueError):  # the stream is closed
            tell(line, self._stream)

    def _draw(self, line: str) -> None:
        # The cursor returns to the beginning, so that other output overwrites the line instead of following it.
        self._write(f"\r{printable(line)[: _columns(self._stream) - 1]}{ERASE}\r")
        self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._write(f"\r{ERASE}")
            self._is_drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(encodable(text, self._stream))
            self._stream.flush()
        except ValueError:  # it is closed
            self._stream = None
        except OSError:
            discard_output(self._stream)


_printer: ProgressPrinter | None = None


@contextlib.contextmanager
def waiting(
    what: str, *, patience_secs: float = FIRST_SECS, unit: Callable[[float], str] = "{:,.0f}".format
) -> Iterator[Show]:
    """Report progress while the block runs; call the yielded function with `(done, total)`.

    Nothing is printed if the block ends before `patience_secs` of silence, or if no printer is installed.
    """
    printer = _printer
    if printer is None:
        yield lambda done, total: None
        return
    task = printer.begin(what, patience_secs, unit)

    def show(done: float, total: float | None) -> None:
        task.done, task.total = done, total

    failed = True
    try:
        yield show
        failed = False
    finally:
        printer.end(task, failed=failed)


@contextlib.contextmanager
def printing_progress(printer: ProgressPrinter | None) -> Iterator[None]:
    """Use this progress printer while the block runs; None prints nothing."""
    global _printer
    before, _printer = _printer, printer
    try:
        yield
    finally:
        _printer = before
        if printer is not None:
            printer.close()


@contextlib.contextmanager
def loading(module: str, stream: TextIO | None) -> Iterator[None]:
    """Report that a program loads JAX, silence JAX's start-up messages, and print progress from then on. What is loaded
    is no garbage: it is not searched for any, now or later, and what the program makes then is searched rarely.

    `module` is the `__name__` of the file: nothing is printed if another program imports it, or for --help, and that
    program decides about its garbage.
    """
    # XLA's C++ reads this when it is loaded. It hides start-up messages unless the user has set it.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if module == "__main__" and not any(re.fullmatch("-h|--?help.*", word) for word in sys.argv[1:]):
        print_progress_on(stream)
    try:
        with waiting("loading JAX"), _no_garbage() if module == "__main__" else contextlib.nullcontext():
            yield
    except KeyboardInterrupt:
        if module != "__main__":
            raise
        raise SystemExit(INTERRUPTED) from None  # nothing has begun, so a traceback of imports would not help


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Python's collector searches nothing that is made in this context."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*SEARCHED_AFTER)
        if was_on:
            gc.enable()


def print_progress_on(stream: TextIO | None) -> None:
    """Print progress from now on, in the first process of a job."""
    global _printer
    _printer = progress_printer(stream) if is_likely_first(os.environ) else None


def progress_printer(stream: TextIO | None, log: Log = lambda line: None) -> ProgressPrinter | None:
    """A printer, or None if PARALLAX_PROGRESS=off."""
    return None if os.environ.get(VARIABLE) == "off" else ProgressPrinter(stream, log).start()


def stop_progress() -> None:
    """Stop printing progress in this process, since process 0 prints it for all."""
    global _printer
    _printer = None


def clear_progress() -> None:
    """Clear the progress line before something else is printed."""
    if _printer is not None:
        _printer.clear()


def is_likely_first(environment: Mapping[str, str]) -> bool:
    """Whether this is process 0 as far as the environment says.

    >>> is_likely_first({"SLURM_PROCID": "3"}), is_likely_first({})
    (False, True)
    """
    return not any(environment.get(name, "0") not in ("", "0") for name in RANKS)


def _has_cursor(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal on which a line can be overwritten."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    except ValueError:  # it is closed
        return False


def has_colours(stream: TextIO) -> bool:
    """Whether the stream is a terminal that shows colours, and its user has not switched them off."""
    return _has_cursor(stream) and not os.environ.get("NO_COLOR")


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS
