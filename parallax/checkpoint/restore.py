"""Loads a checkpoint onto any mesh and checks its integrity."""

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from parallax.checkpoint.arrays import damaged_arrays, flatten, read_tree
from parallax.checkpoint.fingerprint import fingerprints
from parallax.checkpoint.steps import (
    DamagedError,
    all_damaged,
    complete_steps,
    files_of,
    odd_files,
    read_manifest,
    wrong_files,
)
from parallax.config.settings import compare_settings, difference_text
from parallax.errors import CheckpointError, StoreError, first_few, first_line, tell
from parallax.processes import job
from parallax.storage import files

DAMAGED, REFUSED = 1, 2  # verdicts of a process on a step; 0 means intact


class Restored(NamedTuple):
    """Trees of arrays, their step, and newer steps that were damaged."""

    step: int
    trees: dict[str, Any]
    damaged: list[DamagedError]


def compare_arrays(stored: Mapping[str, Any], wanted: Mapping[str, Any], part: str) -> list[str]:
    """Differences between the arrays of a manifest and the wanted ones."""
    there = {name: f"{array['dtype']}{array['shape']}" for name, array in stored.items()}
    here = {name: f"{array.dtype}{list(array.shape)}" for name, array in wanted.items()}
    return [
        f"{part} {name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]


def restore_newest(
    folder: Path, trees: Mapping[str, Any], *, settings: Mapping[str, Any] | None = None, before: int | None = None
) -> Restored:
    """`restore` the newest intact step before `before`, skipping damaged ones.

    Raises:
        CheckpointError: all are damaged, there is none, or the newest intact one is of another model.
    """
    damaged: list[DamagedError] = []
    steps = (step for step in complete_steps(folder) if before is None or step < before)
    for step in sorted(steps, reverse=True):
        try:
            return Restored(step, restore(folder, step, trees, settings=settings), damaged)
        except DamagedError as error:
            damaged.append(error)
    if not damaged:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    raise all_damaged(folder, damaged)


def restore(
    folder: Path, step: int, trees: Mapping[str, Any], *, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Load named trees directly into the shardings of `trees`, trees of jax.ShapeDtypeStruct.

    Checksums of files, shapes and dtypes of arrays and, after loading, their fingerprints are checked. With `settings`,
    an error about arrays also names the settings that differ. Other trees are neither loaded nor checked.

    Raises:
        DamagedError: something is not as it was saved; names files, and damaged arrays.
        CheckpointError: there is no such step, or it is of another model.
    """
    manifest = checked_by_all(folder, step, lambda: read_manifest(folder, step))
    for part, tree in trees.items():
        if differences := compare_arrays(manifest["arrays"].get(part, {}), flatten(tree), part):
            drift = compare_settings(manifest["settings"], settings) if settings is not None else {}
            because = f"; {difference_text(drift, '; ')}" if drift else ""
            raise CheckpointError(
                f"the checkpoint of step {step} in {folder} is of another model: {first_few(differences)}{because}"
            )
    plain = files.PlainPath(folder)
    checked_by_all(folder, step, lambda: _check_files(folder, step, manifest, trees))
    try:
        loaded = {part: _restore_tree(plain.path / str(step) / part, tree) for part, tree in trees.items()}
    except StoreError:
        raise
    except (ValueError, OSError, KeyError) as error:  # tensorstore raises these for problems with its files
        reason = first_line(error)
        if jax.process_count() > 1 or not files.is_local(folder):
            # Other processes may have read it, so none may continue with another step alone; and the checksums of
            # objects are right, so it is the store that does not answer.
            raise CheckpointError(f"the checkpoint of step {step} in {folder} cannot be read: {reason}") from error
        raise DamagedError(folder, step, f"it cannot be read: {reason}") from error
    for part, tree in loaded.items():
        arrays = manifest["arrays"][part]
        wrong = [name for name, number in fingerprints(flatten(tree)).items() if number != arrays[name]["fingerprint"]]
        if wrong:
            raise DamagedError(folder, step, not_as_saved([f"{part} {name}" for name in wrong]))
    return loaded


def checked_by_all(folder: Path, step: int, check: Callable[[], Any]) -> Any:
    """The result of `check`; if one process of a job refuses a step, all do, so that none continues alone."""

    def verdict_of(error: CheckpointError) -> int:
        if jax.process_index():
            tell(f"{type(error).__name__}: {error}", sys.stderr)  # only process 0 has a log
        return DAMAGED if isinstance(error, DamagedError) else REFUSED

    def of_another(process: int, verdict: int) -> CheckpointError:
        text = f"process {process} refuses it; see its own error"
        return DamagedError(folder, step, text) if verdict == DAMAGED else CheckpointError(text)

    return job.agreed(check, CheckpointError, of_another, verdict_of)


def _check_files(folder: Path, step: int, manifest: Mapping[str, Any], trees: Collection[str]) -> None:
    """Check this process's share of the files of these trees, including contents."""
    sums = files_of(manifest, trees)
    names = sorted(sums)[jax.process_index() :: jax.process_count()]
    wrong = wrong_files(folder / str(step), {name: sums[name] for name in names}, contents=True)
    # Files that no manifest lists are of no process's share.
    odd = odd_files(folder / str(step), trees) if wrong or jax.process_index() == 0 else []
    if odd:
        raise DamagedError(folder, step, f"{first_few(wrong or odd)}; its arrays are not read")
    if wrong:
        hit = damaged_arrays(folder / str(step), {part: manifest["arrays"][part] for part in trees})
        raise DamagedError(folder, step, f"{first_few(wrong)}; {not_as_saved([*hit])}")


def _restore_tree(folder: Path, wanted: Any) -> Any:
    flat = read_tree(folder, flatten(wanted))
    return jax.tree.unflatten(jax.tree.structure(wanted), [flat[name] for name in flatten(wanted)])


def not_as_saved(names: list[str]) -> str:
    if not names:
        return "its arrays are whole"
    return f"{first_few(names)} {'is' if len(names) == 1 else 'are'} not what was saved"
