"""Tokenise a source into shards on disk: in parallel, resumable, and independent of the number of workers."""

import contextlib
import json
import logging
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path

import numpy as np

from parallax.config.settings import FINGERPRINT_DIGITS, compare_settings
from parallax.data.chat import ChatTemplate
from parallax.data.conversations import plain_ids
from parallax.data.shards import MANIFEST_FILE, Manifest, Shard, smallest_dtype, totals, write_shard
from parallax.data.sources import Source
from parallax.data.tokenizer import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    Bpe,
    Bytes,
    Tokenizer,
    load_tokenizer,
    train_bpe,
    with_several_templates,
    with_template,
)
from parallax.display.progress import waiting
from parallax.display.units import in_bytes
from parallax.errors import ConfigError, DataError, first_few, shown
from parallax.storage import files

SHARD_BYTES = 32 << 20  # bytes of text: a few seconds of BPE, for fine-grained progress and resuming
BPE_SAMPLE_BYTES = 64 << 20  # bytes of text to train a BPE; more hardly changes its entries
SHA256 = re.compile("[0-9a-f]{64}")
JOURNAL_FILE, LOCK_FILE = "unfinished.jsonl", ".lock"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The source, tokenizer and shard size of a folder; folders of equal requests hold the same bytes."""

    source: Source
    tokenizer: str  # "bytes" | "bpe" | path of a tokenizer.json
    bpe_vocab: int
    shard_bytes: int = SHARD_BYTES
    reserved: tuple[str, ...] = ()  # further special tokens of a bpe that is trained
    special_tokens: str = "text"  # or "tokens": what becomes of text that spells a special token
    fingerprint: str = ""  # of the tokenizer, where an earlier version may have understood its files differently

    def __post_init__(self):
        if self.tokenizer == Bytes.name and self.special_tokens != "text":
            raise ConfigError(
                f"data.special_tokens={self.special_tokens!r} has no effect with the tokenizer 'bytes', which has no "
                "special tokens; use 'text', or another tokenizer"
            )

    def dtype(self, tokenizer: Tokenizer) -> np.dtype:
        """The dtype of ids on disk."""
        return smallest_dtype(tokenizer.vocab, self.source.form is not None)

    def to_json(self) -> dict:
        """Everything that determines the bytes of the shards, without the location of files."""
        chosen = {"tokenizer": self.tokenizer}
        if self.tokenizer == "bpe":
            chosen["bpe_vocab"] = self.bpe_vocab
            chosen |= {"reserved": list(self.reserved)} if self.reserved else {}
        elif self.tokenizer != Bytes.name:
            chosen["tokenizer"] = load_tokenizer(self.tokenizer, self.fingerprint).fingerprint
        if self.special_tokens != "text":
            chosen["special_tokens"] = self.special_tokens
        return {"source": self.source.description, **chosen, "shard_bytes": self.shard_bytes}


def prepare(request: Request, folder: Path, *, workers: int) -> Manifest:
    """Write the missing shards of `request` in `folder` and return the manifest.

    Processes that prepare the same folder at the same time take turns; later ones find it finished.

    Raises:
        DataError: the folder holds data of other settings, a document cannot be read, or there is no text.
    """
    try:
        files.make_folder(folder)
        with files.turns(folder / LOCK_FILE):
            return _prepare(request, folder, workers)
    except OSError as error:
        where = error.filename or folder
        raise DataError(f"preparing data stopped at {where}: {error.strerror}; run again to resume") from error


def remove_prepared(folder: Path) -> None:
    """Delete prepared data, if there is any.

    Raises:
        DataError: the folder also holds something else.
    """
    known = (MANIFEST_FILE, JOURNAL_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG, TEMPLATE_FILE, LOCK_FILE)
    strange = []
    for file in files.names_in(folder):
        name, _, kind = file.removesuffix(".tmp").partition(".")
        if file.removesuffix(".tmp") not in known and not (name.isdigit() and kind in ("ids", "documents")):
            strange.append(file)
    if strange:
        raise DataError(f"{folder} holds more than prepared data ({', '.join(strange[:3])}); delete it by hand")
    if folder.is_dir():
        files.remove(folder)


def _prepare(request: Request, folder: Path, workers: int) -> Manifest:
    journal = folder / JOURNAL_FILE
    finished = Manifest.read(folder) if (folder / MANIFEST_FILE).exists() else None
    # The journal has one line of JSON for the request, then one for each finished shard, so that a killed `prepare`
    # resumes.
    earlier, *records = _whole_lines(journal) or [{}]
    if finished:
        earlier = {**finished.request, "tokenizer_fingerprint": finished.tokenizer_fingerprint}
    begun = {"tokenizer_fingerprint": earlier.get("tokenizer_fingerprint")}
    request = replace(request, fingerprint=begun["tokenizer_fingerprint"] or request.fingerprint)
    wanted = request.to_json()
    if not finished and not records and earlier != begun | wanted:
        # For example with a field that does not exist: nothing in the folder is useful.
        earlier = {}
        for name in (JOURNAL_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG, TEMPLATE_FILE):
            files.remove(folder / name, missing_ok=True)
    tokenizer = _tokenizer(request, folder)
    if (form := request.source.form) and form.template:
        tokenizer = _with_templates(tokenizer, form.template)
    whole_request = {**wanted, "tokenizer_fingerprint": tokenizer.fingerprint}
    _check_same_request(whole_request, earlier or whole_request, folder)
    listed = finished.shards if finished else [Shard.parse(record, journal) for record in records]
    done = {shard.name: shard for shard in listed if _is_complete(shard, folder, request.dtype(tokenizer))}
    if finished and len(done) == len(listed):
        return finished
    # Written again, so that new text does not continue an incomplete line.
    lines = (whole_request, *map(asdict, listed))
    files.replace_log(journal, [json.dumps(line).encode() + b"\n" for line in lines])
    tokenizer.save(folder)
    shards, byte_counts, spelled = _write_missing(request, folder, tokenizer, journal, done, workers)
    manifest = _manifest(request, tokenizer, folder, shards, byte_counts, spelled)
    manifest.write(folder)
    files.remove(journal, missing_ok=True)
    return manifest


def _is_complete(shard: Shard, folder: Path, dtype: np.dtype) -> bool:
    try:
        shard.check(folder, dtype, contents=True)
    except DataError as error:
        logger.warning("%s; it is written again", str(error).partition(";")[0])
        return False
    return True


def _tokenizer(request: Request, folder: Path) -> Tokenizer:
    if request.tokenizer == Bytes.name:
        return Bytes()
    if request.tokenizer != "bpe":
        return load_tokenizer(request.tokenizer, request.fingerprint)
    if (folder / TOKENIZER_FILE).exists():
        return load_tokenizer(folder)
    return bpe_of([request.source], request.bpe_vocab, request.reserved)


def _with_templates(tokenizer: Tokenizer, template: ChatTemplate) -> Tokenizer:
    """The tokenizer with what it needs to render these templates again."""
    if len(template.texts) == 1:
        return with_template(tokenizer, template.text)
    return with_several_templates(tokenizer, dict(zip(("default", "tool_use"), template.texts)))


def bpe_of(sources: Sequence[Source], vocab: int, reserved: Sequence[str] = ()) -> Bpe:
    """A BPE that is trained on documents of these sources, on as many bytes of each, with `reserved` tokens."""

    def sample(source: Source) -> Iterator[str]:
        # Every n-th document, since a corpus may be sorted by subject.
        every = -(-source.text_bytes * len(sources) // BPE_SAMPLE_BYTES) if source.text_bytes else 1
        return islice(source.documents(), 0, None, every)

    with waiting(f"training a bpe of {vocab:,} entries"):
        return train_bpe(chain.from_iterable(map(sample, sources)), vocab=vocab, reserved=reserved)


def _write_missing(
    request: Request, folder: Path, tokenizer: Tokenizer, journal: Path, done: dict[str, Shard], workers: int
) -> tuple[list[Shard], np.ndarray, int]:
    """Write the missing shards; returns all shards, the number of occurrences of each byte in the text, and how many
    special tokens it spells that stay text."""
    text_bytes, shards = request.source.text_bytes, dict(done)
    byte_counts, spelled = np.zeros(256, np.int64), Counter()
    with waiting("tokenising", unit=in_bytes) as show:

        def missing() -> Iterator[tuple[str, list[str]]]:
            for name, texts in _texts_of_shards(request.source.documents(), request.shard_bytes):
                byte_counts[:] += _histogram(np.frombuffer("".join(texts).encode("utf-8"), np.uint8), 256)
                if request.special_tokens == "text":
                    for text in texts:
                        spelled.update(tokenizer.spelled(text))
                if name not in done:
                    yield name, texts

        show(sum(shard.text_bytes for shard in shards.values()), text_bytes)
        options = {"special_tokens": request.special_tokens, "workers": workers}
        with contextlib.closing(files.append_file(journal)) as opened:
            for shard in write_shards(folder, missing(), tokenizer, **options):
                opened.write(json.dumps(asdict(shard)) + "\n")
                shards[shard.name] = shard
                show(sum(shard.text_bytes for shard in shards.values()), text_bytes)
    if spelled:
        logger.warning(
            "the text spells special tokens of the tokenizer %s times (%s); they stay text, "
            "data.special_tokens='tokens' makes tokens of them",
            f"{spelled.total():,}",
            first_few([f"{shown(name)} {count:,}" for name, count in spelled.most_common()]),
        )
    return [shards[name] for name in sorted(shards, key=int)], byte_counts, spelled.total()


def _texts_of_shards(documents: Iterator[str], shard_bytes: int) -> Iterator[tuple[str, list[str]]]:
    """Names and texts of shards, each of at least `shard_bytes` except the last."""
    number, texts, size = 0, [], 0
    for text in documents:
        texts.append(text)
        size += len(text) if text.isascii() else len(text.encode("utf-8"))
        if size >= shard_bytes:
            yield f"{number:05}", texts
            number, texts, size = number + 1, [], 0
    if texts:
        yield f"{number:05}", texts


def _histogram(values: np.ndarray, size: int) -> np.ndarray:
    # In slices, since bincount makes a copy with eight bytes per value.
    slices = (values[start : start + (1 << 20)] for start in range(0, len(values), 1 << 20))
    return sum((np.bincount(part, minlength=size) for part in slices), np.zeros(size, np.int64))


def _manifest(
    request: Request, tokenizer: Tokenizer, folder: Path, shards: list[Shard], byte_counts: np.ndarray, spelled: int
) -> Manifest:
    counts = totals(shards)
    if not counts["documents"]:
        raise DataError(f"the corpus is empty: {counts['empty_documents']} documents, none with text; give it some")
    token_counts = np.zeros(tokenizer.vocab, np.int64)
    for shard in shards:
        ids = shard.read_ids(folder, request.dtype(tokenizer))
        token_counts += _histogram(plain_ids(ids) if request.source.form else ids, tokenizer.vocab)
    return Manifest(
        request=request.to_json(),
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab=tokenizer.vocab,
        **counts,
        token_entropy_nats=_entropy(token_counts),
        byte_entropy_nats=_entropy(byte_counts),
        spelled_tokens=spelled,
        shards=tuple(shards),
    )


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


# ---- the shards of an unfinished folder


def _whole_lines(file: Path) -> list[dict]:
    # The last line is incomplete if the writer was killed.
    lines = []
    for line in files.lines_in(file) if file.exists() else ():
        try:
            lines.append(files.object_of(line))
        except ValueError:
            break
    return lines


def _check_same_request(wanted: dict, earlier: dict, folder: Path) -> None:
    """Raise DataError, with the first difference, unless a folder holds the wanted data."""
    if wanted == earlier:
        return
    # Common keys come first: with another tokenizer, only one of the requests has a bpe_vocab.
    different = compare_settings(earlier, wanted)
    key, (earlier_value, wanted_value) = min(different.items(), key=lambda item: None in item[1])

    def short(value: object) -> object:
        return value[:FINGERPRINT_DIGITS] if SHA256.fullmatch(str(value)) else value

    raise DataError(
        f"{folder} holds data of other settings: {key}={short(earlier_value)!r} where {short(wanted_value)!r} is "
        "wanted; choose another folder, or delete this one (`python -m parallax.data prepare --rebuild` does)"
    )


def write_shards(
    folder: Path,
    groups: Iterable[tuple[str, list[str]]],
    tokenizer: Tokenizer,
    *,
    special_tokens: str,
    workers: int,
) -> Iterator[Shard]:
    """Write a shard of each group (a name and its texts) in `workers` threads, and yield it when it is finished."""
    pending: deque[AsyncResult] = deque()
    # Daemon threads, so that an interrupt does not wait for them; a tokenizer releases the GIL while it encodes.
    with ThreadPool(workers) as pool:
        for group in groups:
            pending.append(pool.apply_async(write_shard, (folder, *group, tokenizer, special_tokens)))
            # One spare group for each further worker; more would only use memory.
            if len(pending) > 2 * (workers - 1):
                yield pending.popleft().get()
        yield from (shard.get() for shard in pending)
