"""The border between a ConfigDict, which users write, and the dataclasses that the package reads."""

from pathlib import Path

from ml_collections import ConfigDict

from parallax.settings import Settings, load_json, read_settings


def settings_of(config: ConfigDict | Settings) -> Settings:
    """The checked settings of a config; ConfigError names what is wrong."""
    return config if isinstance(config, Settings) else read_settings(config)


def load_config(path: Path | str) -> ConfigDict:
    """The config that a run has saved as config.json."""
    return ConfigDict(load_json(Path(path)))


def lines_of(settings: Settings) -> list[str]:
    """A section a line, as it is printed when a run starts."""
    return repr(settings).splitlines()
