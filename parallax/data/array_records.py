"""ArrayRecord files, which Grain reads: records that are texts, JSON objects, or TensorFlow's Examples."""

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from parallax.data.records import BOM, document_of, texts_of
from parallax.errors import DataError, errors_as, imported
from parallax.storage.files import local_copy, object_of

RECORDS_AT_ONCE = 256
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers
FEATURES = 1  # of an Example; a SequenceExample has lists of them in another field
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3  # what a feature of an Example is


def read_array_records(file: Path, *, field: str, where: str = "") -> Iterator[str]:
    """The string in `field` of each record, a JSON object or an Example; without a field, each record as UTF-8 text.
    With `where`, of the records that pass it.

    Raises:
        ConfigError: array_record is not installed.
        DataError: the file is damaged, or a record is none of these; names file and record.
    """
    if field:
        return texts_of(json_or_examples(file), partial(document_of, field=field), where)
    return (_text(content, place) for place, content in _contents_with_places(file))


def json_or_examples(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file, JSON objects or Examples, with their places."""
    return ((place, _record(content, place)) for place, content in _contents_with_places(file))


def _contents_with_places(file: Path) -> Iterator[tuple[str, bytes]]:
    return ((f"{file}, record {number}", content) for number, content in enumerate(_contents(file), start=1))


def _contents(file: Path) -> Iterator[bytes]:
    library = imported("array_record.python.array_record_module", "data.source='arrayrecord'", "arrayrecord")
    reader = library.ArrayRecordReader(str(local_copy(file)))
    if not reader.ok():
        raise DataError(f"{file} cannot be read as ArrayRecord: it is damaged, or another file")
    try:
        for start in range(0, count := reader.num_records(), RECORDS_AT_ONCE):
            yield from reader.read(start, min(start + RECORDS_AT_ONCE, count))
    except (RuntimeError, ValueError, IndexError) as error:
        raise DataError(f"{file} cannot be read as ArrayRecord: {str(error).partition(chr(10))[0]}") from error
    finally:
        reader.close()


def _text(content: bytes, place: str) -> str:
    with errors_as(DataError, f"{place} is not UTF-8 text: ", "; name its field in data.field", UnicodeDecodeError):
        return content.decode("utf-8").removeprefix(BOM)


def _record(content: bytes, place: str) -> dict[str, Any]:
    """A record that begins as a JSON object is one, and any other an Example."""
    if content.lstrip().startswith(b"{"):
        with errors_as(DataError, f"{place} cannot be read as JSON: ", "", ValueError):
            return object_of(content, odd_numbers=True)
    advice = "; use data.field='' if it is text"
    with errors_as(DataError, f"{place} is neither JSON nor an Example: ", advice, ValueError, struct.error):
        return example_of(content)


# ---- Examples, as https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto says


def example_of(message: bytes) -> dict[str, Any]:
    """The values of an Example by name, a list of them where there is not one; bytes that are text as that.

    Raises:
        ValueError: it is none.
    """
    features = (features for number, features in _fields(message) if number == FEATURES)
    entries = (dict(_fields(entry)) for each in features for _, entry in _fields(each))
    return {_bytes(entry[1]).decode("utf-8"): _values(entry.get(2, b"")) for entry in entries if 1 in entry}


def _values(feature: bytes) -> Any:
    values = [value for kind, content in _fields(feature) for value in _of_list(kind, content)]
    return values[0] if len(values) == 1 else values


def _of_list(kind: int, content: bytes) -> Iterator[Any]:
    for _, value in _fields(content):
        if kind == BYTES_LIST:
            yield _text_or_bytes(_bytes(value))
        elif kind == FLOAT_LIST:
            yield from (number for (number,) in struct.iter_unpack("<f", _bytes(value)))
        elif isinstance(value, int):
            yield _signed(value)
        else:  # packed
            yield from map(_signed, _varints(value))


def _text_or_bytes(content: bytes) -> str | bytes:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content


def _bytes(content: Any) -> bytes:
    if not isinstance(content, bytes):
        raise ValueError("a number where a message is expected")
    return content


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and content of each field of a message: bytes, or an integer."""
    message, place = _bytes(message), 0
    while place < len(message):
        key, place = _varint(message, place)
        if (kind := key & 7) == VARINT:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if kind == LENGTH_DELIMITED:
            size, place = _varint(message, place)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"an unknown wire type, {kind}")
        if place + size > len(message):
            raise ValueError("it ends within a field")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits in a byte, and the place after it."""
    number = shift = 0
    while place < len(message) and shift < 70:
        number |= (message[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if message[place - 1] < 0x80:
            return number, place
    raise ValueError("it ends within a number")


def _varints(content: bytes) -> Iterator[int]:
    place = 0
    while place < len(content):
        number, place = _varint(content, place)
        yield number


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
