"""Sources of documents: built-in text, counting, files, or data sets by name."""

import contextlib
import gzip
import hashlib
import importlib.resources
import io
import logging
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any, BinaryIO

from parallax.config.mixture import DATASET, RECORDS
from parallax.config.where import where_of
from parallax.data.array_records import json_or_examples, read_array_records
from parallax.data.conversations import RecordFormat
from parallax.data.hub import NamedDataset
from parallax.data.records import BOM, document_of, texts_of
from parallax.data.shards import MANIFEST_FILE
from parallax.display.progress import waiting
from parallax.errors import ConfigError, DataError, check_utf8, errors_as, first_few, imported, names_of, quoted, shown
from parallax.storage.files import (
    LARGEST_BYTES,
    files_below,
    is_local,
    local_copy,
    matching,
    names_in,
    object_of,
    open_copy,
)
from parallax.storage.remote import AnyPath, source_path
from parallax.user_code import named, names_code

# A longer text file is divided at line ends, so that a part can be held out and tokenisation is parallel.
TEXT_PIECE_BYTES = 1 << 16
PARQUET_ROWS = 256  # at once: half a kilobyte of a file may say a text of 26 kB a million times
COUNTING_BYTES = 1000  # of a document of the source "synthetic"
PACKED = (".gz", ".zst")  # endings that may follow those of a source, in any case
# Endings of a source's files below a folder; the source "text" reads all.
SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrayrecord": (".arrayrecord", ".array_record"),
}
NUMBER_OF_SHARD = re.compile(r"-\d+-of-\d+$")  # after the ending of a file of several
PARQUET_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    `description` is JSON; equal descriptions mean equal documents.
    `text_bytes` is the size of the text, None if only reading can tell.
    """

    description: dict
    text_bytes: int | None
    documents: Callable[[], Iterator[str]]
    form: RecordFormat | None = None  # of records that hold no plain texts
    left_out: str = ""  # how many files are read of a folder, and why not others; "" if all are


def open_source(
    kind: str,
    *,
    path: str | Sequence[str],
    field: str,
    synthetic_tokens: int,
    where: str = "",
    form: RecordFormat | None = None,
) -> Source:
    """The documents of a source, see `configs/base.py`; `path` may be several of them. With `form`, its records hold
    no plain texts.

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
    if names_code(kind):
        return _users(kind, [path] if isinstance(path, str) and path else path)
    settings: dict[str, Any] = {"field": field} if kind in RECORDS else {}
    if form:
        field, settings = form.fields[0], form.description
    settings |= {"where": where_of("data.where", where).text} if where else {}
    paths = [path] if isinstance(path, str) else path
    if kind == DATASET:
        return _of_datasets(paths, field, where, form)
    files, left_out = _find_all(paths, kind, field)
    read = partial(read_records, kind, form, where) if form else partial(READERS[kind], **settings)
    return replace(_files(kind, files, read, **settings), form=form, left_out=left_out)


def _of_datasets(paths: Sequence[str], field: str, where: str, form: RecordFormat | None) -> Source:
    """The rows of data sets, one after another."""
    with waiting("finding the files of a data set"):
        each = [NamedDataset(path) for path in paths]
    about = form.description if form else {"field": field}
    description = {"kind": DATASET, **about, "where": where, "of": [dataset.description for dataset in each]}
    read = form.document if form else partial(document_of, field=field)
    rows = lambda: chain.from_iterable(dataset.rows() for dataset in each)  # noqa: E731
    return Source(description, None, lambda: texts_of(rows(), read, where), form=form)


def _find_all(paths: Sequence[str], kind: str, field: str) -> tuple[list[Path], str]:
    """The files of paths, in the order of these, each file once; and what is left out."""
    each = [find_files(path, kind, field) for path in paths]
    files = [file for files, _ in each for file in files]
    again = _repeated([*dict.fromkeys(files)])
    return [file for file in dict.fromkeys(files) if file not in again], "\n".join(said for _, said in each if said)


def _users(code: str, paths: Sequence[str]) -> Source:
    """A source of a user's own: a function of each file of `paths`, or of nothing if there are none."""
    read = partial(_checked, code, named("data.source", code, {}))
    if paths:
        files, left_out = _find_all(paths, code, "")
        source = replace(_files(code, files, lambda file: read(file=file)), text_bytes=None, left_out=left_out)
    else:
        source = Source({"kind": str(code)}, None, read)
    return replace(source, description={**source.description, "code": code.source})


def _checked(code: str, read: Callable[..., Iterator[str]], **file: Path) -> Iterator[str]:
    """The documents that code yields; DataError for anything else."""
    where = "".join(f" of {path}" for path in file.values())
    texts = read(**{name: local_copy(path) for name, path in file.items()})
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        kind = type(texts).__name__
        raise DataError(f"data.source={quoted(code)} returns a {kind}{where}, not documents; yield a text for each")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise DataError(
                f"data.source={quoted(code)}: document {number}{where} is a {type(text).__name__}; yield texts"
            )
        check_utf8(DataError, f"data.source={quoted(code)}: document {number}{where}", text)
        yield text


def find_files(path: str, kind: str, field: str) -> tuple[list[Path], str]:
    """Files that `path` names, sorted: one file, all files of a source below a folder, or a glob; and what is left out.

    Below a folder, links are followed; hidden files, those with other endings, and .json without `field` in its first
    line are left out. A file to which several paths lead is read once. One line says what is left out.

    Raises:
        DataError: there are none, or a folder cannot be read.
    """
    place = source_path(path, "data.path", pattern=True)
    with _reading(place):
        if place.is_file():
            return [place], ""
        in_folder = place.is_dir()
        there = _below(place) if in_folder else [file for file in matching(place) if not file.is_dir()]
        why_not = {file: _why_not(file, kind if in_folder else None, field) for file in there}
        why_not |= _repeated([file for file, why in why_not.items() if not why])
    files = [file for file, why in why_not.items() if not why]
    counts = Counter(filter(None, why_not.values())).most_common()
    left_out = f"leaving out {len(there) - len(files):,}: {first_few([f'{count:,} {why}' for why, count in counts])}"
    if not files:
        wrong = "no file matches this glob" if {*"*?["} & {*path} else "there is no such file or folder"
        if in_folder:
            ending = f", which would end in {' or '.join(SUFFIXES[kind])}" if kind in SUFFIXES else ""
            wrong = f"this folder has no file to read{ending}"
        but = f"; {left_out}" if counts else ""
        looked = f" (looked from {Path.cwd()})" if is_local(place) else ""
        raise DataError(f"data.path={path!r}: {wrong}{looked}{but}")
    if not counts:
        return files, ""
    said = f"{path}: reading {len(files):,} file{'s'[: len(files) != 1]}, {left_out}"
    _say_once(said)
    return files, said


def kind_of(path: str, field: str) -> str:
    """The source of files, by their names: prepared for a folder with a manifest, jsonl, parquet or arrayrecord if one
    of the files has such an ending, else text. Files that end in .json, which may be anything, count only where they
    are alone.

    >>> [kind_of(name, "text") for name in ("a/*.txt", "b.jsonl.gz", "c.parquet")]
    ['text', 'jsonl', 'parquet']
    """
    place = source_path(path, "--data", pattern=True)
    with _reading(place):
        if (place / MANIFEST_FILE).is_file():
            return "prepared"
        files = [file for file in _below(place) if not _why_not(file, "text", field)] if place.is_dir() else []
        said = [file for file in files if _ending(file) != ".json"] or files

        def fits(kind: str) -> bool:
            return any(not _why_not(file, kind, field) for file in said)

        return next((kind for kind in SUFFIXES if _ending(place) in SUFFIXES[kind] or fits(kind)), "text")


def kind_of_all(paths: Sequence[str], field: str) -> str:
    """The source of the files of several paths; ConfigError if they are of several sources."""
    kinds = sorted({kind_of(path, field) for path in paths})
    if len(kinds) > 1:
        raise ConfigError(f"its paths are of several sources, {names_of(kinds)}; give each an entry of its own")
    return kinds[0]


def _below(folder: Path) -> list[Path]:
    """All files and hidden folders below a folder, sorted. A folder to which several paths lead is entered once, by the
    one without links if there is one."""

    if not is_local(folder):
        below = files_below(folder)
        return [file for file in below if not any(name.startswith(".") for name in file.relative_to(folder).parts[:-1])]

    def fail(error: OSError) -> None:
        raise error

    there, entered, links = [], set(), [folder]
    while links:
        starts, links = links, []
        for start in starts:
            for above, folders, names in os.walk(start, onerror=fail):
                about = os.stat(above)
                identity = about.st_dev, about.st_ino
                if identity in entered:
                    folders.clear()
                    continue
                entered.add(identity)
                hidden = {name for name in folders if name.startswith(".")}
                there += [Path(above, name) for name in (*names, *hidden)]
                folders[:] = sorted(set(folders) - hidden)
                links += [Path(above, name) for name in folders if Path(above, name).is_symlink()]
    return sorted(there)


def _repeated(files: list[Path]) -> dict[Path, str]:
    """Why not to read files that are links to others of them; hard links are files of their own."""
    files = [file for file in files if is_local(file)]
    real, chosen = {file: file.resolve() for file in files}, {}
    for file in sorted(files, key=lambda file: (file.absolute() != real[file], file)):
        chosen.setdefault(real[file], file)
    return {file: "linked to others" for file in files if chosen[real[file]] != file}


def _why_not(file: Path, kind: str | None, field: str) -> str:
    """Why a file is not one of a source, "" if it is; without a source, any file is."""
    if kind and file.name.startswith("."):
        return "hidden"
    if is_local(file) and not file.is_file():
        return "that are broken links or no files"
    if kind not in SUFFIXES:
        return ""
    if _ending(file) not in SUFFIXES[kind]:
        return f"with the ending {shown(''.join(file.suffixes[-2:] if _is_packed(file) else [file.suffix])) or 'none'}"
    # .json is the ending of C4's and Dolma's lines, and of all other JSON.
    lacks = _ending(file) == ".json" and not _has_lines(file, field)
    return f"of JSON without the field {quoted(field)} in an object in the first line" if lacks else ""


def _is_packed(file: Path) -> bool:
    return file.suffix.lower() in PACKED


def _ending(file: Path) -> str:
    """The last ending but for that of a packed file."""
    return NUMBER_OF_SHARD.sub("", (file.with_suffix("") if _is_packed(file) else file).suffix.lower())


def _has_lines(file: Path, field: str) -> bool:
    """Whether the first line of a file that is not blank is a JSON object with this field."""
    with _reading(file), _open(file) as opened:
        line = next((line for line in iter(partial(opened.readline, LARGEST_BYTES), b"") if line.strip()), b"")
    try:
        return field in object_of(line, odd_numbers=True, read=field)
    except ValueError:
        return False


@cache
def _say_once(text: str) -> None:
    """Each split of a run opens its source."""
    _logger.warning(text)


def _files(kind: str, files: list[Path], read: Callable[[Path], Iterator[str]], **settings: Any) -> Source:
    compressed = kind in ("parquet", "arrayrecord") or any(map(_is_packed, files))
    text_bytes, sha256 = 0, hashlib.sha256()
    with waiting("reading the files of text") as show:
        for done, file in enumerate(files):
            show(done, len(files))
            with _reading(file):
                size, digest = _size_and_hash(file)
                text_bytes += size
                sha256.update(digest)
    description = {"kind": kind, **settings, "files": len(files), "bytes": text_bytes, "sha256": sha256.hexdigest()}

    def documents() -> Iterator[str]:
        for file in files:
            with _reading(file):
                yield from read(file)

    return Source(description, None if compressed else text_bytes, documents)


def _reading(file: Path) -> contextlib.AbstractContextManager[None]:
    return errors_as(DataError, f"{file} cannot be read: ", "", EOFError, zlib.error)


def _size_and_hash(file: AnyPath) -> tuple[int, bytes]:
    # Only of contents, in order, so that a corpus in another folder is still the same.
    with open_copy(file) as opened:
        digest = hashlib.file_digest(opened, "sha256").digest()
        return opened.tell(), digest


@contextlib.contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    """A file, unpacked piece by piece if its ending says that it is packed."""
    ending = file.suffix.lower()
    with open_copy(file) as opened:
        if ending == ".zst":
            pyarrow = imported("pyarrow", f"{file.name}, which is packed with zstd,", "data")
            yield io.BufferedReader(pyarrow.CompressedInputStream(opened, "zstd"))
        else:
            yield gzip.GzipFile(fileobj=opened) if ending == ".gz" else opened


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
        text = content.decode("utf-8")
        return text if offset else text.removeprefix(BOM)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text: byte {content[error.start]:#04x} at offset {offset + error.start}; "
            "name only text files, for example with a glob such as 'folder/**/*.txt'"
        ) from None


# ---- records


def read_jsonl(file: Path, *, field: str, where: str = "") -> Iterator[str]:
    """The string in `field` of each line that is not empty; a null is an empty document. With `where`, of the records
    that pass it.

    Raises:
        DataError: a line is not a JSON object with such a string, or is too long; names file and line.
    """
    return texts_of(_records(file, field), partial(document_of, field=field), where)


def _records(file: Path, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in the lines of a file that are not empty, with their places."""
    with _open(file) as opened:
        for number, line in enumerate(iter(partial(opened.readline, LARGEST_BYTES + 1), b""), start=1):
            if len(line) > LARGEST_BYTES:
                raise DataError(f"{file}:{number} is a line of more than {LARGEST_BYTES:,} bytes; divide its document")
            if line.strip():
                yield f"{file}:{number}", _record(line, field, f"{file}:{number}")


def _record(line: bytes, field: str, where: str) -> dict[str, Any]:
    with errors_as(DataError, f"{where} cannot be read as JSON: ", "", ValueError):
        return object_of(line, odd_numbers=True, read=field)  # pandas writes NaN in other fields


def read_parquet(file: Path, *, field: str, where: str = "") -> Iterator[str]:
    """The strings of column `field`, or its bytes as UTF-8, also where it is a dictionary; a null is an empty document.
    With `where`, of the rows that pass it.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is damaged, or the column is missing or holds no text.
    """
    pyarrow, parquet = (imported(name, "data.source='parquet'", "data") for name in ("pyarrow", "pyarrow.parquet"))
    chosen = where_of("data.where", where) if where else None
    compared = chosen.columns if chosen else []
    try:
        with parquet.ParquetFile(local_copy(file)) as opened:
            names = opened.schema_arrow.names
            if lacking := [name for name in compared if name not in names]:
                raise DataError(f"{file} has no column {quoted(lacking[0])} (data.where); columns: {names_of(names)}")
            if field not in names:
                raise DataError(f"{file} has no column {quoted(field)} (data.field); columns: {names_of(names)}")
            kind = opened.schema_arrow.field(field).type
            values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if str(values) not in PARQUET_TYPES:
                raise DataError(f"{file}: column {field!r} (data.field) holds {kind}, not strings")
            batches = opened.iter_batches(PARQUET_ROWS, columns=[field, *(name for name in compared if name != field)])
            rows = (pair for batch in batches for pair in zip(batch.column(field), _compared(batch, compared)))
            for row, (text, record) in enumerate(rows, start=1):
                if chosen and not chosen.passes(record, f"{file}, row {row}"):
                    continue
                try:
                    content = text.as_py()
                    content = content.decode("utf-8") if isinstance(content, bytes) else content
                except UnicodeDecodeError as error:
                    byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
                    about = f"column {field!r} (data.field) is not UTF-8: {byte}; write it as UTF-8"
                    raise DataError(f"{file}, row {row}: {about}") from None
                yield (content or "").removeprefix(BOM)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


def _compared(batch: Any, names: Sequence[str]) -> Iterable[dict[str, Any]]:
    """The values of these columns in each row of a batch of Arrow."""
    return batch.select(list(names)).to_pylist() if names else repeat({})


def _rows(file: Path, form: RecordFormat, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file of Parquet, of the columns that are read, with their places."""
    pyarrow, parquet = (imported(name, "data.source='parquet'", "data") for name in ("pyarrow", "pyarrow.parquet"))
    compared = where_of("data.where", where).columns if where else ()
    try:
        with parquet.ParquetFile(local_copy(file)) as opened:
            names = opened.schema_arrow.names
            wanted = (*form.fields_among(names), *compared)
            if lacking := [name for name in wanted if name not in names]:
                raise DataError(f"{file} has no column {quoted(lacking[0])}; columns: {names_of(names)}")
            columns = [name for name in dict.fromkeys((*wanted, *form.columns)) if name in names]
            rows = (row for batch in opened.iter_batches(PARQUET_ROWS, columns=columns) for row in batch.to_pylist())
            for number, record in enumerate(rows, start=1):
                yield f"{file}, row {number}", record
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


def read_records(kind: str, form: RecordFormat, where: str, file: Path) -> Iterator[str]:
    """The texts of records that hold no plain texts. DataError names file and record."""
    if kind == "parquet":
        records = _rows(file, form, where)
    else:
        records = _records(file, form.fields[0]) if kind == "jsonl" else json_or_examples(file)
    return texts_of(records, form.document, where)


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
READERS = {"text": read_text, "jsonl": read_jsonl, "parquet": read_parquet, "arrayrecord": read_array_records}
