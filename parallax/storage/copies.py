"""Copies of what is elsewhere, on this machine: whole files, up to a limit in bytes, shared by its processes.

A copy is named by its URL and the state of what it is a copy of, so that an object that has changed is another file. To
make room, those go that were not used for longest. Who has one open keeps it until it is closed.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from parallax.storage import files

LIMIT_BYTES = 100 * 10**9
PART = ".part"  # ends the name of a copy that is not whole

_limit = [LIMIT_BYTES]


def limit_copies(most: int) -> None:
    """Let the copies have so many bytes from now on."""
    _limit[0] = most


def copies_folder() -> Path:
    """The folder of the copies."""
    return files.cache_folder() / "copies"


def copy_of(url: str, state: tuple, pieces: Callable[[], Iterable[bytes]]) -> Path:
    """The copy of what a URL has in this state, whose content are the pieces; OSError if there is no room for it."""
    key = hashlib.sha256(json.dumps([url, *map(str, state)]).encode()).hexdigest()[:32]
    copy = copies_folder() / f"{key}-{PurePosixPath(url).name[-100:]}"  # libraries look at the ending
    with contextlib.suppress(FileNotFoundError):
        os.utime(copy)
        return copy
    files.make_folder(copy.parent, mode=0o700)
    part = copy.with_name(copy.name + PART)
    # Another process may have made the copy while this one waited, or given up and removed the part.
    while not copy.exists():
        with open(part, "ab") as opened:
            files.lock(opened, wait=True)
            if _is_named(opened.fileno(), part) and not copy.exists():
                opened.truncate(0)
                _fill(opened, url, pieces())
                os.replace(part, copy)
    return copy


def _is_named(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False


def _fill(opened, url: str, pieces: Iterable[bytes]) -> None:
    try:
        for piece in pieces:
            _make_room(len(piece), url)
            opened.write(piece)
            opened.flush()
    except BaseException:
        os.unlink(opened.name)
        raise


def _make_room(size: int, url: str) -> None:
    """Remove the copies that were not used for longest, until there is room; OSError if that is not enough."""
    held = []
    for path in copies_folder().iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes them, too
            about = path.stat()
            held.append((about.st_mtime_ns, about.st_size, path))
    over = sum(size for _, size, _ in held) + size - _limit[0]
    for _, size, path in sorted(held):
        if over > 0 and (path.suffix != PART or _is_left(path)):
            path.unlink(missing_ok=True)
            over -= size
    if over > 0:
        text = f"copies may have {_limit[0]:,} bytes on this machine, and it needs more; raise data.cache_bytes"
        raise OSError(errno.EFBIG, text, url)


def _is_left(part: Path) -> bool:
    """Whether no process writes a part any more."""
    try:
        with open(part, "rb") as opened:
            files.lock(opened, wait=False)
            return True
    except OSError:
        return False
