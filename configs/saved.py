"""The config of a run that was trained before: `--config=runs/mine/config.json` loads it through this file."""

from pathlib import Path

from ml_collections import ConfigDict

from parallax.config.settings import load_saved


def get_config(path: str) -> ConfigDict:
    return ConfigDict(load_saved(Path(path)))
