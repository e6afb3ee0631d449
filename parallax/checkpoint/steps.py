"""The steps in a folder of checkpoints, and checks that each is intact. Needs no JAX.

A step is a folder named by its number, with a manifest that lists its files, arrays and settings. The manifest is
written last when a step is saved and removed first when it is removed, so an interrupted save or removal leaves a
folder that does not count.
"""

import itertools
import json
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from parallax.display.units import in_bytes
from parallax.errors import CheckpointError, StoreError, errors_as, first_few
from parallax.storage import files

FORMAT = 2
MANIFEST, REMOVED = "manifest.json", "manifest.removed"
# Orbax writes these beside the trees when the manifest is complete, and nothing reads them.
ORBAX_NOTES = ("_CHECKPOINT_METADATA", "commit_success.txt")
BEGUN = "unfinished"  # in a step that is not renamed when it is whole, before anything else
UNLISTED = (*ORBAX_NOTES, BEGUN)
NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
UNFINISHED = re.compile(r"([0-9]+)\.orbax-checkpoint-tmp.*")  # orbax's names of unfinished folders
BLOCK_BYTES = 1 << 22
FILES_ABREAST = 4  # that are read for their checksums
SIZE_LIMIT = 1 << 63
CHECKSUM_LIMIT = 1 << 32
NO_FILES_SECS, LAST_FILES_SECS = 0.5, 10.0  # time without new files; limit of the wait for it


class DamagedError(CheckpointError):
    """A step is not as it was saved. `damage` describes it, without the step's name."""

    def __init__(self, folder: Path, step: int, damage: str):
        super().__init__(f"the checkpoint of step {step} in {folder} is damaged: {damage}; use another step")
        self.step, self.damage = step, damage


def all_damaged(folder: Path, errors: Iterable[DamagedError]) -> CheckpointError:
    """The error for a folder all of whose steps are damaged."""
    causes = "; ".join(f"step {error.step}: {error.damage}" for error in errors)
    return CheckpointError(f"every checkpoint in {folder} is damaged: {causes}; restore one of them from a copy")


class CheckedSteps(NamedTuple):
    """Steps whose files exist with the right sizes, newest first, and other complete steps with their problems."""

    valid: list[int]
    damaged: dict[int, DamagedError]


def numbered_steps(folder: Path) -> set[int]:
    """Numbers of all folders named like a step, complete or not."""
    with errors_as(CheckpointError, f"{folder} cannot be read (", "); let this user read it"):
        return {int(name) for name in files.names_in(folder) if NUMBER.fullmatch(name)}


def complete_steps(folder: Path) -> set[int]:
    """Steps with a manifest; links to folders do not count."""
    return {step for step in numbered_steps(folder) if _has_manifest(folder / str(step))}


def unfinished_saves(folder: Path) -> list[tuple[int, Path]]:
    """Steps whose save has not ended, each with its folder: it is in progress or was killed."""
    try:
        names = files.names_in(folder)
    except OSError:
        return []
    renamed = [(int(match[1]), folder / name) for name in names if (match := UNFINISHED.fullmatch(name))]
    return renamed + [
        (int(name), folder / name) for name in names if NUMBER.fullmatch(name) and _is_begun(folder / name)
    ]


def check_steps(folder: Path) -> CheckedSteps:
    """Check files and sizes of every complete step against its manifest; CheckpointError if one has another format."""
    checked = CheckedSteps([], {})
    for step in sorted(complete_steps(folder), reverse=True):
        try:
            wrong = wrong_files(folder / str(step), read_manifest(folder, step)["files"], contents=False)
            if wrong:
                raise DamagedError(folder, step, first_few(wrong))
            checked.valid.append(step)
        except DamagedError as error:
            checked.damaged[step] = error
    return checked


def latest_step(folder: Path) -> int | None:
    """The newest valid step, by number, not by time; None if there is no complete one.

    Raises:
        CheckpointError: there are steps, and all are damaged.
    """
    checked = check_steps(folder)
    if not checked.valid and checked.damaged:
        raise all_damaged(folder, checked.damaged.values())
    return max(checked.valid, default=None)


# ---- manifests


def write_manifest(folder: Path, content: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> None:
    """Write the manifest of a step's folder, with a list of its files and `content`, after all other files; `known` has
    sizes and checksums of some."""
    names = {path.relative_to(folder).as_posix() for path in files.files_below(folder)}
    known = known or {}
    if missing := sorted({*known} - names):
        raise CheckpointError(f"lists of this store do not show {first_few(missing)}, which were just written")
    sums = {**known, **sizes_and_checksums(folder, sorted(names - {*UNLISTED, *known}))}
    # Converted as by JSON: keys become strings, tuples lists.
    content = json.loads(json.dumps({**content, "files": sums}))
    files.write_file(folder / MANIFEST, json.dumps({"format": FORMAT, "crc32": _checksum(content), "content": content}))
    files.sync_names(folder)  # TensorStore flushes its own files


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """Read a step's manifest.

    Raises:
        DamagedError: it is not as it was written, or has impossible values.
        CheckpointError: there is no such step, or it has another format.
    """
    path = folder / str(step) / MANIFEST
    try:
        if path.parent.is_symlink():
            raise NotADirectoryError
        if path.is_symlink():
            raise ValueError("it is a link")
        written = files.read_object(path, most=files.LARGEST_BYTES)
        written_format = written["format"]
    except (FileNotFoundError, NotADirectoryError):
        known = ", ".join(map(str, sorted(complete_steps(folder)))) or "none"
        raise CheckpointError(f"there is no checkpoint of step {step} in {folder}; steps there: {known}") from None
    except StoreError:  # a store that does not answer says nothing of the step
        raise
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DamagedError(folder, step, f"its {MANIFEST} cannot be read ({reason})") from error
    if written_format != FORMAT:
        raise CheckpointError(f"{path} has format {written_format!r}, but this version of parallax reads {FORMAT}")
    wrong = next(_wrongs(written, step), None)
    if wrong is not None:
        raise DamagedError(folder, step, f"its {MANIFEST} {wrong}")
    return written["content"]


def files_of(manifest: Mapping[str, Any], trees: Collection[str]) -> dict[str, dict[str, int]]:
    """The files of some trees of a step, and those of no part, such as its tokenizer."""
    items = manifest["files"].items()
    return {name: sums for name, sums in items if "/" not in name or name.split("/")[0] in trees}


def wrong_files(folder: Path, sums: Mapping[str, Mapping[str, int]], *, contents: bool) -> list[str]:
    """Problems with files of a step's folder: existence and sizes, and with `contents` checksums."""
    is_plain = files.plain_files(folder)
    with ThreadPoolExecutor(FILES_ABREAST) as pool:
        damages = pool.map(lambda name: _wrong_file(folder, name, sums[name], is_plain, contents), sums)
        return [f"its file {name} {damage}" for name, damage in zip(sums, damages, strict=True) if damage is not None]


def odd_files(folder: Path, trees: Collection[str]) -> list[str]:
    """Links, pipes and the like in the folders of some trees of a step, listed in its manifest or not.

    TensorStore would follow a link out of the folder, and wait for ever for the writer of a pipe.
    """
    paths = [path for part in trees for path in (folder / part, *sorted((folder / part).rglob("*")))]
    damages = {path.relative_to(folder).as_posix(): files.odd_kind(path) for path in paths}
    return [f"its file {name} {damage}" for name, damage in damages.items() if damage is not None]


def sizes_and_checksums(folder: Path, names: Collection[str]) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of files in a folder, by name."""
    with ThreadPoolExecutor(FILES_ABREAST) as pool:
        return dict(zip(names, pool.map(lambda name: size_and_checksum(folder / name), names), strict=True))


def size_and_checksum(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    size = checksum = 0
    with files.open_file(path) as file:
        while block := file.read(BLOCK_BYTES):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}


def is_inside(name: str) -> bool:
    """Whether a file's name in a manifest stays inside its folder.

    >>> [is_inside(name) for name in ("params/d/0a", "/etc/passwd", "params/../../x", "a\\\\b", "")]
    [True, False, False, False, False]
    """
    parts = PurePosixPath(name).parts
    plain = bool(parts) and "/".join(parts) == name and name.isprintable() and "\\" not in name
    return plain and not name.startswith("/") and ".." not in parts


# ---- removing and setting aside


def remove_step(folder: Path, step: int) -> None:
    """Remove a step, its manifest first."""
    path = folder / str(step)
    (path / MANIFEST).replace(path / REMOVED)
    files.remove(path)


def remove_notes(folder: Path, step: int) -> None:
    """Remove what is in a step and not in its manifest."""
    for name in UNLISTED:
        files.remove(folder / str(step) / name, missing_ok=True)


def set_aside(folder: Path, step: int, why: str) -> Path:
    """Rename a step, as "damaged-7", so that the step can be saved again and this one can be inspected."""
    names = itertools.chain([f"{why}-{step}"], (f"{why}-{step}.{number}" for number in itertools.count(2)))
    aside = next(folder / name for name in names if name not in files.names_in(folder))
    return (folder / str(step)).replace(aside)


def tidy(folder: Path) -> list[str]:
    """Remove or rename incomplete steps; returns a list of actions."""
    try:
        return list(_tidy(folder))
    except OSError as error:
        raise CheckpointError(f"cannot tidy {folder}: {error.filename}: {error.strerror}") from error


def remove_unfinished(folder: Path, step: int) -> None:
    """Remove the files of a failed save until no more appear.

    When one file fails, others are still being written, and their folders are created.
    """
    now = time.monotonic()
    last, end = now, now + LAST_FILES_SECS
    while now < min(last + NO_FILES_SECS, end):
        left = [path for unfinished, path in unfinished_saves(folder) if unfinished == step]
        now = time.monotonic()
        last = now if left else last
        for path in left:
            files.remove_what_can_be(path)
        time.sleep(0.05)


def _tidy(folder: Path) -> Iterator[str]:
    for step, path in unfinished_saves(folder):
        size = files.bytes_below(path)
        files.remove(path)
        yield f"removed an unfinished save of step {step}{'' if size is None else f', {in_bytes(size)}'}: {path}"
    for name in files.names_in(folder):
        if name.startswith(files.PROBE):
            files.remove(folder / name, missing_ok=True)
    for step in sorted(numbered_steps(folder) - complete_steps(folder)):
        path = folder / str(step)
        if not path.is_symlink() and (path / REMOVED).is_file():
            files.remove(path)
            yield f"removed what was left of step {step}: {path}"
        else:
            yield f"set aside a checkpoint that was never finished: {set_aside(folder, step, 'unfinished')}"


def _is_begun(step: Path) -> bool:
    try:
        return (step / BEGUN).is_file() and not _has_manifest(step)
    except OSError:
        return False


def _has_manifest(step: Path) -> bool:
    try:
        return not step.is_symlink() and (step / MANIFEST).is_file()
    except OSError:
        return True  # unknown; reading it will report that the step is damaged


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _wrongs(written: Mapping[str, Any], step: int) -> Iterator[str]:
    """Problems that a manifest written by us for this step cannot have; the first one is enough to refuse it."""
    content = written.get("content")
    if not isinstance(content, dict) or written.get("crc32") != _checksum(content):
        yield "does not match its own checksum"
        return
    if content.get("step") != step:
        yield f"is that of step {content.get('step')!r:.40}"
    for key in ("settings", "arrays", "files"):
        if not isinstance(content.get(key), dict):
            yield f"has no {key}"
            return
    if not all(isinstance(keys, dict) for keys in content["settings"].values()):
        yield "has settings without sections"
    if not isinstance(content.get("loss", ""), int | float | None):
        yield "has no loss, nor null in its place"
    for name, sums in content["files"].items():
        if not is_inside(name):
            yield f"names a file outside of its folder, {name!r:.100}"
        sums = sums if isinstance(sums, dict) else {}
        if not (_is_count(sums.get("bytes"), SIZE_LIMIT) and _is_count(sums.get("crc32"), CHECKSUM_LIMIT)):
            yield f"gives file {name!r:.100} a size that no file has, or no checksum"
    for part, arrays in content["arrays"].items():
        if not isinstance(arrays, dict) or not is_inside(part):
            yield f"has an unknown part {part!r:.100}"
        elif not all(map(_is_array, arrays.values())):
            yield f"describes an impossible array of {part!r:.100}"


def _is_count(number: Any, limit: int) -> bool:
    return type(number) is int and 0 <= number < limit


def _is_array(array: Any) -> bool:
    if not isinstance(array, dict) or not isinstance(array.get("shape"), list):
        return False
    sizes = all(_is_count(size, SIZE_LIMIT) for size in array["shape"])
    return sizes and isinstance(array.get("dtype"), str) and _is_count(array.get("fingerprint"), CHECKSUM_LIMIT)


def _wrong_file(
    folder: Path, name: str, wanted: Mapping[str, int], is_plain: Callable[[Path], bool], contents: bool
) -> str | None:
    path = folder / name
    try:
        if path.resolve() != folder.resolve() / name:
            return "is a link, or in a folder that is one"
        if not is_plain(path):
            return "is no plain file" if path.exists() else "is missing"
        if (size := files.size_of(path)) not in (None, wanted["bytes"]):
            return f"has {size} bytes instead of {wanted['bytes']}"
        return "does not match its checksum" if contents and size_and_checksum(path) != wanted else None
    except StoreError:
        raise
    except (OSError, RuntimeError) as error:  # Python up to 3.12 raises RuntimeError for cyclic links
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
