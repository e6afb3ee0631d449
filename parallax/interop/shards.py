"""A model in several safetensors files, with an index that says which tensor is in which."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parallax.interop.safetensors import HEADER_LIMIT_BYTES, Tensor, nbytes, read_header, write
from parallax.runtime.errors import CheckpointError, quoted
from parallax.runtime.files import read_object, write_whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INDEX_LIMIT_BYTES = HEADER_LIMIT_BYTES
NAME_BYTES = 255  # of a file, in POSIX's file systems


def write_shards(
    folder: Path, tensors: Mapping[str, Any], pieces: Callable[[str], Iterable[np.ndarray]], *, shard_bytes: int
) -> None:
    """Write tensors in their order into files of at most `shard_bytes`, but for one that is larger; the index last."""
    groups = grouped(tensors, shard_bytes)
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    for name, group in zip(names, groups):
        write(folder / name, group, pieces)
    index = {
        "metadata": {"total_size": sum(map(nbytes, tensors.values()))},
        "weight_map": {tensor: name for name, group in zip(names, groups) for tensor in group},
    }
    write_whole(folder / INDEX, json.dumps(index, indent=1) + "\n")


def grouped(tensors: Mapping[str, Any], limit_bytes: int) -> list[dict[str, Any]]:
    """Tensors in their order, in groups of at most so many bytes; a larger one has a group of its own.

    >>> [list(group) for group in grouped({name: np.zeros(3, np.uint8) for name in "abc"}, 6)]
    [['a', 'b'], ['c']]
    """
    groups: list[dict[str, Any]] = [{}]
    held = 0
    for name, about in tensors.items():
        if groups[-1] and held + nbytes(about) > limit_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = about
        held += nbytes(about)
    return groups


def read_shards(folder: Path) -> dict[str, tuple[Path, Tensor]]:
    """Every tensor of a folder, with the file that holds it; of each file the header alone is read.

    Raises:
        CheckpointError: the index or a file is missing, damaged, or leads out of the folder.
    """
    if not (folder / INDEX).exists() and (folder / SINGLE).is_file():
        path = _inside(folder, SINGLE)
        return {name: (path, tensor) for name, tensor in read_header(path).items()}
    homes = _read_index(folder)
    of_shard: dict[str, set[str]] = {}
    for name, home in homes.items():
        of_shard.setdefault(home, set()).add(name)
    found = {}
    for shard, names in sorted(of_shard.items()):
        path = _inside(folder, shard)
        tensors = read_header(path)
        odd = names ^ set(tensors)
        if odd:
            raise CheckpointError(f"{folder / INDEX} and {shard} do not agree about {quoted(min(odd))}")
        found |= {name: (path, tensor) for name, tensor in tensors.items()}
    return {name: found[name] for name in homes}


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        about = path.stat()
        if about.st_size > INDEX_LIMIT_BYTES:
            raise CheckpointError(f"{path} has {about.st_size} bytes, more than {INDEX_LIMIT_BYTES}")
        homes = read_object(path)["weight_map"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has neither {INDEX} nor {SINGLE}; is it what an export has finished?"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except KeyError as error:
        raise CheckpointError(f"{path} is damaged: it has no weight_map") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(homes, dict) or not all(isinstance(home, str) for home in homes.values()):
        raise CheckpointError(f"{path} is damaged: its weight_map does not lead from names to files")
    return homes


def _inside(folder: Path, name: str) -> Path:
    """A file of the folder itself: a name with a path in it, or a link, could be any file of the machine."""
    path = folder / name
    is_path = Path(name).name != name or name in ("", ".", "..") or "\\" in name
    if is_path or not name.isprintable() or len(name.encode()) > NAME_BYTES:
        raise CheckpointError(
            f"{folder / INDEX} names {quoted(name)}, which is no file's name; it must be in the folder"
        )
    if not name.endswith(".safetensors"):
        raise CheckpointError(f"{folder / INDEX} names {quoted(name)}; nothing but .safetensors is read")
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link; put the file itself there")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    return path
