"""Notebooks as pages of the site: their cells, and what these showed when the notebook was saved."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SUFFIXES = {"image/svg+xml": ".svg", "image/png": ".png"}
# Of an output that comes in several forms, the first of these that it has is shown.
FORMS = ("text/html", "text/markdown", *SUFFIXES, "text/plain")
HEADING = re.compile(r"(?m)^#+ (.+)$")


class NotebookPage(NamedTuple):
    """A page in Markdown, and its pictures by the names that it has for them."""

    markdown: str
    pictures: dict[str, str | bytes]


def page(file: Path, linked: Callable[[str], str]) -> NotebookPage:
    """The page of a notebook; `linked` gives the texts of its cells the links of the site."""
    parts, pictures, heading = [], {}, file.stem
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = whole(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = [heading, *HEADING.findall(source)][-1]
            parts.append(linked(source))
            continue
        parts.append(fenced(source, "python"))
        for kind, content in filter(None, map(shown, cell["outputs"])):
            if kind in SUFFIXES:
                name = f"{file.stem}_{len(pictures) + 1}{SUFFIXES[kind]}"
                pictures[name] = base64.b64decode(content) if kind == "image/png" else content
                content = f"![{heading}]({name})"
            parts.append(content)
    title, _, rest = "\n\n".join(parts).partition("\n")
    return NotebookPage(f"{title}\n\n*`notebooks/{file.name}`, as it ran.*\n{rest}\n", pictures)


def shown(output: dict[str, Any]) -> tuple[str, str] | None:
    """What a reader sees of an output: its form, and a picture or Markdown; None of what has none of FORMS."""
    forms = {"text/plain": output["text"]} if output["output_type"] == "stream" else output.get("data", {})
    kind = next((form for form in FORMS if form in forms), None)
    if kind is None:
        return None
    content = whole(forms[kind])
    if kind == "text/html":
        content = f'<div class="output">\n{content}\n</div>'
    return kind, fenced(content, "text") if kind == "text/plain" else content


def whole(lines: str | list[str]) -> str:
    """A text as notebooks store it: in one piece, or in lines that have their ends."""
    return "".join(lines).rstrip("\n")


def fenced(text: str, language: str) -> str:
    """A block of code, between more backticks than are in it.

    >>> fenced("x = 1", "python")
    '```python\\nx = 1\\n```'
    """
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    return f"{ticks}{language}\n{text}\n{ticks}"
