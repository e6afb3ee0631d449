"""Writes docs/configs.md, the presets and keys of configs/: `python docs/config_keys.py`, or `make golden`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configs.md"
HEAD = """# Configs

*Written by `python docs/config_keys.py` from `configs/`, whose `base.py` is the one place where defaults are born.*

A config is a Python file with `get_config()`: `configs/base.py` has every key, the others are differences from it. On
the command line a key is written `--config.SECTION.KEY=VALUE`. A name that is unknown, a value of another type, or one
that fits nothing else is an error of one line, before anything is compiled. Each section is the keyword arguments of
one frozen dataclass, which checks them.
"""
PRESETS = """## Presets

A preset is a start for a run of your own: copy it, or change keys on the command line. The header of each file says
where its numbers are from, with which command it runs, how long it takes, and which loss to expect.

| `--config=` | | hardware |
|---|---|---|
"""
NO_PRESETS = ("base", "saved")  # all keys, and what loads the config of a run
SECTION = re.compile(r"    config\.(\w+) = ConfigDict\(\)")
KEY = re.compile(r"    config\.(\w+)\.(\w+) = (.+?)(?:  # (.+))?")
COMMENT = re.compile(r"    # (.+)")


class Key(NamedTuple):
    """A key as it is written, and what the comments above and beside it say."""

    name: str
    default: str
    meaning: str


class Section(NamedTuple):
    name: str
    meaning: str
    keys: list[Key]


def sections(source: str) -> Iterator[Section]:
    """The sections of configs/base.py; AssertionError at a line that is none of section, key and comment."""
    above, found = [], []
    for line in source.split("config = ConfigDict()\n", 1)[1].splitlines():
        if comment := COMMENT.fullmatch(line):
            above.append(comment[1])
        elif section := SECTION.fullmatch(line):
            found.append(Section(section[1], " ".join(above), []))
            above = []
        elif key := KEY.fullmatch(line):
            section, name, default, beside = key.groups()
            assert section == found[-1].name, line
            found[-1].keys.append(Key(name, default, " ".join(filter(None, [*above, beside]))))
            above = []
        else:
            assert line.strip() in ("", "return config"), f"configs/base.py: {line!r} is no section, key or comment"
    yield from found


def presets() -> Iterator[str]:
    """A row for each config that is not for all, by its header."""
    for file in sorted((ROOT / "configs").glob("*.py")):
        if file.stem not in NO_PRESETS:
            header = ast.get_docstring(ast.parse(file.read_text()))
            what, hardware = header.partition("\n")[0], re.search(r"(?m)^Hardware: (.+)", header)
            yield f"| `configs/{file.name}` | {marked(what.rstrip('.'))} | {hardware[1].strip().rstrip('.')} |\n"


def page(source: str) -> str:
    """docs/configs.md of a configs/base.py."""
    parts = [HEAD, PRESETS + "".join(presets())]
    for section in sections(source):
        name, _, rest = section.meaning.partition(":")
        parts.append(f"## {section.name}\n\n`{name}`{': ' * bool(rest)}{marked(rest.strip())}\n")
        rows = (f"| `{key.name}` | `{key.default}` | {marked(key.meaning)} |\n" for key in section.keys)
        parts.append("| key | default | |\n|---|---|---|\n" + "".join(rows))
    return "\n".join(parts)


def marked(comment: str) -> str:
    """A comment as Markdown: what it quotes is code, and a bar ends no cell of a table.

    >>> marked('"mla" | "gqa"')
    '`"mla"` \\\\| `"gqa"`'
    """
    return re.sub(r'("[^"]*")', r"`\1`", comment).replace("|", "\\|").replace("*", "\\*")


def main() -> None:
    PAGE.write_text(page((ROOT / "configs" / "base.py").read_text()))
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
