"""The config of a run that was trained before: `--config=runs/mine/config.json` loads it through this file."""

from ml_collections import ConfigDict

from parallax.config.load import load_config


def get_config(path: str) -> ConfigDict:
    return load_config(path)
