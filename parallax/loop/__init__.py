"""Training from a config to a finished run folder: all on the host that has time, files and printing."""

from parallax.loop.config import load_config, settings_of
from parallax.loop.folder import RunFolder, check_run_name
from parallax.loop.run import DivergenceError, Outcome, train
from parallax.settings import TrainConfig

__all__ = [
    "DivergenceError",
    "Outcome",
    "RunFolder",
    "TrainConfig",
    "check_run_name",
    "load_config",
    "settings_of",
    "train",
]
