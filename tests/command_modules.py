"""The module behind each command, `python -m parallax.NAME`."""

import importlib
from types import ModuleType

FOLDERS = {"watch": "cli.watch.__main__"}


def command(name: str) -> ModuleType:
    """The module that `python -m parallax.NAME` runs."""
    return importlib.import_module(f"parallax.{FOLDERS.get(name, f'cli.{name}')}")
