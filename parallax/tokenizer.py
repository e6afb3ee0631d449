"""Text to token ids and back: plain bytes, or byte-level BPE."""

import hashlib
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from parallax.errors import ConfigError, DataError, how_to_install
from parallax.plainfile import object_of, read_bytes, write_whole

FILE_NAME = "tokenizer.json"
END_OF_DOCUMENT = "<|endoftext|>"
# What other projects call the token that ends a document, for tokenizers that are loaded from their files.
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>")
SMALLEST_BPE_VOCAB = 257  # every byte, and the end of a document


class Tokenizer(Protocol):
    """What data and generation need of a tokenizer."""

    name: str
    vocab: int  # ids are 0 ... vocab-1
    end: int  # id that ends a document; no text encodes to it

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex; equal for tokenizers that encode alike."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32, without an end."""

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on several threads where that helps."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; ends and ids beyond the vocab (a model's padding) are left out."""

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, which `load` reads."""


class Bytes:
    """The 256 bytes of UTF-8, and one id that ends a document.

    >>> Bytes().encode("né").tolist()
    [110, 195, 169]
    """

    name = "bytes"
    vocab = 257
    end = 256

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes and an end").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        _write(folder, json.dumps({"parallax": self.name}))


class Bpe:
    """Byte-level byte-pair encoding by the `tokenizers` library.

    Args:
        text: content of a tokenizer.json.
        origin: its file, for messages.
    Raises:
        DataError: `text` is damaged, or has no token that ends a document.
    """

    name = "bpe"

    def __init__(self, text: str, origin: str = FILE_NAME):
        try:
            self._inner = _library().Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{origin} is not a tokenizer: {error}") from error
        self._text = text
        # Text that spells a special token is text: no document may hold an end that we did not put there.
        self._inner.encode_special_tokens = True
        ids = self._inner.get_vocab()
        names = [name for name in END_NAMES if name in ids]
        if not names:
            raise DataError(f"{origin} has no token that ends a document; one of {', '.join(END_NAMES)} is needed")
        self.vocab = max(ids.values()) + 1
        self.end = ids[names[0]]

    def __reduce__(self):
        return Bpe, (self._text,)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._text.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode([int(i) for i in ids if i < self.vocab], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        _write(folder, self._text)


def train_bpe(documents: Iterable[str], *, vocab: int) -> Bpe:
    """Byte-level BPE of at most `vocab` entries, fewer for a small corpus; equal documents give equal ones.

    Raises:
        ConfigError: `vocab` has no room for the bytes.
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
    inner.train_from_iterator(documents, trainer)
    return Bpe(inner.to_str())


def load(path: Path | str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, ours or of the `tokenizers` library, or of a folder that holds one.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        written = read_bytes(path)
        content = object_of(written)
    except FileNotFoundError:
        raise DataError(f"tokenizer {str(path)!r} does not exist") from None
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not a tokenizer: {error}") from error
    if content == {"parallax": Bytes.name}:
        return Bytes()
    # Line ends as text has them: the fingerprint is of it.
    return Bpe(io.StringIO(written.decode("utf-8"), newline=None).read(), str(path))


def _library():
    # An optional extra: whoever trains on bytes does without it.
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(f"a bpe tokenizer needs the tokenizers library: {how_to_install('data')}") from None
    return tokenizers


def _write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE_NAME, text)
