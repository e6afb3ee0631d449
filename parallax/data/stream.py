"""The ids of one split's documents, end to end, read from the shards in any place."""

import os
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from parallax.data.manifest import Manifest, Shard
from parallax.data.shard import check_file, ids_file, reading
from parallax.runtime.errors import DataError

OPEN_FILES = 128  # at once, well below the usual limit of 1024 for a process


class Stream:
    """`stream.read(start, count)` is ids start ... start+count-1 of the split.

    Read with `pread` rather than mapped: a file that is cut short meanwhile is then an error that names it,
    where a mapped one would kill the process with SIGBUS.

    Args:
        documents: a mask over all documents of the manifest, those of the split.
    """

    def __init__(self, folder: Path, manifest: Manifest, tokens_of_documents: np.ndarray, documents: np.ndarray):
        self._folder = folder
        self._names = [shard.name for shard in manifest.shards]
        checked = {shard.name: (shard, _state(ids_file(folder, shard.name))) for shard in manifest.shards}
        self._dtype = manifest.dtype
        self._vocab = manifest.vocab
        self._shards, self._offsets, lengths = _runs(manifest, tokens_of_documents, documents)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        # What falls out of the cache is closed with its last reference.
        self._open = lru_cache(OPEN_FILES)(partial(_open_anew, folder, manifest.dtype, checked))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [len(starts), count], as stored; zeros where a row goes beyond the end.

        Raises:
            DataError: a shard is cut short, or holds an id that the tokenizer does not have.
        """
        rows = np.zeros((len(starts), count), self._dtype)
        filled = np.zeros(len(starts), np.int64)
        # A row that goes over several stretches of documents takes as many turns.
        while len(unfinished := np.flatnonzero((filled < count) & (starts + filled < len(self)))):
            at = starts[unfinished] + filled[unfinished]
            runs = np.searchsorted(self._starts, at, side="right") - 1
            pieces = np.minimum(count - filled[unfinished], self._starts[runs + 1] - at)
            columns = (unfinished, filled[unfinished], pieces, self._shards[runs], self._offset(at, runs))
            for row, column, piece, shard, offset in zip(*map(np.ndarray.tolist, columns)):
                self._read_into(rows[row, column : column + piece], shard, offset)
            filled[unfinished] += pieces
        if rows.size and rows.max() >= self._vocab:
            self._refuse(rows, starts)
        return rows

    def _offset(self, at: np.ndarray, runs: np.ndarray) -> np.ndarray:
        """Ids before these places in their shards."""
        return self._offsets[runs] + at - self._starts[runs]

    def _read_into(self, target: np.ndarray, shard: int, offset: int) -> None:
        name, at = self._names[shard], offset * self._dtype.itemsize
        file = ids_file(self._folder, name)
        with reading(file):
            opened = self._open(name)
            if os.preadv(opened.fileno(), [target], at) < target.nbytes:
                raise DataError(
                    f"shard {file} was cut short while it was read: it ends before byte {at + target.nbytes}"
                )

    def _refuse(self, rows: np.ndarray, starts: np.ndarray) -> None:
        row, column = np.argwhere(rows >= self._vocab)[0].tolist()
        at = starts[row] + column
        run = np.searchsorted(self._starts, at, side="right") - 1
        file = ids_file(self._folder, self._names[self._shards[run]])
        raise DataError(
            f"shard {file} holds id {rows[row, column]} at position {self._offset(at, run)}, but the vocab has "
            f"{self._vocab} ids (0 to {self._vocab - 1}); prepare the data again"
        )


class State(NamedTuple):
    """What changes when a file is written to, or another takes its name."""

    st_dev: int
    st_ino: int
    st_size: int
    st_mtime_ns: int


def _state(file: Path) -> State:
    with reading(file):
        about = file.stat()
    return State(*(getattr(about, name) for name in State._fields))


def _open_anew(folder: Path, dtype: np.dtype, checked: Mapping[str, tuple[Shard, State]], name: str) -> BinaryIO:
    """A shard, which may have been replaced since the stream was opened, though not by other ids."""
    file = ids_file(folder, name)
    shard, state = checked[name]
    size, now = shard.tokens * dtype.itemsize, _state(file)
    if now != state and now.st_size >= size:  # one that was cut says so where it is read
        check_file(file, size, shard.ids_sha256)
    return open(file, "rb", buffering=0)


def _runs(manifest: Manifest, tokens_of_documents: np.ndarray, documents: np.ndarray):
    """Shard, first id and length of each stretch of documents that lie side by side in a shard."""
    shard_of = np.repeat(np.arange(len(manifest.shards)), [shard.documents for shard in manifest.shards])
    first_of_shard = np.concatenate([[0], np.cumsum([shard.tokens for shard in manifest.shards])])
    ends = np.cumsum(tokens_of_documents, dtype=np.int64)
    offsets = ends - tokens_of_documents.astype(np.int64) - first_of_shard[shard_of]
    begins = documents.copy()
    begins[1:] &= ~(documents[:-1] & (shard_of[1:] == shard_of[:-1]))
    first = np.flatnonzero(begins)
    run_of = np.cumsum(begins) - 1
    lengths = np.bincount(run_of[documents], tokens_of_documents[documents], minlength=len(first)).astype(np.int64)
    return shard_of[first], offsets[first], lengths
