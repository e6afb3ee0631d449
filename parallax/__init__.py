"""Parallax: transformers in JAX and Flax Linen on any pipeline, data, context and tensor mesh, with the same loss
on each."""

from importlib import import_module
from typing import Any

# Imported on first use, so that commands without JAX, as those on data, start without it.
HOME = {
    "IGNORED": "model.batch",
    "Layout": "sharding.layout",
    "MeshConfig": "config.sections",
    "Run": "inference.run",
    "Settings": "config.settings",
    "ShardingPlan": "sharding.plan",
    "ShardedModel": "pipeline",
    "as_batch": "data.windows",
    "load": "inference.run",
    "capture_activations": "inference.capture",
    "devices_of": "analysis.planned.topology",
    "look_inside": "inference.capture",
    "make_mesh": "sharding.mesh",
    "mesh_of": "sharding.mesh",
    "model_of": "step.step",
    "named_leaves": "sharding.layout",
    "new_dims": "sharding.layout",
    "parity": "analysis.parity",
    "plan": "analysis.planned.plan",
    "read_settings": "config.settings",
    "report": "analysis.report",
    "save_run": "interop.export",
    "sent_by": "analysis.traced.collectives",
    "simulate_devices": "hardware.devices",
    "step_of": "step.step",
    "train": "training.run",
}
MODULES = {"collectives": "sharding.collectives", "schedules": "schedules"}

# `python -m parallax.plan` is the command parallax/cli/plan.py.
__path__.append(f"{__path__[0]}/cli")


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return import_module(f"parallax.{MODULES[name]}")
    if name not in HOME:
        raise AttributeError(f"module 'parallax' has no {name!r}; it has {', '.join([*HOME, *MODULES])}")
    return getattr(import_module(f"parallax.{HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *HOME, *MODULES]
