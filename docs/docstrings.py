"""Docstrings as the site shows them: examples and what a layer sends, line by line, in blocks of their own."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)^[ \t]*>>> .*(?:\n[ \t]*\S.*)*")
SENDS = re.compile(r"(?m)^(Communication.*):\n((?:[ \t]+\S.*\n?)+)")


class Blocks(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring with its literal parts fenced.

    >>> as_markdown("Adds.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    text = SENDS.sub(lambda m: f"\n**{m[1]}**\n\n```text\n{_dedented(m[2])}\n```\n", text)
    return EXAMPLE.sub(lambda m: f"```pycon\n{_dedented(m[0])}\n```", text)


def _dedented(block: str) -> str:
    lines = block.rstrip().splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "\n".join(line[margin:] for line in lines)
