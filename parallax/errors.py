"""Errors that a user can cause: each quotes what was written, measures, and advises."""

import contextlib
import difflib
import errno
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

# What a command ends with. 0: done, or stopped and saved; 1: an error of ours, with its traceback.
EXIT_BAD_INPUT = 2  # a config, a flag or a file is wrong
EXIT_CHECKPOINT = 3  # a checkpoint is missing, damaged or of another model, or cannot be written
EXIT_NUMBERS = 4  # loss or gradient not finite, or other bits when a step is computed again: faulty hardware
EXIT_DATA = 5  # a corpus, a shard or a tokenizer
EXIT_RESTART = 75  # nothing is wrong here, start the same command again: EX_TEMPFAIL of sysexits.h
NOT_WORTH_A_RESTART = (EXIT_BAD_INPUT, EXIT_CHECKPOINT, EXIT_NUMBERS, EXIT_DATA)
INTERRUPTED = 130  # as shells count Ctrl-C

LARGEST_INT32 = 2**31 - 1  # devices count in int32


class ParallaxError(ValueError):
    """Base of all errors that a user can cause. `exit_status` is what the command line ends with."""

    exit_status = EXIT_BAD_INPUT


class ConfigError(ParallaxError):
    """A setting is wrong, or two settings do not agree."""


class NotationError(ParallaxError):
    """A layout string is wrong, or an array does not fit it."""


class DataError(ParallaxError):
    """A corpus, a shard or a tokenizer is missing, damaged or does not fit the model."""

    exit_status = EXIT_DATA


class CheckpointError(ParallaxError):
    """A checkpoint is missing, damaged or of another model."""

    exit_status = EXIT_CHECKPOINT


class LostError(ParallaxError):
    """Another process of the job is gone, or does not come; the same command goes on from the last checkpoint."""

    exit_status = EXIT_RESTART


def exit_status(act: Callable[[], int | None], *, one_line: bool = False, interrupted: str = "") -> int:
    """Run a command; its exit status, and on stderr what a user got wrong, in `one_line` if asked for.

    Ctrl-C says `interrupted` and no traceback, and whoever closes the pipe that is written to has seen enough, as has
    who closes the terminal.
    """
    try:
        status = act() or 0
    except ParallaxError as error:
        message = " ".join(str(error).split()) if one_line else str(error)
        tell(f"{type(error).__name__}: {message}", sys.stderr)
        status = error.exit_status
    except OSError as error:
        # Of a closed pipe and of a closed terminal; another error of a file is not to be taken for it.
        if error.errno not in (errno.EPIPE, errno.EIO) or error.filename is not None or not _is_gone(sys.stdout):
            raise
        status = 0
    except KeyboardInterrupt:
        if interrupted:
            tell(interrupted, sys.stderr)
        status = INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        # What is left in them would fail when Python ends, and change the status.
        if _is_gone(stream):
            lead_nowhere(stream)
    sys.stdout.flush()
    return status


def tell(text: str, stream: TextIO) -> None:
    """Print at once, if anybody still reads it: who tells does not end because nobody listens any more."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        lead_nowhere(stream)


def _is_gone(stream: TextIO) -> bool:
    """Whether nobody can read the stream any more: its pipe is closed at the other end, or its terminal is."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # it is no file, or has been closed
        return False
    poll = select.poll()
    poll.register(number, 0)  # asked for nothing, it says what is wrong
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def lead_nowhere(stream: TextIO) -> None:
    """What the stream still holds, and what is written to it from now on, is dropped, when Python ends too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def writing(folder: Path, advice: str = "choose another --workdir") -> Iterator[None]:
    """Turn what a disk refuses while a folder is written in into a CheckpointError with the reason."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write in {folder} ({error.strerror or error}); {advice}") from error


def nearest(written: str, known: Iterable[str]) -> str:
    """Say which known names exist, the nearest first.

    >>> nearest("gpip", ["gpipe", "one_f_one_b"])
    "did you mean 'gpipe'? Known: gpipe, one_f_one_b"
    """
    known = list(known)
    close = difflib.get_close_matches(written, known, n=1)
    lead = f"did you mean {close[0]!r}? Known" if close else "known"
    return f"{lead}: {', '.join(known)}"


def check_choice(key: str, written: str, known: Iterable[str]) -> None:
    """Raise ConfigError unless `written` is one of `known`."""
    known = list(known)
    if written not in known:
        raise ConfigError(f"{key}={written!r} is unknown; {nearest(str(written), known)}")


def check_whole(key: str, written: object, *, least: int) -> None:
    """Raise ConfigError unless `written` is a whole number of `least` or more."""
    if isinstance(written, bool) or not isinstance(written, int) or written < least:
        raise ConfigError(f"{key}={written!r} must be a whole number of {least} or more.")


def divisors(number: int) -> list[int]:
    """All divisors in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, number + 1) if number % d == 0]
