"""`python -m parallax`: the commands, each with what it does."""

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from parallax.errors import ConfigError, exit_status, nearest
from parallax.storage.files import names_in, read_bytes

CLI = Path(__file__).parent / "cli"
SCRIPT = "parallax-"  # an installed command is a program of this name, too
LAST_LINE = f"--help says more of each. Where Parallax is installed, each is a program, too, as {SCRIPT}train."


def start() -> None:
    """Run the command after which the program is named, as parallax-train."""
    name = Path(sys.argv[0]).stem.removeprefix(SCRIPT)
    runpy.run_module(f"parallax.cli.{name}", run_name="__main__", alter_sys=True)


def main(arguments: Sequence[str]) -> int:
    """Print the commands; returns the exit status. What does not exist is one line on stderr."""
    return exit_status(lambda: print(_listed(arguments)))


def _listed(arguments: Sequence[str]) -> str:
    known = commands()
    if arguments and arguments[0] not in ("-h", "--help"):
        name = arguments[0]
        advice = f"write python -m parallax.{name}" if name in known else nearest(name, known)
        raise ConfigError(f"{name!r} is no argument of python -m parallax; {advice}")
    lines = {f"python -m parallax.{name}": about for name, about in known.items()}
    width = max(map(len, lines))
    return "\n".join([*(f"{line:{width}}  {about}" for line, about in lines.items()), "", LAST_LINE])


def commands() -> dict[str, str]:
    """The commands by name, each with the first sentence of its help; nothing of them is imported."""
    programs = {Path(name).stem: _parsed(CLI / name) for name in names_in(CLI) if name.endswith(".py")}
    mains = {name for name, tree in programs.items() for node in tree.body if getattr(node, "name", "") == "main"}
    return {name: _about(tree) for name, tree in programs.items() if name in mains}


def _parsed(file: Path) -> ast.Module:
    return ast.parse(read_bytes(file))


def _about(program: ast.Module) -> str:
    return " ".join(ast.get_docstring(program).partition("\n\n")[0].split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
