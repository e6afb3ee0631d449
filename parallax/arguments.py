"""Command lines that argparse reads, with errors like all others, and the defaults that they share with configs."""

import argparse
import runpy
from pathlib import Path
from typing import Any, NoReturn

from parallax.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print with its usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def defaults_of(section: str) -> dict[str, Any]:
    """The defaults of a section, by key, as configs/base.py has them.

    >>> defaults_of("data")["field"]
    'text'
    """
    return dict(runpy.run_path(str(CONFIGS / "base.py"))["get_config"]()[section])
