"""The module behind each command, `python -m parallax.NAME`."""

import importlib
from types import ModuleType


def command(name: str) -> ModuleType:
    """The module that `python -m parallax.NAME` runs."""
    return importlib.import_module(f"parallax.cli.{name}")
