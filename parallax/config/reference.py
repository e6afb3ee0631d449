"""Every key of a config as a line, with its default and meaning, for configs/base.py and --help-config."""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from parallax.config.keys import Section

CONFIGS = Path(__file__).resolve().parents[2] / "configs"  # that come with the repository
WIDTH = 120


def about(section: type[Section]) -> str:
    """What a section is about, in a sentence."""
    return inspect.getdoc(section).partition("\n")[0]


def key_lines(section: type[Section], prefix: str) -> Iterator[str]:
    """A line for each key of a section, whose comment goes above it where it is long.

    >>> from parallax.config.sections import GuardConfig
    >>> list(key_lines(GuardConfig, "config"))[2]
    'config.guard.spike_signal = "loss"  # "loss" | "grad_norm": what is judged'
    """
    indent = " " * (len(prefix) - len(prefix.lstrip())) + "# "
    for field in fields(section):
        key = field.metadata["key"]
        comment = ": ".join(filter(None, [key.range if key.choices else "", key.meaning]))
        line = f"{prefix}.{section.section}.{field.name} = {default_of(field)}"
        if len(line) + len(f"  # {comment}") <= WIDTH:
            yield f"{line}  # {comment}"
        else:
            yield from textwrap.wrap(comment, WIDTH, initial_indent=indent, subsequent_indent=indent)
            yield line


def default_of(field: Field) -> str:
    """The default of a key as Python writes it."""
    return json.dumps(field.default) if field.type is str else _number(field.default)


def _number(value: Any) -> str:
    """A number or truth value; many digits are grouped.

    >>> [_number(value) for value in (True, 1000, 86_400, 1e-6)]
    ['True', '1000', '86_400', '1e-6']
    """
    many = not isinstance(value, bool) and abs(value) >= 10_000
    return f"{value:_}" if many else re.sub("e-0", "e-", repr(value))
