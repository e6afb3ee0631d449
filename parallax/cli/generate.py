"""Let a trained model write.

    python -m parallax.generate --workdir runs/mine --prompt "def "

The text goes to stdout, all else to stderr. What is not given is as the run's config.json says, the mesh too.
"""

import os

# The start-up talk of XLA's C++ is for those who ask for it; it reads this when it is loaded.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from parallax.runtime.progress import loading, waiting

with loading(__name__, sys.stderr):
    import absl.logging

    from parallax.cli.arguments import Parser, local_path
    from parallax.config.sections import SampleConfig
    from parallax.config.settings import load_settings
    from parallax.data.tokenizer import Tokenizer
    from parallax.inference.generate import complete, encode
    from parallax.inference.trained import load_trained, mesh_config, sizes_of
    from parallax.pipeline.sharded_model import ShardedModel
    from parallax.runtime.devices import leave_out_absent_tpu
    from parallax.runtime.errors import ConfigError, exit_status, nearest, printable, tell

SAMPLE_FLAGS = {
    "prompt": (str, "text to go on from"),
    "tokens": (int, "tokens to write at most; a document's end comes first, if it comes"),
    "temperature": (float, "0 is greedy; near 0 is sure of itself, 1 is as trained"),
    "top_k": (int, "choose among the k likeliest tokens; 0 is off"),
    "top_p": (float, "choose among the fewest tokens that reach this probability; 1 is off"),
    "seed": (int, "of the choices; the same seed writes the same on every mesh"),
}
MESH_FLAGS = {
    "pp": "devices along the pipeline axis",
    "dp": "devices along the data axis",
    "tp": "devices along the tensor axis",
    "simulate": "simulated CPU devices; 0 takes the machine's",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the text; returns the exit status. What a user got wrong is one line on stderr."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    leave_out_absent_tpu()
    return exit_status(lambda: show(run(parse(arguments))))


def show(text: str) -> None:
    """Print what the model wrote; a terminal gets what is printable."""
    print(printable(text) if sys.stdout is not None and sys.stdout.isatty() else text)


def run(flags: argparse.Namespace) -> str:
    """The prompt and what the run's model writes behind it."""
    settings = load_settings(flags.workdir)
    sample = dataclasses.replace(settings.sample, **_given(flags, SAMPLE_FLAGS))
    mesh = mesh_config(settings.mesh, _given(flags, MESH_FLAGS))
    step, _, model, params, tokenizer = load_trained(
        flags.workdir, settings, mesh, flags.step, ", ".join(map(_flag, MESH_FLAGS))
    )
    prompt = encode(tokenizer, sample.prompt)
    _say(f"step {step} of {flags.workdir} on {sizes_of(model)}")
    _note_length(len(prompt) + sample.tokens, settings.data.seq)
    return timed(model, params, tokenizer, sample)


def timed(model: ShardedModel, params: Any, tokenizer: Tokenizer, sample: SampleConfig) -> str:
    """`complete`, and its speed to stderr."""
    start = time.perf_counter()
    with waiting(f"compiling, and writing up to {sample.tokens} tokens"):
        text = complete(model, params, tokenizer, sample)
    secs = time.perf_counter() - start
    _say(f"up to {sample.tokens} tokens in {secs:.1f} s, {sample.tokens / secs:.1f} tokens/s, compilation included")
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags; those that were not given are None. ConfigError names the nearest of an unknown one."""
    parser = Parser("python -m parallax.generate", description=__doc__)
    parser.add_argument("--workdir", type=local_path, required=True, help="the folder of the run")
    parser.add_argument("--step", type=int, help="of which checkpoint; default: the newest")
    for name, (kind, text) in SAMPLE_FLAGS.items():
        parser.add_argument(_flag(name), type=kind, help=f"{text}; default: the run's sample.{name}")
    for name, text in MESH_FLAGS.items():
        parser.add_argument(_flag(name), type=int, help=f"{text}; default: as in training")
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = ["--workdir", "--step", *map(_flag, SAMPLE_FLAGS), *map(_flag, MESH_FLAGS)]
        raise ConfigError(f"unknown argument {unknown[0]!r}; {nearest(unknown[0].partition('=')[0], known)}")
    return flags


def _flag(name: str) -> str:
    return f"--{name}".replace("_", "-")


def _given(flags: argparse.Namespace, names: Any) -> dict[str, Any]:
    return {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}


def _note_length(length: int, seq: int) -> None:
    if length > seq:
        _say(f"note: {length} tokens are more than the {seq} of the windows that the model has seen (data.seq)")


def _say(text: str) -> None:
    tell(text, sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
