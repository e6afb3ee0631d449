"""What settings describe, put together on a mesh: the model, its optimizer, the training step."""

from typing import Any

import optax

from parallax.config.settings import Settings
from parallax.pipeline import ShardedModel
from parallax.sharding.mesh import make_mesh
from parallax.training.optimizer import make_optimizer
from parallax.training.step import TrainStep, make_train_step


def model_of(settings: Settings, mesh: Any = None) -> ShardedModel:
    """The model on a mesh, which may be abstract; a ParallaxError where it does not fit.

    Without a mesh, on that of the settings, over all devices that are here.
    """
    mesh = make_mesh(settings.mesh) if mesh is None else mesh
    return ShardedModel(
        settings.model, settings.layout, settings.pipeline, settings.data_parallel, settings.fsdp, settings.loss, mesh
    )


def model_and_optimizer(settings: Settings, mesh: Any = None) -> tuple[ShardedModel, optax.GradientTransformation]:
    """Both; a ParallaxError where they do not fit the mesh, the batch or the steps."""
    model = model_of(settings, mesh)
    model.check_batch(settings.data.global_batch, settings.data.seq)
    return model, make_optimizer(settings.optimizer, settings.train.steps, model.layouts)


def step_of(settings: Settings, mesh: Any = None) -> TrainStep:
    """The step that training with these settings takes, with its guard: `(state, batch) -> (state, metrics)`.

    Without a mesh, on that of the settings, over all devices that are here. Errors as of `model_and_optimizer`.
    """
    return make_train_step(*model_and_optimizer(settings, mesh), settings.train.seed, settings.guard)
