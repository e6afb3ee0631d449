"""Files behind URLs that fsspec reads, such as https:// and hf://. They are only read, and only as data."""

import errno
import functools
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from parallax.errors import (
    URL,
    ConfigError,
    ParallaxError,
    StoreError,
    first_line,
    how_to_install,
    imported,
    quoted,
    why_not_local,
)
from parallax.storage import files
from parallax.storage.buckets import BucketPath, is_in_bucket, path_of
from parallax.storage.copies import copy_of

# Stores of fsspec. Its other schemes are files of this machine, or lead from one URL to others.
SCHEMES = ("https", "http", "hf", "az", "abfs", "adl", "oci", "oss", "hdfs", "sftp", "ftp", "memory")
STATE = ("size", "etag", "ETag", "md5", "content_md5", "blob_id", "mtime", "LastModified", "last_modified", "created")
LIBRARY_LETTERS = 200


class RemotePath(files.UrlPath):
    """A path behind a URL, with the questions of pathlib that a reader of data asks.

    >>> path = RemotePath("https://host/corpus/a.jsonl")
    >>> str(path.parent), path.name
    ('https://host/corpus', 'a.jsonl')
    """

    def exists(self) -> bool:
        return _info(self) is not None

    def is_file(self) -> bool:
        return (_info(self) or {}).get("type") == "file"

    def is_dir(self) -> bool:
        return (_info(self) or {}).get("type") == "directory"


AnyPath = Path | BucketPath | RemotePath


def source_path(written: str | os.PathLike, key: str = "", *, pattern: bool = False) -> AnyPath:
    """The path of what is only read: here, in a bucket, or behind a URL. ConfigError, which names the key, for a URL
    that cannot be read. With `pattern`, it may have * and **.

    >>> source_path("runs/mine"), source_path("hf://datasets/them/corpus/a.parquet")
    (PosixPath('runs/mine'), RemotePath('hf://datasets/them/corpus/a.parquet'))
    """
    if isinstance(written, BucketPath | RemotePath) or is_in_bucket(written):
        return written if isinstance(written, RemotePath) else path_of(written, pattern=pattern)
    url = URL.match(str(written))
    if url is None:
        return Path(os.path.expanduser(written))  # as it is written if there is no such user
    scheme, rest = url[1].lower(), url[2]
    if "@" in rest.split("/")[0] or re.search(r"[?#\s\\]|::|(^|/)\.\.?(/|$)", rest):
        raise ConfigError(
            f"{key or 'a path'} is a URL of {scheme}:// with a user, a query, .. or other letters that may hold a "
            f"secret or lead elsewhere; write {scheme}://HOST/PATH, and give credentials as the store's own tools do"
        )
    named = f"{key}={quoted(str(written))}" if key else quoted(str(written))
    if scheme not in SCHEMES:
        raise ConfigError(f"{named} {why_not_local(written)}")
    if "*" in rest and not pattern:
        raise ConfigError(f"{named} has an asterisk, and one file or folder is needed")
    return RemotePath(f"{scheme}://{rest}")


# ---- requests


@functools.cache
def _file_system(scheme: str) -> Any:
    fsspec = imported("fsspec", f"{scheme}://", "urls")
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs a further package ({first_line(error)}); those of https:// and hf:// come with "
            f"{how_to_install('urls')}"
        ) from None


def _asked(path: RemotePath, ask: Callable[[Any], Any]) -> Any:
    """The answer to a request; StoreError, which is an OSError, with the first line of what the library says."""
    file_system = _file_system(path.scheme)
    try:
        return ask(file_system)
    except FileNotFoundError as error:
        # https:// says so, too, where a server refuses or does not answer.
        if isinstance(error.__cause__, FileNotFoundError | None) or getattr(error.__cause__, "status", 0) == 404:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        said = error.__cause__
    except (ParallaxError, MemoryError):
        raise
    except Exception as error:  # of any library
        said = error
    # Its text may name a URL with a signature.
    reason = re.sub(r"\?\S*", "?…", re.sub(r"//[^/@\s]*@", "//", first_line(said)))[:LIBRARY_LETTERS]
    number = said.errno if isinstance(said, OSError) and said.errno else errno.EIO
    raise StoreError(number, reason, str(path))


def _info(path: RemotePath) -> dict[str, Any] | None:
    """What a store says of a file or a folder; None if it is not there."""

    def fresh(file_system: Any) -> dict[str, Any]:
        file_system.invalidate_cache()
        return file_system.info(str(path))

    try:
        return _asked(path, fresh)
    except FileNotFoundError:
        return None


def _there(path: RemotePath) -> dict[str, Any]:
    about = _info(path)
    if about is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return about


def _pieces(path: RemotePath) -> Iterator[bytes]:
    """The content, piece by piece; OSError if it has another size in the end than it had before, or changes."""
    state, size = _state_of(path), 0
    opened = _asked(path, lambda file_system: file_system.open(str(path), "rb"))
    with opened:
        while piece := _asked(path, lambda _: opened.read(files.READ_BYTES)):
            size += len(piece)
            yield piece
    about = _there(path)
    if _state_of(path) != state or about.get("size") not in (None, size):
        raise OSError(errno.ESTALE, "it was changed, or the connection ended, while it was read", str(path))


# ---- the interface of storage/files.py


@files.state_of.register
def _state_of(path: RemotePath) -> tuple:
    about = _there(path)
    return tuple((name, str(about[name])) for name in STATE if about.get(name) is not None)


@files.size_of.register
def _size_of(path: RemotePath) -> int | None:
    return _there(path).get("size")


@files.files_below.register
def _files_below(folder: RemotePath) -> list[RemotePath]:
    urls = _asked(folder, lambda file_system: [*map(file_system.unstrip_protocol, file_system.find(str(folder)))])
    # A store of several schemes, as az:// and abfs://, says another one.
    return sorted(RemotePath(f"{folder.scheme}://{url.partition('://')[2]}") for url in urls)


@files.names_in.register
def _names_in(folder: RemotePath) -> list[str]:
    return sorted({path.relative_to(folder).parts[0] for path in _files_below(folder)})


@files.read_bytes.register
def _read_bytes(path: RemotePath, most: int = files.LARGEST_BYTES) -> bytes:
    with _asked(path, lambda file_system: file_system.open(str(path), "rb")) as opened:
        content = _asked(path, lambda _: opened.read(most + 1))
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


@files.open_file.register
def _open_file(path: RemotePath, mode: str = "rb", **options: Any) -> IO:
    assert mode in ("r", "rb"), "what is behind a URL is only read"
    content = _read_bytes(path)
    return io.BytesIO(content) if mode == "rb" else io.StringIO(content.decode("utf-8", "replace"))


@files.local_copy.register
def _local_copy(path: RemotePath) -> Path:
    return copy_of(str(path), _state_of(path), lambda: _pieces(path))
