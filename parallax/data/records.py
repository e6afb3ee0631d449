"""Documents in the records of JSONL and Parquet files."""

import gzip
from collections.abc import Iterator
from pathlib import Path

from parallax.runtime.errors import ConfigError, DataError, how_to_install, names_of, quoted
from parallax.runtime.files import object_of


def read_jsonl(file: Path, *, field: str) -> Iterator[str]:
    """The string in `field` of each line that is not empty.

    Raises:
        DataError: a line is not a JSON object with such a string; names file and line.
    """
    with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _field(line, field, f"{file}:{number}")


def read_parquet(file: Path, *, field: str) -> Iterator[str]:
    """The strings of column `field`; a null is an empty document.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is damaged, or the column is missing or holds no strings.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"data.source='parquet' needs pyarrow: {how_to_install('data')}") from None
    rows = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            _check_column(opened.schema_arrow, field, file)
            for batch in opened.iter_batches(columns=[field]):
                column = batch.column(0)
                try:
                    texts = column.to_pylist()
                except UnicodeDecodeError:
                    raise DataError(_not_text(column, field, f"{file}, row", rows)) from None
                rows += len(texts)
                yield from (text or "" for text in texts)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


def _check_column(schema, field: str, file: Path) -> None:
    if field not in schema.names:
        raise DataError(f"{file} has no column {quoted(field)} (data.field); columns: {names_of(schema.names)}")
    kind = schema.field(field).type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise DataError(f"{file}: column {field!r} (data.field) holds {kind}, not strings")


def _not_text(column, field: str, place: str, rows: int) -> str:
    """Where in a column the first string is that is none; `rows` come before it."""
    for row, text in enumerate(column, start=rows + 1):
        try:
            text.as_py()
        except UnicodeDecodeError as error:
            byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
            return f"{place} {row}: column {field!r} (data.field) is not UTF-8: {byte}; write it as UTF-8"


def _field(line: bytes, field: str, place: str) -> str:
    try:
        record = object_of(line, odd_numbers=True, read=field)  # pandas writes NaN in other fields
    except ValueError as error:
        raise DataError(f"{place} cannot be read as JSON: {error}") from None
    if field not in record:
        raise DataError(f"{place} has no field {quoted(field)} (data.field); fields: {names_of(record) or 'none'}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{place}: field {field!r} (data.field) holds {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: field {field!r} has half a surrogate pair at character {error.start}") from None
    return text
