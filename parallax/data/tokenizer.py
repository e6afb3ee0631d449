"""Text to token ids and back: plain bytes, or byte-level BPE."""

import hashlib
import io
import json
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from parallax.config.sections import SMALLEST_BPE_VOCAB
from parallax.data.growth import check_growth
from parallax.runtime.errors import ConfigError, DataError, errors_as, how_to_install, imported
from parallax.runtime.files import make_folder, object_of, read_bytes, write_whole

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # written beside it by `transformers`
LONGEST_WORD = 1024  # characters of a word to learn from, as of DNA or base64
LONG_WORD = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}|(?<!\s)\s{{{LONGEST_WORD},}}")
END_OF_DOCUMENT = "<|endoftext|>"
# Other projects' names of the token that ends a document, for tokenizers loaded from their files.
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>")


class Bytes:
    """The 256 byte values and one id that ends a document. `Bpe` has the same members.

    >>> Bytes().encode("né").tolist()
    [110, 195, 169]
    """

    name = "bytes"
    vocab = 257  # ids are 0 ... vocab-1
    begin = ()  # ids that begin a document and a prompt: a BOS token, or none
    end = 256  # id that ends a document; no text encodes to it

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex; equal for tokenizers that encode and begin documents in the same way."""
        return hashlib.sha256(b"bytes and an end").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32, without `begin` and `end`."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` each text, on several threads if that helps."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; `begin`, `end` and ids beyond the vocab (a model's padding) are left out."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def token(self, number: int) -> str:
        """The name of an id in tokenizer.json."""
        return END_OF_DOCUMENT if number == self.end else _BYTE_SYMBOLS[number]

    def save(self, folder: Path) -> None:
        """Write the files for `load_tokenizer`: tokenizer.json, and tokenizer_config.json if there was one."""
        make_folder(folder)
        write_whole(folder / TOKENIZER_FILE, json.dumps({"parallax": self.name}))

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


def _byte_symbols() -> list[str]:
    """The character of each byte in byte-level BPE: itself if it is printable, otherwise one from U+0100 on.

    The `tokenizers` library, an extra, also has these characters, but without their bytes.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


_BYTE_SYMBOLS = _byte_symbols()


class Bpe:
    """Byte-level byte-pair encoding by the `tokenizers` library.

    Args:
        text: content of a tokenizer.json.
        origin: its file, for messages.
        config: content of the tokenizer_config.json beside it; empty if there is none.
    Raises:
        DataError: a file is damaged, or no token ends a document.
    """

    name = "bpe"

    def __init__(self, text: str, origin: str = TOKENIZER_FILE, config: str = ""):
        try:
            self._inner = _library().Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{origin} is not a tokenizer: {error}") from error
        check_growth(self._inner, origin)
        self._text, self._config = text, config
        # Text that spells a special token is encoded as text, so that a document has no end inside it.
        self._inner.encode_special_tokens = True
        # A file may define truncation and padding, which must not apply to documents.
        self._inner.no_truncation()
        self._inner.no_padding()
        ids = self._inner.get_vocab()
        names = [name for name in END_NAMES if name in ids]
        if not names:
            raise DataError(f"{origin} has no token that ends a document; one of {', '.join(END_NAMES)} is needed")
        self.vocab = max(ids.values()) + 1
        self.end = ids[names[0]]
        self.begin = self._begin(config, Path(origin).with_name(TOKENIZER_CONFIG))

    def _begin(self, config: str, origin: Path) -> tuple[int, ...]:
        """The BOS token if add_bos_token is true; if that field is absent, the tokens that the post-processor puts
        first."""
        try:
            written = object_of(config) if config else {}
        except ValueError as error:
            raise DataError(f"{origin} is not a configuration of a tokenizer: {error}") from error
        adds, bos = written.get("add_bos_token"), written.get("bos_token")
        if adds is None:
            found = self._inner.encode("a", add_special_tokens=True)
            first = takewhile(lambda pair: pair[1], zip(found.ids, found.special_tokens_mask))
            return tuple(number for number, _ in first)
        if not adds:
            return ()
        name = bos.get("content") if isinstance(bos, dict) else bos
        number = self._inner.token_to_id(name) if isinstance(name, str) else None
        if number is None:
            raise DataError(
                f"{origin} has add_bos_token={adds!r}, but bos_token={bos!r:.100} is not an entry of {TOKENIZER_FILE}"
            )
        return (number,)

    @property
    def fingerprint(self) -> str:
        first = f"documents begin with {self.begin}" if self.begin else ""
        return hashlib.sha256((self._text + first).encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        edges = (*self.begin, self.end)  # some files do not mark them as special
        kept = [int(i) for i in ids if i < self.vocab and i not in edges]
        return self._inner.decode(kept, skip_special_tokens=True)

    def token(self, number: int) -> str:
        return self._inner.id_to_token(number)

    def save(self, folder: Path) -> None:
        make_folder(folder)
        write_whole(folder / TOKENIZER_FILE, self._text)
        if self._config:
            write_whole(folder / TOKENIZER_CONFIG, self._config)


Tokenizer = Bytes | Bpe


def train_bpe(documents: Iterable[str], *, vocab: int) -> Bpe:
    """Train a byte-level BPE with at most `vocab` entries (fewer for a small corpus); equal documents give equal
    results. Ctrl-C ends it.

    Raises:
        ConfigError: `vocab` is too small for the bytes.
    """
    if vocab < SMALLEST_BPE_VOCAB:
        raise ConfigError(
            f"bpe_vocab={vocab} is too small; {SMALLEST_BPE_VOCAB} hold the bytes and the end of a document"
        )
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    # In a thread: the library hears no Ctrl-C until it is done.
    with ThreadPool(1) as pool:
        pool.apply_async(inner.train_from_iterator, (map(_with_long_words_cut, documents), trainer)).get()
    return Bpe(inner.to_str())


def _with_long_words_cut(text: str) -> list[str]:
    """Pieces of a document whose words have at most LONGEST_WORD characters: the library's time for a word grows with
    the square of its length."""
    long_words = (found.span() for found in LONG_WORD.finditer(text))
    cuts = [cut for start, end in long_words for cut in range(start + LONGEST_WORD, end, LONGEST_WORD)]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, ours or that of the `tokenizers` library, or of a folder with one.

    A tokenizer_config.json beside it may say whether documents begin with a BOS token.

    Raises:
        DataError: the file is missing, or a file is damaged.
    """
    path = Path(path)
    path = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        written = read_bytes(path)
        content = object_of(written)
    except FileNotFoundError:
        raise DataError(f"tokenizer {str(path)!r} does not exist") from None
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not a tokenizer: {error}") from error
    if content in ({"parallax": Bytes.name}, Bytes().as_bpe()):
        return Bytes()
    return Bpe(_text(written), str(path), _config_beside(path))


def _config_beside(path: Path) -> str:
    path = path.with_name(TOKENIZER_CONFIG)
    with errors_as(DataError, f"{path} cannot be read: ", "", UnicodeDecodeError):
        return _text(read_bytes(path)) if path.exists() else ""


def _text(written: bytes) -> str:
    """Text with normalised line ends, from which the fingerprint is computed."""
    return io.StringIO(written.decode("utf-8"), newline=None).read()


def _library():
    return imported("tokenizers", f"a bpe tokenizer needs the tokenizers library: {how_to_install('data')}")
