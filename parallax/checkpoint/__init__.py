"""Checkpoints of a run: saved in the background, complete or not there at all, loaded onto any mesh.

A step counts only with its manifest, which lists the files with sizes and checksums, the arrays with shapes
and dtypes, and the settings of the run that wrote them. Orbax writes the arrays; it would take any folder
that is named by a number for a step, and would restore flipped bits in silence.
"""

from parallax.checkpoint.manifest import compare_settings, complete_steps, read_manifest
from parallax.checkpoint.reader import latest_step, restore
from parallax.checkpoint.writer import CheckpointConfig, Checkpoints, set_unfinished_aside

__all__ = [
    "CheckpointConfig",
    "Checkpoints",
    "compare_settings",
    "complete_steps",
    "latest_step",
    "read_manifest",
    "restore",
    "set_unfinished_aside",
]
