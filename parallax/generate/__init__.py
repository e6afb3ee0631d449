"""Text from a model, on the mesh that it lies on."""

from importlib import import_module
from typing import Any

# Imported when first asked for: the command says what it loads before it does.
HOME = {
    "SampleConfig": "sampling",
    "check_length": "generate.write",
    "complete": "generate.write",
    "encode": "generate.write",
    "generate": "generate.write",
}


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module 'parallax.generate' has no {name!r}")
    return getattr(import_module(f"parallax.{HOME[name]}"), name)
