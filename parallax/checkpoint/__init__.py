"""Checkpoints of a run: saved in the background, complete or not there at all, loaded onto any mesh.

A step counts only with its manifest, which lists the files with sizes and checksums, the arrays with shapes,
dtypes and fingerprints, and the settings of the run that wrote them. Orbax writes the arrays; it would take any
folder that is named by a number for a step, and would restore flipped bits in silence.
"""

from parallax.checkpoint.manifest import DamagedError, compare_settings, read_manifest
from parallax.checkpoint.reader import Loaded, restore, restore_newest
from parallax.checkpoint.steps import complete_steps, examine, latest_step, set_damaged_aside, tidy
from parallax.checkpoint.writer import CheckpointConfig, Checkpoints, check_space, probe_folder

__all__ = [
    "CheckpointConfig",
    "Checkpoints",
    "DamagedError",
    "Loaded",
    "check_space",
    "compare_settings",
    "complete_steps",
    "examine",
    "latest_step",
    "probe_folder",
    "read_manifest",
    "restore",
    "restore_newest",
    "set_damaged_aside",
    "tidy",
]
