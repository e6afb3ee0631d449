"""Records of conversations, and of prompts with their completions, as texts that know which of them is learned."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from parallax.config.sections import (
    AUTO,
    CHAT,
    MESSAGES,
    NAMED_TEMPLATES,
    PROMPT_AND_COMPLETION,
    TEXT,
    TOKENIZER_ENDINGS,
    fields_of_records,
)
from parallax.data.chat import ChatTemplate, Messages, check_messages
from parallax.data.tokenizer import Bytes, Tokenizer, as_document, with_begin
from parallax.errors import DataError, check_utf8, errors_as, names_of, quoted
from parallax.storage.files import object_of

# The date for templates that ask for it: data does not depend on the day. It is the one that Llama 3 writes by itself.
DAY_OF_DATA = datetime(2024, 7, 26)
TOOLS = "tools"


class Marked(str):
    """A text of which only parts are learned.

    `learned` are their first letters and the letters after their last, in order. `turns` are the letters at which the
    text may be divided. Nothing is put before and after a text that `is_whole`: its template wrote it.
    """

    learned: Sequence[tuple[int, int]]
    turns: Sequence[int]
    is_whole: bool

    def __new__(
        cls, text: str, learned: Sequence[tuple[int, int]], turns: Sequence[int] = (), *, is_whole: bool = True
    ) -> "Marked":
        made = super().__new__(cls, text)
        made.learned, made.turns, made.is_whole = learned, turns, is_whole
        return made


@dataclass(frozen=True)
class RecordFormat:
    """What a record holds: `kind` as data.format, the names of its fields, and the template of conversations."""

    kind: str
    fields: tuple[str, ...]
    template: ChatTemplate | None = None

    @property
    def description(self) -> dict[str, Any]:
        """JSON; equal descriptions make equal texts of equal records."""
        said: dict[str, Any] = {"format": self.kind, "fields": list(self.fields)}
        if self.template:
            content = json.dumps([*self.template.texts, self.template.tokens], sort_keys=True)
            said["template"] = hashlib.sha256(content.encode()).hexdigest()
        return said

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields that may be read."""
        return (*self.fields, TOOLS) if self.kind == CHAT else self.fields

    def fields_among(self, names: Collection[str]) -> tuple[str, ...]:
        """The fields that a record with these names must have: a conversation may be in two parts, without `messages`.

        >>> RecordFormat("chat", ("messages",)).fields_among(["prompt", "completion"])
        ('prompt', 'completion')
        """
        in_parts = MESSAGES not in names and {*PROMPT_AND_COMPLETION} <= {*names}
        return PROMPT_AND_COMPLETION if in_parts and self.fields == (MESSAGES,) else self.fields

    def document(self, record: Mapping[str, Any], where: str) -> Marked:
        """The text of a record.

        Raises:
            DataError: the record is wrong, or the template refuses it; says where it is.
        """
        for field in self.fields_among(record):
            if field not in record:
                raise DataError(f"{where} has no field {quoted(field)} ({self.kind}); fields: {names_of(record)}")
        made = self._conversation(record, where) if self.kind == CHAT else self._completion(record, where)
        check_utf8(DataError, where, made)
        return made

    def _conversation(self, record: Mapping[str, Any], where: str) -> Marked:
        prompt, completion = self._parts(record, where)
        try:
            tools = _tools(record.get(TOOLS), where)
            pieces = self.template.spans([*prompt, *completion], tools, first_learned=len(prompt))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        learned, turns, start = [], [], 0
        for piece in pieces:
            if piece.is_answer:
                learned.append((start, start + len(piece.text)))
            elif start and piece.role in ("user", "system", "developer"):
                turns.append(start + len(piece.text) - len(piece.text.lstrip()))
            start += len(piece.text)
        return Marked("".join(piece.text for piece in pieces), learned, turns)

    def _parts(self, record: Mapping[str, Any], where: str) -> tuple[Messages, Messages]:
        """Messages that are only read, and those of which answers are learned."""
        fields = self.fields_among(record)
        if fields == self.fields:
            messages = record[fields[0]]
            check_messages(messages, where)
            return [], messages
        prompt, completion = (record[field] for field in fields)
        check_messages(prompt, f"{where}: {fields[0]}", needs_answer=False)
        check_messages(completion, f"{where}: {fields[1]}")
        return prompt, completion

    def _completion(self, record: Mapping[str, Any], where: str) -> Marked:
        for field in self.fields:
            if not isinstance(record[field], str):
                read = f"; data.format={CHAT!r} reads messages" if isinstance(record[field], list) else ""
                raise DataError(f"{where}: field {field!r} holds {quoted(record[field])}, not a text{read}")
        prompt, completion = (record[field] for field in self.fields)
        if not completion:
            raise DataError(f"{where} has an empty {self.fields[1]}, so there is nothing to learn")
        return Marked(prompt + completion, [(len(prompt), len(prompt) + len(completion))], is_whole=False)


def _tools(written: object, where: str) -> list[Any] | None:
    """The tools of a conversation: a list of objects, or JSON of such a list, as tables often hold it."""
    if isinstance(written, str):
        with errors_as(DataError, f"{where}: tools cannot be read as JSON: ", "", ValueError):
            written = object_of(f'{{"{TOOLS}": {written or "null"}}}')[TOOLS]
    if written is None or written == []:
        return None
    if not (isinstance(written, list) and all(isinstance(tool, dict) for tool in written)):
        raise DataError(f"{where}: tools is {quoted(written)}, not a list of objects")
    return written


def format_of(kind: str, *, field: str, template: str, tokenizer: str) -> RecordFormat | None:
    """The format of a source's records; None where a document is a text.

    Args:
        kind: as data.format.
        field: of the messages, if it is not that of texts.
        template: as data.chat_template.
        tokenizer: the file, or the name of one without a template.
    """
    if kind == TEXT:
        return None
    fields = fields_of_records(kind, field)
    return RecordFormat(kind, fields, template_of(template, tokenizer) if kind == CHAT else None)


def template_of(template: str, tokenizer: str) -> ChatTemplate:
    """The template that data.chat_template names: the tokenizer's, one by its name, or a file.

    Raises:
        DataError: the tokenizer has none, or the file is none.
    """
    now = {"now": lambda: DAY_OF_DATA}
    is_file = tokenizer.endswith(TOKENIZER_ENDINGS)
    if template == AUTO and not is_file:
        raise DataError(
            f"data.chat_template='auto' is that of the tokenizer, and {tokenizer!r} has none; "
            f"use {', '.join(NAMED_TEMPLATES)} or a file"
        )
    if template == AUTO:
        return ChatTemplate.of_tokenizer(tokenizer, **now)
    tokens = ChatTemplate.tokens_of(tokenizer) if is_file else {}
    if template in NAMED_TEMPLATES:
        return ChatTemplate.named(template, tokens=tokens, **now)
    return ChatTemplate.of_file(template, tokens=tokens, **now)


def special_tokens_of(kind: str, written: str, tokenizer: str) -> str:
    """data.special_tokens for records of a format: a template writes special tokens, if the tokenizer has any."""
    return "tokens" if kind == CHAT and tokenizer != Bytes.name else written


# ---- ids

# Ids on disk of texts that are learned in part have four bytes, with two marks above the id.
LEARNED, TURN = np.uint32(1 << 31), np.uint32(1 << 30)
ID = np.uint32((1 << 30) - 1)
MARKED_IDS = np.dtype("<u4")


def encode_marked(tokenizer: Tokenizer, texts: Sequence[Marked], *, special_tokens: str) -> list[np.ndarray]:
    """Ids of texts with `LEARNED` where a token has a letter of what is learned, and `TURN` where one begins a turn."""
    encoded = tokenizer.encode_with_places(texts, special_tokens=special_tokens)
    return [_marked(tokenizer, text, *ids_and_places) for text, ids_and_places in zip(texts, encoded)]


def _marked(tokenizer: Tokenizer, text: Marked, ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    ends = np.maximum(ends, starts + 1)
    marks = np.zeros(len(ids), np.uint32)
    for first, after in text.learned:
        marks[(starts < after) & (ends > first)] |= LEARNED
    for place in text.turns:
        following = np.flatnonzero(starts >= place)
        marks[following[:1]] |= TURN
    if text.is_whole:
        return ids.astype(np.uint32) | marks
    whole = as_document(tokenizer, ids)
    begin = len(with_begin(tokenizer, ids)) - len(ids)
    around = np.zeros(len(whole), np.uint32)
    around[begin : begin + len(ids)] = marks
    around[-1] |= LEARNED  # the end of what is learned, which is its last part
    return whole.astype(np.uint32) | around


def plain_ids(ids: np.ndarray) -> np.ndarray:
    """Ids without marks."""
    return ids & ID
