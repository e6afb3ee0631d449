"""Trees of arrays in a bucket, where nothing can be renamed: orbax writes them on a disk only.

Each part of a step is a database of TensorStore, in orbax's format: a folder that is copied to a disk is a run there.
Each process writes a database of its shards, and process 0 one that names the values of all of them.
"""

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore

from parallax.checkpoint.arrays import (
    DATABASE,
    new_cache,
    open_database,
    open_new_array,
    open_new_database,
    store_manifest,
)
from parallax.checkpoint.steps import BEGUN, sizes_and_checksums
from parallax.errors import CheckpointError
from parallax.processes import job
from parallax.storage import files

OF_PROCESS = "ocdbt.process_"  # orbax's name of a folder with what one process has written
SUMS = "sums."  # begins the name of an object of a step that is not whole: checksums of what one process has stored
# Orbax's names of what a process spends for its own part of a save.
COPY_EVENT = "/jax/orbax/write/blocking_d2h_duration_secs"
WRITE_EVENT = "/jax/checkpoint/write/async/commit_duration_sec"
START_LETTERS = 8


class HostCopy(NamedTuple):
    """An array's shards that this process writes, with their places."""

    about: jax.ShapeDtypeStruct
    chunk: tuple[int, ...]
    shards: list[tuple[tuple[slice, ...], np.ndarray]]


class ObjectSaver:
    """What a `CheckpointWriter` needs of orbax's CheckpointManager, for a folder in a bucket.

    Args:
        finish: writes, in process 0, the manifest of a step whose arrays are stored, and removes what it replaces. It
            is given sizes and checksums of what the processes have stored, by name, which each has read back itself.
    """

    def __init__(self, folder: Path, finish: Callable[[Mapping[str, Any]], None]):
        self._folder, self._finish = folder, finish
        # Of this start: a process of a killed job that goes on for a while writes and removes only its own folders.
        self._start = job.broadcast("the name of this start", uuid.uuid4().hex[:START_LETTERS])
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int, args: Mapping[str, Any], *, force: bool) -> bool:
        """Copy the trees of a step, and begin to write them."""
        with recorded(COPY_EVENT):
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
        # A process that fails ends, and with it all others: none waits here for ever.
        try:
            files.write_file(step / BEGUN, "removed when the manifest is there\n")
            if not (step / BEGUN).exists():
                raise CheckpointError(f"lists of this store do not show {step / BEGUN}, which was just written")
            with recorded(WRITE_EVENT):
                self._write_shards(step, copies)
            job.barrier_in_thread(f"the shards of {step} are stored")
            if jax.process_index() == 0:
                names = [self._folder_of(process) for process in range(jax.process_count())]
                known = taken_sums(step, names)
                for part in copies:
                    merge_trees(step / part, names)
                self._finish(known)
            job.barrier_in_thread(f"{step} is stored")
        except Exception as error:
            self._error = refusal_of(self._folder) or error

    def _write_shards(self, step: Path, copies: Mapping[str, Mapping[str, HostCopy]]) -> None:
        name, sums = self._folder_of(jax.process_index()), {}
        for part, arrays in copies.items():
            write_tree(step / part / name, arrays)
            sums |= sums_of(step, step / part / name)
        files.write_file(step / f"{SUMS}{name}", json.dumps(sums))

    def _folder_of(self, process: int) -> str:
        return f"{OF_PROCESS}{process}_{self._start}"


def refusal_of(folder: Path) -> OSError | None:
    """What a store says if it does not even list a folder, from which other errors may follow; None if it does."""
    try:
        files.names_in(folder)
    except OSError as refusal:
        return refusal
    return None


@contextlib.contextmanager
def recorded(event: str) -> Iterator[None]:
    """Record the seconds of the block as an event of JAX."""
    began = time.perf_counter()
    yield
    jax.monitoring.record_event_duration_secs(event, time.perf_counter() - began)


def host_copy(x: jax.Array) -> HostCopy:
    """The shards of an array that no other process writes, on the host."""
    own_shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    # A copy: the step after next may overwrite a donated array.
    shards = [(shard.index, np.array(shard.data)) for shard in own_shards]
    return HostCopy(jax.ShapeDtypeStruct(x.shape, x.dtype), x.sharding.shard_shape(x.shape), shards)


def write_tree(folder: Path, arrays: Mapping[str, HostCopy]) -> None:
    """Write arrays by name, all of them or none."""
    plain = files.PlainPath(folder)  # until all is written
    context, transaction = new_cache(), tensorstore.Transaction(atomic=True)
    together = {"context": context, "transaction": transaction}
    opening = {name: open_new_array(plain, name, copy.about, copy.chunk, **together) for name, copy in arrays.items()}
    for name, copy in arrays.items():
        array = opening[name].result()
        for index, shard in copy.shards:
            array[index].write(shard).result()
    transaction.commit_async().result()
    store_manifest(folder, context)


def sums_of(step: Path, folder: Path) -> dict[str, dict[str, int]]:
    """Sizes and checksums of what a process has stored in its folder of a step, but for the name of its database."""
    names = [path.relative_to(step).as_posix() for path in files.files_below(folder) if path != folder / DATABASE]
    return sizes_and_checksums(step, names)


def taken_sums(step: Path, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Those of all processes, in folders of these names; their objects are removed."""
    sums: dict[str, dict[str, int]] = {}
    for name in names:
        sums |= files.read_object(step / f"{SUMS}{name}", most=files.LARGEST_BYTES)
        files.remove(step / f"{SUMS}{name}")
    return sums


def merge_trees(folder: Path, names: Sequence[str]) -> None:
    """Make one database of those of all processes, in folders of these names, whose values stay where they are.

    Without databases of their own, what a process of a killed job still writes there can no longer matter.
    """
    context, transaction = new_cache(), tensorstore.Transaction(atomic=True)
    folders = [folder / name for name in names]
    whole = open_new_database(folder, context).with_transaction(transaction)
    for process, of_process in enumerate(folders):
        database = open_database(of_process, context)
        if not database.list().result():
            raise CheckpointError(f"what process {process} has stored is not in {of_process}")
        database.experimental_copy_range_to(whole).result()
    transaction.commit_async().result()
    store_manifest(folder, context)
    for of_process in folders:
        files.remove(of_process / DATABASE)
