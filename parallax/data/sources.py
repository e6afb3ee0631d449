"""Sources of documents: built-in text, counting, or text, JSONL and Parquet files."""

import contextlib
import gzip
import hashlib
import importlib.resources
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO

from parallax.runtime.errors import DataError, errors_as, how_to_install, imported, names_of, quoted
from parallax.runtime.files import LARGEST_BYTES, matching, names_in, object_of, open_file
from parallax.runtime.progress import waiting

# A longer text file is divided at line ends, so that a part can be held out and tokenisation is parallel.
TEXT_PIECE_BYTES = 1 << 16
PARQUET_ROWS = 256  # at once: half a kilobyte of a file may say a text of 26 kB a million times
COUNTING_BYTES = 1000  # of a document of the source "synthetic"
SUFFIXES = {"text": ("",), "jsonl": (".jsonl", ".jsonl.gz", ".ndjson"), "parquet": (".parquet",)}


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    `description` is JSON; equal descriptions mean equal documents.
    `text_bytes` is the size of the text, None if only reading can tell.
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
        folder = Path(sysconfig.get_paths()["stdlib"])
        return _files(kind, [folder / name for name in names_in(folder) if name.endswith(".py")], read_whole)
    if kind == "moby":
        content = (importlib.resources.files("parallax.data") / "texts" / "moby_dick.txt").read_bytes()
        description = {"kind": "moby", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        first, *chapters = content.decode("utf-8").split("\nCHAPTER ")
        return Source(description, len(content), lambda: iter([first, *(f"CHAPTER {text}" for text in chapters)]))
    if kind == "synthetic":
        description = {"kind": kind, "tokens": synthetic_tokens}
        return Source(description, synthetic_tokens, partial(counting, synthetic_tokens))
    settings = {"field": field} if kind in ("jsonl", "parquet") else {}
    return _files(kind, find_files(path, SUFFIXES[kind]), partial(READERS[kind], **settings), **settings)


def find_files(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Files that `path` names, sorted: one file, all files below a folder except hidden ones, or a glob.

    Raises:
        DataError: there are none.
    """
    at = Path(path).expanduser()
    with _reading(at):
        if at.is_file():
            return [at]
        if at.is_dir():
            hidden = lambda file: any(part.startswith(".") for part in file.relative_to(at).parts)  # noqa: E731
            found = [one for one in sorted(at.rglob("*")) if one.name.endswith(suffixes) and not hidden(one)]
            wanted = f"a file that ends in {' or '.join(suffixes)}" if suffixes != ("",) else "a file"
        else:
            found, wanted = matching(at), "a match of this file, folder or glob"
        files = [file for file in found if file.is_file()]
    if not files:
        raise DataError(f"data.path={path!r}: {wanted} does not exist (looked from {Path.cwd()})")
    return files


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


def _reading(file: Path) -> contextlib.AbstractContextManager[None]:
    return errors_as(DataError, f"{file} cannot be read: ", "", EOFError, zlib.error)


def _hash(file: Path) -> bytes:
    # Only of contents, in order, so that a corpus in another folder is still the same.
    with open_file(file) as opened:
        return hashlib.file_digest(opened, "sha256").digest()


@contextlib.contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    with open_file(file) as opened:
        yield gzip.GzipFile(fileobj=opened) if file.suffix == ".gz" else opened


# ---- text


def read_whole(file: Path) -> Iterator[str]:
    """A file as one document."""
    with _open(file) as opened:
        yield _decode(opened.read(), file, 0)


def read_text(file: Path) -> Iterator[str]:
    """A file divided at line ends into documents of about TEXT_PIECE_BYTES."""
    offset = 0
    with _open(file) as opened:
        while piece := opened.read(TEXT_PIECE_BYTES):
            if len(piece) == TEXT_PIECE_BYTES:
                piece += opened.readline(TEXT_PIECE_BYTES) + _rest_of_character(opened)
            yield _decode(piece, file, offset)
            offset += len(piece)


def _rest_of_character(opened) -> bytes:
    # Only a line longer than a piece is divided; a UTF-8 character has at most three continuation bytes.
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
            "name only text files, for example with a glob such as 'folder/**/*.txt'"
        ) from None


# ---- records


def read_jsonl(file: Path, *, field: str) -> Iterator[str]:
    """The string in `field` of each line that is not empty.

    Raises:
        DataError: a line is not a JSON object with such a string; names file and line.
    """
    with _open(file) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LARGEST_BYTES + 1), b""), start=1):
            if len(line) > LARGEST_BYTES:
                raise DataError(f"{file}:{number} has more than {LARGEST_BYTES} bytes; a line is a document")
            if line.strip():
                yield _field(line, field, f"{file}:{number}")


def _field(line: bytes, field: str, where: str) -> str:
    try:
        record = object_of(line, odd_numbers=True, read=field)  # pandas writes NaN in other fields
    except ValueError as error:
        raise DataError(f"{where} cannot be read as JSON: {error}") from None
    if field not in record:
        raise DataError(f"{where} has no field {quoted(field)} (data.field); fields: {names_of(record) or 'none'}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} (data.field) holds {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} has half a surrogate pair at character {error.start}") from None
    return text


def read_parquet(file: Path, *, field: str) -> Iterator[str]:
    """The strings of column `field`; a null is an empty document.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is damaged, or the column is missing or holds no strings.
    """
    needs = f"data.source='parquet' needs pyarrow: {how_to_install('data')}"
    pyarrow, parquet = (imported(name, needs) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if field not in names:
                raise DataError(f"{file} has no column {quoted(field)} (data.field); columns: {names_of(names)}")
            kind = opened.schema_arrow.field(field).type
            if str(kind) not in ("string", "large_string", "string_view"):
                raise DataError(f"{file}: column {field!r} (data.field) holds {kind}, not strings")
            batches = opened.iter_batches(PARQUET_ROWS, columns=[field])
            texts = (text for batch in batches for text in batch.column(0))
            for row, text in enumerate(texts, start=1):
                try:
                    content = text.as_py()
                except UnicodeDecodeError as error:
                    byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
                    about = f"column {field!r} (data.field) is not UTF-8: {byte}; write it as UTF-8"
                    raise DataError(f"{file}, row {row}: {about}") from None
                yield content or ""
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


# ---- counting


def counting(tokens: int) -> Iterator[str]:
    """Documents that count, which a small model learns within a few steps.

    They have `tokens` bytes in all, including ends, which is exactly that number of tokens of the bytes tokenizer. Each
    document counts up from its own start by its own step.
    """
    left = tokens
    for number in count():
        # The last document gets one more byte if otherwise a document of only an end would be left.
        size = left - 1 if left <= COUNTING_BYTES + 2 else COUNTING_BYTES
        if size < 1:
            return
        start, step = number * 7919 % 1000, 1 + number * 104_729 % 9
        yield " ".join(map(str, range(start, start + step * size, step)))[:size]
        left -= size + 1


# Functions that yield the documents of a file, by source.
READERS = {"text": read_text, "jsonl": read_jsonl, "parquet": read_parquet}
