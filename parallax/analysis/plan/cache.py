"""What a sweep has found, kept on disk, so that it can be stopped and taken up again."""

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from parallax.runtime.errors import ConfigError
from parallax.runtime.files import read_object

PACKAGES = ("jax", "jaxlib", "libtpu")
SOURCES = Path(__file__).parents[2]


class Cache:
    """A folder with a file for each result, named by the hash of all that it follows from."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--cache={folder} cannot be written ({error.strerror}); name another folder.") from error

    def get(self, key: str) -> Any | None:
        """What was put there, None where nothing was or where the file is damaged."""
        try:
            entry = read_object(self._path(key), odd_numbers=True)
            return entry["value"] if entry["digest"] == digest(entry["value"]) else None
        except (OSError, ValueError, KeyError):
            return None

    def put(self, key: str, value: Any) -> None:
        """Keep a value that JSON can hold."""
        # Written aside and renamed: whoever reads, and whoever is interrupted, leaves whole files alone.
        aside = self._path(key).with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps({"digest": digest(value), "value": value}))
        aside.replace(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def digest(value: Any) -> str:
    """A hash of anything that JSON can hold.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def versions() -> dict[str, str]:
    """Of the packages that a prediction depends on, and a hash of our own source."""
    sources = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        sources.update(path.read_bytes())
    return {"parallax": sources.hexdigest()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
