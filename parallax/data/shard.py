"""One shard on disk: the ids of consecutive documents in one flat array, and a table of these documents."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallax.data.tokenizer import Tokenizer
from parallax.runtime.errors import DataError
from parallax.runtime.files import write_whole

# Per document: how many ids, its begin and end counted, and 8 bytes of the text's hash, which decide the split.
DOCUMENT = np.dtype([("tokens", "<u8"), ("hash", "<u8")])
ADVICE = "run `python -m parallax.data prepare` again to remake it"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What the manifest knows of a shard: `name` is its number in five digits or more."""

    name: str
    documents: int
    empty_documents: int  # left out
    text_bytes: int
    tokens: int  # those that begin and end documents counted
    ids_sha256: str
    documents_sha256: str

    def check(self, folder: Path, dtype: np.dtype, *, contents: bool) -> None:
        """Compare sizes, and with `contents` checksums too, to the files.

        Raises:
            DataError: a file is missing, of another size or changed; names it.
        """
        check_file(ids_file(folder, self.name), self.tokens * dtype.itemsize, self.ids_sha256 if contents else None)
        size = self.documents * DOCUMENT.itemsize
        check_file(documents_file(folder, self.name), size, self.documents_sha256 if contents else None)

    def read_documents(self, folder: Path) -> np.ndarray:
        """The table of documents, of dtype `DOCUMENT`."""
        file = documents_file(folder, self.name)
        with reading(file):
            return np.fromfile(file, DOCUMENT)


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what a disk refuses while a shard is read into a DataError with its name and the reason."""
    try:
        yield
    except OSError as error:
        raise DataError(f"shard {file} cannot be read: {error.strerror}; put it back, or {ADVICE}") from error


def ids_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.ids"


def documents_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.documents"


def smallest_dtype(vocab: int) -> np.dtype:
    """Of ids on disk: two bytes hold 0 ... 65535."""
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def write_shard(folder: Path, name: str, texts: Sequence[str], tokenizer: Tokenizer) -> Shard:
    """Tokenise `texts` into the files of one shard; each file appears whole or not at all."""
    filled = [text for text in texts if text]
    dtype = smallest_dtype(tokenizer.vocab)
    begin, end = np.array(tokenizer.begin, np.int32), np.array([tokenizer.end], np.int32)
    encoded = tokenizer.encode_many(filled)
    pieces = [piece for ids in encoded for piece in (begin, ids, end)]
    ids = _fitting(np.concatenate([np.zeros(0, np.int32), *pieces]), tokenizer.vocab).astype(dtype)
    table = np.empty(len(filled), DOCUMENT)
    table["tokens"] = [len(begin) + len(ids) + 1 for ids in encoded]
    contents = [text.encode("utf-8") for text in filled]
    table["hash"] = [text_hash(content) for content in contents]
    return Shard(
        name=name,
        documents=len(filled),
        empty_documents=len(texts) - len(filled),
        text_bytes=sum(map(len, contents)),
        tokens=len(ids),
        ids_sha256=_write(ids_file(folder, name), ids),
        documents_sha256=_write(documents_file(folder, name), table),
    )


def _fitting(ids: np.ndarray, vocab: int) -> np.ndarray:
    # An unsigned dtype would hold another id in place of one that is negative or too large.
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
        raise DataError(
            f"the tokenizer gives ids from {ids.min()} to {ids.max()}, but says that it has {vocab} "
            f"(0 to {vocab - 1}); use a tokenizer.json whose entries agree with its size"
        )
    return ids


def text_hash(content: bytes) -> int:
    """By which a document is known, of its text in UTF-8."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _write(file: Path, array: np.ndarray) -> str:
    content = memoryview(array.view(np.uint8))
    write_whole(file, content)
    return hashlib.sha256(content).hexdigest()


def check_file(file: Path, size: int, sha256: str | None) -> None:
    """Raise DataError unless a file of a shard has its size, and its checksum if that is given."""
    with reading(file):
        if not file.is_file():
            raise DataError(f"shard {file} is missing; {ADVICE}")
        if file.stat().st_size != size:
            raise DataError(f"shard {file} has {file.stat().st_size} bytes where the manifest says {size}; {ADVICE}")
        if sha256 is None:
            return
        with open(file, "rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise DataError(f"shard {file} is damaged: sha256 {found[:8]}..., in the manifest {sha256[:8]}...; {ADVICE}")
