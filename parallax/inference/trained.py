"""A trained run, loaded: its model on a mesh of one's own, its parameters and its tokenizer."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

from parallax.checkpoint.restore import restore, restore_newest
from parallax.checkpoint.steps import complete_steps
from parallax.config.sections import INFERRED, MeshConfig, PipelineConfig
from parallax.config.settings import Settings
from parallax.data.tokenizer import Tokenizer, load
from parallax.pipeline.sharded_model import ShardedModel
from parallax.runtime.compile_cache import use_compile_cache
from parallax.runtime.devices import simulate_devices
from parallax.runtime.errors import CheckpointError, ConfigError, DataError, tell
from parallax.runtime.progress import make_room, waiting
from parallax.sharding.mesh import make_mesh
from parallax.training.build import model_of


class Trained(NamedTuple):
    """A step of a run on a mesh; `folder` is the step's own, whose tokenizer was held to its checksum."""

    step: int
    folder: Path
    model: ShardedModel
    params: Any
    tokenizer: Tokenizer


def load_trained(workdir: Path, settings: Settings, mesh: MeshConfig, step: int | None, choose: str) -> Trained:
    """A run's step, the newest that is whole where it is None; `choose` says with which flags a mesh is chosen.

    Raises:
        ConfigError: the mesh does not fit the devices or the model.
        CheckpointError: there is no such step, or it is damaged.
        DataError: the tokenizer does not fit the model.
    """
    checkpoints = workdir / "checkpoints"
    if not complete_steps(checkpoints):
        raise CheckpointError(f"{workdir} has no checkpoint; it comes with checkpoint.every_steps, or at the end")
    with waiting("building the model"):
        model = build(settings, mesh, choose)
    with waiting("restoring the parameters"):
        step, params = restore_params(checkpoints, step, model)
    tokenizer = load(checkpoints / str(step))
    _check_tokenizer(tokenizer, model, checkpoints / str(step))
    return Trained(step, checkpoints / str(step), model, params, tokenizer)


def build(settings: Settings, mesh: MeshConfig, choose: str) -> ShardedModel:
    """The run's model on a mesh of one's own."""
    if mesh.simulate:
        simulate_devices(mesh.simulate)
    devices = jax.devices()
    use_compile_cache(settings.train.compile_cache)
    sizes = mesh.sizes.values()
    if INFERRED not in sizes and not mesh.simulate and math.prod(sizes) < len(devices):
        devices = devices[: math.prod(sizes)]  # writing need not use the whole machine
    try:
        laid_out = make_mesh(mesh, devices)
    except ConfigError as error:
        raise ConfigError(f"{error}; choose with {choose}") from error
    # Schedules are for training: one that needs this or that number of stages must not stand in the way.
    pipeline: PipelineConfig = dataclasses.replace(settings.pipeline, schedule="gpipe", virtual=1, microbatches=1)
    return model_of(dataclasses.replace(settings, pipeline=pipeline), laid_out)


def mesh_config(saved: MeshConfig, given: dict[str, int]) -> MeshConfig:
    """The run's mesh with what was given in its place; simulated devices become as many as it takes.

    >>> mesh_config(MeshConfig(pp=2, dp=2, tp=2, simulate=8), {"pp": 1, "dp": 1})
    MeshConfig(pp=1, dp=1, tp=2, simulate=2, replica=1)
    """
    mesh = dataclasses.replace(saved, **given)
    sizes = mesh.sizes.values()
    if saved.simulate and "simulate" not in given and INFERRED not in sizes:
        mesh = dataclasses.replace(mesh, simulate=math.prod(sizes))
    return mesh


def sizes_of(model: ShardedModel) -> str:
    """A model's mesh, as "pp1·dp2·tp4"."""
    return "·".join(f"{axis}{size}" for axis, size in model.axis_sizes.items())


def restore_params(checkpoints: Path, step: int | None, model: ShardedModel) -> tuple[int, Any]:
    """The parameters of a step on the model's mesh, and the step: where it is None, the newest that is whole."""
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    wanted = {"params": jax.tree.map(place, model.shapes, model.shardings)}
    if step is not None:
        return step, restore(checkpoints, step, wanted)["params"]
    found = restore_newest(checkpoints, wanted)
    for error in found.damaged:
        make_room()
        tell(
            f"the checkpoint of step {error.step} is damaged: {error.how}; going on with step {found.step}", sys.stderr
        )
    return found.step, found.parts["params"]


def _check_tokenizer(tokenizer: Tokenizer, model: ShardedModel, folder: Path) -> None:
    if tokenizer.vocab > model.model.vocab:
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer.vocab} entries, but model.vocab={model.model.vocab}; "
            "import the model with its own tokenizer.json"
        )
