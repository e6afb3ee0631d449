"""Trees of arrays in a bucket, where nothing can be renamed: orbax writes them on a disk only.

Each part of a step is a database of TensorStore, in orbax's format: a folder that is copied to a disk is a run there.
"""

import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore

from parallax.checkpoint.arrays import new_cache, open_array, open_new_array
from parallax.checkpoint.steps import BEGUN
from parallax.errors import CheckpointError
from parallax.storage import files

LOST_ANSWERS = 4  # in the writes of a tree


class HostCopy(NamedTuple):
    """An array's shards that this process writes, with their places."""

    about: jax.ShapeDtypeStruct
    chunk: tuple[int, ...]
    shards: list[tuple[tuple[slice, ...], np.ndarray]]


class ObjectSaver:
    """What a `CheckpointWriter` needs of orbax's CheckpointManager, for a folder in a bucket.

    Args:
        finish: writes the manifest of a step whose arrays are stored; it is the last object.
    """

    def __init__(self, folder: Path, finish: Callable[[], None]):
        self._folder, self._finish = folder, finish
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int, args: Mapping[str, Any], *, force: bool) -> bool:
        """Copy the trees of a step, and begin to write them."""
        copies = {part: {name: host_copy(x) for name, x in tree.item.items()} for part, tree in args.items()}
        self._thread = threading.Thread(target=self._write, args=(self._folder / str(step), copies), name="save")
        self._thread.start()
        return True

    def is_saving_in_progress(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check_for_errors(self) -> None:
        if self._error is not None and not self.is_saving_in_progress():
            raise self._error

    def wait_until_finished(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread, error, self._error = None, self._error, None
            if error is not None:
                raise error

    def close(self) -> None:
        """Each save ends by itself."""

    def _write(self, step: Path, copies: Mapping[str, Mapping[str, HostCopy]]) -> None:
        try:
            files.write_file(step / BEGUN, "removed when the manifest is there\n")
            if not (step / BEGUN).exists():
                raise CheckpointError(f"lists of this store do not show {step / BEGUN}, which was just written")
            for part, arrays in copies.items():
                write_new_tree(step / part, arrays)
            self._finish()
        except Exception as error:
            self._error = error


def host_copy(x: jax.Array) -> HostCopy:
    """The shards of an array that no other process writes, on the host."""
    own_shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    # A copy: the step after next may overwrite a donated array.
    shards = [(shard.index, np.array(shard.data)) for shard in own_shards]
    return HostCopy(jax.ShapeDtypeStruct(x.shape, x.dtype), x.sharding.shard_shape(x.shape), shards)


def write_new_tree(folder: Path, arrays: Mapping[str, HostCopy]) -> None:
    """`write_tree` in a folder that is not there. If the answer to a write is lost, TensorStore writes again, and takes
    what it has stored itself for another's; then all is written once more."""
    for tries_left in reversed(range(LOST_ANSWERS + 1)):
        try:
            return write_tree(folder, arrays)
        except ValueError as error:
            if not tries_left or not str(error).startswith("ALREADY_EXISTS"):
                raise
        files.remove(folder)


def write_tree(folder: Path, arrays: Mapping[str, HostCopy]) -> None:
    """Write arrays by name, all of them or none."""
    written, uuid = tensorstore.Transaction(), secrets.token_hex(16)
    for name, (about, chunk, shards) in arrays.items():
        array = open_new_array(files.PlainPath(folder), name, about, chunk, uuid=uuid, transaction=written)
        for index, shard in shards:
            array[index].write(shard).result()
    written.commit_async().result()


def read_tree(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays by name, each process reading what its devices hold."""
    cache = new_cache()

    def read(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        array = open_array(files.PlainPath(folder), name, cache)

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            return np.asarray(array[index].read().result())

        return jax.make_array_from_callback(like.shape, like.sharding, shard)

    return {name: read(name, like) for name, like in wanted.items()}
