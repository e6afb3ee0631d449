"""Batches of several sources: which rows of a step are of which source follows from the settings and the step alone."""

import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallax.config.mixture import DATASET, STOP, Phase, SourceConfig, parts_of
from parallax.config.paths import paths_text
from parallax.config.sections import AUTO, CHAT, FILES, DataConfig, fields_of_records
from parallax.data.prepare import LOCK_FILE, bpe_of
from parallax.data.reader import Reader, check_room, configured_source, open_reader
from parallax.data.shards import MANIFEST_FILE, Manifest
from parallax.data.shares import RowShares, share_rows
from parallax.data.sources import find_files, kind_of_all
from parallax.data.tokenizer import TOKENIZER_FILE, Bpe, Bytes, Tokenizer, load_tokenizer
from parallax.errors import ConfigError, DataError, errors_as
from parallax.model.batch import GROUPS
from parallax.storage import files
from parallax.storage.remote import source_path
from parallax.user_code import UserCode, names_code, refuse_saved

PREPARED = "prepared"
FOREVER = 1 << 62  # rows of the last phase, whose end is not known
OwnPart = Callable[[tuple[int, int]], tuple[np.ndarray, range]]  # of a shape: a process's rows and columns


class SharedRows(NamedTuple):
    """Rows from `row` on, counted from the run's first, that are shared by the same sources. `taken` are the rows of
    each of the mixture's sources before it, of windows as long as here."""

    row: int
    shares: RowShares
    chosen: np.ndarray  # the mixture's sources among which rows are shared, by number
    taken: np.ndarray

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of rows of the run, and the number of each row within its source."""
        sources, numbers = self.shares.of(rows - self.row)
        return self.chosen[sources], self.taken[self.chosen[sources]] + numbers


@dataclass
class Supply:
    """How much of a source was read: rows of windows of this length, and how much of its budget is left."""

    source: SourceConfig
    windows: Mapping[int, int]  # in an epoch, by their length
    seq: int
    taken: int = 0
    left: Fraction | None = field(init=False)  # tokens or epochs
    is_dropped: bool = False

    def __post_init__(self):
        self.left = self.source.budget

    def in_windows_of(self, seq: int) -> None:
        """Read windows of another length: a source that has begun goes on with its next epoch, since windows of another
        length are others."""
        if seq != self.seq:
            epochs = -(-self.taken // self.windows[self.seq]) if self.taken else 0
            self.taken, self.seq = epochs * self.windows[seq], seq

    @property
    def cost(self) -> Fraction:
        """What a row takes from the budget."""
        return Fraction(self.seq) if self.source.tokens else Fraction(1, self.windows[self.seq])

    @property
    def rows_left(self) -> int:
        """Rows until its end."""
        return FOREVER if self.left is None else int(self.left / self.cost)

    def take(self, rows: int) -> None:
        """Count rows as read."""
        self.taken += rows
        if self.left is not None:
            self.left -= rows * self.cost


def segments_of(
    phases: Sequence[Phase], sources: Sequence[SourceConfig], windows: Sequence[Mapping[int, int]]
) -> tuple[list[SharedRows], int, str]:
    """The segments of a run, the number of rows that it can have, and the name of the source that ends it, if one does.

    Args:
        windows: of each source, in an epoch, by their length.
    """
    supplies = [Supply(source, of_source, phases[0].seq) for source, of_source in zip(sources, windows)]
    segments, row = [], 0
    for phase, rows in zip(phases, rows_of(phases)):
        for supply in supplies:
            if phase.weights[supply.source.name]:
                supply.in_windows_of(phase.seq)
        end = row + rows
        while row < end:
            chosen = [n for n, each in enumerate(supplies) if phase.weights[each.source.name] and not each.is_dropped]
            if not chosen:
                return segments, row, "the last source"
            shares = share_rows(parts_of([phase.weights[sources[number].name] for number in chosen]))
            taken = np.array([supply.taken for supply in supplies], np.int64)
            segments.append(SharedRows(row, shares, np.array(chosen), taken))
            ends = [_row_of(shares, place, supplies[number].rows_left) for place, number in enumerate(chosen)]
            last = min(end - row, *ends)
            for number, count in zip(chosen, shares.counts(last).tolist() if last < FOREVER // 2 else ()):
                supplies[number].take(count)
            row += last
            if row < end:
                ended = supplies[chosen[ends.index(last)]]
                if ended.source.end == STOP:
                    return segments, row, ended.source.name
                ended.is_dropped = True
    return segments, FOREVER, ""


def rows_of(phases: Sequence[Phase]) -> list[int]:
    """Rows of each phase."""
    lasts = [phase.first_step for phase in phases[1:]]
    return [(last - phase.first_step) * phase.global_batch for phase, last in zip(phases, lasts)] + [FOREVER]


def _row_of(shares: RowShares, source: int, number: int) -> int:
    return FOREVER if number >= FOREVER else shares.row_of(source, number)


class MixedReader:
    """Batches of a mixture, as a `Reader` has those of one source: the batch of step n depends on data, seed and n.

    Rows of a run are shared among sources by `share_rows`, anew from the first row of each phase and from the row in
    which a source has ended. Each source goes on in its own order of windows, as it would alone.

    Args:
        readers: of each source's train split, in the order of the mixture.
        part: this process's rows and columns of a batch of a shape; all by default.
    Raises:
        ConfigError: a source has not one window in some phase.
    """

    split = "train"

    def __init__(self, config: DataConfig, readers: Mapping[str, Reader], part: OwnPart | None = None):
        self.config, self.phases = config, config.run_phases
        self._readers = [readers[source.name] for source in config.parts]
        lengths = {phase.seq for phase in self.phases}
        windows = [{seq: reader.in_windows_of(seq).windows for seq in lengths} for reader in self._readers]
        self._check_windows(windows)
        self._segments, self.rows_left, self.ended_by = segments_of(self.phases, config.parts, windows)
        self._starts = np.array([segment.row for segment in self._segments])
        self._first_rows = np.cumsum([0, *rows_of(self.phases)[:-1]]).tolist()
        self._readers_by_shape = self._readers_of(part or _whole)

    def _readers_of(self, part: OwnPart) -> dict[tuple[int, int], tuple[np.ndarray, list[Reader]]]:
        """By the shape of a batch, this process's rows, and readers of its columns."""
        parts = {shape: part(shape) for shape in self.config.shapes}
        return {
            shape: (rows, [reader.in_windows_of(shape[1], columns) for reader in self._readers])
            for shape, (rows, columns) in parts.items()
        }

    def _check_windows(self, windows: Sequence[Mapping[int, int]]) -> None:
        for phase in self.phases:
            for source, count in zip(self.config.parts, windows):
                if phase.weights[source.name] and not count[phase.seq]:
                    reader = self.by_name[source.name]
                    raise ConfigError(
                        f"data.mixture.{source.name} has {reader.tokens} tokens to train on, not one window of "
                        f"seq={phase.seq}; give it more text, leave it out, or use shorter windows"
                    )

    def with_part(self, part: OwnPart) -> "MixedReader":
        """The same of another process."""
        other = copy.copy(self)
        other._readers_by_shape = self._readers_of(part)
        return other

    @property
    def by_name(self) -> dict[str, Reader]:
        """The readers of the sources."""
        return {source.name: reader for source, reader in zip(self.config.parts, self._readers)}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all sources, with the chat template of the first that has conversations."""
        of_chats = (reader for reader in self._readers if reader.manifest.record_format == CHAT)
        return next(of_chats, self._readers[0]).tokenizer

    @property
    def about(self) -> dict[str, Any]:
        """The manifests of the sources, as JSON."""
        return {"sources": {name: reader.about for name, reader in self.by_name.items()}}

    @property
    def last_step(self) -> int | None:
        """The number of steps that the sources last for; None without an end."""
        if not self.ended_by:
            return None
        number = int(np.searchsorted(self._first_rows, self.rows_left, side="right")) - 1
        phase = self.phases[number]
        return phase.first_step + (self.rows_left - self._first_rows[number]) // phase.global_batch

    def phase(self, step: int) -> Phase:
        """The phase of a step, which counts from 0."""
        return self.config.phase(step)

    def _number_of_phase(self, step: int) -> int:
        return max(number for number, phase in enumerate(self.phases) if phase.first_step <= step)

    def rows(self, step: int) -> np.ndarray:
        """The rows of a step's batch, counted from the run's first."""
        number = self._number_of_phase(step)
        phase = self.phases[number]
        first = self._first_rows[number] + (step - phase.first_step) * phase.global_batch
        return np.arange(first, first + phase.global_batch)

    def dealt(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row of the run, and the number of the row within its source."""
        if rows.size and rows.max() >= self.rows_left:
            raise DataError(
                f"row {rows.max()} is beyond the mixture's end: {self.ended_by} ends at row {self.rows_left}"
            )
        segments = np.searchsorted(self._starts, rows, side="right") - 1
        sources, numbers = np.empty_like(rows), np.empty_like(rows)
        for number in np.unique(segments):
            here = segments == number
            sources[here], numbers[here] = self._segments[number].of(rows[here])
        return sources, numbers

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """This process's rows and columns of the global batch of `step`; see `batch_arrays` for the arrays. If there
        are several sources, `groups` has the number of each row's."""
        chosen, readers = self._readers_by_shape[self.phase(step).shape]
        sources, numbers = self.dealt(self.rows(step)[chosen])
        arrays: dict[str, np.ndarray] = {}
        for source in np.unique(sources):
            here = sources == source
            for name, array in readers[source].batch_of_rows(numbers[here]).items():
                arrays.setdefault(name, np.empty((len(chosen), array.shape[1]), array.dtype))[here] = array
        if len(self._readers) > 1:
            arrays[GROUPS] = np.broadcast_to(sources[:, None].astype(np.int32), arrays["tokens"].shape)
        return arrays

    def windows_by_source(self, step: int) -> dict[str, tuple[Reader, np.ndarray]]:
        """The windows in the global batch of `step` by source, of all processes, and the reader that has them."""
        sources, numbers = self.dealt(self.rows(step))
        readers = {number: self._readers[number].in_windows_of(self.phase(step).seq) for number in np.unique(sources)}
        named = {self.config.parts[number].name: (number, reader) for number, reader in readers.items()}
        return {name: (each, each.windows_of_rows(numbers[sources == n])) for name, (n, each) in named.items()}

    @property
    def fingerprints(self) -> dict[str, str]:
        """For each phase, by name of its key in a checkpoint, a hash of everything that determines its batches.

        A phase that is added later does not change those before it. A phase of one source without an end, which no
        other has begun, has the hash of that source's own reader.
        """
        hashes, described = {}, []
        for phase in self.phases:
            described.append(self._described(phase))
            name = f"from_step_{phase.first_step + 1}" if phase.first_step else "fingerprint"
            first = described[0]
            is_alone = len(described) == len(first) == 1 and first[0]["budget"] is None
            whole = hashlib.sha256(json.dumps(described).encode()).hexdigest()
            hashes[name] = first[0]["reads"] if is_alone else whole
        return hashes

    @property
    def fingerprint(self) -> str:
        """The hash of the last phase, which covers those before it."""
        return [*self.fingerprints.values()][-1]

    def _described(self, phase: Phase) -> list[dict[str, Any]]:
        chosen = [
            (source, reader) for source, reader in zip(self.config.parts, self._readers) if phase.weights[source.name]
        ]
        parts = parts_of([phase.weights[source.name] for source, _ in chosen])
        return [
            {
                "name": source.name,
                "reads": reader.in_windows_of(phase.seq).fingerprint_with(phase.global_batch),
                "parts": part,
                "budget": None if source.budget is None else [str(source.budget), bool(source.tokens), source.end],
                "first": phase.first_step,
            }
            for part, (source, reader) in zip(parts, chosen)
        ]


def _whole(shape: tuple[int, int]) -> tuple[np.ndarray, range]:
    return np.arange(shape[0]), range(shape[1])


def open_mixture(config: DataConfig, *, part: OwnPart | None = None, **options: Any) -> MixedReader:
    """The train split of a mixture, whose sources are prepared first if necessary; `options` as for `open_reader`.

    Raises:
        ConfigError: the settings do not fit the data.
        DataError: a source is missing or damaged, or has another tokenizer; names it.
    """
    readers = open_sources(config, split="train", **options)
    return MixedReader(config, readers, part)


def open_sources(config: DataConfig, *, split: str, **options: Any) -> dict[str, Reader]:
    """A split of each source of a mixture, by name."""
    of_sources = {source.name: _settings_of(config, source, split) for source in config.parts}
    named = options.get("tokenizer") or config.tokenizer
    if named == Bpe.name:
        options["tokenizer"] = _bpe_of_all(config, of_sources, options["folder"], options.get("finished", ""))
    if named == AUTO and (prepared := [alone.path for alone in of_sources.values() if alone.source == PREPARED]):
        made_with = tokenizer_of_prepared(prepared[0])
        for name, alone in of_sources.items():
            of_sources[name] = alone if alone.source == PREPARED else dataclasses.replace(alone, tokenizer=made_with)
    readers = {
        source.name: _open_source(of_sources[source.name], source, split=split, **options) for source in config.parts
    }
    first, *others = readers.items()
    for name, reader in others:
        if reader.tokenizer.fingerprint != first[1].tokenizer.fingerprint:
            raise DataError(
                f"data.mixture.{name} has the tokenizer {reader.tokenizer.name!r}, and data.mixture.{first[0]} has "
                f"{first[1].tokenizer.name!r}, with other ids; prepare all with one, or name it in data.tokenizer"
            )
    check_chat_settings(config, readers)
    check_room(config, sum(reader.copied_bytes for reader in readers.values()))
    return readers


def check_chat_settings(config: DataConfig, readers: Mapping[str, Reader]) -> None:
    """Raise ConfigError if there are settings of records with answers, and no source has such records."""
    if any(reader.manifest.is_marked for reader in readers.values()):
        return
    for name in ("chat_template", "loss_on", "too_long"):
        if getattr(config, name) != getattr(DataConfig, name):
            raise ConfigError(
                f"data.{name}={getattr(config, name)!r} is not read: the data has neither chats nor completions; leave "
                "it out, or read records with format='chat' or 'completion'"
            )


def _bpe_of_all(config: DataConfig, of_sources: Mapping[str, DataConfig], folder: Path, finished: str) -> str:
    """The tokenizer.json of a BPE for all sources, which is trained first if necessary."""
    if prepared := [name for name, alone in of_sources.items() if alone.source == PREPARED]:
        raise ConfigError(
            f"data.tokenizer='bpe' is trained on the text of all sources, and data.mixture.{prepared[0]} is prepared; "
            "write data.tokenizer='auto', with which its tokenizer reads all"
        )
    sources = []
    for source in config.parts:
        with _naming(source):
            sources.append(configured_source(of_sources[source.name], Bpe.name))
    described = json.dumps([config.bpe_vocab, *(source.description for source in sources)], sort_keys=True)
    name = f"mixture-bpe-{hashlib.sha256(described.encode()).hexdigest()[:12]}"
    cache = Path(config.cache).expanduser() if config.cache else folder
    places = [cache, *([Path(finished).expanduser()] if finished else [])]
    for place in places:
        if (place / name / TOKENIZER_FILE).exists():
            return str(place / name / TOKENIZER_FILE)
    files.make_folder(cache / name)
    with files.turns(cache / name / LOCK_FILE):
        if not (cache / name / TOKENIZER_FILE).exists():
            bpe_of(sources, config.bpe_vocab).save(cache / name)
    return str(cache / name / TOKENIZER_FILE)


def tokenizer_of_prepared(folder: str) -> str:
    """The name or the file of the tokenizer that has made a folder of shards."""
    file = source_path(folder) / TOKENIZER_FILE
    return Bytes.name if load_tokenizer(file).name == Bytes.name else str(file)


def _settings_of(config: DataConfig, source: SourceConfig, split: str) -> DataConfig:
    """The settings of a source alone; an error if it is missing, before any other source is prepared."""
    if names_code(source.source) and not isinstance(source.source, UserCode):
        refuse_saved({"data.mixture": UserCode(config.mixture)})
    kind, field = _kind(config, source), source.field or config.field
    source.check_fields(kind)
    with _naming(source):
        changes = {"source": kind, "path": paths_text(source.path), "field": field}
        if kind == PREPARED:
            if len(source.path) > 1:
                raise ConfigError("prepared data is one folder; give each an entry of its own")
            Manifest.read(source_path(source.path[0]))
            changes["cache"] = ""
        elif kind in FILES and kind != DATASET:
            for path in source.path:
                find_files(path, kind, fields_of_records(source.format or config.format, field)[0])
        if split == "train":
            seqs = [phase.seq for phase in config.run_phases if phase.weights[source.name]]
            changes |= {"global_batch": 1, "seq": min(seqs)}
        changes |= config.changes_of_format(kind, source.format or config.format)
        return dataclasses.replace(config, mixture="", phases="", where=source.where, **changes)


def _kind(config: DataConfig, source: SourceConfig) -> str:
    """What a source reads, as it is written or as the names of its files say."""
    with _naming(source):
        field = fields_of_records(source.format or config.format, source.field or config.field)[0]
        return source.source or kind_of_all(source.path, field)


def _open_source(alone: DataConfig, source: SourceConfig, **options: Any) -> Reader:
    with _naming(source):
        return open_reader(alone, **options)


@contextlib.contextmanager
def _naming(source: SourceConfig) -> Iterator[None]:
    """Say in errors which source they are of."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"data.mixture.{source.name}: {error}") from error


def prepared_paths(config: DataConfig) -> list[str]:
    """The folders of prepared data among a mixture's sources."""
    paths = [path for source in config.parts for path in source.path]
    return [path for path in paths if _is_prepared(path)]


def _is_prepared(path: str) -> bool:
    manifest = source_path(path, "data.mixture", pattern=True) / MANIFEST_FILE
    with errors_as(DataError, f"{manifest} cannot be read: ", ""):
        return manifest.is_file()
