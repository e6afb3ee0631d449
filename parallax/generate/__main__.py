"""Let a trained model write.

    python -m parallax.generate --workdir runs/mine --prompt "def "

The text goes to stdout, all else to stderr. What is not given is as the run's config.json says, the mesh too.
"""

import os

# The start-up talk of XLA's C++ is for those who ask for it; it reads this when it is loaded.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import absl.logging
import jax

from parallax.arguments import Parser
from parallax.assembly import model_of
from parallax.checkpoint import complete_steps, restore, restore_newest
from parallax.errors import CheckpointError, ConfigError, DataError, exit_status, nearest
from parallax.generate.write import complete, encode
from parallax.mesh import INFERRED, MeshConfig, make_mesh, simulate_devices
from parallax.pipeline import PipelineConfig
from parallax.sampling import SampleConfig
from parallax.settings import Settings, load_settings
from parallax.sharded_model import ShardedModel
from parallax.tokenizer import Tokenizer, load

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
    return exit_status(lambda: print(run(parse(arguments))))


def run(flags: argparse.Namespace) -> str:
    """The prompt and what the run's model writes behind it."""
    settings = load_settings(flags.workdir)
    sample = dataclasses.replace(settings.sample, **_given(flags, SAMPLE_FLAGS))
    _check_saved(flags.workdir)
    model = build(settings, mesh_config(settings.mesh, _given(flags, MESH_FLAGS)))
    checkpoints = flags.workdir / "checkpoints"
    step, params = restore_params(checkpoints, flags.step, model)
    tokenizer = load(checkpoints / str(step))  # the step's own, which was held to its checksum
    _check_tokenizer(tokenizer, model, checkpoints / str(step))
    prompt = encode(tokenizer, sample.prompt)
    sizes = "·".join(f"{axis}{size}" for axis, size in model.axis_sizes.items())
    _say(f"step {step} of {flags.workdir} on {sizes}")
    _note_length(len(prompt) + sample.tokens, settings.data.seq)
    return timed(model, params, tokenizer, sample)


def timed(model: ShardedModel, params: Any, tokenizer: Tokenizer, sample: SampleConfig) -> str:
    """`complete`, and its speed to stderr."""
    start = time.perf_counter()
    text = complete(model, params, tokenizer, sample)
    secs = time.perf_counter() - start
    _say(f"up to {sample.tokens} tokens in {secs:.1f} s, {sample.tokens / secs:.1f} tokens/s, compilation included")
    return text


def build(settings: Settings, mesh: MeshConfig) -> ShardedModel:
    """The run's model on a mesh of one's own."""
    if mesh.simulate:
        simulate_devices(mesh.simulate)
    devices = jax.devices()
    sizes = mesh.sizes.values()
    if INFERRED not in sizes and not mesh.simulate and math.prod(sizes) < len(devices):
        devices = devices[: math.prod(sizes)]  # writing need not use the whole machine
    try:
        laid_out = make_mesh(mesh, devices)
    except ConfigError as error:
        raise ConfigError(f"{error}; choose with {', '.join(map(_flag, MESH_FLAGS))}") from error
    # Schedules are for training: one that needs this or that number of stages must not stand in the way.
    pipeline: PipelineConfig = dataclasses.replace(settings.pipeline, schedule="gpipe", virtual=1, microbatches=1)
    return model_of(dataclasses.replace(settings, pipeline=pipeline), laid_out)


def mesh_config(saved: MeshConfig, given: dict[str, int]) -> MeshConfig:
    """The run's mesh with what was given in its place; simulated devices become as many as it takes.

    >>> mesh_config(MeshConfig(pp=2, dp=2, tp=2, simulate=8, across_slices="dp"), {"pp": 1, "dp": 1})
    MeshConfig(pp=1, dp=1, tp=2, simulate=2, across_slices='dp')
    """
    mesh = dataclasses.replace(saved, **given)
    sizes = mesh.sizes.values()
    if saved.simulate and "simulate" not in given and INFERRED not in sizes:
        mesh = dataclasses.replace(mesh, simulate=math.prod(sizes))
    return mesh


def restore_params(checkpoints: Path, step: int | None, model: ShardedModel) -> tuple[int, Any]:
    """The parameters of a step on the model's mesh, and the step: where it is None, the newest that is whole."""
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    wanted = {"params": jax.tree.map(place, model.shapes, model.shardings)}
    if step is not None:
        return step, restore(checkpoints, step, wanted)["params"]
    found = restore_newest(checkpoints, wanted)
    for error in found.damaged:
        _say(f"the checkpoint of step {error.step} is damaged: {error.how}; going on with step {found.step}")
    return found.step, found.parts["params"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags; those that were not given are None. ConfigError names the nearest of an unknown one."""
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m parallax.generate", description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--workdir", type=Path, required=True, help="the folder of the run")
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
    return f"--{name}"


def _given(flags: argparse.Namespace, names: Any) -> dict[str, Any]:
    return {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}


def _check_saved(workdir: Path) -> None:
    if not complete_steps(workdir / "checkpoints"):
        raise CheckpointError(f"{workdir} has no checkpoint; it comes with checkpoint.every_steps, or at the end")


def _check_tokenizer(tokenizer: Tokenizer, model: ShardedModel, folder: Path) -> None:
    if tokenizer.vocab > model.model.vocab:
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer.vocab} entries, but model.vocab={model.model.vocab}; "
            "import the model with its own tokenizer.json"
        )


def _note_length(length: int, seq: int) -> None:
    if length > seq:
        _say(f"note: {length} tokens are more than the {seq} of the windows that the model has seen (data.seq)")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
