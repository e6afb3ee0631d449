"""The border between a ConfigDict, which users write, and the dataclasses that the package reads."""

from pathlib import Path

from ml_collections import ConfigDict

from parallax.settings import Settings, load_saved, read_settings


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
    """A section a line, as it is printed when a run starts."""
    return repr(settings).splitlines()
