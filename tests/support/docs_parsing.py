"""Reads command lines of the project's programs, as JSON from stdin, and stops each where it has been read.

Prints, as JSON, what is wrong with each: null where it was accepted.
"""

import argparse
import json
import pathlib
import runpy
import shlex
import sys

import parallax.cli.command
from parallax.config.settings import read_settings


class Accepted(BaseException):
    """A command line that was read to its end."""


def accept_arguments(parser, *args, _parse=argparse.ArgumentParser.parse_args, **kwargs):
    _parse(parser, *args, **kwargs)
    raise Accepted


def accept_line(argv, own, config=None, in_bucket=(), _read=parallax.cli.command.read_line):
    read_settings(_read(argv, own, config, in_bucket=in_bucket).config.to_dict())
    raise Accepted


def verdict(command):
    """None, or what is wrong with `python [-m] WHAT ARGUMENTS`."""
    _, *words = shlex.split(command)
    module = words[0] == "-m"
    name, *arguments = words[1:] if module else words
    sys.argv = [name, *arguments]
    sys.path[0] = "" if module else str(pathlib.Path(name).parent)
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True) if module else runpy.run_path(
            name, run_name="__main__"
        )
    except Accepted:
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "it ended before its arguments were read"


if __name__ == "__main__":
    argparse.ArgumentParser.parse_args = accept_arguments
    parallax.cli.command.read_line = accept_line
    verdicts = [verdict(command) for command in json.load(sys.stdin)]
    print(json.dumps(verdicts))
