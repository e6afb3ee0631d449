"""Common parts of the benchmarks' command lines: fast --help, --smoke, and one-line errors."""

import argparse
import ast
import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parallax.cli.arguments import Parser
from parallax.errors import ConfigError, exit_status

WORKS = ("bench_small", "tiny_gqa")  # configs of a size for simulated devices


class Arguments(Parser):
    """Flags of a benchmark; `smallest` are their defaults with --smoke."""

    def __init__(self, *, smallest: Mapping[str, Any] | None = None, **how: Any):
        super().__init__(**how)
        self.smallest = smallest or {}
        self.add_argument("--smoke", action="store_true", help="the smallest size, as a test; its figures mean nothing")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        written = sys.argv[1:] if args is None else args
        if "--smoke" in sys.argv or "--smoke" in written:  # it may stand before the name of a command
            self.set_defaults(smoke=True, **self.smallest)
        return super().parse_known_args(written, namespace)


def whole_number(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def share(text: str) -> float:
    """A number above 0, and at most 1."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no share; write a number above 0 and at most 1, such as 0.7")


def mesh_sizes(text: str) -> str:
    """Sizes of pp, dp and tp, as written."""
    sizes = text.split(",")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; write PP,DP,TP such as 2,2,2")
    return text


def config_of(name: str) -> Any:
    """A config of the repository by name, with a vocab if it leaves that to the tokenizer."""
    config = importlib.import_module(f"configs.{name}").get_config()
    config.model.vocab = config.model.vocab or 256
    return config


def setting(text: str) -> tuple[str, Any]:
    """A key and its value, as a number if possible."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE; write one such as mesh.tp=2")
    with contextlib.suppress(ValueError, SyntaxError):
        return key, ast.literal_eval(value)
    return key, value


def config_with(name: str, changes: Mapping[str, Any]) -> Any:
    """The same with changes by key; ConfigError for an unknown key or a wrong type."""
    config = config_of(name)
    try:
        config.update_from_flattened_dict(changes)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"argument --set: {error.args[0]}") from error
    return config


def absent_devices(name: str) -> list[Any]:
    """Devices of chips that are not present; ConfigError for an unknown name, or without their compiler."""
    from parallax.analysis.planned.topology import devices_of, without_chips

    without_chips([f"--topology={name}"])
    return devices_of(name)


def run_benchmark(main: Callable[[], None]) -> NoReturn:
    """Run a benchmark and exit with its status; user errors are one line on stderr."""
    sys.exit(exit_status(main, one_line=True))
