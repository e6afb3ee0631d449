"""The border between a ConfigDict, which users write, and the dataclasses that the package reads."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from parallax.config.settings import Settings, default_settings, load_saved, read_settings

WIDTH = 100


def settings_of(config: ConfigDict | Settings, *, lock: bool = False) -> Settings:
    """The checked settings of a config, which can then be locked; ConfigError names what is wrong."""
    if isinstance(config, Settings):
        return config
    settings = read_settings(config)
    if lock:
        config.lock()
    return settings


def load_config(path: Path | str) -> ConfigDict:
    """The config that a run has saved as config.json."""
    return ConfigDict(load_saved(Path(path)))


def lines_of(settings: Settings) -> list[str]:
    """What differs from configs/base.py, a section a line: what is printed when a run starts."""
    base = default_settings().to_dict()
    changed = {
        name: [f"{key}={value!r}" for key, value in keys.items() if value != base[name][key]]
        for name, keys in settings.to_dict().items()
    }
    width = max(map(len, changed))
    return [line for name, keys in changed.items() for line in _wrapped(f"{name:{width}}", keys)]


def _wrapped(head: str, words: Sequence[str]) -> Iterator[str]:
    """The words behind the head, in lines of at most WIDTH columns, where no single word is longer."""
    line = head
    for word in words:
        if line != head and len(line) + 2 + len(word) > WIDTH:
            yield line
            line = head = " " * len(head)
        line += f"  {word}"
    if words:
        yield line
