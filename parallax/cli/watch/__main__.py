"""Watch runs in a terminal: losses, speed, memory, checkpoints, and whether they go on.

    python -m parallax.watch runs/mine
    python -m parallax.watch runs/mine runs/other --once

It only reads what the runs write, from this machine or another that sees their folders. It ends when all of them have
ended, or with Ctrl-C, which no run hears. Where the output is no terminal, one picture is printed.
"""

import argparse
import io
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.live import Live

from parallax.cli.arguments import Parser, local_path
from parallax.cli.watch.run import WatchedRun
from parallax.cli.watch.view import View
from parallax.runtime.errors import ConfigError, check_whole, exit_status
from parallax.runtime.files import write_file

FRESH_SECS = 1.0  # between two looks at the files
SVG = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # it names no font of another site
LEAST_WIDTH = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch; returns the exit status. What a user got wrong is one line on stderr."""
    return exit_status(lambda: watch(parse(arguments)), one_line=True)


def watch(flags: argparse.Namespace) -> None:
    """Draw the runs, once or until they have ended."""
    runs = [WatchedRun(path) for path in flags.workdir]
    console = Console(width=flags.width)
    if flags.once or not console.is_terminal:
        console.print(View(runs))
    else:
        follow(runs, console)
    if flags.svg is not None:
        write_svg(runs, console.width, flags.svg)


def follow(runs: Sequence[WatchedRun], console: Console) -> None:
    """Draw again and again on a screen of its own; the last picture stays on the terminal."""
    try:
        with Live(View(runs), console=console, screen=True, auto_refresh=False) as live:
            while not all(run.status.over for run in runs):
                live.update(View(runs), refresh=True)
                time.sleep(FRESH_SECS)
                for run in runs:
                    run.refresh()
    except KeyboardInterrupt:
        pass
    console.print(View(runs))


def write_svg(runs: Sequence[WatchedRun], width: int, path: Path) -> None:
    """Write the last picture alone, none of those before it."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(View(runs))
    svg = console.export_svg(title="python -m parallax.watch", code_format=SVG)
    try:
        write_file(path, svg)
    except OSError as error:
        raise ConfigError(f"--svg={path} cannot be written: {error.strerror}") from error


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags; ConfigError says what is wrong with them."""
    parser = Parser("python -m parallax.watch", description=__doc__)
    parser.add_argument("workdir", type=local_path, nargs="+", help="the folders of the runs")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--width", type=int, help="columns; default: those of the terminal")
    parser.add_argument("--svg", type=local_path, help="also write the picture to this file")
    flags = parser.parse_args(arguments)
    if flags.width is not None:
        check_whole("--width", flags.width, least=LEAST_WIDTH)
    return flags


if __name__ == "__main__":
    sys.exit(main())
