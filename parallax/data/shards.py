"""Prepared data on disk: shards of token ids with tables of their documents, and the manifest of their folder."""

import contextlib
import hashlib
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from parallax.config.sections import TEXT
from parallax.data.conversations import MARKED_IDS, Marked, encode_marked, plain_ids
from parallax.data.tokenizer import Tokenizer, as_document
from parallax.errors import DataError, errors_as, names_of, quoted
from parallax.storage.files import LARGEST_BYTES, open_copy, read_object, size_of, write_whole

MANIFEST_FILE = "manifest.json"
SHARD_FORMAT = "parallax shards 1"
NEW_FIELDS = {"spelled_tokens": 0}  # which manifests of earlier versions do not have
# Per document: number of ids, including begin and end, and 8 bytes of the text's hash, which determine the split.
DOCUMENT = np.dtype([("tokens", "<u8"), ("hash", "<u8")])
ADVICE = "run `python -m parallax.data prepare` again to remake it"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard in the manifest; its ids are one flat array. `name` is its number, with at least five digits."""

    name: str
    documents: int
    empty_documents: int  # left out
    text_bytes: int
    tokens: int  # including begins and ends of documents
    ids_sha256: str
    documents_sha256: str

    def check(self, folder: Path, dtype: np.dtype, *, contents: bool) -> None:
        """Compare the files' sizes, and with `contents` their checksums, to the manifest.

        Raises:
            DataError: a file is missing, of another size or changed; names it.
        """
        ids, documents = ids_file(folder, self.name), documents_file(folder, self.name)
        check_file(ids, self.tokens * dtype.itemsize, self.ids_sha256 if contents else None)
        check_file(documents, self.documents * DOCUMENT.itemsize, self.documents_sha256 if contents else None)

    def read_ids(self, folder: Path, dtype: np.dtype) -> np.ndarray:
        """All ids, as stored: with marks if the text has them."""
        return _read(ids_file(folder, self.name), dtype)

    def read_documents(self, folder: Path) -> np.ndarray:
        """The table of documents, of dtype `DOCUMENT`."""
        return _read(documents_file(folder, self.name), DOCUMENT)

    @classmethod
    def parse(cls, content: object, file: Path) -> "Shard":
        """A shard from its JSON; DataError, which names `file`, if it is invalid."""
        record = _check_fields(content, cls, file)
        if not re.fullmatch(r"\d{5,}", record["name"]):
            raise DataError(f"{file} is damaged: shard name {record['name']!r:.80} is not a number of five digits")
        return cls(**record)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Source and content of a folder of shards.

    Counts are over all shards. Entropies are those of unigrams: the loss of a model that knows only token frequencies.
    """

    format: str = SHARD_FORMAT
    request: dict  # the requested source, tokenizer and shard size
    tokenizer: str  # name
    tokenizer_fingerprint: str
    vocab: int
    documents: int
    empty_documents: int  # left out
    tokens: int
    text_bytes: int
    token_entropy_nats: float  # per token
    byte_entropy_nats: float  # per byte of text
    spelled_tokens: int  # special tokens of the tokenizer that the text spells and that stay text
    shards: tuple[Shard, ...]

    @property
    def special_tokens(self) -> str:
        """How text that spells special tokens was read, as `data.special_tokens`; earlier versions had one way."""
        return self.request.get("special_tokens", "text")

    @property
    def record_format(self) -> str:
        """What records were, as data.format."""
        source = self.request.get("source")
        return str(source.get("format", TEXT)) if isinstance(source, dict) else TEXT

    @property
    def is_marked(self) -> bool:
        """Whether ids have marks of what is learned."""
        return self.record_format != TEXT

    @property
    def dtype(self) -> np.dtype:
        return smallest_dtype(self.vocab, self.is_marked)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token: a loss per token divided by it is a loss per byte."""
        return self.text_bytes / self.tokens

    def read_documents(self, folder: Path) -> np.ndarray:
        """The tables of documents of all shards."""
        return np.concatenate([shard.read_documents(folder) for shard in self.shards])

    def write(self, folder: Path) -> None:
        """Write manifest.json after all other files: a folder with one is complete."""
        write_whole(folder / MANIFEST_FILE, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a folder.

        Raises:
            DataError: it is missing, is damaged, or names files outside of its folder.
        """
        file = folder / MANIFEST_FILE
        missing = f"{str(folder)!r} has no {MANIFEST_FILE}; make it with `python -m parallax.data prepare`"
        with errors_as(DataError, f"{file} cannot be read: ", "", ValueError, missing=missing):
            content = read_object(file, odd_numbers=True, most=LARGEST_BYTES)  # fields are checked one by one
        if content.get("format", SHARD_FORMAT) != SHARD_FORMAT:
            written = reprlib.repr(content["format"])
            raise DataError(f"{file} has format {written}; this version reads {SHARD_FORMAT!r}")
        record = _check_fields(NEW_FIELDS | content, cls, file)
        manifest = cls(shards=tuple(Shard.parse(shard, file) for shard in record.pop("shards")), **record)
        if not (manifest.documents and manifest.text_bytes):
            raise DataError(f"{file} is damaged: it has {manifest.documents} documents and {manifest.text_bytes} bytes")
        for name, total in totals(manifest.shards).items():
            if total != getattr(manifest, name):
                raise DataError(f"{file} is damaged: {name}={getattr(manifest, name)}, but its shards have {total}")
        return manifest


def totals(shards: Sequence[Shard]) -> dict[str, int]:
    """Counts over all shards, by the manifest's names."""
    names = ("documents", "empty_documents", "tokens", "text_bytes")
    return {name: sum(getattr(shard, name) for shard in shards) for name in names}


LEGAL_VALUES: dict[object, Callable[[Any], bool]] = {
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
    if differing := sorted(content.keys() ^ names):
        raise DataError(f"{file} is damaged: {kind.__name__.lower()} lacks, or should not have, {names_of(differing)}")
    for field in fields(kind):
        if not LEGAL_VALUES[field.type](content[field.name]):
            raise DataError(f"{file} is damaged: {field.name}={reprlib.repr(content[field.name])} is not a legal value")
    return dict(content)


def ids_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.ids"


def documents_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.documents"


def smallest_dtype(vocab: int, is_marked: bool = False) -> np.dtype:
    """The dtype of ids on disk: two bytes hold 0 ... 65535; marks stand above an id."""
    return MARKED_IDS if is_marked else np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def text_hash(content: bytes) -> int:
    """The hash that identifies a document, of its text in UTF-8."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def write_shard(
    folder: Path, name: str, texts: Sequence[str], tokenizer: Tokenizer, special_tokens: str = "text"
) -> Shard:
    """Tokenise `texts` into the files of one shard; each file appears whole or not at all."""
    filled = [text for text in texts if text]
    is_marked = any(isinstance(text, Marked) for text in filled)
    if is_marked:
        encoded = documents = encode_marked(tokenizer, filled, special_tokens=special_tokens)
    else:
        encoded = tokenizer.encode_many(filled, special_tokens=special_tokens)
        documents = [as_document(tokenizer, ids) for ids in encoded]
    if special_tokens == "text" and not is_marked:
        for text, ids in zip(filled, encoded):
            if (ids == tokenizer.end).any():
                raise DataError(
                    f"the tokenizer makes id {tokenizer.end}, which ends a document, of the text {quoted(text)}; use a "
                    "tokenizer whose end stands for no text"
                )
    ids = np.concatenate([np.zeros(0, MARKED_IDS if is_marked else np.int32), *documents])
    plain = plain_ids(ids) if is_marked else ids
    # An unsigned dtype would silently change ids that are negative or too large.
    if plain.size and not 0 <= plain.min() <= plain.max() < tokenizer.vocab:
        raise DataError(
            f"the tokenizer gives ids from {plain.min()} to {plain.max()}, but says that it has {tokenizer.vocab} "
            f"(0 to {tokenizer.vocab - 1}); use a tokenizer.json whose entries agree with its size"
        )
    contents = [text.encode("utf-8") for text in filled]
    table = np.empty(len(filled), DOCUMENT)
    table["tokens"] = [len(ids) for ids in documents]
    table["hash"] = [text_hash(content) for content in contents]
    return Shard(
        name=name,
        documents=len(filled),
        empty_documents=len(texts) - len(filled),
        text_bytes=sum(map(len, contents)),
        tokens=len(ids),
        ids_sha256=_write(ids_file(folder, name), ids.astype(smallest_dtype(tokenizer.vocab, is_marked))),
        documents_sha256=_write(documents_file(folder, name), table),
    )


def _read(file: Path, dtype: np.dtype) -> np.ndarray:
    with reading_shard(file), open_copy(file) as opened:
        return np.fromfile(opened, dtype)


def _write(file: Path, array: np.ndarray) -> str:
    """Write an array; returns its checksum."""
    content = memoryview(array.view(np.uint8))
    write_whole(file, content)
    return hashlib.sha256(content).hexdigest()


def reading_shard(file: Path) -> AbstractContextManager[None]:
    """Turn an OSError while a shard is read into a DataError with the file's name and the reason."""
    return errors_as(DataError, f"shard {file} cannot be read: ", f"; put it back, or {ADVICE}")


def check_file(file: Path, size: int, sha256: str | None) -> None:
    """Raise DataError unless a file of a shard has its size, and its checksum if that is given."""
    with reading_shard(file):
        if not file.is_file():
            raise DataError(f"shard {file} is missing; {ADVICE}")
        there = size_of(file)
        if there is None and sha256 is None:  # looked at when it is opened
            return
        with contextlib.nullcontext() if sha256 is None else open_copy(file) as opened:
            there = there if opened is None else os.fstat(opened.fileno()).st_size
            if there != size:
                raise DataError(f"shard {file} has {there} bytes where the manifest says {size}; {ADVICE}")
            if opened is None:
                return
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != sha256:
        raise DataError(f"shard {file} is damaged: sha256 {digest[:8]}..., in the manifest {sha256[:8]}...; {ADVICE}")
