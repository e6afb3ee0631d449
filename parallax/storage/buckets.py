"""Runs in a bucket: paths such as s3://bucket/run, and what `storage/files.py` does with objects.

An object is whole or not there. There are no folders: a folder is there while the name of an object begins with its
own. Nothing is renamed or appended to: a log is numbered objects, and what replaces all before it is a number, too. A
write may be refused unless the object is the one that was read, which is what a lock stands on.

TensorStore sends the requests, repeats those that the store throttles or does not answer, and finds the credentials
where the store's own tools look for them.
"""

import atexit
import collections
import contextlib
import errno
import functools
import io
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from parallax.errors import URL, CheckpointError, ConfigError, StoreError, first_line, writing
from parallax.storage import files
from parallax.storage.copies import copy_of

DRIVERS = {"s3": "s3", "gs": "gcs"}  # of TensorStore, by scheme
RETRIES = {"max_retries": 7, "initial_delay": "200ms", "max_delay": "8s"}  # about 20 s of trying
# TensorStore reads these from the environment. Without them it waits for ever for a server that says nothing.
TIMEOUTS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",  # without a byte; then the request is repeated
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
READS_AHEAD = 32  # requests for the objects of a log
LAST_ANSWERS_SECS = 10.0  # at the end of Python, for the requests of its threads
FLUSH_SECS = 5.0  # between the objects of a log
LEASE_SECS, RENEW_SECS, LEASE_LOOK_SECS = 60.0, 15.0, 1.0
MOST_SEGMENTS = 2000  # objects of a log; three hours of them
WHEN_LOST = "another run holds it now, or the store did not answer; what is saved stays"


class BucketPath(files.UrlPath):
    """A path in a bucket, with the questions of pathlib that a run asks.

    >>> folder = BucketPath("s3://bucket/runs/mine")
    >>> str(folder / "config.json"), folder.name, folder.key
    ('s3://bucket/runs/mine/config.json', 'mine', 'runs/mine')
    """

    @property
    def bucket(self) -> str:
        return self.parts[1]

    @property
    def key(self) -> str:
        """The name of the object in its bucket."""
        return "/".join(self.parts[2:])

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return bool(self.key and _keys(self, self.key, self.key + "\0"))

    def is_dir(self) -> bool:
        return bool(_keys_below(self))

    def resolve(self) -> "BucketPath":
        return self

    def rglob(self, pattern: str) -> list["BucketPath"]:
        """All objects below; the pattern is "*"."""
        assert pattern == "*"
        return [self / name for name in _keys_below(self)]

    def replace(self, target: "BucketPath") -> "BucketPath":
        """Copy an object, or all of a folder, and then remove it here."""
        for path in [self] if self.is_file() else self.rglob("*"):
            write(target / path.relative_to(self), read(path))
        files.remove(self)
        return target

    def rmdir(self) -> None:
        """A folder is gone with its last object."""


def path_of(written: str | os.PathLike, *, pattern: bool = False) -> Path | BucketPath:
    """The path of a file or a folder, here or in a bucket; ConfigError for a bucket that has no name. With `pattern`,
    its names may have an asterisk.

    >>> path_of("runs/mine"), path_of("s3://bucket/runs")
    (PosixPath('runs/mine'), BucketPath('s3://bucket/runs'))
    """
    if isinstance(written, BucketPath):
        return written
    if not is_in_bucket(written):
        return Path(written)
    path = BucketPath(URL.sub(lambda url: f"{url[1].lower()}://{url[2]}", str(written)))
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", path.bucket if len(path.parts) > 1 else ""):
        raise ConfigError(
            f"a {path.scheme} URL is {path.scheme}://BUCKET/FOLDER; this one names no bucket, or has a user or a "
            "password in it, which belong into the variables of the environment that the store's own tools read"
        )
    if "?" in path.key:
        raise ConfigError(
            f"a {path.scheme} URL has a query, which may hold a secret; write {path.scheme}://{path.bucket}/FOLDER, "
            "and give credentials as the store's own tools do"
        )
    letters = path.key.replace("*", "") if pattern else path.key
    if not path.key or {".", ".."} & {*path.parts} or re.search(r"[^\w./=+,@:~ -]", letters):
        raise ConfigError(
            f"{path} is no folder in a bucket; write {path.scheme}://{path.bucket}/FOLDER with letters, digits and "
            "any of . _ - = + , @ : ~"
        )
    return path


def is_in_bucket(written: str | os.PathLike) -> bool:
    """Whether a path is a URL of a bucket that can be read and written.

    >>> is_in_bucket("s3://bucket/run"), is_in_bucket("/mnt/bucket/run"), is_in_bucket("https://host/run")
    (True, False, False)
    """
    url = URL.match(str(written))
    return bool(url) and url[1].lower() in DRIVERS


# ---- requests


@files.kvstore_of.register
def _kvstore_of(folder: BucketPath) -> dict[str, Any]:
    """The tensorstore spec of a folder, without credentials."""
    prefix = f"{folder.key}/" if folder.key else ""
    for name, value in TIMEOUTS.items():
        os.environ.setdefault(name, value)
    reached = _reached_by_amazon() if folder.scheme == "s3" else _reached_by_google()
    return {"driver": DRIVERS[folder.scheme], "bucket": folder.bucket, "path": prefix} | reached


def _reached_by_google() -> dict[str, Any]:
    """The same for Google's stores. TensorStore reads the address of an emulator from a variable of its own, once."""
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        url = emulator if "://" in emulator else f"http://{emulator}"
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = url.rstrip("/")
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")  # or it would look for a machine of Google's
    return {"gcs_request_retries": RETRIES}


def _reached_by_amazon() -> dict[str, Any]:
    """Where a server is that the environment names, as the store's own tools read it."""
    variables = os.environ
    spec: dict[str, Any] = {"s3_request_retries": RETRIES}
    if endpoint := variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL"):
        region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1"
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region}
    if variables.get("AWS_ACCESS_KEY_ID"):
        spec["aws_credentials"] = {"type": "environment"}  # the default looks for files first, and prints what it lacks
    return spec


def _store(path: BucketPath) -> Any:
    """The bucket of a path."""
    return _opened(json.dumps(_kvstore_of(BucketPath(f"{path.scheme}://{path.bucket}"))))


@functools.cache
def _opened(spec: str) -> Any:
    from tensorstore import KvStore  # late, since it takes a second, and most commands are about local files

    return KvStore.open(json.loads(spec)).result()


class RequestsOfThreads(contextlib.AbstractContextManager):
    """A context around each request, which daemon threads do not leave once Python ends.

    Python stops such a thread where it next needs the interpreter. Inside TensorStore, as in C++ in general, that
    aborts the process (SIGABRT), whatever its status was to be.
    """

    def __init__(self) -> None:
        self._changed, self._in_flight, self._has_ended = threading.Condition(), 0, False
        atexit.register(self._end)

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(self, *_) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        if not threading.current_thread().daemon:
            return
        with self._changed:
            if change < 0 or not self._has_ended:
                self._in_flight += change
                self._changed.notify_all()
            while self._has_ended:
                self._changed.wait()

    def _end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.wait_for(lambda: not self._in_flight, timeout=LAST_ANSWERS_SECS)


_requests = RequestsOfThreads()


def _asked(path: BucketPath, ask: Any) -> Any:
    """The answer to a request; StoreError, which is an OSError, that says what the store said."""
    try:
        with _requests:
            return ask(_store(path)).result()
    except ValueError as error:
        text, reason = str(error), re.sub(r"//[^/@\s]*@", "//", first_line(error))
    kind = "ENOENT" if "NoSuchBucket" in text else text.partition(":")[0]
    if kind == "NOT_FOUND":  # of an object it would be an answer, not an error
        kind, reason = "ENOENT", "the specified bucket does not exist"
    codes = {"ENOENT": errno.ENOENT, "PERMISSION_DENIED": errno.EACCES, "UNAUTHENTICATED": errno.EACCES}
    codes["OUT_OF_RANGE"] = errno.ERANGE  # beyond the end of an object
    raise StoreError(codes.get(kind, errno.EIO), reason, str(path))


def read(path: BucketPath) -> bytes:
    """The content of an object."""
    return _there(path, lambda store: store.read(path.key)).value


def _there(path: BucketPath, ask: Any) -> Any:
    """The answer to a request for an object; FileNotFoundError if it is not there."""
    answer = _asked(path, ask)
    if answer.state != "value":
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return answer


def write(path: BucketPath, content: bytes, *, instead_of: bytes | None = None) -> bytes:
    """Write an object; returns its generation, which is empty if it was not written because it is no longer the one of
    the generation `instead_of`."""
    given = {} if instead_of is None else {"if_equal": instead_of}
    new = _asked(path, lambda store: store.write(path.key, content, **given)).generation
    if new or instead_of is None:
        return new
    # An earlier try may have been stored, and its answer lost.
    there = _asked(path, lambda store: store.read(path.key))
    if there.state == "missing":
        path.exists()  # StoreError if there is no bucket, of which a read says only that there is no object
    return there.stamp.generation if there.state == "value" and there.value == content else b""


def _keys(path: BucketPath, first: str, end: str) -> list[str]:
    from tensorstore import KvStore

    between = KvStore.KeyRange(first, end)
    return [key.decode() for key in sorted(_asked(path, lambda store: store.list(between)))]


def _keys_below(folder: BucketPath) -> list[str]:
    """Names of all objects below, relative to the folder."""
    prefix = f"{folder.key}/"
    return [key.removeprefix(prefix) for key in _keys(folder, prefix, f"{folder.key}0")]  # "0" comes after "/"


# ---- the interface of storage/files.py


@files.names_in.register
def _names_in(folder: BucketPath) -> list[str]:
    return sorted({name.split("/")[0] for name in _keys_below(folder)})


@files.files_below.register
def _files_below(folder: BucketPath) -> list[BucketPath]:
    return folder.rglob("*")


@files.plain_files.register
def _plain_files(folder: BucketPath) -> Callable[[BucketPath], bool]:
    """As a single list shows them now."""
    return frozenset(folder.rglob("*")).__contains__


@files.free_bytes.register
def _free_bytes(folder: BucketPath) -> int:
    return sys.maxsize


@files.size_of.register
@files.bytes_below.register
@files.odd_kind.register
def _not_told(path: BucketPath) -> None:
    """Lists have no sizes, and all that they have are objects."""
    return None


@files.folders_with.register
def _folders_with(folder: BucketPath, name: str) -> list[BucketPath]:
    return [folder / above for above, *rest in (key.split("/") for key in _keys_below(folder)) if rest == [name]]


@files.state_of.register
def _state_of(path: BucketPath) -> tuple:
    return (_part_of(path, 0, 0).stamp.generation.hex(),)


@files.state_below.register
def _state_below(folder: BucketPath) -> tuple:
    return tuple(_keys_below(folder))


@files.time_of.register
def _time_of(path: BucketPath) -> float:
    return 0.0


@files.open_file.register
def _open_file(path: BucketPath, mode: str = "rb", **options: Any) -> IO:
    assert mode in ("r", "rb"), "an object is written as a whole"
    content = b"".join(_log_of(path)[1]) if not path.is_file() and path.is_dir() else read(path)
    return io.BytesIO(content) if mode == "rb" else io.StringIO(content.decode("utf-8", "replace"))


@files.read_bytes.register
def _read_bytes(path: BucketPath, most: int = files.LARGEST_BYTES) -> bytes:
    content = read(path)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


@files.lines_in.register
def _lines_in(path: BucketPath) -> Iterator[bytes]:
    yield from _open_file(path).read().splitlines()


@files.write_whole.register
@files.write_file.register
def _write_whole(path: BucketPath, content: str | bytes | memoryview | Iterable[bytes]) -> None:
    if isinstance(content, str):
        content = files.in_utf8(content)
    write(path, bytes(content) if isinstance(content, bytes | memoryview) else b"".join(content))


class NewObject(io.BytesIO):
    """An object that is stored as a whole when it is closed; use it as a context, which stores nothing after an
    error."""

    def __init__(self, path: BucketPath):
        super().__init__()
        self._path = path

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is None:
            content = self.getvalue()
            self.close()  # a shard is not there twice while it is sent
            write(self._path, content)
        self.close()


files.new_file.register(BucketPath, NewObject)


@files.sync.register
@files.sync_names.register
@files.make_folder.register
@files.make_one_file.register
def _nothing_to_do(path: BucketPath, *, mode: int = 0o777) -> None:
    """A write has ended when the object is stored, a folder is there with its first one, and a log is objects."""


@files.remove.register
def _remove(path: BucketPath, *, missing_ok: bool = False) -> None:
    from tensorstore import KvStore

    below = KvStore.KeyRange(f"{path.key}/", f"{path.key}0")
    _asked(path, lambda store: store.delete_range(below))
    _asked(path, lambda store: store.write(path.key, None))


@files.remove_what_can_be.register
def _remove_what_can_be(path: BucketPath) -> None:
    with contextlib.suppress(OSError):
        _remove(path)


@files.try_writing.register
def _try_writing(folder: BucketPath) -> None:
    """Write and remove an object; OSError if that fails, or if lists show what was there before, since a run finds its
    steps by them."""
    probe = folder / f"{files.PROBE}{uuid.uuid4().hex}"
    write(probe, b"x")
    is_shown = probe.is_file()
    _asked(probe, lambda store: store.write(probe.key, None))
    if not is_shown or probe.is_file():
        raise OSError(errno.ESTALE, "lists of this store do not show what was just written and removed", str(folder))


# ---- logs


def _log_of(path: BucketPath, tries: int = 4) -> tuple[list[str], list[bytes]]:
    """The parts of a log that count, and their names. If its run replaces them meanwhile, they are asked for again."""
    names = _names_that_count(path)
    try:
        return names, list(_contents(path, names))
    except FileNotFoundError:
        if tries == 1:
            raise
    return _log_of(path, tries - 1)


def _names_that_count(path: BucketPath) -> list[str]:
    return [segment.name for segment in files.log_segments(path)]


def _contents(folder: BucketPath, names: Iterable[str]) -> Iterator[bytes]:
    """The objects of these names, in turn; the next ones are already asked for."""
    store, asked = _store(folder), collections.deque()
    for name in names:
        asked.append((folder / name, store.read(f"{folder.key}/{name}")))
        if len(asked) == READS_AHEAD:
            yield _answer(*asked.popleft())
    while asked:
        yield _answer(*asked.popleft())


def _answer(path: BucketPath, reading: Any) -> bytes:
    return _there(path, lambda store: reading).value


def _next_number(path: BucketPath) -> int:
    return max((int(name.removesuffix(files.WHOLE_LOG)) for name in _names_in(path)), default=0) + 1


class GrowingSegments:
    """Reads a log that a run appends to: only objects that were not there before."""

    def __init__(self, path: BucketPath):
        self._path, self._last = path, ""

    def read(self) -> tuple[bool, Iterator[bytes]]:
        """As `GrowingLog.read`."""
        prefix = f"{self._path.key}/"
        keys = _keys(self._path, prefix + self._last, f"{self._path.key}0")
        names = [key.removeprefix(prefix) for key in keys]
        replaced = any(name.endswith(files.WHOLE_LOG) for name in names[1:])
        contents = None
        if self._last and names[:1] == [self._last] and not replaced:
            with contextlib.suppress(FileNotFoundError):  # replaced since it was listed
                contents = list(_contents(self._path, names[1:]))
        if is_new := contents is None:
            names, contents = _log_of(self._path)
        self._last = (names or [""])[-1]
        return is_new, (line for content in contents for line in content.splitlines())


files.growing_log.register(BucketPath, GrowingSegments)


@files.end_of.register
def _end_of(path: BucketPath, most: int) -> bytes:
    names, end = _names_in(path), b""
    while names and len(end) < most:
        end = read(path / names.pop()) + end
    return end


@files.replace_log.register
def _replace_log(path: BucketPath, lines: Iterable[bytes]) -> None:
    _put_instead_of_all(path, _next_number(path), b"".join(lines))


def _put_instead_of_all(path: BucketPath, number: int, content: bytes) -> None:
    """Write an object that replaces those before it in a log, and remove them."""
    from tensorstore import KvStore

    whole = path / f"{number:012}{files.WHOLE_LOG}"
    write(whole, content)
    _asked(path, lambda store: store.delete_range(KvStore.KeyRange(f"{path.key}/", whole.key)))


class Segments:
    """A log in a bucket. A thread stores what was written every few seconds, as an object with the next number, and
    makes one of them when they are many."""

    def __init__(self, path: BucketPath):
        self._path, self._pending, self._failed = path, [], None
        with writing(path.parent):
            self._number, self._segments = _next_number(path), len(_names_that_count(path))
        self._lines, self._sending, self._ended = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._send_often, name=f"log {path.name}", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._ended.is_set()

    def write(self, text: str) -> None:
        """Append text, which is stored soon; CheckpointError if an earlier one could not be."""
        with self._lines:
            self._pending.append(text)
        with writing(self._path.parent, files.WHEN_GONE):
            if self._failed is not None:
                raise self._failed

    def flush(self) -> None:
        """Return when what was written is stored."""
        with writing(self._path.parent, "what is saved stays"), self._sending:
            with self._lines:
                text, self._pending = "".join(self._pending), []
            if text:
                self._send(text)

    def close(self) -> None:
        if not self.closed:
            self._ended.set()
            self._thread.join()
            self.flush()

    def _send(self, text: str) -> None:
        try:
            missing = _asked(self._path, lambda store: store.read(f"{self._path.key}/{self._number:012}"))
            if missing.state == "value" or not write(
                self._path / f"{self._number:012}", files.in_utf8(text), instead_of=missing.stamp.generation
            ):
                raise _of_another_run(self._path)
        except OSError:
            with self._lines:
                self._pending.insert(0, text)
            raise
        self._number, self._segments = self._number + 1, self._segments + 1

    def _fold(self) -> None:
        with writing(self._path.parent, "what is saved stays"), self._sending:
            if _next_number(self._path) > self._number:
                raise _of_another_run(self._path)
            self._number += 1  # first: what comes next must come after it, though the answer to this were lost
            _put_instead_of_all(self._path, self._number - 1, b"".join(_log_of(self._path)[1]))
            self._segments = 1

    def _send_often(self) -> None:
        while not self._ended.wait(FLUSH_SECS):
            try:
                self.flush()
                if self._segments >= MOST_SEGMENTS:
                    self._fold()
                self._failed = None
            except CheckpointError as error:
                self._failed = error.__cause__


def _of_another_run(log: BucketPath) -> OSError:
    return OSError(errno.EEXIST, "another run writes this log", str(log))


files.append_file.register(BucketPath, Segments)


# ---- objects that are read as files of this machine

OBJECT_PIECE_BYTES = 1 << 24


@files.local_copy.register
def _local_copy(path: BucketPath) -> Path:
    state = _state_of(path)
    return copy_of(str(path), state, lambda: _pieces(path, state))


def _pieces(path: BucketPath, state: tuple) -> Iterator[bytes]:
    """The content of an object, piece by piece; OSError if it is no longer the one of this state."""
    start = 0
    while (answer := _piece(path, start)) is not None:
        if (answer.stamp.generation.hex(),) != state:
            raise OSError(errno.ESTALE, "it was changed while it was read", str(path))
        if not answer.value:
            return
        yield answer.value
        start += len(answer.value)


def _piece(path: BucketPath, start: int) -> Any:
    """Some of an object from a byte on; None from its end on."""
    for end in (start + OBJECT_PIECE_BYTES, None):
        try:
            return _part_of(path, start, end)
        except StoreError as error:
            if error.errno != errno.ERANGE:
                raise
    return None


def _part_of(path: BucketPath, start: int, end: int | None) -> Any:
    """Bytes of an object, all of them up to the end if that is None."""
    return _there(path, lambda store: store.read(path.key, byte_range=slice(start, end)))


# ---- the lock of a run


class Lease(contextlib.AbstractContextManager):
    """A lock that ends when nobody renews it: an object that says who holds it, replaced again and again.

    A run that was killed leaves its lease. A process of the same machine sees that it is gone and takes the lease over;
    one of another machine waits until it has not changed for LEASE_SECS. No clocks are compared.
    """

    def __init__(self, path: BucketPath):
        self._path, self._generation, self._content = path, b"", {}
        self._replacing, self._ended, self._thread = threading.Lock(), threading.Event(), None

    def take(self, owner: str) -> None:
        """Hold the lease; BlockingIOError with the other owner's text if another run does."""
        self._content = {"owner": owner, "secs": LEASE_SECS, **this_process()}
        seen = self._seen()
        since = time.monotonic()
        while seen.state == "value" and not _is_gone(_object(seen.value)):
            if time.monotonic() - since >= LEASE_SECS:
                break
            time.sleep(LEASE_LOOK_SECS)
            now = self._seen()
            if now.state == "value" and now.stamp.generation != seen.stamp.generation:
                raise _held(now.value)
            seen = now
        self._generation = seen.stamp.generation
        if not self._replace():
            raise _held(self._seen().value)
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Renew the lease; CheckpointError if that is refused."""
        with writing(self._path.parent, WHEN_LOST):
            if self._ended.is_set() or not self._replace():
                self._ended.set()
                raise OSError(errno.ENOLCK, "the lease of this run is lost", str(self._path))

    def __exit__(self, *_) -> None:
        if self._thread is not None and not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            with contextlib.suppress(OSError):
                _asked(self._path, lambda store: store.write(self._path.key, None, if_equal=self._generation))

    def _seen(self) -> Any:
        return _asked(self._path, lambda store: store.read(self._path.key))

    def _replace(self) -> bool:
        """Write the lease again, if it is as it was; equal contents would be one generation, so it is counted."""
        with self._replacing:
            self._content["renewals"] = self._content.get("renewals", -1) + 1
            new = write(self._path, json.dumps(self._content).encode(), instead_of=self._generation)
            self._generation = new or self._generation
            return bool(new)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECS):
            with contextlib.suppress(CheckpointError):  # the next save asks again
                self.check()


files.run_lock.register(BucketPath, Lease)


@files.turns.register
def _turns(path: BucketPath) -> Lease:
    lease, owner = Lease(path), f"process {os.getpid()} on {socket.gethostname()}"
    _names_in(path.parent)  # says that there is no such bucket, where a lease would be waited for
    while True:
        try:
            lease.take(owner)
            return lease
        except BlockingIOError:
            time.sleep(LEASE_LOOK_SECS)


@files.owner_of.register
def _owner_of(path: BucketPath) -> str:
    return _owner(read(path))


def this_process() -> dict[str, Any]:
    """What tells this process from all others of this machine, before and after a restart."""
    return {
        "host": socket.gethostname(),
        "boot": _first_line("/proc/sys/kernel/random/boot_id"),
        "processes": _linked("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
    }


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the holder of a lease was a process of this machine that has ended."""
    here = this_process()
    if not here["boot"] or any(holder.get(name) != here[name] for name in ("host", "boot", "processes")):
        return False
    return type(holder.get("pid")) is int and _began(holder["pid"]) != holder.get("began")


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine did; "" if it is not there."""
    after_name = _first_line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return after_name[19] if len(after_name) > 19 else ""


def _first_line(path: str) -> str:
    try:
        with files.open_file(path, "r", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _linked(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _object(content: bytes) -> dict[str, Any]:
    try:
        return files.object_of(content)
    except ValueError:
        return {}


def _held(content: bytes) -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, _owner(content))


def _owner(content: bytes) -> str:
    return str(_object(content).get("owner", "unknown"))[: files.OWNER_LETTERS]
