"""Every key of a config as a line, with its default and meaning, for configs/base.py and --help-config."""

import inspect
import math
import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path

from parallax.config.keys import ABOVE_ZERO, Section

CONFIGS = Path(__file__).resolve().parents[2] / "configs"  # that come with the repository
FILE_WIDTH = 120
LARGEST_SHOWN = 10_000  # a larger limit is far from what anybody writes


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
        comment = f"{values_of(field)}: {key.meaning}" if key.choices else key.meaning
        line = f"{prefix}.{section.section}.{field.name} = {default_of(field)}"
        if len(line) + len(f"  # {comment}") <= FILE_WIDTH:
            yield f"{line}  # {comment}"
        else:
            yield from textwrap.wrap(comment, FILE_WIDTH, initial_indent=indent, subsequent_indent=indent)
            yield line


def values_of(field: Field) -> str:
    """The values that a key takes; "" where any text is, and where they are True and False.

    >>> from parallax.config.sections import LayoutConfig, MeshConfig
    >>> values_of(fields(MeshConfig)[0]), values_of(fields(LayoutConfig)[2])
    ('1 or more, or -1', '"vocab_parallel" | "all_to_all"')
    """
    key = field.metadata["key"]
    if field.type in (str, bool):
        return " | ".join([*(f'"{choice}"' for choice in key.choices), *filter(None, [key.other])])
    least = "above 0" if key.least == ABOVE_ZERO else f"{key.least:.7g}"
    upper = "or more" if key.below == math.inf else f"to below {key.below:g}"
    if key.most is not None and key.most < LARGEST_SHOWN:
        upper = f"to {key.most:g}"
    return f"{least} {upper}" + f", or {key.also}" * (key.also is not None)


def default_of(field: Field) -> str:
    """The default of a key as Python writes it, with the quotation marks of this project."""
    return repr(field.default).replace("'", '"')
