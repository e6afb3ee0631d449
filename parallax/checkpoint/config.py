"""The settings of a run's checkpoints."""

from dataclasses import dataclass

from parallax.runtime.errors import ConfigError


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep: the last few, and the best few by eval/loss."""

    every_steps: int
    keep_last: int
    keep_best: int

    def __post_init__(self):
        for key, least in (("every_steps", 0), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"checkpoint.{key}={getattr(self, key)} is too small; use {least} or more")
