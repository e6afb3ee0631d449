"""Batches of a run: the batch of step n is a function of (data, seed, n) and of nothing else."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from parallax.config.sections import AUTO, DataConfig
from parallax.data import tokenizer as tokenizers
from parallax.data.manifest import Manifest, read_manifest
from parallax.data.order import shuffled
from parallax.data.prepare import Request, prepare
from parallax.data.shard import text_hash
from parallax.data.sources import open_source
from parallax.data.split import SPLITS, documents_of_split
from parallax.data.stream import Stream
from parallax.data.tokenizer import Bytes, Tokenizer
from parallax.data.windows import batch_arrays
from parallax.runtime.errors import ConfigError, DataError, check_choice

CHECKSUM_BYTES = 1 << 30  # data up to this size is checked whole when opened: about a second


class Reader:
    """Windows of one split, in a shuffled order.

    Train: every epoch is a permutation of all whole windows, and batch n takes windows n*B ... n*B+B-1 of
    the epochs one after another; the tail of the stream that fills no window is never read.
    Eval, and all: `batches` batches hold every window once, in one shuffled order; the last window and the last
    batch are padded, so that each token of the split counts once. Beyond `batches` they repeat.

    Args:
        rows: those of the global batch that this host reads, in any order; what is in a row does not depend on it.
    Raises:
        DataError: a shard is missing or damaged, or the split has fewer windows than a global batch.
    """

    def __init__(
        self, config: DataConfig, folder: Path, *, tokenizer: Tokenizer, split: str, rows: Sequence[int] | None = None
    ):
        self.manifest = read_manifest(folder)
        self.tokenizer = tokenizer
        self.split = split
        self.seq = config.seq
        self.rows = _check_rows(rows, config.global_batch)
        self._seed = config.seed
        self._global_batch = config.global_batch
        self._eval_fraction = config.eval_fraction
        self._folder = folder
        self._stream = _open_stream(folder, self.manifest, split, config.eval_fraction)
        self._check_windows()

    @property
    def tokens(self) -> int:
        """Tokens of the split, document ends counted."""
        return len(self._stream)

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        labelled = self.tokens - 1
        return labelled // self.seq if self.split == "train" else -(-labelled // self.seq)

    @property
    def batches(self) -> int:
        """Global batches that show every window once; in training the last reaches into the next epoch."""
        return -(-self.windows // self._global_batch)

    @property
    def entropy_nats(self) -> float:
        """Of the corpus's unigrams, per token: the loss where only the tokens' frequencies are known."""
        return self.manifest.token_entropy_nats

    @property
    def byte_entropy_nats(self) -> float:
        """Of the corpus's bytes, per byte."""
        return self.manifest.byte_entropy_nats

    @property
    def bytes_per_token(self) -> float:
        """A loss per token divided by it is a loss per byte."""
        return self.manifest.bytes_per_token

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex of all that decides the batches: equal ones give equal batches at every step."""
        shards = [shard.ids_sha256 for shard in self.manifest.shards]
        chosen = [self.split, self.seq, self._global_batch, self._eval_fraction, self._seed]
        content = [self.manifest.tokenizer_fingerprint, shards, chosen]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def documents(self) -> int:
        """Documents of the split."""
        return int(self._chosen().sum())

    def text_bytes(self) -> tuple[int, bool]:
        """Bytes of the split's text, and whether they are known: a document counts as its decoded text where that has
        the hash of what was prepared, and as its share of the corpus where a tokenizer does not give text back."""
        if self.split == "all":
            return self.manifest.text_bytes, True
        table, chosen = _read_documents(self._folder, self.manifest), self._chosen()
        total, guessed, start = 0, 0, 0
        for tokens, known in zip(table["tokens"][chosen].tolist(), table["hash"][chosen].tolist()):
            (ids,) = self._stream.read(np.array([start]), tokens)
            content = self.tokenizer.decode(ids[:-1]).encode("utf-8")
            exact = text_hash(content) == known
            total, guessed = total + exact * len(content), guessed + (not exact) * tokens
            start += tokens
        return total + round(guessed * self.bytes_per_token), not guessed

    def epoch(self, step: int) -> float:
        """How often the windows were seen before `step`."""
        return step * self._global_batch / self.windows

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """This host's rows of the global batch of `step`; see `batch_arrays` for what is in it.

        Raises:
            DataError: a shard was changed meanwhile.
        """
        windows = self._windows_of(step, self.rows)
        starts = np.minimum(windows * self.seq, self.tokens)
        ids = self._stream.read(starts, self.seq + 1)
        return batch_arrays(ids, self.tokens - starts, end=self.tokenizer.end)

    def windows_of(self, step: int) -> np.ndarray:
        """The windows in the global batch of `step`, of all hosts, in the order of its rows."""
        return self._windows_of(step, np.arange(self._global_batch))

    def documents_of(self, windows: np.ndarray) -> np.ndarray:
        """The documents that lie in any of these windows, counted from 0 in the order of the corpus."""
        table, chosen = _read_documents(self._folder, self.manifest), np.flatnonzero(self._chosen())
        ends = np.cumsum(table["tokens"][chosen].astype(np.int64))
        first = np.searchsorted(ends, windows * self.seq, side="right")
        last = np.searchsorted(ends, np.minimum((windows + 1) * self.seq, self.tokens - 1), side="right")
        inside = [chosen[a : b + 1] for a, b in zip(first, last)]
        return np.unique(np.concatenate(inside))

    def _chosen(self) -> np.ndarray:
        """A mask of the documents in the split, over all of the corpus."""
        table = _read_documents(self._folder, self.manifest)
        return documents_of_split(table["hash"], split=self.split, eval_fraction=self._eval_fraction)

    def _windows_of(self, step: int, rows: np.ndarray) -> np.ndarray:
        if self.split != "train":
            positions = step % self.batches * self._global_batch + rows
            real = positions < self.windows
            windows = np.full(len(positions), self.windows)  # beyond the last: all padding
            windows[real] = shuffled(positions[real], self.windows, seed=self._seed, epoch=0)
            return windows
        positions = step * self._global_batch + rows
        windows = np.empty(len(positions), np.int64)
        for epoch in np.unique(positions // self.windows):
            mine = positions // self.windows == epoch
            windows[mine] = shuffled(positions[mine] % self.windows, self.windows, seed=self._seed, epoch=int(epoch))
        return windows

    def _check_windows(self) -> None:
        if self.split == "train" and self.windows < self._global_batch:
            raise DataError(
                f"the train split has {self.tokens} tokens, {self.windows} windows of data.seq={self.seq}, "
                f"fewer than data.global_batch={self._global_batch}; give it more text, or make one smaller"
            )


def open_reader(
    config: DataConfig, *, folder: Path, vocab: int | None, split: str, rows: Sequence[int] | None = None
) -> Reader:
    """A reader of the configured source, which is prepared first where it is not yet.

    Args:
        folder: for prepared shards, unless `config.cache` names one; each corpus has its own folder in it.
        vocab: of the model; None where it is yet to be taken from the reader's tokenizer.
        split: "train", "eval" or "all".
        rows: see `Reader`.
    Raises:
        ConfigError: the settings do not agree with the data.
        DataError: the data is missing, damaged or too small.
    """
    check_choice("split", split, SPLITS)
    if config.source == "prepared":
        at = Path(config.path).expanduser()
    else:
        config = replace(config, tokenizer=Bytes.name) if config.tokenizer == AUTO else config
        at = _prepare(config, Path(config.cache).expanduser() if config.cache else folder)
    tokenizer = _open_tokenizer(config, at)
    if vocab is not None and vocab < tokenizer.vocab:
        written = tokenizer.name if config.tokenizer == AUTO else config.tokenizer
        raise ConfigError(
            f"model.vocab={vocab} is less than the {tokenizer.vocab} ids of tokenizer {written!r}; "
            "use as many or more, or 0 to take them from the tokenizer"
        )
    return Reader(config, at, tokenizer=tokenizer, split=split, rows=rows)


def _prepare(config: DataConfig, folder: Path) -> Path:
    source = open_source(config.source, path=config.path, field=config.field, synthetic_tokens=config.synthetic_tokens)
    request = Request(source=source, tokenizer=config.tokenizer, bpe_vocab=config.bpe_vocab)
    key = hashlib.sha256(json.dumps(request.to_json(), sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"\W", "_", Path(config.tokenizer).stem)
    at = folder / f"{config.source}-{name}-{key}"
    prepare(request, at, workers=os.cpu_count() or 1)
    return at


def _open_tokenizer(config: DataConfig, folder: Path) -> Tokenizer:
    """The tokenizer of prepared data, which must be the one that the config names."""
    manifest = read_manifest(folder)
    tokenizer = tokenizers.load(folder)
    if tokenizer.fingerprint != manifest.tokenizer_fingerprint or tokenizer.vocab != manifest.vocab:
        raise DataError(f"{folder / tokenizers.FILE_NAME} is not the tokenizer that made the shards beside it")
    if config.tokenizer == AUTO:
        return tokenizer
    if config.tokenizer.endswith(".json"):
        agrees = tokenizers.load(config.tokenizer).fingerprint == tokenizer.fingerprint
    else:
        agrees = config.tokenizer == tokenizer.name
    if not agrees:
        raise DataError(
            f"data.tokenizer={config.tokenizer!r} is not that of {folder}: that is {tokenizer.name!r} "
            f"with {tokenizer.vocab} ids and fingerprint {tokenizer.fingerprint[:12]}..."
        )
    return tokenizer


def _open_stream(folder: Path, manifest: Manifest, split: str, eval_fraction: float) -> Stream:
    contents = sum(shard.tokens for shard in manifest.shards) * manifest.dtype.itemsize <= CHECKSUM_BYTES
    for shard in manifest.shards:
        shard.check(folder, manifest.dtype, contents=contents)
    table = _read_documents(folder, manifest)
    if table["tokens"].sum() != manifest.tokens:
        raise DataError(f"{folder}: its documents have {table['tokens'].sum()} tokens, its shards {manifest.tokens}")
    chosen = documents_of_split(table["hash"], split=split, eval_fraction=eval_fraction)
    return Stream(folder, manifest, table["tokens"], chosen)


def _read_documents(folder: Path, manifest: Manifest) -> np.ndarray:
    return np.concatenate([shard.read_documents(folder) for shard in manifest.shards])


def _check_rows(rows: Sequence[int] | None, global_batch: int) -> np.ndarray:
    chosen = np.arange(global_batch) if rows is None else np.asarray(rows, np.int64)
    if not len(chosen) or chosen.min() < 0 or chosen.max() >= global_batch:
        raise ConfigError(f"rows {rows} are not rows of data.global_batch={global_batch}; use 0 to {global_batch - 1}")
    return chosen
