"""A file of prompts, generated from in batches of few shapes."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from parallax.config.sections import SampleConfig
from parallax.data.chat import ASSISTANT, ChatTemplate
from parallax.errors import DataError, errors_as, first_line, quoted
from parallax.inference.chat import ids_of_messages
from parallax.inference.generate import encode, ends_with, generate, padded_length, text_after
from parallax.inference.run import Run
from parallax.storage.files import read_bytes

Prompt = dict[str, Any]  # {"prompt": text} or {"messages": [...]}, and what else its line has


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file: of JSON in each line, if its name ends in .jsonl, otherwise lines of text. Empty lines are
    left out.

    Raises:
        DataError: the file is missing, has no prompts, or a line is not one.
    """
    with errors_as(DataError, f"{file} cannot be read: ", "", UnicodeDecodeError, missing=f"{file} does not exist"):
        text = read_bytes(file).decode("utf-8")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"{file} has no prompts; write one in each line")
    if file.suffix != ".jsonl":
        return [{"prompt": line.removesuffix("\r")} for _, line in lines]
    return [_prompt(line, f"{file}, line {number}") for number, line in lines]


def _prompt(line: str, where: str) -> Prompt:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {first_line(error)}") from None
    given = {"prompt": str, "messages": list}
    named = [key for key in given if isinstance(content, dict) and key in content]
    if len(named) != 1 or not content[named[0]] or not isinstance(content[named[0]], given[named[0]]):
        raise DataError(f'{where} is {quoted(content)}; write {{"prompt": "text"}} or {{"messages": [...]}}')
    for message in content.get("messages", ()):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise DataError(f'{where} has the message {quoted(message)}; write {{"role": "user", "content": "text"}}')
    return content


class Completion(NamedTuple):
    """The text after the prompt of this number in its file, and the number of tokens that it has."""

    number: int
    text: str
    tokens: int


def complete_prompts(
    run: Run,
    prompts: Sequence[Prompt],
    sample: SampleConfig,
    *,
    rows: int,
    template: Callable[[], ChatTemplate],
    stop: Sequence[str] = (),
) -> Iterator[Completion]:
    """Completions in the order of the prompts' lengths, shortest first; `template` is called if there are messages.

    Batches have `rows` prompts, and are padded to few lengths, so that few programs are compiled. Noise is another in
    each batch.
    """
    of_messages = template() if any("messages" in prompt for prompt in prompts) else None
    stop = (*stop, *(of_messages.stops if of_messages else ()))
    ends = ends_with(run.tokenizer, run.ends, stop)
    decode = partial(run.tokenizer.decode, special_tokens=sample.special_tokens)
    ids = [_ids(run, prompt, sample, of_messages) for prompt in prompts]
    for batch, (length, numbers) in enumerate(batches_by_length(ids, rows, run.settings.data.longest_seq)):
        filled = [ids[number] for number in (*numbers, *[numbers[0]] * (rows - len(numbers)))]
        seeded = dataclasses.replace(sample, seed=sample.seed + batch)
        about = dict(ends=ends, vocab=run.tokenizer.vocab, length=length)
        for number, new in zip(numbers, generate(run.model, run.params, filled, seeded, **about)):
            lead = ids[number] if "prompt" in prompts[number] else []
            text = text_after(decode(lead), decode([*lead, *new]), stop)
            yield Completion(number, text, len(new))


def batches_by_length(ids: Sequence[Sequence[int]], rows: int, longest: int) -> list[tuple[int, list[int]]]:
    """Numbers of prompts that are generated from together, and the length to which they are padded.

    >>> batches_by_length([[1] * 40, [1], [1] * 3, [1] * 2], rows=2, longest=100)
    [(32, [1, 3]), (32, [2]), (64, [0])]
    """
    numbers = sorted(range(len(ids)), key=lambda number: len(ids[number]))
    batches = []
    for length, group in itertools.groupby(numbers, lambda number: padded_length(len(ids[number]), longest)):
        members = list(group)
        batches += [(length, members[first : first + rows]) for first in range(0, len(members), rows)]
    return batches


def _ids(run: Run, prompt: Prompt, sample: SampleConfig, template: ChatTemplate | None) -> list[int]:
    if "messages" in prompt:
        return ids_of_messages(run, template, prompt["messages"])
    return encode(run.tokenizer, prompt["prompt"], special_tokens=sample.special_tokens).tolist()


def with_completion(prompt: Prompt, text: str) -> Prompt:
    """A prompt's line with what was generated: an answer among its messages, or a completion.

    >>> with_completion({"prompt": "It is"}, " so")
    {'prompt': 'It is', 'completion': ' so'}
    """
    if "messages" in prompt:
        return prompt | {"messages": [*prompt["messages"], {"role": ASSISTANT, "content": text}]}
    return prompt | {"completion": text}
