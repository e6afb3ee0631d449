"""Text to token ids and back: plain bytes, byte-level BPE, or a published tokenizer."""

import base64
import copy
import hashlib
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from parallax.config.sections import SMALLEST_BPE_VOCAB
from parallax.data.growth import check_growth
from parallax.data.rank_files import ENCODING_PREFIX, is_rank_file, json_of_encoding, json_of_rank_file
from parallax.data.sentence_pieces import SentencePiece
from parallax.data.special_tokens import (
    BYTE_SYMBOLS,
    END_NAMES,
    END_OF_DOCUMENT,
    PIECES_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    end_name,
    save_files,
    token_name,
    without,
)
from parallax.errors import ConfigError, DataError, errors_as, first_line, imported
from parallax.storage.files import object_if_readable, object_of, read_bytes
from parallax.storage.remote import AnyPath, source_path

MODEL_CONFIG = "config.json"  # of a published model
LONGEST_WORD = 1024  # characters of a word to learn from, as of DNA or base64
LONG_WORD = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}|(?<!\s)\s{{{LONGEST_WORD},}}")

# Ids of a text, the first letter of each, and the letter after its last.
EncodedInPlace = tuple[np.ndarray, np.ndarray, np.ndarray]


class Bytes:
    """The 256 byte values and one id that ends a document. `Bpe` has the same members.

    >>> Bytes().encode("né").tolist()
    [110, 195, 169]
    """

    name = "bytes"
    vocab = 257  # ids are 0 ... vocab-1
    needed = 257  # least vocab of a model: only added tokens, which no plain text has, may lie beyond
    begin = ()  # ids that begin a document and a prompt: a BOS token, or none
    end = 256  # id that ends a document; no text encodes to it
    config = ""  # content of tokenizer_config.json
    template = ""  # content of chat_template.jinja
    earlier = None  # the tokenizer as earlier versions understood its files, if that is another one

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex; equal for tokenizers that encode and begin documents in the same way."""
        return hashlib.sha256(b"bytes and an end").hexdigest()

    def encode(self, text: str, *, special_tokens: str = "text") -> np.ndarray:
        """Ids of a text, int32, without `begin` and `end`.

        What spells a special token stays text, or becomes that token if `special_tokens` is "tokens". Bytes have none.
        """
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[str], *, special_tokens: str = "text") -> list[np.ndarray]:
        """`encode` each text, on several threads if that helps."""
        return [self.encode(text) for text in texts]

    def encode_with_places(self, texts: Sequence[str], *, special_tokens: str = "text") -> list[EncodedInPlace]:
        """`encode` each text; for each id also its first letter in the text, and the letter after its last."""
        return [_bytes_in_place(text) for text in texts]

    def spelled(self, text: str) -> Counter[str]:
        """How often a text spells each special token."""
        return Counter()

    def decode(self, ids: Iterable[int], *, special_tokens: str = "text") -> str:
        """Text of ids, without special tokens, and without ids beyond the vocab (a model's padding).

        If `special_tokens` is "tokens", only the first `begin` and the last `end` are left out.
        """
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def decode_whole(self, ids: Iterable[int]) -> str:
        """Text of ids, with the names of special tokens."""
        parts = [bytes([i]) if i < 256 else self.token(i).encode() for i in ids if i < self.vocab]
        return b"".join(parts).decode("utf-8", errors="replace")

    def token(self, number: int) -> str:
        """The name of an id in tokenizer.json."""
        return END_OF_DOCUMENT if number == self.end else BYTE_SYMBOLS[number]

    def special_id(self, name: str) -> int | None:
        """The id of the special token with this name; None if there is none."""
        return self.end if name == END_OF_DOCUMENT else None

    @property
    def content(self) -> str:
        """Content of a tokenizer.json, which `load_tokenizer` reads."""
        return json.dumps({"parallax": self.name})

    def save(self, folder: Path) -> None:
        """Write the files for `load_tokenizer`: tokenizer.json, and those beside it that there were."""
        save_files(folder, self.content, self.config, self.template)

    def as_bpe(self) -> dict[str, Any]:
        """The same ids in the format of the `tokenizers` library: a byte-level BPE without merges."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        end = {"id": self.end, "content": END_OF_DOCUMENT, "special": True, "normalized": False}
        nothing = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
        return {
            "version": "1.0",
            **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
            "added_tokens": [end | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {
                "type": "BPE",
                **dict.fromkeys(nothing),
                **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
                "vocab": {self.token(number): number for number in range(self.vocab)},
                "merges": [],
            },
        }


def _bytes_in_place(text: str) -> EncodedInPlace:
    lengths = [len(letter.encode("utf-8")) for letter in text]
    starts = np.repeat(np.arange(len(text)), lengths)
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32), starts, starts + 1


class Bpe:
    """A tokenizer of the `tokenizers` library: usually byte-level byte-pair encoding.

    Args:
        text: content of a tokenizer.json.
        origin: its file, for messages.
        config: content of the tokenizer_config.json beside it; empty if there is none.
        model: content of the model's config.json beside it; empty if there is none.
    Raises:
        DataError: a file is damaged, or no token ends a document.
    """

    name = "bpe"
    template = ""

    def __init__(
        self, text: str, origin: str = TOKENIZER_FILE, config: str = "", model: Mapping[str, Any] | None = None
    ):
        self._inner = _from_text(text, origin)
        check_growth(self._inner, origin)
        self._text, self._origin, self.config = text, origin, config
        beside = source_path(origin).with_name(TOKENIZER_CONFIG)
        with errors_as(DataError, f"{beside} is not a configuration of a tokenizer: ", "", ValueError):
            written = object_of(config) if config else {}
        ids, added = self._inner.get_vocab(), self._inner.get_added_tokens_decoder()
        names = {token.content for token in added.values()}
        end = end_name(ids, names, written, model or {}, beside)
        if end is None:
            raise DataError(
                f"{origin} has no token that ends a document; eos_token in {TOKENIZER_CONFIG} beside it names one, "
                f"otherwise one of {', '.join(END_NAMES)} is needed"
            )
        if end != end_name(ids, names, written, {}, beside):  # config.json does not go where the tokenizer goes
            self.config = json.dumps({**written, "eos_token": end}, ensure_ascii=False, indent=2) + "\n"
        self.vocab, self.end = max(ids.values()) + 1, ids[end]
        self.begin = self._begin(written, beside)
        of_model = [number for number in self._inner.get_vocab(with_added_tokens=False).values() if number not in added]
        self.needed = 1 + max([*of_model, *self.begin, self.end])
        special = {token.content for token in added.values() if token.special}
        self._special = special | {self.token(number) for number in (*self.begin, self.end)}
        self._usual_end = next((name for name in END_NAMES if name in ids), None)
        self._written = written

    def _begin(self, written: Mapping[str, Any], origin: Path) -> tuple[int, ...]:
        """The BOS token if add_bos_token is true; if that field is absent, the tokens that the post-processor puts
        first."""
        adds, bos = written.get("add_bos_token"), written.get("bos_token")
        if adds is None:
            encoded = self._inner.encode("a", add_special_tokens=True)
            first = takewhile(lambda pair: pair[1], zip(encoded.ids, encoded.special_tokens_mask))
            return tuple(number for number, _ in first)
        if not adds:
            return ()
        name = token_name(bos)
        number = None if name is None else self._inner.token_to_id(name)
        if number is None:
            raise DataError(
                f"{origin} has add_bos_token={adds!r}, but bos_token={bos!r:.100} is not an entry of {TOKENIZER_FILE}"
            )
        return (number,)

    @property
    def fingerprint(self) -> str:
        first = f"documents begin with {self.begin}" if self.begin else ""
        last = "" if self.token(self.end) == self._usual_end else f"documents end with {self.end}"
        return hashlib.sha256((self._text + first + last).encode()).hexdigest()

    @cached_property
    def earlier(self) -> "Bpe | None":
        """With the end that earlier versions chose by its name, if that is another one: it ends the documents of
        shards that they made."""
        if self._usual_end in (None, self.token(self.end)):
            return None
        return Bpe(self._text, self._origin, json.dumps({**self._written, "eos_token": self._usual_end}))

    @cached_property
    def _to_text(self) -> Any:
        """The library's tokenizer that makes no special token of text."""
        if (text := without(self._text, self._special)) is None:
            return self._inner
        return _from_text(text, self._origin)

    @cached_property
    def _end_is_lost(self) -> bool:
        """Whether nothing is left of a text that spells the end of a document."""
        try:
            return not self._to_text.encode(self.token(self.end), add_special_tokens=False).ids
        except Exception:  # a model without a token for what it does not know, which `encode_many` reports
            return False

    @cached_property
    def _to_tokens(self) -> Any:
        inner = _from_text(self._text, self._origin)
        inner.encode_special_tokens = False
        return inner

    @cached_property
    def _spelling(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))))

    def encode(self, text: str, *, special_tokens: str = "text") -> np.ndarray:
        return self.encode_many([text], special_tokens=special_tokens)[0]

    def encode_many(self, texts: Sequence[str], *, special_tokens: str = "text") -> list[np.ndarray]:
        inner = self._to_text if special_tokens == "text" else self._to_tokens
        try:
            encodings = inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{self._origin} cannot encode a text: {first_line(error)}") from error
        end = self.token(self.end)
        if special_tokens == "text" and self._end_is_lost and any(end in text for text in texts):
            raise DataError(
                f"{self._origin} cannot write the text {end!r} without the token of that name, which ends a document; "
                f"use texts without it, or name another eos_token in {TOKENIZER_CONFIG}"
            )
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_with_places(self, texts: Sequence[str], *, special_tokens: str = "text") -> list[EncodedInPlace]:
        inner = self._to_text if special_tokens == "text" else self._to_tokens
        try:
            encodings = inner.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{self._origin} cannot encode a text: {first_line(error)}") from error
        places = [np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in encodings]
        return [(np.array(each.ids, np.int32), *place.T) for each, place in zip(encodings, places)]

    def spelled(self, text: str) -> Counter[str]:
        return Counter(self._spelling.findall(text))

    def decode(self, ids: Iterable[int], *, special_tokens: str = "text") -> str:
        kept = [int(i) for i in ids if i < self.vocab]
        if special_tokens == "tokens":
            kept = kept[len(self.begin) :] if tuple(kept[: len(self.begin)]) == self.begin else kept
            kept = kept[:-1] if kept[-1:] == [self.end] else kept
            return self._inner.decode(kept, skip_special_tokens=False)
        edges = (*self.begin, self.end)  # some files do not mark them as special
        return self._inner.decode([i for i in kept if i not in edges], skip_special_tokens=True)

    def decode_whole(self, ids: Iterable[int]) -> str:
        return self._inner.decode([int(i) for i in ids if i < self.vocab], skip_special_tokens=False)

    def token(self, number: int) -> str:
        return self._inner.id_to_token(number)

    def special_id(self, name: str) -> int | None:
        added = self._inner.get_added_tokens_decoder()
        return next((number for number, token in added.items() if token.content == name), None)

    @property
    def content(self) -> str:
        return self._text

    def save(self, folder: Path) -> None:
        save_files(folder, self.content, self.config, self.template)


def _from_text(text: str, origin: str) -> Any:
    """A tokenizer of the library, with which text that spells an added special token stays text."""
    library = _library()
    try:
        inner = library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{origin} is not a tokenizer: {error}") from error
    inner.encode_special_tokens = True
    # A file may define truncation and padding, which must not apply to documents.
    inner.no_truncation()
    inner.no_padding()
    return inner


Tokenizer = Bytes | Bpe | SentencePiece


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The same tokenizer, with the chat template that is written beside it."""
    other = copy.copy(tokenizer)
    other.template = template
    return other


def with_several_templates(tokenizer: Tokenizer, templates: Mapping[str, str]) -> Tokenizer:
    """The same tokenizer, with chat templates by name, which are written into its tokenizer_config.json."""
    other = with_template(tokenizer, "")
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    other.config = json.dumps(json.loads(tokenizer.config or "{}") | {"chat_template": listed}, indent=2) + "\n"
    return other


def with_begin(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Ids of a text after those that begin a document; a text that spells them itself does not get them twice."""
    begin = np.array(tokenizer.begin, np.int32)
    return ids if len(begin) and np.array_equal(ids[: len(begin)], begin) else np.concatenate([begin, ids])


def as_document(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Ids of a text between those that begin and end a document; one that spells them itself does not get them
    twice."""
    end = np.array([] if len(ids) and ids[-1] == tokenizer.end else [tokenizer.end], np.int32)
    return np.concatenate([with_begin(tokenizer, ids), end])


def train_bpe(documents: Iterable[str], *, vocab: int, reserved: Sequence[str] = ()) -> Bpe:
    """Train a byte-level BPE with at most `vocab` entries (fewer for a small corpus); equal documents give equal
    results. Ctrl-C ends it.

    Args:
        reserved: names of further special tokens, as those of a chat template, which count as entries.
    Raises:
        ConfigError: `vocab` is too small for the bytes, or a name is empty or is there twice.
    """
    special = [END_OF_DOCUMENT, *reserved]
    smallest = SMALLEST_BPE_VOCAB + len(reserved)
    if vocab < smallest:
        held = "the bytes and the end of a document" + (f", and {len(reserved)} reserved tokens" if reserved else "")
        raise ConfigError(f"bpe_vocab={vocab} is too small; {smallest} hold {held}")
    for name in reserved:
        if not name or special.count(name) > 1:
            raise ConfigError(f"the reserved token {name!r} is empty or is there twice; give each a name of its own")
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    # In a thread: the library hears no Ctrl-C until it is done.
    with ThreadPool(1) as pool:
        pool.apply_async(inner.train_from_iterator, (map(split_long_words, documents), trainer)).get()
    return Bpe(inner.to_str())


def split_long_words(text: str) -> list[str]:
    """Pieces of a document whose words have at most LONGEST_WORD characters: the library's time for a word grows with
    the square of its length."""
    half = LONGEST_WORD // 2  # a long word covers one of these blocks, which are looked at faster than every word
    blocks = (text[start : start + half] for start in range(0, len(text), half))
    if not any(block.isspace() or block.split(maxsplit=1) == [block] for block in blocks):
        return [text]
    long_words = (match.span() for match in LONG_WORD.finditer(text))
    cuts = [cut for start, end in long_words for cut in range(start + LONGEST_WORD, end, LONGEST_WORD)]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]


def load_tokenizer(path: Path | str, fingerprint: str = "") -> Tokenizer:
    """The tokenizer of a file: a tokenizer.json, ours or that of the `tokenizers` library, ranks of tiktoken, or a
    model of SentencePiece; of a folder with a tokenizer.json, or without it a tokenizer.model; or of an encoding of
    tiktoken, as "tiktoken:cl100k_base". It is as an earlier version understood its files, if it had this fingerprint
    then.

    A tokenizer_config.json beside it may say which token ends a document, and whether one begins it; the config.json
    of a published model, which one ends it.

    Raises:
        DataError: the file is missing, or a file is damaged.
    """
    if str(path).startswith(ENCODING_PREFIX):
        return Bpe(json_of_encoding(str(path)), str(path))
    path = source_path(path, "the tokenizer")
    path = tokenizer_file_in(path) if path.is_dir() else path
    tokenizer, template = _of_file(path, fingerprint), path.with_name(TEMPLATE_FILE)
    with errors_as(DataError, f"{template} cannot be read: ", "", UnicodeDecodeError):
        return with_template(tokenizer, read_bytes(template).decode("utf-8") if template.is_file() else "")


def tokenizer_file_in(folder: AnyPath) -> AnyPath:
    """The tokenizer.json of a folder, or without it the tokenizer.model; DataError if it has neither."""
    for name in (TOKENIZER_FILE, PIECES_FILE):
        if (folder / name).exists():
            return folder / name
    raise DataError(f"{folder} has no tokenizer, neither {TOKENIZER_FILE} nor {PIECES_FILE}; copy it there")


def _of_file(path: Path, fingerprint: str) -> Tokenizer:
    missing = f"tokenizer {str(path)!r} does not exist"
    with errors_as(DataError, f"tokenizer {path} cannot be read: ", "", missing=missing):
        written = read_bytes(path)
    is_json = path.suffix not in (".tiktoken", ".model")
    with errors_as(DataError, f"tokenizer {path} cannot be read: ", "", ValueError):
        content = object_of(written) if is_json else {}
        if content.get("parallax") == SentencePiece.name:
            written, is_json = base64.b64decode(content.get("model", "")), False
    if content in ({"parallax": Bytes.name}, Bytes().as_bpe()):
        return Bytes()
    beside = path.with_name(TOKENIZER_CONFIG)
    with errors_as(DataError, f"{beside} cannot be read: ", "", UnicodeDecodeError):
        config = _text(read_bytes(beside)) if beside.exists() else ""
    if not is_json and not content and (is_rank_file(written) or path.suffix == ".tiktoken"):
        text, config = json_of_rank_file(written, config, str(path))
        return Bpe(text, str(path), config)
    if not is_json:
        return SentencePiece(written, str(path), config)
    model = object_if_readable(path.with_name(MODEL_CONFIG), odd_numbers=True)
    tokenizer = Bpe(_text(written), str(path), config, model)
    earlier = tokenizer.earlier if fingerprint else None
    return earlier if earlier and earlier.fingerprint == fingerprint else tokenizer


def _text(written: bytes) -> str:
    """Text with normalised line ends, from which the fingerprint is computed."""
    return io.StringIO(written.decode("utf-8"), newline=None).read()


def _library():
    return imported("tokenizers", "a bpe tokenizer", "data")
