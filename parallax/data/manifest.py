"""The manifest of a folder of prepared shards: what they were made of, and what they must contain."""

import json
import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from parallax.data.shard import Shard, smallest_dtype
from parallax.runtime.errors import DataError, names_of
from parallax.runtime.files import read_object, write_whole

FILE_NAME = "manifest.json"
FORMAT = "parallax shards 1"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Counts are over all shards; entropies are of unigrams: the loss where only frequencies are known."""

    format: str
    request: dict  # source, tokenizer and shard size that were asked for
    tokenizer: str  # name
    tokenizer_fingerprint: str
    vocab: int
    documents: int
    empty_documents: int  # left out
    tokens: int
    text_bytes: int
    token_entropy_nats: float  # per token
    byte_entropy_nats: float  # per byte of text
    shards: tuple[Shard, ...]

    @property
    def dtype(self) -> np.dtype:
        return smallest_dtype(self.vocab)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token: a loss per token divided by it is a loss per byte."""
        return self.text_bytes / self.tokens

    def write(self, folder: Path) -> None:
        """Write manifest.json, last of all files: a folder that has one is complete."""
        write_whole(folder / FILE_NAME, json.dumps(asdict(self), indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        DataError: it is missing, is damaged, or names files outside of its folder.
    """
    file = folder / FILE_NAME
    try:
        content = read_object(file, odd_numbers=True)  # fields are checked one by one
    except FileNotFoundError:
        raise DataError(f"{str(folder)!r} has no {FILE_NAME}; make it with `python -m parallax.data prepare`") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{file} is damaged: {error}") from None
    if content.get("format", FORMAT) != FORMAT:
        raise DataError(f"{file} has format {reprlib.repr(content['format'])}; this version reads {FORMAT!r}")
    record = _check_fields(content, Manifest, file)
    shards = tuple(parse_shard(shard, file) for shard in record.pop("shards"))
    manifest = Manifest(shards=shards, **record)
    _check_sums(manifest, file)
    return manifest


def parse_shard(content: object, file: Path) -> Shard:
    """A shard from its JSON.

    Raises:
        DataError: it is not one; names `file`.
    """
    record = _check_fields(content, Shard, file)
    if not re.fullmatch(r"\d{5,}", record["name"]):
        raise DataError(f"{file} is damaged: shard name {record['name']!r:.80} is not a number of five digits")
    return Shard(**record)


_JSON: dict[object, Callable] = {
    int: lambda value: type(value) is int and value >= 0,
    float: lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    str: lambda value: type(value) is str,
    dict: lambda value: type(value) is dict,
    tuple[Shard, ...]: lambda value: type(value) is list,
}


def _check_fields(content: object, kind: type, file: Path) -> dict:
    if not isinstance(content, dict):
        raise DataError(f"{file} is damaged: {kind.__name__.lower()} is {type(content).__name__}, not an object")
    names = {field.name for field in fields(kind)}
    if content.keys() != names:
        differing = sorted(content.keys() ^ names)
        raise DataError(f"{file} is damaged: {kind.__name__.lower()} lacks, or should not have, {names_of(differing)}")
    for field in fields(kind):
        if not _JSON[field.type](content[field.name]):
            raise DataError(f"{file} is damaged: {field.name}={reprlib.repr(content[field.name])} is not a legal value")
    return dict(content)


def _check_sums(manifest: Manifest, file: Path) -> None:
    if not manifest.documents:
        raise DataError(f"{file} is damaged: it has no documents")
    if not manifest.text_bytes:
        raise DataError(f"{file} is damaged: text_bytes=0, but no document is empty")
    for name in ("documents", "empty_documents", "tokens", "text_bytes"):
        found = sum(getattr(shard, name) for shard in manifest.shards)
        if found != getattr(manifest, name):
            raise DataError(f"{file} is damaged: {name}={getattr(manifest, name)}, but its shards have {found}")
