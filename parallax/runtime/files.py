"""Files that somebody else may have made: plain ones are opened, and no link, pipe or device; JSON that is in them."""

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_BYTES = 1 << 28  # of a file that is read at once: a manifest of 10^5 shards has a tenth of it
DEEPEST = 64  # lists and objects in each other; ours have six
SHOWN = 40


def plain(path: str | Path, flags: int) -> int:
    """An opener for `open`: OSError where there is something else than a file; a pipe is not waited for.

    Who writes meets no link either, symbolic or hard, which would lead what is written elsewhere.
    """
    assert not flags & os.O_TRUNC, "a file is emptied before it is looked at; use write_whole"
    writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
    try:
        opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _odd(path, "is a symbolic link") from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise _odd(path, "is no plain file") from None
        raise
    about = os.fstat(opened)
    if not stat.S_ISREG(about.st_mode):
        os.close(opened)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise _odd(path, "is no plain file")
    if writes and about.st_nlink > 1:
        os.close(opened)
        raise _odd(path, f"has {about.st_nlink} names, as hard links are made")
    return opened


def _odd(path: str | Path, what: str) -> OSError:
    return OSError(errno.EINVAL, f"{Path(path).name} {what}; remove it", str(path))


def read_bytes(path: Path) -> bytes:
    """What is in a plain file; OSError too if that is absurdly much."""
    with open(path, "rb", opener=plain) as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {LARGEST_BYTES} bytes", str(path))
    return content


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file so that it appears whole or not at all, even if the machine stops; what has its name is replaced."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
        with open(aside, "xb") as file:  # made anew: a link that somebody has put there is not followed
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        # A full disk is not kept full by what is of no use; and the system names no file where a write fails.
        with contextlib.suppress(OSError):
            aside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_object(path: Path, *, odd_numbers: bool = False) -> dict[str, Any]:
    """The JSON object of a file; OSError where it cannot be read, ValueError as `object_of`."""
    return object_of(read_bytes(path), odd_numbers=odd_numbers)


def object_of(text: str | bytes, *, odd_numbers: bool = False, read: str | None = None) -> dict[str, Any]:
    """A JSON object; ValueError says in a few words why the text is none, or one that nobody would mean.

    `odd_numbers` lets pass what Python writes and JSON does not have, NaN and infinities. With the key of the one entry
    that is `read`, that one must be there at most once, and others may be whatever JSON allows.

    >>> object_of('{"steps": 8}')
    {'steps': 8}
    """
    how = {} if odd_numbers else {"parse_constant": _no_number, "parse_float": _finite}
    pairs: list[tuple[str, Any]] = []

    def outermost(inner: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal pairs
        pairs = inner  # the outermost object is the last one to end
        return dict(inner)

    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=_each_once if read is None else outermost, **how)
        _each_once([pair for pair in pairs if pair[0] == read])
    except RecursionError:
        raise ValueError("it is nested without end") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8") from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # Python's advice is about Python
            raise ValueError("a whole number has thousands of digits") from None
        raise
    if not isinstance(content, dict):
        raise ValueError(f"it is {text.strip()[:SHOWN]!r} and no JSON object")
    if read is None and text.count("[") + text.count("{") > DEEPEST and _is_deep(content):
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    return content


def _is_deep(content: dict[str, Any]) -> bool:
    level: list[Any] = [content]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]
    return bool(level)


def _inside(outer: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return iter(outer.values() if isinstance(outer, dict) else outer)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:SHOWN]!r} is there twice")
    return content


def _no_number(written: str) -> float:
    raise ValueError(f"{written} is no number of JSON")


def _finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(f"{written[:SHOWN]} is more than a float holds")
    return number
