"""Batches of a run: the batch of step n depends only on data, seed and n."""

import contextlib
import copy
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property, lru_cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from parallax.config.sections import AUTO, CHAT, DROP_LONG, EVERY_TOKEN, SPLIT, DataConfig
from parallax.data.conversations import LEARNED, TURN, format_of, plain_ids, special_tokens_of
from parallax.data.packing import Packing, pack, parts_of_document
from parallax.data.prepare import Request, prepare
from parallax.data.shards import (
    DOCUMENT,
    MANIFEST_FILE,
    Manifest,
    check_file,
    documents_file,
    ids_file,
    reading_shard,
    text_hash,
)
from parallax.data.shuffle import shuffled
from parallax.data.sources import Source, open_source
from parallax.data.tokenizer import TOKENIZER_FILE, Bpe, Bytes, Tokenizer, load_tokenizer
from parallax.data.windows import batch_arrays
from parallax.errors import ConfigError, DataError, check_choice
from parallax.hardware.devices import usable_cpus
from parallax.model.batch import IGNORED
from parallax.storage.copies import limit_copies
from parallax.storage.files import is_local, local_copy, open_copy, state_of
from parallax.storage.remote import AnyPath, source_path

CHECKSUM_BYTES = 1 << 30  # data up to this size is checked as a whole when opened, which takes about a second
CHECKED_IDS = 1 << 20  # at once
OPEN_FILES = 128  # open at once, well below the usual limit of 1024 per process
FETCHED_AT_ONCE = 8  # files
STEPS_AHEAD = 200  # whose windows say in which order shards are fetched
SPLITS = ("train", "eval", "all")


def open_reader(
    config: DataConfig,
    *,
    folder: Path,
    vocab: int | None,
    split: str,
    rows: Sequence[int] | None = None,
    columns: range | None = None,
    tokenizer: str = "",
    fingerprint: str = "",
    finished: str = "",
) -> "Reader":
    """A reader of the configured source, which is prepared first if necessary.

    Args:
        folder: for prepared shards, unless `config.cache` names one; each corpus has its own folder in it.
        vocab: of the model; None if it will be taken from the reader's tokenizer.
        split: "train", "eval" or "all".
        rows, columns: see `Reader`.
        tokenizer: what `config.tokenizer` "auto" stands for, if a run has decided it.
        fingerprint: of the tokenizer with which a run began, since an earlier version may have understood its files
            differently; "" for a new run.
        finished: another cache, whose complete data is read where `folder` has none; nothing is written there.
    Raises:
        ConfigError: the settings do not fit the data.
        DataError: the data is missing, damaged or too small.
    """
    check_choice("split", split, SPLITS)
    named = tokenizer or config.tokenizer
    special_tokens = config.special_tokens
    limit_copies(config.cache_bytes)
    if config.source == "prepared":
        prepared, left_out = source_path(config.path, "data.path"), ""
    else:
        named = Bytes.name if named == AUTO else named
        special_tokens = special_tokens_of(config.format, config.special_tokens, named)
        options = {"bpe_vocab": config.bpe_vocab, "special_tokens": special_tokens}
        source = configured_source(config, named)
        left_out, request = source.left_out, Request(source=source, tokenizer=named, fingerprint=fingerprint, **options)
        key = hashlib.sha256(json.dumps(request.to_json(), sort_keys=True).encode()).hexdigest()[:12]
        name = re.sub(r"\W", "_", Path(named).stem)
        cache = Path(config.cache).expanduser() if config.cache else folder
        kind = re.sub(r"\W+", "_", config.source)
        prepared = cache / (corpus := f"{kind}-{name}-{key}")
        there = Path(finished).expanduser() / corpus
        if finished and not (prepared / MANIFEST_FILE).exists() and _is_complete(there, request):
            prepared = there
        else:
            prepare(request, prepared, workers=usable_cpus())
    opened = _open_tokenizer(named, special_tokens, prepared)
    if vocab is not None and vocab < opened.needed:
        raise ConfigError(
            f"model.vocab={vocab} is less than the {opened.needed} ids of tokenizer "
            f"{opened.name if named == AUTO else named!r}; "
            "use as many or more, or 0 to take them from the tokenizer"
        )
    options = {"rows": rows, "columns": columns, "vocab": vocab, "left_out": left_out}
    kind = PackedReader if Manifest.read(prepared).is_marked else Reader
    return kind(config, prepared, tokenizer=opened, split=split, **options)


def configured_source(config: DataConfig, tokenizer: str) -> Source:
    """The documents of the configured source, which is not a prepared one; `tokenizer` may have a chat template."""
    form = format_of(config.format, field=config.field, template=config.chat_template, tokenizer=tokenizer)
    about = {"path": config.paths, "field": config.field, "where": config.where, "form": form}
    return open_source(config.source, synthetic_tokens=config.synthetic_tokens, **about)


def _is_complete(folder: Path, request: Request) -> bool:
    """Whether a folder has all data of a request; what is in its shards is checked when they are opened."""
    try:
        manifest = Manifest.read(folder)
        for shard in manifest.shards:
            shard.check(folder, manifest.dtype, contents=False)
    except DataError:
        return False
    return manifest.request == request.to_json()


def _open_tokenizer(named: str, special_tokens: str, folder: Path) -> Tokenizer:
    """The tokenizer of prepared data, which must be the one that is `named`."""
    manifest = Manifest.read(folder)
    tokenizer = load_tokenizer(folder, manifest.tokenizer_fingerprint)
    if tokenizer.fingerprint != manifest.tokenizer_fingerprint or tokenizer.vocab != manifest.vocab:
        raise DataError(f"{folder / TOKENIZER_FILE} is not the tokenizer that made the shards beside it")
    made = manifest.special_tokens
    if special_tokens != made and manifest.record_format != CHAT:
        raise DataError(f"data.special_tokens={special_tokens!r}, but {folder} was prepared with {made!r}; use that")
    agrees = named in (AUTO, tokenizer.name)
    if named not in (AUTO, Bytes.name, Bpe.name):
        agrees = load_tokenizer(named, tokenizer.fingerprint).fingerprint == tokenizer.fingerprint
    if not agrees:
        raise DataError(
            f"data.tokenizer={named!r} is not that of {folder}: that is {tokenizer.name!r} "
            f"with {tokenizer.vocab} ids and fingerprint {tokenizer.fingerprint[:12]}..."
        )
    return tokenizer


class Reader:
    """Windows of one split, in a shuffled order.

    Train: every epoch is a permutation of all whole windows, and batch n takes windows n*B ... n*B+B-1 of
    the epochs one after another; the tail of the stream that fills no window is never read.
    Eval, and all: `batches` batches hold every window once, in one shuffled order; the last window and the last
    batch are padded, so that each token of the split counts once. Beyond `batches` they repeat.

    Args:
        rows: rows of the global batch that this host reads, in any order; their content does not depend on this choice.
        columns: range of columns that this host reads; their content does not depend on this choice.
        vocab: of the model, if ids may lie beyond; None if they may not.
        left_out: files of the source that are not read, in a sentence.
    Raises:
        DataError: a shard is missing or damaged, or the split has fewer windows than a global batch.
    """

    def __init__(
        self,
        config: DataConfig,
        folder: Path,
        *,
        tokenizer: Tokenizer,
        split: str,
        rows: Sequence[int] | None = None,
        columns: range | None = None,
        vocab: int | None = None,
        left_out: str = "",
    ):
        self.manifest = manifest = Manifest.read(folder)
        self.left_out = left_out
        self.tokenizer, self.split, self.seq = tokenizer, split, config.seq
        self.rows = np.arange(config.global_batch) if rows is None else np.asarray(rows, np.int64)
        if not len(self.rows) or self.rows.min() < 0 or self.rows.max() >= config.global_batch:
            last = config.global_batch - 1
            raise ConfigError(f"rows {rows} are not rows of data.global_batch={last + 1}; use 0 to {last}")
        self.columns = range(config.seq) if columns is None else columns
        if not self.columns or self.columns.step != 1 or self.columns[0] < 0 or self.columns[-1] >= config.seq:
            raise ConfigError(
                f"columns {columns} are not columns of data.seq={config.seq}; use a range in 0 to {config.seq - 1}"
            )
        self.folder, self._seed = folder, config.seed
        self._global_batch, self._eval_fraction = config.global_batch, config.eval_fraction
        of_ids = sum(shard.tokens for shard in manifest.shards) * manifest.dtype.itemsize
        contents = of_ids <= CHECKSUM_BYTES
        self._fetching: threading.Thread | None = None
        self._is_elsewhere = not is_local(folder)
        self.copied_bytes = 0  # of shards that are elsewhere
        if self._is_elsewhere:
            self.copied_bytes = of_ids + sum(shard.documents for shard in manifest.shards) * DOCUMENT.itemsize
            check_room(config, self.copied_bytes)
            names = [shard.name for shard in manifest.shards]
            tables = [documents_file(folder, name) for name in names]
            fetch([*tables, *(ids_file(folder, name) for name in names if contents)])
        for shard in manifest.shards:
            shard.check(folder, manifest.dtype, contents=contents)
        tokens = manifest.read_documents(folder)["tokens"]
        if tokens.sum() != manifest.tokens:
            raise DataError(f"{folder}: its documents have {tokens.sum()} tokens, its shards {manifest.tokens}")
        self._stream = TokenStream(folder, manifest, tokens, self._chosen(), vocab)
        if contents and vocab is not None and vocab < manifest.vocab:
            self._stream.check_ids()
        self._check_windows()

    def _check_windows(self) -> None:
        if self.split == "train" and self.windows < self._global_batch:
            fewer = f", fewer than data.global_batch={self._global_batch}" if self._global_batch > 1 else ""
            raise DataError(
                f"the train split has {self.tokens} tokens, {self.windows} windows of data.seq={self.seq}{fewer}; "
                "give it more text, or make one smaller"
            )

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Rows and columns of a global batch."""
        return self._global_batch, self.seq

    @property
    def tokens(self) -> int:
        """Tokens of the split, including document ends."""
        return len(self._stream)

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        labelled = self.tokens - 1
        return labelled // self.seq if self.split == "train" else -(-labelled // self.seq)

    @property
    def batches(self) -> int:
        """Number of global batches that contain every window once; in training the last one includes windows of the
        next epoch."""
        return -(-self.windows // self._global_batch)

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex of everything that determines the batches: if equal, batches are equal at every step."""
        return self.fingerprint_with(self._global_batch)

    def fingerprint_with(self, global_batch: int) -> str:
        """The same with batches of another size."""
        shards = [shard.ids_sha256 for shard in self.manifest.shards]
        chosen = [self.split, self.seq, global_batch, self._eval_fraction, self._seed]
        content = [self.manifest.tokenizer_fingerprint, shards, chosen]
        spelled = self.manifest.special_tokens == "tokens"
        if spelled or self.tokenizer.end in self.tokenizer.begin:  # ids do not say where a document ends
            content.append([shard.documents_sha256 for shard in self.manifest.shards])
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def last_step(self) -> int | None:
        """The number of steps that the text lasts for; it is read again and again."""
        return None

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint, by the name of its key in a checkpoint."""
        return {"fingerprint": self.fingerprint}

    @property
    def about(self) -> dict[str, Any]:
        """The manifest, as JSON."""
        return asdict(self.manifest)

    @property
    def documents(self) -> int:
        """Documents of the split."""
        return int(self._chosen().sum())

    def text_bytes(self) -> tuple[int, bool]:
        """Bytes of the split's text, and whether they are exact.

        A document counts as its decoded text if that has the hash of the prepared text. If the tokenizer does not
        reproduce the text, it counts as its share of the corpus.
        """
        if self.split == "all":
            return self.manifest.text_bytes, True
        table = self.manifest.read_documents(self.folder)[self._chosen()]
        special_tokens = self.manifest.special_tokens
        total, guessed, start = 0, 0, 0
        for tokens, known in zip(table["tokens"].tolist(), table["hash"].tolist()):
            (ids,) = self._stream.read(np.array([start]), tokens)
            content = self.tokenizer.decode(ids, special_tokens=special_tokens).encode("utf-8")
            exact = text_hash(content) == known
            total, guessed = total + exact * len(content), guessed + (not exact) * tokens
            start += tokens
        return total + round(guessed * self.manifest.bytes_per_token), not guessed

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """This host's rows and columns of the global batch of `step`; see `batch_arrays` for the arrays.

        Raises:
            DataError: a shard has changed since it was opened.
        """
        self._fetch_from(step)
        return self._arrays(self._windows_in(step, self.rows))

    def batch_of_rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The same columns of any rows of a run of this split alone, counted from its first one."""
        self._fetch_from(int(rows[0]) // self._global_batch)
        return self._arrays(self.windows_of_rows(rows))

    def _fetch_from(self, step: int) -> None:
        """Begin to copy shards that are elsewhere, unless it has begun."""
        if self._is_elsewhere and self._fetching is None:
            files = (self._stream.files[shard] for shard in self._shards_from(step))
            self._fetching = threading.Thread(target=fetch, args=(files,), name="shards", daemon=True)
            self._fetching.start()

    def _arrays(self, windows: np.ndarray) -> dict[str, np.ndarray]:
        windows = np.minimum(windows * self.seq, self.tokens)
        starts = np.minimum(windows + self.columns.start, self.tokens)
        ids = self._stream.read(starts, len(self.columns) + 1)
        # For the model, the first document of a window begins at the window's start.
        segments, positions = self._before(windows, starts) if self.columns.start else (1, 0)
        ends = self._ends_in(starts, len(self.columns))
        return batch_arrays(ids, self.tokens - starts, ends, segments=segments, positions=positions)

    def _shards_from(self, step: int) -> Iterator[int]:
        """All shards, in the order in which batches from a step on need them first."""
        yielded: set[int] = set()
        for ahead in range(step, step + STEPS_AHEAD):
            if len(yielded) == len(self._stream.files):
                return
            for shard in self._stream.shards_of(self._places_of(self._windows_in(ahead, self.rows))):
                if shard not in yielded:
                    yielded.add(shard)
                    yield shard
        yield from (shard for shard in range(len(self._stream.files)) if shard not in yielded)

    def _places_of(self, windows: np.ndarray) -> np.ndarray:
        """Indices in the stream at which these windows are read."""
        return np.minimum(windows * self.seq, self.tokens - 1)

    def _ends_in(self, starts: np.ndarray, columns: int) -> np.ndarray:
        """Whether each of the tokens from `starts` on is its document's last, [rows, columns]. The table of documents
        decides: the id of an end may also begin a document, or stand inside of one."""
        ends = np.zeros((len(starts), columns), bool)
        firsts, lasts = (np.searchsorted(self._ends, places, side="right") for places in (starts, starts + columns))
        for row, start, first, last in zip(ends, starts, firsts, lasts):
            row[self._ends[first:last] - start - 1] = True
        return ends

    def _before(self, windows: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Segment and position of the tokens at `starts`, in windows that begin at `windows`. They follow from the
        table of documents, without reading ids."""
        first, current = (np.searchsorted(self._ends, places, side="right") for places in (windows, starts))
        begin = np.concatenate([[0], self._ends])[current]
        return 1 + current - first, starts - np.maximum(windows, begin)

    @cached_property
    def _ends(self) -> np.ndarray:
        """Index in the stream after each document's last token."""
        return np.cumsum(self.manifest.read_documents(self.folder)["tokens"][self._chosen()].astype(np.int64))

    def in_windows_of(self, seq: int, columns: range | None = None) -> "Reader":
        """The same split in windows of another length; files and tables are shared."""
        assert self._ends is not None  # computed now, so that the copy has it
        other = copy.copy(self)
        other.seq, other.columns = seq, range(seq) if columns is None else columns
        return other

    def windows_of(self, step: int) -> np.ndarray:
        """The windows in the global batch of `step`, of all hosts, in the order of its rows."""
        return self._windows_in(step, np.arange(self._global_batch))

    def windows_by_source(self, step: int) -> dict[str, tuple["Reader", np.ndarray]]:
        """The same as those of a mixture's only source, which has no name."""
        return {"": (self, self.windows_of(step))}

    def documents_of(self, windows: np.ndarray) -> np.ndarray:
        """The documents in any of these windows, counted from 0 in the order of the corpus."""
        chosen = np.flatnonzero(self._chosen())
        first = np.searchsorted(self._ends, windows * self.seq, side="right")
        last = np.searchsorted(self._ends, np.minimum((windows + 1) * self.seq, self.tokens - 1), side="right")
        return np.unique(np.concatenate([chosen[a : b + 1] for a, b in zip(first, last)]))

    def _chosen(self) -> np.ndarray:
        """A mask of the split's documents over the whole corpus."""
        hashes = self.manifest.read_documents(self.folder)["hash"]
        return documents_of_split(hashes, split=self.split, eval_fraction=self._eval_fraction)

    def _windows_in(self, step: int, rows: np.ndarray) -> np.ndarray:
        if self.split == "train":
            return self.windows_of_rows(step * self._global_batch + rows)
        return self._shuffled(np.zeros(len(rows), np.int64), step % self.batches * self._global_batch + rows)

    def windows_of_rows(self, rows: np.ndarray) -> np.ndarray:
        """The windows of rows, counted from the first one of a run of this split alone, over all epochs."""
        return self._shuffled(*np.divmod(rows, self.windows))

    def _shuffled(self, epochs: np.ndarray, positions: np.ndarray) -> np.ndarray:
        windows = np.full(len(epochs), self.windows)  # beyond the last: all padding
        for epoch in np.unique(epochs):
            mine = (epochs == epoch) & (positions < self.windows)
            windows[mine] = shuffled(positions[mine], self.windows, seed=self._seed, epoch=int(epoch))
        return windows


def check_room(config: DataConfig, size: int) -> None:
    """ConfigError if copies of the shards would displace each other: windows are drawn from all of them."""
    if size > config.cache_bytes:
        folder = config.path or "data.mixture"
        raise ConfigError(
            f"data.cache_bytes={config.cache_bytes} is less than the {size:,} bytes of the shards in {folder}, "
            "and windows are drawn from all of them; raise it, or copy them to a disk that all hosts see"
        )


def fetch(files: Iterable[AnyPath]) -> None:
    """Copy files to this machine, several at once and in order; what fails is reported by who reads it."""

    def copy(file: AnyPath) -> None:
        with contextlib.suppress(OSError):
            local_copy(file)

    with ThreadPool(FETCHED_AT_ONCE) as pool:
        for _ in pool.imap_unordered(copy, files):
            pass


def documents_of_split(hashes: np.ndarray, *, split: str, eval_fraction: float) -> np.ndarray:
    """A mask of the documents in `split`.

    The documents with the smallest hashes of their text are held out. They do not depend on the division into shards,
    are almost the same when documents are added, and copies of a document stay together. "all" contains the documents
    of both splits.

    Args:
        hashes: of the text of every document, in order.
        eval_fraction: share of the documents, at least one; 0 holds out none.
    Raises:
        ConfigError: there are too few documents to hold one out, or none is held out and `split` is "eval".
    """
    if eval_fraction == 0 and split == "eval":
        raise ConfigError("data.eval_fraction=0 holds out no document, so there is nothing to evaluate on; raise it")
    if split == "all" or eval_fraction == 0:
        return np.ones(len(hashes), bool)
    if len(hashes) < 2:
        raise ConfigError(
            f"data.eval_fraction={eval_fraction} holds out whole documents, but the corpus has "
            f"{len(hashes)}; give it two or more, or use data.eval_fraction=0"
        )
    held_out = min(max(round(eval_fraction * len(hashes)), 1), len(hashes) - 1)
    mask = np.zeros(len(hashes), bool)
    mask[np.argsort(hashes, kind="stable")[:held_out]] = True
    return mask if split == "eval" else ~mask


class PackedReader(Reader):
    """Windows of whole documents of which parts are learned.

    A window has as many whole documents as fit, and then padding. Of one that is longer than a window, data.too_long
    says what is read. Order, epochs and splits are a `Reader`'s.
    """

    def __init__(self, config: DataConfig, folder: Path, **options: Any):
        self._too_long, self._loss_on = config.too_long, config.loss_on
        self._packings: dict[int, Packing] = {}  # by the length of windows; copies share it
        super().__init__(config, folder, **options)

    def _check_windows(self) -> None:
        if not self.windows:
            raise DataError(
                f"no document of the {self.split} split in {self.folder} has a token to learn in a window of data.seq="
                f"{self.seq}; use longer windows, or data.too_long='split'"
            )
        super()._check_windows()

    @property
    def windows(self) -> int:
        return self._packing.windows

    @property
    def packed(self) -> str:
        """How full the windows are, and what is done with documents that are longer, in a sentence."""
        lengths = np.diff(self._ends, prepend=0)
        long = int((lengths > self.seq + 1).sum())
        fill = self._packing.lengths.sum() / (self.windows * (self.seq + 1))
        return (
            f"{len(lengths):,} documents packed whole, {fill:.1%} of the windows; {long:,} are longer than one, "
            f"data.too_long={self._too_long!r}"
        )

    @property
    def _packing(self) -> Packing:
        if self.seq not in self._packings:
            self._packings[self.seq] = self._packed()
        return self._packings[self.seq]

    def _packed(self) -> Packing:
        lengths = np.diff(self._ends, prepend=0)
        starts, room = self._ends - lengths, self.seq + 1
        fits = lengths <= room
        rows = [np.stack([starts, lengths, np.arange(len(lengths))])[:, fits].T]
        for document in np.flatnonzero(~fits) if self._too_long != DROP_LONG else ():
            rows += self._parts(int(starts[document]), int(lengths[document]), int(document))
        pieces = np.concatenate(rows).astype(np.int64)
        return pack(*pieces[np.argsort(pieces[:, 0])].T, room)

    def _parts(self, start: int, length: int, document: int) -> Iterator[np.ndarray]:
        """The parts of a document that is too long, without those in which nothing is learned."""
        stored = self._stream.read_stored(np.array([start]), length)[0]
        turns = np.flatnonzero(stored & TURN).tolist() if self._too_long == SPLIT else []
        parts = parts_of_document(length, turns, self.seq + 1)
        for first, count in parts if self._too_long == SPLIT else parts[:1]:
            if self._loss_on == EVERY_TOKEN or (stored[first + 1 : first + count] & LEARNED).any():
                yield np.array([[start + first, count, document]])

    def fingerprint_with(self, global_batch: int) -> str:
        documents = [shard.documents_sha256 for shard in self.manifest.shards]
        content = [super().fingerprint_with(global_batch), documents, self._too_long, self._loss_on]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def documents_of(self, windows: np.ndarray) -> np.ndarray:
        chosen = np.flatnonzero(self._chosen())
        pieces = [self._packing.documents[self._packing.pieces_in(window)] for window in windows.tolist()]
        return np.unique(chosen[np.concatenate([np.zeros(0, np.int64), *pieces])])

    def _arrays(self, windows: np.ndarray) -> dict[str, np.ndarray]:
        stored = np.zeros((len(windows), self.seq + 1), np.uint32)
        ends, counts = np.zeros((len(windows), self.seq), bool), np.zeros(len(windows), np.int64)
        for row, window in enumerate(windows.tolist()):
            for piece in self._packing.pieces_in(window):
                start, length = self._packing.starts[piece], self._packing.lengths[piece]
                begin, counts[row] = counts[row], counts[row] + length
                stored[row, begin : counts[row]] = self._stream.read_stored(np.array([start]), int(length))[0]
                ends[row, counts[row] - 1 : counts[row]] = True
        arrays = batch_arrays(plain_ids(stored), counts, ends)
        if self._loss_on != EVERY_TOKEN:
            arrays["labels"][(stored[:, 1:] & LEARNED) == 0] = IGNORED
        return {name: array[:, self.columns.start : self.columns.stop] for name, array in arrays.items()}

    def _places_of(self, windows: np.ndarray) -> np.ndarray:
        packing = self._packing
        pieces = [packing.pieces_in(window) for window in windows.tolist()]
        return packing.starts[np.concatenate([packing.order[:0], *pieces])]


class TokenStream:
    """The ids of one split's documents, end to end: `stream.read(start, count)` is ids start ... start+count-1.

    Files are read with `pread` instead of a memory map: a file that is truncated meanwhile is then an error that names
    it, where a memory map would kill the process with SIGBUS.

    Args:
        tokens: of each document of the manifest.
        documents: a mask of the split's documents over all documents of the manifest.
        vocab: of the model, which may have fewer ids than the tokenizer.
    """

    def __init__(self, folder: Path, manifest: Manifest, tokens: np.ndarray, documents: np.ndarray, vocab: int | None):
        self._dtype, self._known, self._is_marked = manifest.dtype, manifest.vocab, manifest.is_marked
        self._vocab = self._known if vocab is None else min(vocab, self._known)
        self.files = files = [ids_file(folder, shard.name) for shard in manifest.shards]
        states = [_state(file) if is_local(file) else () for file in files]

        def open_shard(number: int) -> BinaryIO:
            """Open the file, which may have been replaced meanwhile, but only with the same ids."""
            file, shard = files[number], manifest.shards[number]
            size = shard.tokens * manifest.dtype.itemsize
            state = _state(file)
            if state != states[number] and not _is_shorter(file, size):  # a shorter file is refused by reads
                check_file(file, size, shard.ids_sha256)
                states[number] = state if not is_local(file) else states[number]
            return open_copy(file, buffering=0)

        self._shards, self._offsets, lengths = _runs(manifest, tokens, documents)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        # A file that leaves the cache is closed with its last reference.
        self._open = lru_cache(OPEN_FILES)(open_shard)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [len(starts), count]; zeros where a row goes beyond the end.

        Raises:
            DataError: a shard was truncated, or holds an id that the tokenizer does not have.
        """
        rows = self.read_stored(starts, count)
        return plain_ids(rows) if self._is_marked else rows

    def read_stored(self, starts: np.ndarray, count: int) -> np.ndarray:
        """The same with marks, where the text has them."""
        rows = np.zeros((len(starts), count), self._dtype)
        for row, start in zip(rows, starts.tolist()):
            position, end = start, min(start + count, len(self))
            while position < end:  # one iteration for each run of documents
                shard, offset, left = self._find(position)
                piece = min(left, end - position)
                self._read_into(row[position - start : position - start + piece], shard, offset)
                position += piece
        ids = plain_ids(rows) if self._is_marked else rows
        if ids.size and ids.max() >= self._vocab:
            row, column = np.argwhere(ids >= self._vocab)[0].tolist()
            shard, offset, _ = self._find(int(starts[row]) + column)
            raise DataError(
                f"shard {self.files[shard]} holds id {ids[row, column]} at position {offset}, but the tokenizer has "
                f"{self._known} ids and the model's table {self._vocab} of them; prepare the data again if it is none "
                "of the tokenizer's, or use texts without this token, or a model with more"
            )
        return rows

    def shards_of(self, places: np.ndarray) -> list[int]:
        """The shards of these indices in the stream."""
        return self._shards[np.searchsorted(self._starts, places, side="right") - 1].tolist()

    def check_ids(self) -> None:
        """Read everything once; DataError as in `read`."""
        for start in range(0, len(self), CHECKED_IDS):
            self.read(np.array([start]), CHECKED_IDS)

    def _find(self, place: int) -> tuple[int, int, int]:
        """For an index in the stream: its shard, the number of ids before it there, and of those after it in its
        run."""
        run = np.searchsorted(self._starts, place, side="right") - 1
        begin, end = self._starts[run : run + 2].tolist()
        return int(self._shards[run]), int(self._offsets[run]) + place - begin, end - place

    def _read_into(self, target: np.ndarray, shard: int, offset: int) -> None:
        file, start = self.files[shard], offset * self._dtype.itemsize
        with reading_shard(file):
            opened = self._open(shard)
            if os.preadv(opened.fileno(), [target], start) < target.nbytes:
                end = start + target.nbytes
                raise DataError(f"shard {file} was truncated while it was read: it ends before byte {end}")


def _state(file: Path) -> tuple[int, ...]:
    with reading_shard(file):
        return state_of(file)


def _is_shorter(file: AnyPath, size: int) -> bool:
    """Whether a shard of this machine is shorter than it should be."""
    return is_local(file) and file.stat().st_size < size


def _runs(manifest: Manifest, tokens_of_documents: np.ndarray, documents: np.ndarray):
    """Shard, first id and length of each run of adjacent documents in a shard."""
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
