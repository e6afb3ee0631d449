"""What a step of a checkpoint says about itself: its files, its arrays, and the settings behind them."""

import json
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from parallax.runtime.errors import CheckpointError
from parallax.runtime.files import read_object

FORMAT = 2
MANIFEST = "manifest.json"
# Orbax rewrites this file after the manifest is made, and restores without it.
NOT_COUNTED = "_CHECKPOINT_METADATA"
READ_BYTES = 1 << 22
# A manifest has a line for each file and array: thousands of them are a megabyte.
LIMIT_BYTES = 1 << 28
SIZE_LIMIT = 1 << 63
CHECKSUM_LIMIT = 1 << 32
NAMED = 5  # differences that a message lists


class DamagedError(CheckpointError):
    """A step is not what was saved. `how` says what is wrong with it, without its name."""

    def __init__(self, folder: Path, step: int, how: str):
        super().__init__(f"the checkpoint of step {step} in {folder} is damaged: {how}; use another step")
        self.step, self.how = step, how


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """List the files of a step's folder, and write that with `content` into it, last of all."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != NOT_COUNTED)
    sums = {path.relative_to(folder).as_posix(): measure(path) for path in files}
    # As JSON gives it back: keys are texts, tuples are lists.
    content = json.loads(json.dumps({**content, "files": sums}))
    written = {"format": FORMAT, "crc32": _checksum(content), "content": content}
    (folder / MANIFEST).write_text(json.dumps(written))
    # TensorStore flushes its own files: what is left are the names, and the files that belong to no part.
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() or path.parent == folder:
            sync(path)


def sync(path: Path) -> None:
    """Have the disk keep a file, or a folder's names, as writing and renaming alone do not when the power goes."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """What a step says about itself.

    Raises:
        DamagedError: it is not what was written, or names what cannot be.
        CheckpointError: there is no such step, or it has another format.
    """
    path = folder / str(step) / MANIFEST
    try:
        size = path.stat().st_size
        if path.is_symlink() or size > LIMIT_BYTES:
            raise DamagedError(folder, step, f"its {MANIFEST} is a link or has {size} bytes, more than {LIMIT_BYTES}")
        written = read_object(path)
        written_format = written["format"]
    except (FileNotFoundError, NotADirectoryError):
        numbers = sorted(int(at.parent.name) for at in folder.glob(f"*/{MANIFEST}") if at.parent.name.isdecimal())
        known = ", ".join(map(str, numbers)) or "none"
        raise CheckpointError(f"there is no checkpoint of step {step} in {folder}; steps there: {known}") from None
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(folder, step, f"its {MANIFEST} cannot be read") from error
    if written_format != FORMAT:
        raise CheckpointError(f"{path} has format {written_format!r}, but this version of parallax reads {FORMAT}")
    wrong = next(_wrongs(written, step), None)
    if wrong is not None:
        raise DamagedError(folder, step, f"its {MANIFEST} {wrong}")
    return written["content"]


def check_sizes(folder: Path, step: int) -> None:
    """Hold a step's files to the sizes in its manifest; DamagedError names those that differ."""
    manifest = read_manifest(folder, step)
    wrong = wrong_files(folder / str(step), manifest["files"], contents=False)
    if wrong:
        raise DamagedError(folder, step, shortened(wrong))


def files_of(manifest: Mapping[str, Any], parts: Collection[str]) -> dict[str, dict[str, int]]:
    """The files of some parts of a step, and those that belong to none, such as its tokenizer."""
    files = manifest["files"].items()
    return {name: sums for name, sums in files if "/" not in name or name.split("/")[0] in parts}


def wrong_files(folder: Path, files: Mapping[str, Mapping[str, int]], *, contents: bool) -> list[str]:
    """What is wrong with files of a step's folder: their places and sizes, and with `contents` their checksums."""
    wrong = []
    for name, sums in files.items():
        how = _wrong_size(folder, name, sums["bytes"])
        if how is None and contents:
            how = _wrong_content(folder / name, sums)
        wrong += [] if how is None else [f"its file {name} {how}"]
    return wrong


def shortened(texts: list[str]) -> str:
    """The first few of a list in words, and how many more there are."""
    more = len(texts) - NAMED
    return ", ".join(texts if more <= 0 else [*texts[:NAMED], f"and {more} more"])


def measure(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by name: a checkpoint is a flat dict, whatever containers the trees are made of.

    >>> flatten({"mlp": {"gate": 1, "up": (2, 3)}})
    {'mlp.gate': 1, 'mlp.up.0': 2, 'mlp.up.1': 3}
    """
    import jax  # here: who only looks at the files of a step needs none of it

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


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _wrongs(written: Mapping[str, Any], step: int) -> Iterator[str]:
    """What no manifest of this step that we wrote would say; the first is enough to leave it alone."""
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
    if not isinstance(content.get("loss", ""), int | float | None):
        yield "has no loss, nor null in its place"
    for name, sums in content["files"].items():
        if not is_inside(name):
            yield f"names a file outside of its folder, {name!r:.100}"
        if not isinstance(sums, dict) or not _is_count(sums.get("bytes"), SIZE_LIMIT):
            yield f"gives file {name!r:.100} a size that no file has"
        elif not _is_count(sums.get("crc32"), CHECKSUM_LIMIT):
            yield f"has no checksum of file {name!r:.100}"
    for part, arrays in content["arrays"].items():
        if not isinstance(arrays, dict) or not is_inside(part):
            yield f"has a part {part!r:.100} that is none"
        elif not all(map(_is_array, arrays.values())):
            yield f"describes an array of {part!r:.100} that cannot be"


def is_inside(name: str) -> bool:
    """Whether a file's name, as it is written in a manifest, stays in the folder that it is relative to.

    >>> [is_inside(name) for name in ("params/d/0a", "/etc/passwd", "params/../../x", "a\\\\b", "")]
    [True, False, False, False, False]
    """
    parts = PurePosixPath(name).parts
    plain = bool(parts) and "/".join(parts) == name and name.isprintable() and "\\" not in name
    return plain and not name.startswith("/") and ".." not in parts


def _is_count(number: Any, limit: int) -> bool:
    return type(number) is int and 0 <= number < limit


def _is_array(array: Any) -> bool:
    if not isinstance(array, dict) or not isinstance(array.get("shape"), list):
        return False
    sizes = all(_is_count(size, SIZE_LIMIT) for size in array["shape"])
    return sizes and isinstance(array.get("dtype"), str) and _is_count(array.get("fingerprint"), CHECKSUM_LIMIT)


def _wrong_size(folder: Path, name: str, size: int) -> str | None:
    path = folder / name
    try:
        if path.resolve() != folder.resolve() / name:
            return "is a link, or in a folder that is one"
        if not path.is_file():
            return "is missing"
        found = path.stat().st_size
    except (OSError, RuntimeError) as error:  # Python up to 3.12 has a RuntimeError for links in a circle
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    return None if found == size else f"has {found} bytes instead of {size}"


def _wrong_content(path: Path, sums: Mapping[str, int]) -> str | None:
    try:
        return None if measure(path) == sums else "does not match its checksum"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _text(array: Mapping[str, Any]) -> str:
    return f"{array['dtype']}{array['shape']}"
