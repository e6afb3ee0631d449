"""A conversation with a model: messages through a template to ids, and the answer's text as it comes."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from parallax.config.sections import NAMED_TEMPLATES, SampleConfig
from parallax.data.chat import ASSISTANT, ChatTemplate
from parallax.errors import ConfigError, DataError, quoted
from parallax.inference.generate import check_text, ends_with, padded_length, stream, text_after
from parallax.inference.run import Run

BROKEN = "\ufffd"  # what bytes decode to that are no letter, or not yet


class ContextIsFull(ConfigError):
    """A conversation has no room for an answer."""


@dataclasses.dataclass
class Conversation:
    """Messages so far; `context` is the number of tokens that messages and an answer may have together."""

    run: Run
    template: ChatTemplate
    sample: SampleConfig
    context: int
    system: str = ""
    stop: Sequence[str] = ()

    def __post_init__(self):
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, text: str) -> Iterator[str]:
        """The answer to a message in pieces, as it is generated. Both are in `messages` at its end.

        Raises:
            ContextIsFull: there is no room for an answer; the message is not added.
            DataError: the template refuses the messages.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces = []
        for piece in answer_text(self.run, self.prompt(asked), self.sample, self.stops, context=self.context):
            pieces.append(piece)
            yield piece
        self.messages = [*asked, {"role": ASSISTANT, "content": "".join(pieces)}]

    def prompt(self, messages: Sequence[dict]) -> list[int]:
        """The ids of messages, up to where the assistant answers."""
        return ids_of_messages(self.run, self.template, messages)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends."""
        return (*self.template.stops, *self.stop)


def ids_of_messages(run: Run, template: ChatTemplate, messages: Sequence[dict]) -> list[int]:
    """The ids of messages, up to where the assistant answers."""
    text = template.render(messages, add_generation_prompt=True)
    check_text("the messages", text)
    return run.tokenizer.encode(text, special_tokens="tokens").tolist()


def answer_text(
    run: Run, prompt: Sequence[int], sample: SampleConfig, stop: Sequence[str], *, context: int
) -> Iterator[str]:
    """The text after a prompt's ids in pieces, up to one of the model's ends or of the texts `stop`."""
    room = context - len(prompt)
    if room < 1:
        raise ContextIsFull(f"the context is full: {len(prompt)} of {context} tokens (data.seq)")
    ends = ends_with(run.tokenizer, run.ends, stop)
    length, vocab = padded_length(len(prompt), context), run.tokenizer.vocab
    ids = stream(run.model, run.params, prompt, sample, ends=ends, vocab=vocab, length=length, tokens=room)
    return texts_as_they_come(lambda ids: run.tokenizer.decode(ids, special_tokens=sample.special_tokens), ids, stop)


def texts_as_they_come(
    decode: Callable[[list[int]], str], new: Iterable[list[int]], stop: Sequence[str]
) -> Iterator[str]:
    """The text of ids in pieces that are final: what may be a part of a letter, or begin a text of `stop`, is kept
    back.

    >>> decode = lambda ids: bytes(ids).decode(errors="replace")
    >>> list(texts_as_they_come(decode, [[72, 195], [169], [10, 33]], ["!"]))
    ['H', 'é', '\\n']
    >>> list(texts_as_they_come(decode, [[78], [195], [169], [33]], ["Né"]))
    []
    """
    ids, shown = [], 0
    for more in new:
        ids += more
        whole = decode(ids)
        text = text_after("", whole, stop)
        ended = len(text) < len(whole)
        final = text if ended else text[: len(text) - _unsettled(text, stop)]
        if len(final) > shown:
            yield final[shown:]
            shown = len(final)
        if ended:
            return
    rest = text_after("", decode(ids), stop)[shown:]
    if rest:
        yield rest


def _unsettled(text: str, stop: Sequence[str]) -> int:
    """How many letters at the end of a text may become others, or begin a text of `stop`."""
    whole = text.rstrip(BROKEN)
    begun = (size for each in stop for size in range(len(each) - 1, 0, -1) if whole.endswith(each[:size]))
    return len(text) - len(whole) + max(begun, default=0)


def template_beside(tokenizer: Path, written: str) -> ChatTemplate:
    """The template beside the tokenizer of a run's step, or one by name or file.

    Raises:
        DataError: there is none, or it is not a template.
    """
    if not written:
        return ChatTemplate.of_tokenizer(tokenizer)
    tokens = ChatTemplate.tokens_of(tokenizer)
    if written in NAMED_TEMPLATES:
        return ChatTemplate.named(written, tokens=tokens)
    if not Path(written).is_file():
        raise DataError(f"--template={quoted(written)} is no file; name one, or one of {', '.join(NAMED_TEMPLATES)}")
    return ChatTemplate.of_file(written, tokens=tokens)
