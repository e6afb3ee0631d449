"""Generate text with a trained model.

    python -m parallax.generate --workdir=runs/mine --prompt="def "
    python -m parallax.generate --workdir=runs/mine --prompt="def " --config.mesh.tp=2

The text goes to stdout, everything else to stderr. Missing values, also of the mesh, are those of the run's
config.json; flags as --config.mesh.tp=2 change them.
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
    from parallax.cli.command import Flag, read_line_of_run, unknown_flag, written_mesh
    from parallax.config.sections import MeshConfig, SampleConfig
    from parallax.config.settings import Settings, load_settings, read_settings
    from parallax.inference.generate import complete, encode
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
    settings, axes = settings_of(flags)
    sample = dataclasses.replace(settings.sample, **_given(flags, SAMPLE_FIELDS))
    mesh = mesh_config(settings.mesh, {**axes, **_given(flags, MESH_FIELDS)})
    choose = ", ".join(f"--config.mesh.{key}" for key in MESH_KEYS)
    trained = load_trained(flags.workdir, settings, mesh, flags.step, choose)
    length, seq = len(encode(trained.tokenizer, sample.prompt)) + sample.tokens, settings.data.seq
    _say(f"step {trained.step} of {flags.workdir} on {sizes_of(trained.model)}")
    if length > seq:
        _say(f"note: {length} tokens are more than the {seq} of the windows in training (data.seq)")
    start = time.perf_counter()
    with waiting(f"compiling, and writing up to {sample.tokens} tokens"):
        text = complete(trained.model, trained.params, trained.tokenizer, sample)
    secs = time.perf_counter() - start
    _say(f"up to {sample.tokens} tokens in {secs:.1f} s, {sample.tokens / secs:.1f} tokens/s, compilation included")
    return text


def settings_of(flags: argparse.Namespace) -> tuple[Settings, dict[str, int]]:
    """The run's settings with the keys that --config flags change, and those of them that are of the mesh."""
    if not flags.config:
        return load_settings(flags.workdir), {}
    argv = [__name__, f"--workdir={flags.workdir}", *flags.config]
    settings = read_settings(read_line_of_run(argv, {"workdir": Flag("the folder of the run")}).config)
    return settings, written_mesh(argv, settings.mesh)


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
    if unknown and not unknown[0].startswith("--config."):
        name = unknown[0].partition("=")[0]
        if name.startswith("-") and "." in name:
            raise ConfigError(unknown_flag(name.lstrip("-"), ()))
        known = ["--workdir", "--step", *map(_flag, SAMPLE_FIELDS), *map(_flag, MESH_FIELDS)]
        raise ConfigError(f"unknown argument {unknown[0]!r}; {nearest(name, known)}")
    flags.config = unknown
    return flags


def _say(text: str) -> None:
    tell(text, sys.stderr)


def _flag(key: dataclasses.Field) -> str:
    return f"--{key.name}".replace("_", "-")


def _given(flags: argparse.Namespace, keys: Sequence[dataclasses.Field]) -> dict[str, Any]:
    return {key.name: getattr(flags, key.name) for key in keys if getattr(flags, key.name) is not None}


if __name__ == "__main__":
    sys.exit(main())
