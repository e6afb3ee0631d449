"""Conversations about Python's standard library, made from its documentation strings: something to fine-tune on."""

import ast
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

WHAT = ("What does {} do?", "What is {} for?", "Tell me about {}.", "Explain {} in a sentence.")
HOW = ("How do I call it?", "Which arguments does it take?", "And how is it called?")
LONGEST_ANSWER = 300  # letters
ChatRecord = dict[str, list[dict[str, str]]]


class Documented(NamedTuple):
    """A function, class or method, with the first paragraph of what is written about it."""

    name: str
    said: str
    call: str  # as `name(argument, other=...)`; "" of classes


def conversations(folder: Path | None = None, *, held_out: bool = False) -> Iterator[ChatRecord]:
    """Conversations about each documented public function, class and method of the modules in a folder, of Python's
    standard library by default, in a fixed order. Modules are read, not imported.

    Each is asked for in all words of `WHAT` but one; with `held_out`, in that one.

    >>> first = next(conversations())["messages"]
    >>> [message["role"] for message in first[:2]], first[0]["content"]
    (['user', 'assistant'], 'What is abc.abstractmethod for?')
    """
    number = count()
    for module, file in _modules(folder or Path(sysconfig.get_paths()["stdlib"])):
        for name, said, call in _documented(module, _body(file)):
            place = next(number)
            left_out = WHAT[place % len(WHAT)]
            further = _turn(HOW[place % len(HOW)], call) if call else []
            for question in WHAT:
                if (question == left_out) == held_out:
                    yield {"messages": _turn(question.format(name), said) + further}


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Modules and packages, without tests and what is installed beside them."""
    packages = [(file.parent.name, file) for file in folder.glob("[a-z]*/__init__.py")]
    modules = [(file.stem, file) for file in folder.glob("[a-z]*.py")]
    return sorted((name, file) for name, file in packages + modules if "test" not in name and "-" not in name)


def _body(file: Path) -> list[ast.stmt]:
    """The statements of a module; none of a file that this Python cannot read."""
    try:
        return ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return []


def _documented(within: str, body: list[ast.stmt]) -> Iterator[Documented]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name, is_class = f"{within}.{node.name}", isinstance(node, ast.ClassDef)
        if said := _first_paragraph(ast.get_docstring(node) or ""):
            yield Documented(name, said, "" if is_class else f"{name}({ast.unparse(node.args)})")
        if is_class:
            yield from _documented(name, node.body)


def _first_paragraph(text: str) -> str:
    """The first paragraph in a line, or "" if it is long or no sentence."""
    said = " ".join(text.partition("\n\n")[0].split())
    return said if said[:1].isupper() and len(said) <= LONGEST_ANSWER else ""


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
