"""Writes configs/base.py and docs/configs.md from parallax/config/sections.py: `python docs/config_keys.py`."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from parallax.config.reference import about, default_of, key_lines, values_of
from parallax.config.sections import SECTIONS

PAGE = ROOT / "docs" / "configs.md"
BASE = ROOT / "configs" / "base.py"
BASE_HEAD = '''"""Every key of a run, with its default and meaning. Other configs are differences from this one.

Written by `python docs/config_keys.py` from parallax/config/sections.py, where a key is added or changed.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
'''
HEAD = """# Configs

*Written by `python docs/config_keys.py` from `parallax/config/sections.py` and `configs/`.*

A config is a Python file with `get_config()`: `configs/base.py` has every key, the others are differences from it. On
the command line a key is written `--config.SECTION.KEY=VALUE`. A name that is unknown, a value of another type, or one
that fits nothing else is an error of one line, before anything is compiled. Each section is one frozen dataclass, which
checks its values; Python makes it as `ModelConfig(layers=8)`, say, with the defaults for all other keys.

Configs and run folders of earlier versions load: a key that was renamed counts as what it is today, a key that came
later has its default, and one line on stderr says so. A run's folder [does not decide
all keys](reliability.md#a-runs-folder-from-somebody-else).
"""
PRESETS = """## Presets

A preset is a start for a run of your own: copy it, or change keys on the command line. The header of each file says
where its numbers are from, with which command it runs, how long it takes, and which loss to expect.

| `--config=` | | hardware |
|---|---|---|
"""
NO_PRESETS = ("base",)  # all keys


def base() -> str:
    """configs/base.py."""
    parts = [BASE_HEAD]
    for name, section in SECTIONS.items():
        lines = [f"# {about(section)}", f"config.{name} = ConfigDict()"]
        keys = key_lines(section, "    config")
        parts.append("".join(f"{line}\n" for line in (*(f"    {line}" for line in lines), *keys)))
    return "\n".join([*parts, "    return config\n"])


def presets() -> Iterator[str]:
    """A row for each config that is not for all, by its header."""
    for file in sorted((ROOT / "configs").glob("*.py")):
        if file.stem not in NO_PRESETS:
            header = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
            what, hardware = header.partition("\n")[0], re.search(r"(?m)^Hardware: (.+)", header)
            yield f"| `configs/{file.name}` | {marked(what.rstrip('.'))} | {hardware[1].strip().rstrip('.')} |\n"


def page() -> str:
    """docs/configs.md."""
    parts = [HEAD, PRESETS + "".join(presets())]
    for name, section in SECTIONS.items():
        rows = [
            f"| `{field.name}` | `{default_of(field)}` | {marked(values_of(field))} | "
            f"{marked(field.metadata['key'].meaning)} |\n"
            for field in fields(section)
        ]
        parts.append(f"## {name}\n\n{marked(about(section))}\n")
        parts.append("| key | default | values | |\n|---|---|---|---|\n" + "".join(rows))
    return "\n".join(parts)


def marked(comment: str) -> str:
    """A comment as Markdown: what it quotes is code, and a bar ends no cell of a table.

    >>> marked('"mla" | "gqa"')
    '`"mla"` \\\\| `"gqa"`'
    """
    return re.sub(r'("[^"]*")', r"`\1`", comment).replace("|", "\\|").replace("*", "\\*")


def main() -> None:
    for path, text in ((BASE, base()), (PAGE, page())):
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
