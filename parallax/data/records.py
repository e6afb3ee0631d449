"""Records of a source, and the document in one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from parallax.config.where import where_of
from parallax.errors import DataError, check_utf8, names_of, quoted

BOM = "\ufeff"  # a mark of the encoding, which some editors write before a text


def document_of(record: Mapping[str, Any], place: str, *, field: str) -> str:
    """The string in a field of a record; a null is an empty document. DataError, with its place, for anything else."""
    if field not in record:
        raise DataError(f"{place} has no field {quoted(field)} (data.field); fields: {names_of(record) or 'none'}")
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{place}: field {field!r} (data.field) holds {type(text).__name__}, not a string")
    check_utf8(DataError, f"{place}: field {field!r}", text)
    return text.removeprefix(BOM)


def texts_of(
    records: Iterable[tuple[str, Mapping[str, Any]]], document: Callable[[Mapping[str, Any], str], str], where: str
) -> Iterator[str]:
    """The documents of records with their places, each made of both; with `where`, of those that pass it."""
    chosen = where_of("data.where", where) if where else None
    for place, record in records:
        if chosen is None or chosen.passes(record, place):
            yield document(record, place)
