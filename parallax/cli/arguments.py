"""Common parts of command lines: flags with dashes, help, and one-line errors for argparse."""

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from parallax.errors import ConfigError, errors_as, quoted, why_not_local
from parallax.storage.buckets import BucketPath, is_in_bucket, path_of
from parallax.storage.files import write_file
from parallax.storage.remote import AnyPath, source_path


class Parser(argparse.ArgumentParser):
    """Raises errors that argparse would print with its usage; its help has the description first and the flags last."""

    def __init__(self, *args: Any, description: str = "", **kwargs: Any):
        style = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **style | kwargs)
        self._about = description.strip()

    def format_help(self) -> str:
        return f"{self._about}\n\n{super().format_help()}".lstrip()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        flags = re.findall(r"--([\w-]+)", self.format_usage())
        return super().parse_known_args(dashed(sys.argv[1:] if args is None else args, flags), namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def dashed(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """A command line with dashes in its own flags, also for --run_name; words after -- are not changed.

    >>> dashed(["--run_name=my_run", "--a_b", "--", "--run_name"], ["run-name"])
    ['--run-name=my_run', '--a_b', '--', '--run_name']
    """
    end = words.index("--") if "--" in words else len(words)
    return [_dashed(word, flags) for word in words[:end]] + list(words[end:])


def _dashed(word: str, flags: Collection[str]) -> str:
    flag, equals, value = word.partition("=")
    name = flag.lstrip("-").replace("_", "-")
    known = name in flags or name.removeprefix("no") in flags  # as in absl: --notrace-only
    return flag.replace("_", "-") + equals + value if flag.startswith("-") and known else word


def add_command(commands: Any, name: str, text: str, doc: str) -> argparse.ArgumentParser:
    """The parser of one of a program's commands; `doc` is the program's docstring."""
    return commands.add_parser(name, help=text, description=about_command(name, text, doc))


def about_command(name: str, text: str, doc: str) -> str:
    """Description of a command: a sentence, and its examples from the program's docstring.

    >>> print(about_command("add", "add numbers up", "Sums.\\n\\n    sums add 1 2\\n    sums take 1 2"))
    Add numbers up.
    <BLANKLINE>
        sums add 1 2
    """
    examples = [line for line in doc.splitlines() if line.startswith(" ") and f" {name} " in line]
    return "\n".join([f"{text[0].upper()}{text[1:]}.", "", *examples])


def write_output(flag: str, path: str | Path, text: str) -> None:
    """Write the file that a flag names; ConfigError if that fails."""
    with errors_as(ConfigError, f"--{flag}={path} cannot be written: "):
        write_file(Path(path), text)


def local_path(text: str) -> Path:
    """The type of path arguments; argparse reports URLs, with the argument's name."""
    if reason := why_not_local(text):
        raise argparse.ArgumentTypeError(f"{quoted(text)} {reason}")
    return Path(text)


def run_path(text: str) -> Path | BucketPath:
    """The type of arguments that name the folder of a run, here or in a bucket."""
    return path_of(text) if is_in_bucket(text) else local_path(text)


def source_of(text: str) -> AnyPath:
    """The type of arguments that name a folder or a file to read, here, in a bucket, or behind a URL."""
    try:
        return source_path(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """The type of integer arguments from 1."""
    if not re.fullmatch("0*[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999999")
    return int(text)
