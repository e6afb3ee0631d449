"""Opens, replaces, locks and parses files of runs, checkpoints and data.

Only regular files are opened: links are not followed for writing, and pipes and devices never block. Functions raise
OSError unless they say otherwise.

Those that dispatch on the type of a path are the interface of storage. Here is what they do with files of a disk;
`storage/buckets.py` registers what they do with objects.
"""

import collections
import contextlib
import errno
import fcntl
import functools
import glob
import grp
import json
import math
import os
import pwd
import re
import shutil
import stat
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from parallax.errors import ESCAPED, CheckpointError, errors_as, writing

LARGEST_BYTES = 1 << 28  # of a file that is read as a whole; a manifest of 10^5 shards has a tenth of it
OBJECT_BYTES = 1 << 24  # of a JSON object such as a config, which Python may need twenty times the memory for
READ_BYTES = 1 << 20
LINE_BYTES = 1 << 22  # of a line; metrics with the load of ten thousand experts have a tenth of it
DEEPEST = 64  # nested lists and objects; ours have six levels
SHOWN = 40
OWNER_LETTERS = 200  # most characters of a lock that are shown
DESCRIPTORS = Path("/proc/self/fd")  # of this process, as links that lead to their files
# More than a name to Orbax or TensorStore: patterns, backslashes taken for slashes, locks, buckets; or not tried.
MEANT_OTHERWISE = re.compile(r"[^\w./=+,@:~ -]|\.__lock(?=/|$)|^/(gs|s3|az|hf)(?=/|$)")
WHOLE_LOG = ".whole"  # ends the name of an object that replaces those before it in a log
SEGMENT = re.compile(rf"\d{{12}}({re.escape(WHOLE_LOG)})?")  # the name of an object of a log
COPIED_LOG = ".objects"  # ends the name of a log's folder while one file is made of it
PROBE = "probe-"  # prefix of files that `check_writable` creates and that a kill may leave behind
WHEN_GONE = "it was removed or renamed while the run went on: put it back, and the same command goes on"
WHEN_FULL = "what is saved stays; make room, and the same command goes on from there"


# ---- what is there


@functools.singledispatch
def names_in(folder: Path) -> list[str]:
    """Sorted names in a folder; empty if it is not a folder."""
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def matching(pattern: str | Path, folder: Path | None = None) -> list[Path]:
    """Paths that match a glob pattern, sorted; relative to `folder` if given. Folders at its beginning that exist by
    their letters are not patterns: "lr=[1e-3]/*.txt". Elsewhere, * and ** are all that patterns have."""
    if not is_local(pattern):
        return _matching_elsewhere(pattern)
    pattern = Path(pattern)
    base = next((parent for parent in pattern.parents if (folder or Path()).joinpath(parent).is_dir()), Path())
    escaped = os.path.join(glob.escape(str(base)), pattern.relative_to(base))
    names = glob.glob(escaped, root_dir=folder, recursive=True)
    return sorted(map(Path, names or glob.glob(str(pattern), root_dir=folder, recursive=True)))


def _matching_elsewhere(pattern: PurePosixPath) -> list[Any]:
    """As with files, an asterisk stands for no hidden name."""
    base, text = next(parent for parent in pattern.parents if "*" not in str(parent)), str(pattern)

    def form(part: re.Match) -> str:
        if part[0] == "**/":
            return "(?:[^./][^/]*/)*"
        begins_a_name = text[part.start() - 1] == "/"
        return ("[^./][^/]*" if begins_a_name else "[^/]*") if part[0][0] == "*" else re.escape(part[0])

    meant = re.compile(re.sub(r"\*\*/|\*+|[^*]+", form, text))
    return [path for path in files_below(base) if meant.fullmatch(str(path))]


@functools.singledispatch
def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder."""
    return shutil.disk_usage(folder).free


@functools.singledispatch
def size_of(path: Path) -> int | None:
    """The size of a file; None if its store tells it only with the content."""
    return path.stat().st_size


@functools.singledispatch
def plain_files(folder: Path) -> Callable[[Path], bool]:
    """A function that says whether a path in a folder is a plain file."""
    return Path.is_file


@functools.singledispatch
def files_below(folder: Path) -> list[Path]:
    """The plain files in a folder and in those below it, sorted."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


@functools.singledispatch
def bytes_below(folder: Path) -> int | None:
    """The size of everything in a folder; None if its store does not tell it."""
    return sum(file.lstat().st_size for file in folder.rglob("*"))


@functools.singledispatch
def folders_with(folder: Path, name: str) -> list[Path]:
    """Folders directly in a folder that have a file of this name, sorted."""
    return [folder / file.parent for file in matching(f"*/{name}", folder)]


@functools.singledispatch
def state_of(path: Path) -> tuple:
    """A value that changes when a file is written or replaced."""
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


@functools.singledispatch
def state_below(folder: Path) -> tuple:
    """A value that changes when something directly in a folder is written, replaced or removed."""
    return tuple((name, (folder / name).stat().st_mtime_ns) for name in names_in(folder))


@functools.singledispatch
def time_of(path: Path) -> float:
    """When a file or folder was last changed, in seconds since 1970; 0 if it is missing or its store does not say."""
    try:
        return path.stat().st_mtime_ns / 1e9
    except OSError:
        return 0.0


@functools.singledispatch
def odd_kind(path: Path) -> str | None:
    """What a path is if it is neither a plain file nor a folder; None if it is, or is not there."""
    try:
        kind = path.lstat().st_mode
    except OSError as error:
        return None if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    if stat.S_ISLNK(kind):
        return "is a link, or in a folder that is one"
    return None if stat.S_ISREG(kind) or stat.S_ISDIR(kind) else "is no plain file"


class UrlPath(PurePosixPath):
    """A path of a URL, which is not of this machine; what can be asked of it depends on its store."""

    def __str__(self) -> str:
        return re.sub("^([a-z0-9]+):/+", r"\1://", super().__str__())

    @property
    def scheme(self) -> str:
        return self.parts[0].rstrip(":")

    def is_symlink(self) -> bool:
        return False


def is_local(path: str | Path | UrlPath) -> bool:
    """Whether a path is one of this machine, which libraries can be given."""
    return not isinstance(path, UrlPath)


@functools.singledispatch
def local_copy(path: Path) -> Path:
    """The file itself, or a copy on this machine of one that is elsewhere; others may remove it to make room."""
    return path


def open_copy(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a file of this machine or, if it is elsewhere, its copy here: it has a descriptor, and all can be read."""
    copy = local_copy(path)
    try:
        return open_file(copy, buffering=buffering)
    except FileNotFoundError:  # removed since
        return open_file(path if is_local(path) else local_copy(path), buffering=buffering)


def cache_folder() -> Path:
    """The folder for what is kept on this machine, following the XDG base directories."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "parallax"


@functools.singledispatch
def kvstore_of(folder: Path) -> dict[str, Any]:
    """The tensorstore spec of a folder."""
    return {"driver": "file", "path": f"{folder}/"}  # not a URL, in which some letters would have to be escaped


# ---- reading and writing


@functools.singledispatch
def open_file(path: Path | str, mode: str = "rb", **options: Any) -> IO:
    """`open` for regular files; text is UTF-8, whatever the locale. Use `write_whole` to replace a file."""
    encoding = {} if "b" in mode else {"encoding": "utf-8"}
    return open(path, mode, opener=plain, **encoding | options)


def plain(path: str | Path, flags: int) -> int:
    """An opener for `open` that accepts only regular files and never blocks on a pipe.

    For writing it also refuses symbolic and hard links, which would redirect the output.
    """
    assert not flags & os.O_TRUNC, "a file would be truncated before it is checked; use write_whole"
    writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
    try:
        opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _odd(path, "is a symbolic link") from None
        if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
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


@functools.singledispatch
def read_bytes(path: Path, most: int = LARGEST_BYTES) -> bytes:
    """The content of a plain file; OSError if it has more than `most` bytes. It takes memory for what is there."""
    content = bytearray()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        while size <= most and (block := file.read(READ_BYTES)):
            content += block
            size = max(size, len(content))
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return bytes(content)


class LineReader:
    """Reads the lines of a file that may grow, in little memory: a line of more than LINE_BYTES, or with a block of
    zeros, as sparse files have, is empty."""

    def __init__(self) -> None:
        self.offset = 0  # of what is read next
        self._begun, self._is_odd = b"", False  # the line that has no end yet

    def read(self, file: IO[bytes]) -> Iterator[bytes]:
        """Lines that have ended since the last call."""
        file.seek(self.offset)
        while block := file.read(READ_BYTES):
            self.offset += len(block)
            *ends, begun = block.split(b"\n")
            for end in ends:
                self._add(end)
                yield self.rest()
            self._add(begun)
            if not block.strip(b"\0"):
                self._is_odd = True
                self.offset = _next_data(file, self.offset)
                file.seek(self.offset)

    def rest(self) -> bytes:
        """The line that has no end yet, which is then forgotten."""
        line, self._begun, self._is_odd = b"" if self._is_odd else self._begun, b"", False
        return line

    def _add(self, piece: bytes) -> None:
        self._is_odd = self._is_odd or len(self._begun) + len(piece) > LINE_BYTES
        self._begun = b"" if self._is_odd else self._begun + piece


class GrowingLog:
    """Reads a log that a run appends to and may replace."""

    def __init__(self, path: Path):
        self._path, self._inode, self._lines = path, 0, LineReader()
        self._segments: list[Path] = []

    def read(self) -> tuple[bool, Iterator[bytes]]:
        """Whether it was replaced or made shorter since the last call, as a resumed run does; and the lines that have
        ended since then, or in that case all."""
        before, self._segments = self._segments, log_segments(self._path)
        if self._segments:
            is_new = self._segments != before
            return is_new, lines_in(self._path) if is_new else iter(())
        try:
            file = open_file(self._path)
        except OSError:
            self._inode, self._lines = 0, LineReader()
            return True, iter(())
        about = os.fstat(file.fileno())
        if replaced := about.st_ino != self._inode or about.st_size < self._lines.offset:
            self._inode, self._lines = about.st_ino, LineReader()
        return replaced, self._new_lines(file)

    def _new_lines(self, file: IO[bytes]) -> Iterator[bytes]:
        with file:
            yield from self._lines.read(file)


@functools.singledispatch
def growing_log(path: Path) -> GrowingLog:
    """A log of this name to read as it grows."""
    return GrowingLog(path)


@functools.singledispatch
def end_of(path: Path, most: int) -> bytes:
    """The last bytes of a log, `most` of them or a few more."""
    with open_file((log_segments(path) or [path])[-1]) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - most, 0))
        return file.read()


@functools.singledispatch
def lines_in(path: Path) -> Iterator[bytes]:
    """The lines of a file, as of `LineReader`, also the last one if it has no end; or those of a log that was copied
    from a bucket."""
    for part in log_segments(path) or [path]:
        lines = LineReader()
        with open_file(part) as file:
            yield from lines.read(file)
        if rest := lines.rest():
            yield rest


def log_segments(path: Path) -> list[Path]:
    """The objects of a log in a bucket, or copied from there, that count; none if it is a file."""
    names = [name for name in names_in(path) if SEGMENT.fullmatch(name)]
    first = max((place for place, name in enumerate(names) if name.endswith(WHOLE_LOG)), default=0)
    return [path / name for name in names[first:]]


@functools.singledispatch
def make_one_file(path: Path) -> None:
    """Make a file of a log that was copied from a bucket to a disk; after a kill, the next call ends the work."""
    aside = path.with_name(path.name + COPIED_LOG)
    if log_segments(path):
        if aside.is_dir():  # of a copy before, with which a start was killed here
            remove(aside)
        path.rename(aside)
    if aside.is_dir():
        if not path.exists():
            write_whole(path, (line + b"\n" for line in lines_in(aside)))
        remove(aside)


def _next_data(file: IO[bytes], offset: int) -> int:
    """Where a sparse file has data next; the offset itself on a file system that does not know."""
    number = file.fileno()
    place = os.lseek(number, 0, os.SEEK_CUR)
    try:
        return os.lseek(number, offset, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(number).st_size if error.errno == errno.ENXIO else offset
    finally:
        os.lseek(number, place, os.SEEK_SET)  # the file's own buffer counts on it


@functools.singledispatch
def write_whole(path: Path, content: str | bytes | memoryview | Iterable[bytes]) -> None:
    """Replace a file atomically and durably: write, flush and rename. The pieces of an iterable are written in turn."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
        with open(aside, "xb") as file:  # exclusive: an existing link is not followed
            content = in_utf8(content) if isinstance(content, str) else content
            file.writelines([content] if isinstance(content, bytes | memoryview) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        # Remove the useless part from a full disk. The error of a failed write names no file, so it is added.
        with contextlib.suppress(OSError):
            aside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


@functools.singledispatch
def write_file(path: Path, content: str | bytes) -> None:
    """Write a file without atomicity; a crash may leave a partial file."""
    path.write_bytes(in_utf8(content) if isinstance(content, str) else content)


def in_utf8(text: str) -> bytes:
    """Text as a file has it. Halves of surrogate pairs, as in names that are not UTF-8, are escaped."""
    return text.encode("utf-8", ESCAPED)


@functools.singledispatch
def new_file(path: Path) -> IO[bytes]:
    """A new file to write in pieces, as a context, which replaces an existing one; a kill may leave an incomplete
    file."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


def copy_file(path: Path, target: Path) -> None:
    """Copy the content of a file to another one."""
    with open_copy(path) as content, new_file(target) as copy:
        shutil.copyfileobj(content, copy)


class FolderHere:
    """A folder of this machine for a library that writes files of a disk: the folder itself or, if that is elsewhere, a
    temporary one, whose files `store` brings there."""

    def __init__(self, folder: Path):
        self._folder, self._temporary = folder, None
        self.path = folder
        if not is_local(folder):
            self._temporary = tempfile.TemporaryDirectory(prefix="parallax-")
            self.path = Path(self._temporary.name)

    def store(self, *, last: str = "") -> None:
        """Store all files, those with this ending after the others, and then remove them here."""
        if self._temporary is not None:
            for path in sorted(files_below(self.path), key=lambda path: path.suffix == last):
                copy_file(path, self._folder / path.relative_to(self.path))
            self.remove()

    def remove(self) -> None:
        """Remove a temporary folder, with what is in it."""
        if self._temporary is not None:
            self._temporary.cleanup()


@functools.singledispatch
def sync(path: Path) -> None:
    """fsync a file, or a folder's entries."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@functools.singledispatch
def sync_names(folder: Path) -> None:
    """fsync a folder's own files, and the names in it and in the folders below it."""
    for path in [folder, *sorted(folder.rglob("*"))]:
        if path.is_dir() or path.parent == folder:
            sync(path)


@functools.singledispatch
def append_file(path: Path) -> "AppendFile":
    """A log of this name to append to."""
    return AppendFile(path)


@functools.singledispatch
def replace_log(path: Path, lines: Iterable[bytes]) -> None:
    """Replace what is in a log, atomically."""
    write_whole(path, lines)


class AppendFile:
    """A file to append lines to; CheckpointError if the disk is full or the folder is gone."""

    def __init__(self, path: Path):
        self._folder = path.parent
        with writing(self._folder, WHEN_FULL):
            self._file = open_file(path, "a", errors=ESCAPED)
            # While it is open, no other folder gets its inode number.
            self._opened = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, text: str) -> None:
        """Append text and flush it."""
        with writing(self._folder, WHEN_FULL):
            self._file.write(text)
            self._file.flush()
        # Writes to a folder that was removed or renamed succeed, but their text is lost or elsewhere.
        with errors_as(CheckpointError, f"{self._folder} cannot be looked at (", f"); {WHEN_GONE}"):
            there = os.path.samestat(self._folder.stat(), os.fstat(self._opened))
        if not there:
            raise CheckpointError(f"{self._folder} is not the same folder as when the run began; {WHEN_GONE}")

    def flush(self) -> None:
        """Return when what was written is stored, which a file's text is at once."""

    def close(self) -> None:
        if not self.closed:
            os.close(self._opened)
            self._file.close()


# ---- folders, names and locks


@functools.singledispatch
def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Create a folder and its parents, if missing."""
    path.mkdir(mode=mode, parents=True, exist_ok=True)


class PlainPath:
    """`path` leads to an existing folder, and libraries take each of its letters for itself.

    It is the folder's own path, or one through a descriptor of the folder, valid while this object exists.

    Raises:
        OSError: the folder cannot be opened.
        CheckpointError: its own path has other letters, and this system has no paths of descriptors.
    """

    def __init__(self, folder: Path):
        self.path = folder.resolve()
        special = MEANT_OTHERWISE.search(str(self.path))
        if special is None:
            return
        opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, opened)
        self.path = DESCRIPTORS / str(opened)
        if not (self.path.exists() and self.path.samefile(folder)):
            raise CheckpointError(
                f"{str(folder)!r} cannot hold checkpoints: {special[0]!r} is not part of a name for the library that "
                f"writes them, and {DESCRIPTORS} is missing; use letters, digits and any of . _ - = + , @ : ~"
            )


@functools.singledispatch
def remove(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=missing_ok)


@functools.singledispatch
def remove_what_can_be(path: Path) -> None:
    """Remove a folder, ignoring errors; others may still be writing in it."""
    shutil.rmtree(path, ignore_errors=True)


def lock(opened: IO, *, wait: bool) -> None:
    """Lock an open file until it is closed; BlockingIOError if it is taken and not `wait`."""
    fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@functools.singledispatch
def turns(path: Path) -> contextlib.AbstractContextManager:
    """A context in which no other process holds the lock of this name; waits until that is so."""
    opened = open_file(path, "a")
    try:
        lock(opened, wait=True)
    except BaseException:
        opened.close()
        raise
    return opened


class FileLock(contextlib.AbstractContextManager):
    """A lock on a file, which ends with the process; use it as a context."""

    def __init__(self, path: Path):
        self._file = open_file(path, "a+", errors="replace")

    def take(self, owner: str) -> None:
        """Lock it and write the owner into it; BlockingIOError with the other one's text if it is taken."""
        try:
            lock(self._file, wait=False)
        except BlockingIOError as error:
            self._file.seek(0)
            raise BlockingIOError(error.errno, self._file.read(OWNER_LETTERS).strip()) from None
        self._file.truncate(0)
        # Unbuffered, so that closing the file writes nothing if the disk is full.
        os.write(self._file.fileno(), owner.encode())

    def check(self) -> None:
        """CheckpointError if it is lost, which a file's lock never is."""

    def __exit__(self, *_) -> None:
        self._file.close()


@functools.singledispatch
def run_lock(path: Path) -> FileLock:
    """The lock of this name, which is not taken yet."""
    return FileLock(path)


@functools.singledispatch
def owner_of(path: Path) -> str:
    """Who holds, or held, the lock of this name, as its `take` was told; OSError if it is not there."""
    with open_file(path, "r", errors="replace") as file:
        return file.read(OWNER_LETTERS)


@functools.singledispatch
def try_writing(folder: Path) -> None:
    """Write, rename and remove a file in a folder; OSError if that fails."""
    probe = folder / f"{PROBE}{uuid.uuid4().hex}"
    probe.write_bytes(b"x")
    probe.rename(probe.with_suffix(".renamed")).unlink()


def try_appending(path: Path) -> None:
    """Open a file to append to, which changes nothing in one that is there; OSError if that fails."""
    with open(path, "ab"):
        pass


def check_writable(folder: Path) -> None:
    """Create the folder; CheckpointError unless files can be written, renamed and removed in it."""
    with writing(folder):
        make_folder(folder)
        try_writing(folder)


def open_to_others(folder: Path) -> Path | None:
    """What gives other users a way to change the files in a folder whose path has no link: the folder, one above it, or
    a file in it; None if there is nothing.

    Root is nobody else, and owns /. In a folder above it with the sticky bit, as /tmp, anybody may write: there, nobody
    can rename what others own.
    """
    trusted = {os.getuid(), Path("/").stat().st_uid}
    about = folder.stat()
    if about.st_uid != os.getuid() or _others_write(about):
        return folder
    for above in folder.parents:
        there = above.stat()
        if there.st_uid not in trusted or (_others_write(there) and not there.st_mode & stat.S_ISVTX):
            return above
    if about.st_mode & (stat.S_IXGRP | stat.S_IXOTH):  # others can open what is in it
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process may just have removed it
                there = file.lstat()
                if there.st_uid not in trusted or _others_write(there):
                    return file
    return None


def _others_write(about: os.stat_result) -> bool:
    """Whether other users may write; a group with this user's name and without other members is nobody else."""
    if about.st_mode & stat.S_IWOTH:
        return True
    if not about.st_mode & stat.S_IWGRP:
        return False
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(about.st_gid)
    except KeyError:
        return True
    return group.gr_gid != user.pw_gid or group.gr_name != user.pw_name or not {*group.gr_mem} <= {user.pw_name}


# ---- JSON


def read_object(path: Path, *, odd_numbers: bool = False, most: int = OBJECT_BYTES) -> dict[str, Any]:
    """The JSON object of a file; OSError if it cannot be read or has more than `most` bytes, ValueError as in
    `object_of`."""
    return object_of(read_bytes(path, most), odd_numbers=odd_numbers)


def object_if_readable(path: Path, *, odd_numbers: bool = False) -> dict[str, Any]:
    """The JSON object of a file; empty if it is missing or cannot be read."""
    try:
        return read_object(path, odd_numbers=odd_numbers)
    except (OSError, ValueError):
        return {}


def object_of(text: str | bytes, *, odd_numbers: bool = False, read: str | None = None) -> dict[str, Any]:
    """Parse a JSON object strictly; ValueError names the problem briefly.

    `odd_numbers` accepts NaN and infinities, which Python writes although JSON does not have them. If only the entry
    `read` will be used, only that key must be unique; other entries may be any JSON.

    >>> object_of('{"steps": 8}')
    {'steps': 8}
    """
    options = {} if odd_numbers else {"parse_constant": _no_number, "parse_float": _finite}
    pairs: list[tuple[str, Any]] = []

    def outermost(inner: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal pairs
        pairs = inner  # the outermost object ends last
        return dict(inner)

    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=_each_once if read is None else outermost, **options)
        _each_once([pair for pair in pairs if pair[0] == read])
    except RecursionError:
        raise ValueError("it is nested without end") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8") from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # Python's own advice does not help users
            raise ValueError("a whole number has thousands of digits") from None
        raise
    if not isinstance(content, dict):
        raise ValueError(f"it is {text.strip()[:SHOWN]!r}, not a JSON object")
    if read is None and text.count("[") + text.count("{") > DEEPEST and _is_deep(content):
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    return content


def _is_deep(content: dict[str, Any]) -> bool:
    level: list[Any] = [content]
    for _ in range(DEEPEST):
        items = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in items if isinstance(each, dict | list)]
    return bool(level)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:SHOWN]!r} is there twice")
    return content


def _no_number(written: str) -> float:
    raise ValueError(f"{written} is not a number of JSON")


def _finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(f"{written[:SHOWN]} is more than a float holds")
    return number
