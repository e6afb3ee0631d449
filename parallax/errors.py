"""Errors that a user can cause, and helpers for messages that quote the input, give the numbers and suggest a fix."""

import contextlib
import difflib
import errno
import importlib
import io
import math
import os
import re
import select
import sys
import textwrap
import threading
import traceback
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

# Exit statuses. 0: done, or stopped and saved; 1: a bug in Parallax, with its traceback.
EXIT_BAD_INPUT = 2  # a config, a flag or a file is wrong
EXIT_CHECKPOINT = 3  # a checkpoint is missing, damaged or of another model, or cannot be written
# Loss or gradient not finite, other bits when a step is recomputed (faulty hardware), or others on a mesh than on one
# device (`parallax.parity`).
EXIT_NUMBERS = 4
EXIT_DATA = 5  # a corpus, a shard or a tokenizer
EXIT_RESTART = 75  # not an error of this process: start the same command again (EX_TEMPFAIL of sysexits.h)
NOT_WORTH_A_RESTART = (EXIT_BAD_INPUT, EXIT_CHECKPOINT, EXIT_NUMBERS, EXIT_DATA)
INTERRUPTED = 130  # the status of Ctrl-C in shells

LARGEST_INT32 = 2**31 - 1  # devices count in int32
QUOTED_LETTERS = 80  # most characters of a quoted value in an error
LONGEST_PATH = 4096  # most characters of a quoted path, so that the file can be found
LISTED_NUMBERS = LISTED_NAMES = 12
LISTED_LETTERS = 320  # most characters of a list of known names
LISTED_DIFFERENCES = 5

URL = re.compile("([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # pathlib reduces two slashes to one
MOUNTED_BY = {"gs": " with gcsfuse", "s3": " with mount-s3"}

STORE_DETAILS = re.compile(r" \[[a-z_]+='|<\?xml")  # in what TensorStore says of a request that failed
ESCAPED = "backslashreplace"  # how text is written that an encoding does not have
JOINERS = "\u200c\u200d"  # within words and emoji


class ParallaxError(ValueError):
    """Base of all errors that a user can cause. `exit_status` is the exit status of commands."""

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


class StoreError(CheckpointError, OSError):
    """A store of objects refuses a request, or does not answer."""

    def __init__(self, number: int, reason: str, path: str):
        super().__init__(number, reason, path)
        self.errno, self.strerror, self.filename = number, reason, path

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class LostError(ParallaxError):
    """Another process of the job is gone or did not start; the same command resumes from the last checkpoint."""

    exit_status = EXIT_RESTART


def exit_status(act: Callable[[], int | None], *, one_line: bool = False, interrupted: str = "") -> int:
    """Run a command and return its exit status; print user errors to stderr, shortened to one line with `one_line`.

    Ctrl-C prints `interrupted` and no traceback. A closed output pipe or terminal ends the command without an error.
    What the encoding of the output does not have is escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):  # a closed one
                stream.reconfigure(errors=ESCAPED)
    try:
        status = act() or 0
    except ParallaxError as error:
        message = " ".join(str(error).split()) if one_line else str(error)
        tell(f"{type(error).__name__}: {printable(message)}", sys.stderr)
        status = error.exit_status
    except OSError as error:
        # Only for a closed pipe or terminal; other errors of files must not be taken for it.
        if error.errno not in (errno.EPIPE, errno.EIO) or error.filename is not None or not _is_gone(sys.stdout):
            raise
        status = 0
    except KeyboardInterrupt:
        if interrupted:
            tell(interrupted, sys.stderr)
        status = INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        # Buffered output would fail when Python ends, and change the status.
        if _is_gone(stream):
            discard_output(stream)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # a full disk
        discard_output(sys.stdout)
        tell(f"the output is incomplete: {error.strerror}", sys.stderr)
        status = status or EXIT_BAD_INPUT
    return status


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""Escape control and bidirectional characters in text from other sources.

    >>> print(printable("a run\x1b[2J\u202e"))
    a run\x1b[2J\u202e
    """
    if text.isprintable():
        return text
    return "".join(letter if letter in keep or _is_text(letter) else ascii(letter)[1:-1] for letter in text)


def _is_text(letter: str) -> bool:
    return letter.isprintable() or letter in JOINERS or unicodedata.category(letter) == "Zs"


def thread_stacks() -> str:
    """Stacks of all threads, the main one first; faulthandler leaves out the first ones if there are a hundred."""
    frames = sys._current_frames()
    running = [thread for thread in threading.enumerate() if thread.ident in frames]
    stacks = (traceback.format_stack(frames[thread.ident]) for thread in running)
    return "\n".join(f"Thread {thread.name}:\n{''.join(stack)}" for thread, stack in zip(running, stacks))


def tell(text: str, stream: TextIO | None) -> None:
    """Print and flush; errors of a closed stream are ignored.

    A terminal gets `printable` text, a file or a pipe the whole text; what the stream's encoding does not have is
    escaped. A stream that was never open is ignored.
    """
    if stream is None:
        return
    try:
        # In one call, since another thread may write, too.
        stream.write(encodable(printable(text) if stream.isatty() else text, stream) + "\n")
        stream.flush()
    except OSError:
        discard_output(stream)


def encodable(text: str, stream: TextIO) -> str:
    r"""Text with escapes for what the encoding of a stream does not have.

    >>> print(encodable("né", io.TextIOWrapper(io.BytesIO(), encoding="ascii")))
    n\xe9
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, ESCAPED).decode(encoding)


def _is_gone(stream: TextIO | None) -> bool:
    """Whether the other end of a pipe or the terminal is closed."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # not a file, or closed
        return False
    poll = select.poll()
    poll.register(number, 0)  # without events, poll reports only errors
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard_output(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, including buffered output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def errors_as(
    kind: type[ParallaxError], before: str, after: str = "", *others: type[Exception], missing: str = ""
) -> Iterator[None]:
    """Turn an OSError, or one of `others`, into an error of this kind, with the reason between two texts; that there is
    no file has the text `missing`, if one is given."""
    try:
        yield
    except (OSError, *others) as error:
        text = missing if isinstance(error, FileNotFoundError) else ""
        raise kind(text or f"{before}{getattr(error, 'strerror', None) or error}{after}") from error


def writing(folder: Path, advice: str = "choose another --workdir") -> AbstractContextManager[None]:
    """Turn an OSError while writing in a folder into a CheckpointError with the reason."""
    return errors_as(CheckpointError, f"cannot write in {folder} (", f"); {advice}")


def quoted(value: object, letters: int = QUOTED_LETTERS) -> str:
    """Quote a value for an error message: one line, shortened if long.

    >>> quoted("x" * 5000, letters=4), quoted(10**400, letters=4), quoted(7)
    ("'xxxx'… (5000 letters)", '1000… (401 letters)', '7')
    """
    if isinstance(value, str):
        return repr(value) if len(value) <= letters else f"{value[:letters]!r}… ({len(value)} letters)"
    try:
        text = repr(value)
    except Exception:  # Python does not print an int of more than 4300 digits, and a class's __repr__ may fail
        if isinstance(value, int):
            return f"<a whole number of {int(value.bit_length() * math.log10(2)) + 1} digits>"
        return f"<{type(value).__name__} that Python cannot print>"
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= letters else f"{text[:letters]}… ({len(text)} letters)"


def shown(text: str, letters: int = QUOTED_LETTERS) -> str:
    """A word without quotation marks, unless it is long or not printable.

    >>> shown("mesh.tp"), shown("a\\nb")
    ('mesh.tp', "'a\\\\nb'")
    """
    return text if text.isprintable() and len(text) <= letters else quoted(text, letters)


def names_of(names: Iterable[str]) -> str:
    """The first twelve names, and the number of further ones.

    >>> names_of("abc"), names_of(map(str, range(100)))
    ('a, b, c', '0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, and 88 more')
    """
    return first_few([shown(name) for name in names], LISTED_NAMES)


def first_few(texts: list[str], most: int = LISTED_DIFFERENCES) -> str:
    """The first few texts of a list, and the number of further ones."""
    more = len(texts) - most
    return ", ".join(texts if more <= 0 else [*texts[:most], f"and {more} more"])


def nearest(written: str, known: Iterable[str]) -> str:
    """List the known names, with the closest match first; shortened if they would fill more than a few lines.

    >>> nearest("gpip", ["gpipe", "one_f_one_b"])
    "did you mean 'gpipe'? Known: gpipe, one_f_one_b"
    """
    known = list(known)
    close = difflib.get_close_matches(written[:QUOTED_LETTERS], known, n=1)
    lead = f"did you mean {close[0]!r}? Known" if close else "known"
    return f"{lead}: {textwrap.shorten(', '.join(known), LISTED_LETTERS, placeholder=' ...')}"


def check_choice(key: str, written: str, known: Collection[str]) -> None:
    """Raise ConfigError unless `written` is one of `known`."""
    if written not in [*known]:  # a file may have written a list, which no dict can be asked for
        raise ConfigError(f"{key}={quoted(written)} is unknown; {nearest(str(written), known)}")


def words_of(key: str, written: str, known: Collection[str], alone: Collection[str] = ()) -> list[str]:
    """The words of a set; ConfigError unless each is one of `known`, or the only word is one of `alone`.

    >>> words_of("model.matmul_parts", "mlp attention", ["attention", "mlp"])
    ['mlp', 'attention']
    """
    words = written.split()
    for word in words:
        if word not in (*alone, *known):
            unknown = f"has {quoted(word)}, which is unknown" if words[1:] else "is unknown"
            raise ConfigError(f"{key}={quoted(written)} {unknown}; {nearest(word, [*alone, *known])}")
    if not words or (words[1:] and {*words} & {*alone}):
        single = f"one of {', '.join(alone)} alone, or " if alone else ""
        raise ConfigError(f"{key}={quoted(written)} is not a set of parts; use {single}a set of {', '.join(known)}")
    return words


def check_utf8(kind: type[ParallaxError], where: str, text: str) -> None:
    """Raise an error of this kind unless UTF-8 can hold a text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise kind(f"{where} has half a surrogate pair at character {error.start}") from None


def check_whole(key: str, written: object, *, least: int) -> None:
    """Raise ConfigError unless `written` is a whole number of `least` or more."""
    if isinstance(written, bool) or not isinstance(written, int) or written < least:
        raise ConfigError(f"{key}={quoted(written)} must be a whole number of {least} or more.")


def check_local(key: str, path: str | os.PathLike) -> None:
    """Raise ConfigError if `path` is a URL: runs, data and reports are local folders and files.

    >>> check_local("--workdir", "/mnt/bucket/runs/mine")
    >>> check_local("--workdir", "file:///mnt/runs")
    Traceback (most recent call last):
    parallax.errors.ConfigError: --workdir='file:///mnt/runs' is a URL, and a path is needed; write '/mnt/runs'
    """
    if reason := why_not_local(path):
        raise ConfigError(f"{key}={quoted(str(path))} {reason}")


def why_not_local(path: str | os.PathLike) -> str:
    """Why a URL cannot be used as a path, and what to do; "" for a path."""
    url = URL.match(str(path))
    if not url:
        return ""
    scheme = url[1].lower()
    if scheme == "file":
        return f"is a URL, and a path is needed; write {quoted(f'/{url[2]}')}"
    if scheme in ("http", "https", "hf"):
        return "is a URL, and a path is needed; download the file, and write the path of the copy"
    tool = MOUNTED_BY.get(scheme, "")
    return f"is a URL, and a path is needed; mount the bucket{tool} and write that folder, or copy the files"


def first_line(error: Exception) -> str:
    """The first line of an error's message; its type if the message is empty. Headers, bodies and specs that
    TensorStore adds are left out."""
    return STORE_DETAILS.split((str(error).strip() or type(error).__name__).splitlines()[0])[0]


def how_to_install(extra: str) -> str:
    """The command that installs an extra; the project is not on PyPI.

    >>> how_to_install("data")
    "pip install -e '.[data]' or 'WHEEL[data]'"
    """
    return f"pip install -e '.[{extra}]' or 'WHEEL[{extra}]'"


def imported(module: str, what: str, extra: str) -> Any:
    """Import a module of a package that an extra installs; if it is missing, ConfigError says what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(f"{what} needs the package {package}: {how_to_install(extra)}") from None


def divisors(number: int) -> list[int]:
    """All divisors in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def listed(numbers: Sequence[int]) -> str:
    """A set of numbers to choose from, shortened if long.

    >>> listed([1, 2, 4]), listed(range(1, 100))
    ('{1, 2, 4}', '{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ...}')
    """
    more = ["..."] if len(numbers) > LISTED_NUMBERS else []
    return f"{{{', '.join([*map(str, numbers[:LISTED_NUMBERS]), *more])}}}"
