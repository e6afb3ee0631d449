"""Parameters of a run as safetensors files, and back.

    python -m parallax.convert export runs/mine exported/mine
    python -m parallax.convert import exported/mine runs/other

An imported run is what train.init_from and `python -m parallax.generate` take.
"""

import os

# The start-up talk of XLA's C++ is for those who ask for it; it reads this when it is loaded.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import absl.logging

from parallax.arguments import Parser
from parallax.convert.move import export_params, import_params
from parallax.errors import check_whole, exit_status

SHARD_MBYTES = 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; returns the exit status. What a user got wrong is one line on stderr."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    return exit_status(lambda: run(parse(arguments)), one_line=True)


def run(flags: argparse.Namespace) -> None:
    """Do what the command line says, and say so."""
    if flags.act == "import":
        import_params(flags.source, flags.workdir)
        print(f"the parameters in {flags.source} are step 0 of {flags.workdir}: train.init_from={flags.workdir}")
        return
    check_whole("--shard-mbytes", flags.shard_mbytes, least=1)
    step = export_params(flags.workdir, flags.out, step=flags.step, shard_bytes=flags.shard_mbytes << 20)
    print(f"the parameters of step {step} of {flags.workdir} are in {flags.out}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags; ConfigError says what is wrong with them."""
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m parallax.convert", description=__doc__, formatter_class=style, allow_abbrev=False)
    acts = parser.add_subparsers(dest="act", required=True)
    out = acts.add_parser("export", help="write a checkpoint's parameters", allow_abbrev=False)
    out.add_argument("workdir", type=Path, help="the folder of the run")
    out.add_argument("out", type=Path, help="a new folder")
    out.add_argument("--step", type=int, help="of which checkpoint; default: the newest")
    size = f"MiB in a file at most; default: {SHARD_MBYTES}"
    out.add_argument("--shard-mbytes", type=int, default=SHARD_MBYTES, help=size)
    back = acts.add_parser("import", help="make a run folder of such files", allow_abbrev=False)
    back.add_argument("source", type=Path, help="a folder with safetensors files, config.json and tokenizer.json")
    back.add_argument("workdir", type=Path, help="a new folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
