"""What a step of a checkpoint says about itself: its files, its arrays, and the settings behind them."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from parallax.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
# Orbax rewrites this file after the manifest is made, and restores without it.
NOT_COUNTED = "_CHECKPOINT_METADATA"
READ_BYTES = 1 << 22


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """List the files of a step's folder, and write that with `content` into it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != NOT_COUNTED)
    sums = {str(path.relative_to(folder)): measure(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **content, "files": sums}))


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """What a step says about itself; CheckpointError if there is no such step, or it cannot be read."""
    path = folder / str(step) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        written = manifest["format"]
    except FileNotFoundError:
        known = ", ".join(map(str, sorted(complete_steps(folder)))) or "none"
        raise CheckpointError(f"there is no checkpoint of step {step} in {folder}; steps there: {known}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(_damaged(folder, step, f"its {MANIFEST} cannot be read")) from error
    if written != FORMAT:
        raise CheckpointError(f"{path} has format {written!r}, but this version of parallax reads {FORMAT}")
    return manifest


def check_files(folder: Path, step: int, *, checksums: bool) -> dict[str, Any]:
    """Hold a step's files to its manifest and return that; CheckpointError names the file that is damaged."""
    manifest = read_manifest(folder, step)
    for name, expected in manifest["files"].items():
        path = folder / str(step) / name
        if not path.is_file():
            raise CheckpointError(_damaged(folder, step, f"its file {name} is missing"))
        if path.stat().st_size != expected["bytes"]:
            sizes = f"has {path.stat().st_size} bytes instead of {expected['bytes']}"
            raise CheckpointError(_damaged(folder, step, f"its file {name} {sizes}"))
        if checksums and measure(path) != expected:
            raise CheckpointError(_damaged(folder, step, f"its file {name} does not match its checksum"))
    return manifest


def measure(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}


def numbered_steps(folder: Path) -> set[int]:
    """Numbers of all folders that could be steps."""
    if not folder.is_dir():
        return set()
    return {int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()}


def complete_steps(folder: Path) -> set[int]:
    """Steps that have a manifest."""
    return {step for step in numbered_steps(folder) if (folder / str(step) / MANIFEST).exists()}


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by name: a checkpoint is a flat dict, whatever containers the trees are made of.

    >>> flatten({"mlp": {"gate": 1, "up": (2, 3)}})
    {'mlp.gate': 1, 'mlp.up.0': 2, 'mlp.up.1': 3}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def describe(array: Any) -> dict[str, Any]:
    """Shape and dtype as JSON holds them."""
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def compare_arrays(stored: Mapping[str, Any], wanted: Mapping[str, Any], part: str) -> list[str]:
    """Say what differs between the arrays of a manifest and the wanted ones."""
    differences = []
    for name in sorted({*stored, *wanted}):
        there = _text(stored[name]) if name in stored else "absent"
        here = _text(describe(wanted[name])) if name in wanted else "absent"
        if there != here:
            differences.append(f"{part} {name} is {there} there and {here} here")
    return differences


def compare_settings(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, each with the stored and the wanted value.

    >>> compare_settings({"model": {"layers": 4, "heads": 8}}, {"model": {"layers": 6, "heads": 8}})
    {'model.layers': (4, 6)}
    """
    flat_stored, flat_wanted = flatten(stored), flatten(wanted)
    keys = sorted({*flat_stored, *flat_wanted})
    pairs = {key: (flat_stored.get(key), flat_wanted.get(key)) for key in keys}
    return {key: (there, here) for key, (there, here) in pairs.items() if there != here}


def _damaged(folder: Path, step: int, how: str) -> str:
    older = [other for other in complete_steps(folder) if other < step]
    way_out = f"remove {folder / str(step)} to go on from step {max(older)}" if older else "there is no older step"
    return f"the checkpoint of step {step} in {folder} is damaged: {how}; {way_out}"


def _text(array: Mapping[str, Any]) -> str:
    return f"{array['dtype']}{array['shape']}"
