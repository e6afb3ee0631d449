"""Several paths in one text of a config, as a list in Python's notation."""

import ast
from collections.abc import Sequence
from typing import NamedTuple

from parallax.errors import ConfigError, nearest, quoted

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


class DatasetName(NamedTuple):
    """A split of a data set: of the Hugging Face hub by name, or in a folder."""

    name: str
    config: str = ""  # the library's own choice, if there is one
    split: str = "train"
    revision: str = ""


def dataset_of(key: str, path: str) -> DatasetName:
    """The data set that a path names.

    >>> dataset_of("data.path", "allenai/c4?config=en&split=validation")
    DatasetName(name='allenai/c4', config='en', split='validation', revision='')

    Raises:
        ConfigError: a setting is unknown, empty or there twice.
    """
    name, _, written = path.partition("?")
    settings = [setting.partition("=") for setting in written.split("&") if setting]
    known = DatasetName._fields[1:]
    for setting, _, value in settings:
        if setting not in known:
            raise ConfigError(f"{key}={quoted(path)}: {quoted(setting)} is unknown; {nearest(setting, known)}")
        if not value or [each for each, *_ in settings].count(setting) > 1:
            raise ConfigError(f"{key}={quoted(path)}: write {setting} once, as NAME?{setting}=VALUE")
    if not name:
        raise ConfigError(f"{key}={quoted(path)} has no name; write it as 'allenai/c4?config=en'")
    return DatasetName(name, **{setting: value for setting, _, value in settings})
