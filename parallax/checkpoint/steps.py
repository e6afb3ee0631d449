"""Which steps a folder of checkpoints holds, and what must not stay among them.

A step is a folder named by its number, with a manifest. The manifest comes last when a step is saved and goes
first when it is removed: whatever is killed in between leaves a folder that does not count.
"""

import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from parallax.checkpoint.manifest import MANIFEST, DamagedError, check_sizes
from parallax.runtime.errors import CheckpointError
from parallax.runtime.units import in_bytes

REMOVED = "manifest.removed"
NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
# How orbax calls what it has not finished.
UNFINISHED = re.compile(r"([0-9]+)\.orbax-checkpoint-tmp.*")
PROBE = "probe-"
QUIET_SECS, LAST_FILES_SECS = 0.5, 10.0  # that no file came for; to wait for that


class Standing(NamedTuple):
    """Steps whose files are there with their sizes, newest first, and the other complete ones with what is wrong."""

    valid: list[int]
    damaged: dict[int, DamagedError]


def numbered_steps(folder: Path) -> set[int]:
    """Numbers of all that could be a step, or stands where one would be saved."""
    try:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}); let this user read it") from error
    return {int(name) for name in names if NUMBER.fullmatch(name)}


def complete_steps(folder: Path) -> set[int]:
    """Steps that have a manifest; a link to a folder is not one of ours."""
    return {step for step in numbered_steps(folder) if _has_manifest(folder / str(step))}


def unfinished_steps(folder: Path) -> set[int]:
    """Steps whose save has begun and not ended: it goes on, or was killed."""
    try:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    except OSError:
        return set()
    return {int(match[1]) for name in names if (match := UNFINISHED.fullmatch(name))}


def examine(folder: Path) -> Standing:
    """Hold every complete step to its manifest, contents aside; CheckpointError if one has another format."""
    standing = Standing([], {})
    for step in sorted(complete_steps(folder), reverse=True):
        try:
            check_sizes(folder, step)
            standing.valid.append(step)
        except DamagedError as error:
            standing.damaged[step] = error
    return standing


def latest_step(folder: Path) -> int | None:
    """The newest valid step, by number and never by time; None if there is no complete one.

    Raises:
        DamagedError: there are steps, and all are damaged.
    """
    standing = examine(folder)
    if not standing.valid and standing.damaged:
        raise standing.damaged[max(standing.damaged)]
    return max(standing.valid, default=None)


def remove_step(folder: Path, step: int) -> None:
    """Remove a step, its manifest first."""
    at = folder / str(step)
    (at / MANIFEST).replace(at / REMOVED)
    shutil.rmtree(at)


def set_damaged_aside(folder: Path, step: int) -> Path:
    """Rename a damaged step, so that the step can be saved again and the damage looked at."""
    return _set_aside(folder, step, "damaged")


def tidy(folder: Path) -> list[str]:
    """Clear away what a kill has left: says what was removed or renamed."""
    try:
        return list(_tidy(folder)) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"cannot tidy {folder}: {error.filename}: {error.strerror}") from error


def remove_unfinished(folder: Path, step: int) -> None:
    """Give back the disk that a failed save of a step takes, until nothing of it comes any more.

    When one file fails, others are still being written, each in folders that are made for it.
    """
    now = time.monotonic()
    last, end = now, now + LAST_FILES_SECS
    while now < min(last + QUIET_SECS, end):
        try:
            left = [path for path in folder.iterdir() if _is_unfinished(path, step)]
        except OSError:  # the folder is gone itself
            return
        now = time.monotonic()
        if left:
            last = now
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.05)


def _is_unfinished(path: Path, step: int) -> bool:
    match = UNFINISHED.fullmatch(path.name)
    return match is not None and int(match[1]) == step


def _has_manifest(step: Path) -> bool:
    try:
        return not step.is_symlink() and (step / MANIFEST).is_file()
    except OSError:
        return True  # it cannot be known: whoever reads it says that the step is damaged


def _tidy(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if match := UNFINISHED.fullmatch(path.name):
            size = in_bytes(sum(file.lstat().st_size for file in path.rglob("*")))
            _clear(path)
            yield f"removed an unfinished save of step {match[1]}, {size}: {path}"
        if path.name.startswith(PROBE):
            _clear(path)
    for step in sorted(numbered_steps(folder) - complete_steps(folder)):
        at = folder / str(step)
        if not at.is_symlink() and (at / REMOVED).is_file():
            shutil.rmtree(at)
            yield f"removed what was left of step {step}: {at}"
        else:
            yield f"set aside a checkpoint that was never finished: {_set_aside(folder, step, 'unfinished')}"


def _set_aside(folder: Path, step: int, why: str) -> Path:
    names = itertools.chain([f"{why}-{step}"], (f"{why}-{step}.{number}" for number in itertools.count(2)))
    aside = next(folder / name for name in names if not os.path.lexists(folder / name))
    return (folder / str(step)).rename(aside)


def _clear(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
