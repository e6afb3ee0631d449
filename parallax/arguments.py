"""Command lines that argparse reads, with errors like all others."""

import argparse
from typing import NoReturn

from parallax.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print with its usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
