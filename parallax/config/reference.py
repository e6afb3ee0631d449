"""Every key of a config as a line, with its default and meaning, for configs/base.py and --help-config."""

import inspect
import math
import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path

from parallax.config.keys import ABOVE_ZERO, Section

CONFIGS = Path(__file__).resolve().parents[2] / "configs"  # the configs of the repository
FILE_WIDTH = 120
LARGEST_SHOWN = 10_000  # larger limits are not shown: no useful value comes near


def about(section: type[Section]) -> str:
    """The topic of a section, in one sentence."""
    return inspect.getdoc(section).partition("\n")[0]


def key_lines(section: type[Section], prefix: str) -> Iterator[str]:
    """A line for each key of a section; a long comment goes above its key.

    >>> from parallax.config.sections import GuardConfig
    >>> list(key_lines(GuardConfig, "config"))[2]
    'config.guard.spike_signal = "loss"  # "loss" | "grad_norm": signal in which spikes are detected'
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
    """The allowed values of a key; "" if any text is allowed, or True and False.

    >>> from parallax.config.sections import LayoutConfig, MeshConfig
    >>> values_of(fields(MeshConfig)[0]), values_of(fields(LayoutConfig)[2])
    ('1 or more, or -1', '"vocab_parallel" | "all_to_all"')
    """
    key = field.metadata["key"]
    if field.type in (str, bool):
        of_code = "code" if key.code and key.choices else ""
        return " | ".join([*(f'"{choice}"' for choice in key.choices), *filter(None, [key.other, of_code])])
    least = "above 0" if key.least == ABOVE_ZERO else f"{key.least:.7g}"
    upper = "or more" if key.below == math.inf else f"to below {key.below:g}"
    if key.most is not None and key.most < LARGEST_SHOWN:
        upper = f"to {key.most:g}"
    return f"{least} {upper}" + f", or {key.also}" * (key.also is not None)


def default_of(field: Field) -> str:
    """The default of a key as a Python literal with double quotation marks."""
    return repr(field.default).replace("'", '"')
