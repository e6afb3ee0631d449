"""The sections `Communication` of docstrings, read as numbers.

    Communication, scatter:
        forward   all_to_all of x over tp if it is cut over seq; reduce_scatter of gate, up and the result over tp
        backward  the transposes

has a variant, and two directions of items, each with a kind, what is sent (as many calls as things), an axis and
perhaps a condition.
"""

import inspect
import re
from collections import Counter
from typing import NamedTuple

TRANSPOSES = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "permute": "permute",
    "all_reduce": None,
}
HEADER = re.compile(r"Communication(?:, ([\w ]+))?:")
ITEM = re.compile(r"(\w+) of (.+?) over (.+?)(?: if (.+))?")


class Item(NamedTuple):
    kind: str
    count: int
    axis: str
    condition: str | None


class Section(NamedTuple):
    forward: list[Item]
    backward: list[Item]


def sections(thing, **others):
    """Those of a class or function, by variant ("" where none is named); "as Dense" is found in `others`."""
    found, lines = {}, None
    for line in (inspect.getdoc(thing) or "").splitlines():
        if header := HEADER.fullmatch(line):
            lines = found[header[1] or ""] = []
        elif lines is not None and line.startswith(" "):
            lines.append(line.strip())
        else:
            lines = None
    return {variant: _section(thing, " ".join(lines), others) for variant, lines in found.items()}


def expected(items, facts):
    """How often each (kind, axis) is called where these conditions hold; one that nobody decides is a KeyError."""
    found = Counter()
    for kind, count, axis, condition in items:
        if condition is None or facts[condition]:
            found[kind, axis] += count
    return found


def _section(thing, text, others):
    parts = re.fullmatch(r"forward (.+) backward (.+)", text)
    assert parts, f"{thing.__name__}: a section says what goes forward, then what goes backward, not {text!r}"
    forward = [item for part in parts[1].split(";") for item in _items(part.strip(), others, "forward")]
    backward = []
    for part in map(str.strip, parts[2].split(";")):
        backward += _transposed(forward) if part == "the transposes" else _items(part, others, "backward")
    return Section(forward, backward)


def _items(text, others, direction):
    if text == "nothing":
        return []
    if text.startswith("as "):
        return getattr(sections(others[text.removeprefix("as ")])[""], direction)
    item = ITEM.fullmatch(text)
    assert item and item[1] in TRANSPOSES, f"{text!r} is not like 'all_gather of x over tp if it is cut'"
    return [Item(item[1], len(re.split(", | and ", item[2])), item[3], item[4])]


def _transposed(items):
    return [item._replace(kind=TRANSPOSES[item.kind]) for item in items if TRANSPOSES[item.kind]]
