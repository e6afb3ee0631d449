"""Parallax: transformers in JAX and Flax Linen on any pipeline, data and tensor mesh, with the same loss on each."""

from importlib import import_module
from typing import Any

# Imported when first asked for, so that commands which need no JAX, as those on data, start without it.
HOME = {
    "IGNORED": "batch",
    "Layout": "notation",
    "MeshConfig": "mesh",
    "Run": "run",
    "Settings": "settings",
    "ShardedModel": "sharded_model",
    "as_batch": "data",
    "collectives": "collectives",
    "load": "run",
    "look_inside": "inside",
    "make_mesh": "mesh",
    "mesh_of": "mesh",
    "model_of": "assembly",
    "named_leaves": "notation",
    "plan": "plan",
    "read_settings": "settings",
    "report": "report",
    "schedules": "schedules",
    "sent_by": "report.local",
    "simulate_devices": "mesh",
    "step_of": "assembly",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module 'parallax' has no {name!r}; it has {', '.join(HOME)}")
    home = import_module(f"parallax.{HOME[name]}")
    return home if name == HOME[name] else getattr(home, name)


def __dir__() -> list[str]:
    return [*globals(), *HOME]
