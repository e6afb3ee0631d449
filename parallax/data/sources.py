"""Where documents come from: built-in text, or text, JSONL and Parquet files."""

import contextlib
import glob
import gzip
import hashlib
import importlib.resources
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallax.data import synthetic
from parallax.data.records import read_jsonl, read_parquet
from parallax.runtime.errors import DataError
from parallax.runtime.progress import waiting

# A longer text file is cut at line ends: it can then be held out in part, and tokenised in parallel.
PIECE_BYTES = 1 << 16
SUFFIXES = {"text": ("",), "jsonl": (".jsonl", ".jsonl.gz", ".ndjson"), "parquet": (".parquet",)}


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    `description` is JSON; equal descriptions mean equal documents.
    `text_bytes` is how much there is to read, None where only reading tells.
    """

    description: dict
    text_bytes: int | None
    documents: Callable[[], Iterator[str]]


def open_source(kind: str, *, path: str, field: str, synthetic_tokens: int) -> Source:
    """The documents of a source, see `configs/base.py`.

    Raises:
        DataError: no file matches.
    """
    if kind == "stdlib":
        return _files(kind, sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), _read_whole)
    if kind == "moby":
        return _moby()
    if kind == "synthetic":
        description = {"kind": kind, "tokens": synthetic_tokens}
        return Source(description, synthetic_tokens, partial(synthetic.documents, synthetic_tokens))
    files = find_files(path, SUFFIXES[kind])
    if kind == "text":
        return _files(kind, files, _read_pieces)
    read = {"jsonl": read_jsonl, "parquet": read_parquet}[kind]
    return _files(kind, files, partial(read, field=field), field=field)


def find_files(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Files that `path` names, in sorted order: one file, a folder (all below it but hidden ones), or a glob.

    Raises:
        DataError: there is none.
    """
    at = Path(path).expanduser()
    with _reading(at):
        if at.is_file():
            return [at]
        if at.is_dir():
            found = [one for one in at.rglob("*") if one.name.endswith(suffixes) and not _hidden(one.relative_to(at))]
            wanted = f"a file that ends in {' or '.join(suffixes)}" if suffixes != ("",) else "a file"
        else:
            found = [Path(match) for match in glob.glob(str(at), recursive=True)]
            wanted = "a match of this file, folder or glob"
        files = sorted(file for file in found if file.is_file())
    if not files:
        raise DataError(f"data.path={path!r}: {wanted} does not exist (looked from {Path.cwd()})")
    return files


def _hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def _files(kind: str, files: list[Path], read: Callable[[Path], Iterator[str]], **settings: str) -> Source:
    compressed = kind == "parquet" or any(file.suffix == ".gz" for file in files)
    text_bytes, sha256 = 0, hashlib.sha256()
    with waiting("reading the files of text") as show:
        for done, file in enumerate(files):
            show(done, len(files))
            with _reading(file):
                text_bytes += file.stat().st_size
                sha256.update(_hash(file))
    description = {"kind": kind, **settings, "files": len(files), "bytes": text_bytes, "sha256": sha256.hexdigest()}

    def documents() -> Iterator[str]:
        for file in files:
            with _reading(file):
                yield from read(file)

    return Source(description, None if compressed else text_bytes, documents)


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _hash(file: Path) -> bytes:
    # Of contents, which follow in order, alone: a corpus that is moved to another folder is still the same.
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _moby() -> Source:
    content = (importlib.resources.files("parallax.data") / "texts" / "moby_dick.txt").read_bytes()
    description = {"kind": "moby", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return Source(description, len(content), partial(_chapters, content.decode("utf-8")))


def _chapters(text: str) -> Iterator[str]:
    first, *others = text.split("\nCHAPTER ")
    yield first
    for chapter in others:
        yield f"CHAPTER {chapter}"


def _open(file: Path):
    return gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb")


def _read_whole(file: Path) -> Iterator[str]:
    with _open(file) as opened:
        yield _decode(opened.read(), file, 0)


def _read_pieces(file: Path) -> Iterator[str]:
    offset = 0
    with _open(file) as opened:
        while piece := opened.read(PIECE_BYTES):
            if len(piece) == PIECE_BYTES:
                piece += opened.readline(PIECE_BYTES) + _rest_of_character(opened)
            yield _decode(piece, file, offset)
            offset += len(piece)


def _rest_of_character(opened) -> bytes:
    # Only a line longer than a piece is cut inside; a UTF-8 character has at most three continuation bytes.
    rest = b""
    while len(rest) < 3 and (following := opened.peek(1)[:1]) and following[0] & 0xC0 == 0x80:
        rest += opened.read(1)
    return rest


def _decode(content: bytes, file: Path, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text: byte {content[error.start]:#04x} at offset {offset + error.start}; "
            "name text files alone, for example with a glob such as 'folder/**/*.txt'"
        ) from None
