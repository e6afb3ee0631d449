"""Generate text with a trained model.

    python -m parallax.generate --workdir runs/mine --prompt "def "

The text goes to stdout, everything else to stderr. Missing values, also of the mesh, are those of the run's
config.json.
"""

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
    from parallax.config.sections import MeshConfig, SampleConfig
    from parallax.config.settings import load_settings
    from parallax.inference.generate import complete, encode, stays_text
    from parallax.inference.run import MESH_KEYS, load_trained, mesh_config, sizes_of
    from parallax.runtime.devices import leave_out_absent_tpu
    from parallax.runtime.errors import ConfigError, exit_status, nearest, printable, tell

# Flags from keys of the config's sections.
SAMPLE_FIELDS = dataclasses.fields(SampleConfig)
MESH_FIELDS = [field for field in dataclasses.fields(MeshConfig) if field.name in MESH_KEYS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the text; returns the exit status. User errors are one line on stderr."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    leave_out_absent_tpu()
    return exit_status(lambda: show(run(parse(arguments))))


def show(text: str) -> None:
    """Print the generated text; on a terminal, with unprintable characters escaped."""
    print(printable(text) if sys.stdout is not None and sys.stdout.isatty() else text)


def run(flags: argparse.Namespace) -> str:
    """The prompt and the text that the run's model generates after it; the speed goes to stderr."""
    settings = load_settings(flags.workdir)
    sample = dataclasses.replace(settings.sample, **_given(flags, SAMPLE_FIELDS))
    mesh = mesh_config(settings.mesh, _given(flags, MESH_FIELDS))
    choose = ", ".join(map(_flag, MESH_FIELDS))
    trained = load_trained(flags.workdir, settings, mesh, flags.step, choose)
    prompt = encode(trained.tokenizer, sample.prompt, special_tokens=sample.special_tokens)
    length, seq = len(prompt) + sample.tokens, settings.data.seq
    _say(f"step {trained.step} of {flags.workdir} on {sizes_of(trained.model)}")
    if length > seq:
        _say(f"note: {length} tokens are more than the {seq} of the windows in training (data.seq)")
    if spelled := stays_text(trained.tokenizer, sample):
        _say(f"note: {spelled}")
    start = time.perf_counter()
    with waiting(f"compiling, and writing up to {sample.tokens} tokens"):
        text = complete(trained.model, trained.params, trained.tokenizer, sample)
    secs = time.perf_counter() - start
    _say(f"up to {sample.tokens} tokens in {secs:.1f} s, {sample.tokens / secs:.1f} tokens/s, compilation included")
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse flags; missing ones are None. ConfigError suggests the nearest name for an unknown flag."""
    parser = Parser("python -m parallax.generate", description=__doc__)
    parser.add_argument("--workdir", type=local_path, required=True, help="the folder of the run")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    for origin, keys in (("the run's sample.{}", SAMPLE_FIELDS), ("as in training", MESH_FIELDS)):
        for key in keys:
            meaning = f"{key.metadata['key'].meaning}; default: {origin.format(key.name)}"
            parser.add_argument(_flag(key), type=key.type, help=meaning)
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = ["--workdir", "--step", *map(_flag, SAMPLE_FIELDS), *map(_flag, MESH_FIELDS)]
        raise ConfigError(f"unknown argument {unknown[0]!r}; {nearest(unknown[0].partition('=')[0], known)}")
    return flags


def _say(text: str) -> None:
    tell(text, sys.stderr)


def _flag(key: dataclasses.Field) -> str:
    return f"--{key.name}".replace("_", "-")


def _given(flags: argparse.Namespace, keys: Sequence[dataclasses.Field]) -> dict[str, Any]:
    return {key.name: getattr(flags, key.name) for key in keys if getattr(flags, key.name) is not None}


if __name__ == "__main__":
    sys.exit(main())
