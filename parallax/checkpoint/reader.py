"""Finding the newest checkpoint, and loading it onto any mesh."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from parallax.checkpoint.manifest import (
    check_files,
    compare_arrays,
    compare_settings,
    complete_steps,
    flatten,
)
from parallax.errors import CheckpointError

NAMED_DIFFERENCES = 5


def latest_step(folder: Path) -> int | None:
    """The newest complete step, None if there is none; CheckpointError if the newest is damaged."""
    newest = max(complete_steps(folder), default=None)
    if newest is not None:
        check_files(folder, newest, checksums=False)
    return newest


def restore(
    folder: Path, step: int, parts: Mapping[str, Any], *, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Load named trees straight into the shardings of `parts`, trees of jax.ShapeDtypeStruct.

    Files are checked against their sums, arrays against the wanted shapes and dtypes. With `settings`, an
    error about arrays also names the settings that differ. Parts that are not asked for are not read.
    """
    manifest = check_files(folder, step, checksums=True)
    for part, tree in parts.items():
        differences = compare_arrays(manifest["arrays"].get(part, {}), flatten(tree), part)
        if differences:
            raise CheckpointError(_other_model(folder, manifest, differences, settings))
    return {part: _restore_tree(folder.resolve() / str(step) / part, tree) for part, tree in parts.items()}


def _restore_tree(folder: Path, wanted: Any) -> Any:
    with ocp.StandardCheckpointer() as reader:
        flat = reader.restore(folder, flatten(wanted))
    return jax.tree.unflatten(jax.tree.structure(wanted), [flat[name] for name in flatten(wanted)])


def _other_model(
    folder: Path, manifest: Mapping[str, Any], differences: list[str], settings: Mapping[str, Any] | None
) -> str:
    named = "; ".join(differences[:NAMED_DIFFERENCES])
    more = f" (and {len(differences) - NAMED_DIFFERENCES} more)" if len(differences) > NAMED_DIFFERENCES else ""
    drift = compare_settings(manifest["settings"], settings) if settings is not None else {}
    because = "".join(f"; {key}={there!r} there, {here!r} here" for key, (there, here) in drift.items())
    return f"the checkpoint of step {manifest['step']} in {folder} is of another model: {named}{more}{because}"
