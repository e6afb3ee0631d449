"""Tokenizers of SentencePiece: the library itself makes the ids, with all that its model says of spaces and letters."""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from parallax.data.special_tokens import END_NAMES, TOKENIZER_CONFIG, save_files, token_name
from parallax.errors import DataError, errors_as, first_line, imported, quoted
from parallax.storage.files import object_of

# Classes of `transformers` that write a BOS token unless `add_bos_token` says otherwise.
BEGIN_BY_DEFAULT = ("LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast")


class SentencePiece:
    """A tokenizer of the `sentencepiece` library, with the members of `Bytes`. Its special tokens are the model's
    control symbols, which the library never makes of text.

    Args:
        model: content of a .model file.
        origin: its file, for messages.
        config: content of the tokenizer_config.json beside it; empty if there is none.
    Raises:
        DataError: a file is damaged, or no symbol ends a document.
    """

    name = "sentencepiece"
    template = ""
    earlier = None

    def __init__(self, model: bytes, origin: str, config: str = ""):
        library = imported("sentencepiece", f"{origin}, a model of SentencePiece,", "tokenizers")
        self._model, self._origin, self.config = model, origin, config
        try:
            self._inner = library.SentencePieceProcessor(model_proto=model)
        except Exception as error:  # the library raises bare RuntimeError
            raise DataError(f"{origin} is not a model of SentencePiece: {first_line(error)}") from error
        with errors_as(DataError, f"{TOKENIZER_CONFIG} beside {origin} cannot be read: ", "", ValueError):
            written = object_of(config) if config else {}
        self.vocab = self.needed = self._inner.get_piece_size()
        controls = filter(self._inner.is_control, range(self.vocab))
        self._controls = {self._inner.id_to_piece(number): number for number in controls}
        self.end = self._end(token_name(written.get("eos_token")))
        adds_begin = written.get("add_bos_token", written.get("tokenizer_class") in BEGIN_BY_DEFAULT)
        self.begin = (self._begin(token_name(written.get("bos_token"))),) if adds_begin else ()

    def _end(self, said: str | None) -> int:
        usual = [self._controls[name] for name in END_NAMES if name in self._controls]
        if said is not None:
            usual = [self._control("eos_token", said)]
        elif self._inner.eos_id() >= 0:
            usual = [self._inner.eos_id()]
        if not usual:
            raise DataError(f"{self._origin} has no symbol that ends a document; train it with eos_id, as by default")
        return usual[0]

    def _begin(self, said: str | None) -> int:
        if said is not None:
            return self._control("bos_token", said)
        if self._inner.bos_id() < 0:
            raise DataError(f"{TOKENIZER_CONFIG} beside {self._origin} has add_bos_token, but the model has no bos_id")
        return self._inner.bos_id()

    def _control(self, key: str, name: str) -> int:
        if name not in self._controls:
            raise DataError(
                f"{TOKENIZER_CONFIG} beside {self._origin} has {key}={quoted(name)}, which is no control symbol of it"
            )
        return self._controls[name]

    @property
    def model(self) -> bytes:
        """Content of the .model file."""
        return self._model

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._model + f"{self.begin} {self.end}".encode()).hexdigest()

    @cached_property
    def _spelling(self) -> re.Pattern[str]:
        names = sorted(self._controls, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})")

    def encode(self, text: str, *, special_tokens: str = "text") -> np.ndarray:
        return self.encode_many([text], special_tokens=special_tokens)[0]

    def encode_many(self, texts: Sequence[str], *, special_tokens: str = "text") -> list[np.ndarray]:
        if special_tokens == "text":
            return [np.array(ids, np.int32) for ids in self._inner.encode(list(texts))]
        return [np.array([*self._with_tokens(text)], np.int32) for text in texts]

    def _with_tokens(self, text: str) -> Iterator[int]:
        """Ids of a text in which control symbols are spelled; what is between two of them is a text of its own."""
        for number, part in enumerate(self._spelling.split(text)):
            yield from [self._controls[part]] if number % 2 else self._inner.encode(part)

    def encode_with_places(
        self, texts: Sequence[str], *, special_tokens: str = "text"
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        return [self._in_place(self._spelling.split(text) if special_tokens == "tokens" else [text]) for text in texts]

    def _in_place(self, parts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and letters of a text in parts, each second of them a control symbol."""
        rows, start = [], 0
        for number, part in enumerate(parts):
            if number % 2:
                rows.append((self._controls[part], start, start + len(part)))
            else:
                made = self._inner.encode(part, return_type="offset_mapping")
                places = zip(made["ids"], made["offsets"], strict=True)
                rows += [(id_, start + first, start + after) for id_, (first, after) in places]
            start += len(part)
        ids, starts, ends = np.array(rows, np.int64).reshape(-1, 3).T
        return ids.astype(np.int32), starts, ends

    def spelled(self, text: str) -> Counter[str]:
        return Counter(self._spelling.findall(text))

    def decode(self, ids: Iterable[int], *, special_tokens: str = "text") -> str:
        known = [int(i) for i in ids if i < self.vocab]
        if special_tokens == "text":
            return self._inner.decode([i for i in known if not self._inner.is_control(i)])
        known = known[len(self.begin) :] if tuple(known[: len(self.begin)]) == self.begin else known
        known = known[:-1] if known[-1:] == [self.end] else known
        return self.decode_whole(known)

    def decode_whole(self, ids: Iterable[int]) -> str:
        runs = groupby((int(i) for i in ids if i < self.vocab), self._inner.is_control)
        return "".join(
            "".join(map(self.token, run)) if is_control else self._inner.decode([*run]) for is_control, run in runs
        )

    def token(self, number: int) -> str:
        return self._inner.id_to_piece(number)

    def special_id(self, name: str) -> int | None:
        return self._controls.get(name)

    @property
    def content(self) -> str:
        return json.dumps({"parallax": self.name, "model": base64.b64encode(self._model).decode()})

    def save(self, folder: Path) -> None:
        save_files(folder, self.content, self.config, self.template)
