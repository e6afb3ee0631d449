"""Endless counting: text that a small model learns within a few steps."""

from collections.abc import Iterator
from itertools import count

DOCUMENT_BYTES = 1000


def documents(tokens: int) -> Iterator[str]:
    """Documents of `tokens` bytes in all, ends counted: exactly so many tokens of the bytes tokenizer.

    Each counts up from a start of its own by a step of its own.
    """
    left = tokens
    for number in count():
        # The last document takes a byte more where one that is only an end would be left.
        size = left - 1 if left <= DOCUMENT_BYTES + 2 else DOCUMENT_BYTES
        if size < 1:
            return
        yield _counting(start=number * 7919 % 1000, step=1 + number * 104_729 % 9, size=size)
        left -= size + 1


def _counting(*, start: int, step: int, size: int) -> str:
    numbers = range(start, start + step * size, step)
    return " ".join(map(str, numbers))[:size]
