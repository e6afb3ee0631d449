"""Checkpoints of a run: saved in the background, complete or not there at all, loaded onto any mesh.

A step counts only with its manifest, which lists the files with sizes and checksums, the arrays with shapes,
dtypes and fingerprints, and the settings of the run that wrote them. Orbax writes the arrays; it would take any
folder that is named by a number for a step, and would restore flipped bits in silence.
"""

from importlib import import_module
from typing import Any

# Imported when first asked for: who only looks at a folder of checkpoints needs no JAX.
HOME = {
    "Checkpoints": "writer",
    "DamagedError": "manifest",
    "Loaded": "reader",
    "check_space": "writer",
    "compare_settings": "manifest",
    "complete_steps": "steps",
    "examine": "steps",
    "latest_step": "steps",
    "probe_folder": "writer",
    "read_manifest": "manifest",
    "restore": "reader",
    "restore_newest": "reader",
    "set_damaged_aside": "steps",
    "tidy": "steps",
    "unfinished_steps": "steps",
}


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module 'parallax.checkpoint' has no {name!r}")
    return getattr(import_module(f"parallax.checkpoint.{HOME[name]}"), name)
