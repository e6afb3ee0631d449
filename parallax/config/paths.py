"""Several paths in one text of a config, as a list in Python's notation."""

import ast
from collections.abc import Sequence

from parallax.errors import ConfigError, quoted

LIST_STARTS = ("['", '["')


def paths_of(key: str, text: str) -> tuple[str, ...]:
    """The paths and globs of a text: itself, or those of a list; none of an empty text.

    >>> paths_of("data.path", "[ab]/*.jsonl"), paths_of("data.path", "['web/*.jsonl', 'more']")
    (('[ab]/*.jsonl',), ('web/*.jsonl', 'more'))

    Raises:
        ConfigError: it begins as a list and is none, or not one of texts.
    """
    if not text.lstrip().startswith(LIST_STARTS):
        return (text,) if text else ()
    try:
        paths = ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        paths = None
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(f"""{key}={quoted(text)} is not a list of paths; write it as "['web/*.jsonl', 'more']\"""")
    return tuple(paths)


def paths_text(paths: Sequence[str]) -> str:
    """The text of which `paths_of` reads these paths.

    >>> paths_text(["a"]), paths_text(["a", "b"])
    ('a', "['a', 'b']")
    """
    is_plain = len(paths) == 1 and not paths[0].lstrip().startswith(LIST_STARTS)
    return paths[0] if is_plain else str(list(paths)) if paths else ""
