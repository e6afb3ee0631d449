"""The ids of one split's documents, end to end, read from the shards in any place."""

import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from parallax.data.manifest import Manifest
from parallax.data.shard import ids_file
from parallax.errors import DataError

OPEN_FILES = 128  # at once, well below the usual limit of 1024 for a process


class Stream:
    """`stream.read(start, count)` is ids start ... start+count-1 of the split.

    Read with `pread` rather than mapped: a file that is cut short meanwhile is then an error that names it,
    where a mapped one would kill the process with SIGBUS.

    Args:
        documents: a mask over all documents of the manifest, those of the split.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, tokens_of_documents: np.ndarray, documents: np.ndarray
    ):
        self._folder = folder
        self._names = [shard.name for shard in manifest.shards]
        self._dtype = manifest.dtype
        self._vocab = manifest.vocab
        self._shards, self._offsets, lengths = _runs(manifest, tokens_of_documents, documents)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        # What falls out of the cache is closed with its last reference.
        self._open = lru_cache(OPEN_FILES)(lambda name: open(ids_file(folder, name), "rb", buffering=0))  # noqa: SIM115

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [len(starts), count], as stored; zeros where a row goes beyond the end.

        Raises:
            DataError: a shard is cut short, or holds an id that the tokenizer does not have.
        """
        rows = np.zeros((len(starts), count), self._dtype)
        runs = np.searchsorted(self._starts, starts, side="right") - 1
        for row, start, run in zip(rows, starts.tolist(), runs.tolist(), strict=True):
            self._read_row(row, start, run)
        if rows.size and rows.max() >= self._vocab:
            self._refuse(rows, starts)
        return rows

    def _read_row(self, row: np.ndarray, start: int, run: int) -> None:
        filled, stop = 0, min(len(row), len(self) - start)
        while filled < stop:
            inside = start + filled - int(self._starts[run])
            piece = min(stop - filled, int(self._starts[run + 1]) - int(self._starts[run]) - inside)
            row[filled : filled + piece] = self._read_run(run, inside, piece)
            filled, run = filled + piece, run + 1

    def _read_run(self, run: int, inside: int, count: int) -> np.ndarray:
        name = self._names[self._shards[run]]
        size = self._dtype.itemsize
        at = (int(self._offsets[run]) + inside) * size
        content = os.pread(self._open(name).fileno(), count * size, at)
        if len(content) < count * size:
            file = ids_file(self._folder, name)
            raise DataError(
                f"shard {file} was cut short while it was read: it ends before byte {at + count * size}"
            )
        return np.frombuffer(content, self._dtype)

    def _refuse(self, rows: np.ndarray, starts: np.ndarray) -> None:
        row, column = np.argwhere(rows >= self._vocab)[0].tolist()
        position = int(starts[row]) + column
        run = int(np.searchsorted(self._starts, position, side="right")) - 1
        file = ids_file(self._folder, self._names[self._shards[run]])
        inside = int(self._offsets[run]) + position - int(self._starts[run])
        raise DataError(
            f"shard {file} holds id {rows[row, column]} at position {inside}, but the vocab has "
            f"{self._vocab} ids (0 to {self._vocab - 1}); prepare the data again"
        )


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
    lengths = np.bincount(run_of[documents], tokens_of_documents[documents], minlength=len(first)).astype(
        np.int64
    )
    return shard_of[first], offsets[first], lengths
