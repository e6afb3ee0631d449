"""Tokenise a source into shards on disk: in parallel, resumable, and the same with any number of workers."""

import fcntl
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from parallax.data import journal as journals
from parallax.data import manifest as manifests
from parallax.data import tokenizer as tokenizers
from parallax.data.journal import Journal, check_identity
from parallax.data.manifest import Manifest, read_manifest
from parallax.data.shard import Shard, ids_file, smallest_dtype
from parallax.data.sources import Source
from parallax.data.tokenizer import Bytes, Tokenizer, train_bpe
from parallax.data.workers import write_shards
from parallax.runtime.errors import DataError
from parallax.runtime.files import plain
from parallax.runtime.progress import waiting
from parallax.runtime.units import in_bytes

SHARD_BYTES = 32 << 20  # of text: a few seconds of BPE, so progress and resuming have fine steps
BPE_SAMPLE_BYTES = 64 << 20  # of text that a BPE is trained on; more hardly changes its entries
LOCK_NAME = ".lock"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be made; folders of equal requests hold the same bytes."""

    source: Source
    tokenizer: str  # "bytes" | "bpe" | path of a tokenizer.json
    bpe_vocab: int
    shard_bytes: int = SHARD_BYTES

    def to_json(self) -> dict:
        """All that decides the bytes of the shards, and not where things lie."""
        chosen = {"tokenizer": self.tokenizer}
        if self.tokenizer == "bpe":
            chosen["bpe_vocab"] = self.bpe_vocab
        elif self.tokenizer != Bytes.name:
            chosen["tokenizer"] = tokenizers.load(self.tokenizer).fingerprint
        return {"source": self.source.description, **chosen, "shard_bytes": self.shard_bytes}


def prepare(request: Request, folder: Path, *, workers: int) -> Manifest:
    """Make the shards of `request` in `folder`, keep those that are whole already, and return the manifest.

    Processes that prepare one folder at the same time take turns, and those that come later find it finished.

    Raises:
        DataError: the folder holds data of other settings, a document cannot be read, or there is no text.
    """
    try:
        with _lock(folder):
            return _prepare(request, folder, workers)
    except OSError as error:
        place = error.filename or folder
        raise DataError(f"preparing data stopped at {place}: {error.strerror}; run again to resume") from error


def remove(folder: Path) -> None:
    """Delete prepared data, if there is any.

    Raises:
        DataError: the folder holds something else too.
    """
    known = (manifests.FILE_NAME, journals.FILE_NAME, tokenizers.FILE_NAME, tokenizers.CONFIG_NAME, LOCK_NAME)
    names = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    strange = [name for name in names if name.removesuffix(".tmp") not in known and not _of_shard(name)]
    if strange:
        raise DataError(f"{folder} holds more than prepared data ({', '.join(strange[:3])}); delete it by hand")
    shutil.rmtree(folder, ignore_errors=not names)


def _of_shard(file_name: str) -> bool:
    name, _, kind = file_name.removesuffix(".tmp").partition(".")
    return name.isdigit() and kind in ("ids", "documents")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK_NAME, "a", opener=plain) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _prepare(request: Request, folder: Path, workers: int) -> Manifest:
    file = folder / manifests.FILE_NAME
    wanted = request.to_json()
    finished = read_manifest(folder) if file.exists() else None
    if finished:
        check_identity(wanted, finished.request, file)
    elif journals.began_otherwise(folder, wanted):  # a field that is not there, say: nothing of it is of use
        for name in (journals.FILE_NAME, tokenizers.FILE_NAME, tokenizers.CONFIG_NAME):
            (folder / name).unlink(missing_ok=True)
    tokenizer = _tokenizer(request, folder)
    wanted_whole = {**wanted, "tokenizer_fingerprint": tokenizer.fingerprint}
    if finished:
        fingerprint = finished.tokenizer_fingerprint
        check_identity(wanted_whole, {**finished.request, "tokenizer_fingerprint": fingerprint}, file)
    journal = Journal(folder, wanted_whole)
    listed = [*finished.shards] if finished else journal.read()
    kept = {shard.name: shard for shard in listed if _whole(shard, folder, smallest_dtype(tokenizer.vocab))}
    if finished and len(kept) == len(listed):
        return finished
    tokenizer.save(folder)
    shards, byte_counts = _fill(request, folder, tokenizer, journal, kept, workers)
    manifest = _describe(wanted, tokenizer, folder, shards, byte_counts)
    manifest.write(folder)
    journal.delete()
    return manifest


def _whole(shard: Shard, folder: Path, dtype: np.dtype) -> bool:
    try:
        shard.check(folder, dtype, contents=True)
    except DataError as error:
        logger.warning("%s; it is made again", str(error).partition(";")[0])
        return False
    return True


def _tokenizer(request: Request, folder: Path) -> Tokenizer:
    if request.tokenizer == Bytes.name:
        return Bytes()
    if request.tokenizer != "bpe":
        return tokenizers.load(request.tokenizer)
    if (folder / tokenizers.FILE_NAME).exists():
        return tokenizers.load(folder)
    with waiting(f"training a bpe of {request.bpe_vocab:,} entries"):
        return train_bpe(_sample(request.source), vocab=request.bpe_vocab)


def _sample(source: Source) -> Iterator[str]:
    # Every n-th document, as the order of a corpus may follow its subjects.
    every = -(-source.text_bytes // BPE_SAMPLE_BYTES) if source.text_bytes else 1
    return islice(source.documents(), 0, None, every)


def _fill(
    request: Request,
    folder: Path,
    tokenizer: Tokenizer,
    journal: Journal,
    kept: dict[str, Shard],
    workers: int,
) -> tuple[list[Shard], np.ndarray]:
    text_bytes = request.source.text_bytes
    # A corpus of one shard is tokenised before the processes have started.
    workers = 1 if text_bytes and text_bytes <= request.shard_bytes else workers
    shards = dict(kept)
    byte_counts = np.zeros(256, np.int64)
    with waiting("tokenising", unit=in_bytes) as show:

        def missing() -> Iterator[tuple[str, list[str]]]:
            for name, texts in _groups(request.source.documents(), request.shard_bytes):
                byte_counts[:] += _count_bytes(texts)
                if name not in kept:
                    yield name, texts

        show(sum(shard.text_bytes for shard in shards.values()), text_bytes)
        for shard in write_shards(folder, missing(), tokenizer, workers=workers):
            journal.add(shard)
            shards[shard.name] = shard
            show(sum(shard.text_bytes for shard in shards.values()), text_bytes)
    return [shards[name] for name in sorted(shards, key=int)], byte_counts


def _groups(documents: Iterator[str], shard_bytes: int) -> Iterator[tuple[str, list[str]]]:
    """Names and texts of shards, each of at least `shard_bytes` but the last."""
    number, texts, size = 0, [], 0
    for text in documents:
        texts.append(text)
        size += len(text) if text.isascii() else len(text.encode("utf-8"))
        if size >= shard_bytes:
            yield f"{number:05}", texts
            number, texts, size = number + 1, [], 0
    if texts:
        yield f"{number:05}", texts


def _count_bytes(texts: list[str]) -> np.ndarray:
    return _histogram(np.frombuffer("".join(texts).encode("utf-8"), np.uint8), 256)


def _histogram(values: np.ndarray, size: int) -> np.ndarray:
    # In slices: bincount makes a copy of eight bytes per value.
    slices = (values[start : start + (1 << 20)] for start in range(0, len(values), 1 << 20))
    return sum((np.bincount(part, minlength=size) for part in slices), np.zeros(size, np.int64))


def _describe(
    request: dict, tokenizer: Tokenizer, folder: Path, shards: list[Shard], byte_counts: np.ndarray
) -> Manifest:
    totals = {
        name: sum(getattr(shard, name) for shard in shards)
        for name in ("documents", "empty_documents", "tokens", "text_bytes")
    }
    if not totals["documents"]:
        raise DataError(f"the corpus is empty: {totals['empty_documents']} documents, none with text; give it some")
    return Manifest(
        format=manifests.FORMAT,
        request=request,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab=tokenizer.vocab,
        **totals,
        token_entropy_nats=_entropy(_count_tokens(folder, shards, tokenizer.vocab)),
        byte_entropy_nats=_entropy(byte_counts),
        shards=tuple(shards),
    )


def _count_tokens(folder: Path, shards: list[Shard], vocab: int) -> np.ndarray:
    counts = np.zeros(vocab, np.int64)
    for shard in shards:
        counts += _histogram(np.fromfile(ids_file(folder, shard.name), smallest_dtype(vocab)), vocab)
    return counts


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
