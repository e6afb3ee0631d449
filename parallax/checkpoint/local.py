"""Copies of a run's newest steps in a folder of each host, which a restart reads in place of the run's folder.

Each process keeps the shards of its own devices, and those of a process of the host before it, which sends them over
the mesh. So the shards of a lost host are on the next one. `process-3/of-2` is a folder of steps as `steps.py` has it,
whose arrays have the shards of process 2 alone. Orbax's experimental emergency checkpoints need whole replicas of the
state instead.
"""

import contextlib
import functools
import json
import os
import socket
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from parallax.checkpoint import steps
from parallax.checkpoint.arrays import (
    flatten,
    new_cache,
    on_devices,
    open_array,
    read_tree,
    shape_and_dtype,
    shards_of_process,
)
from parallax.checkpoint.fingerprint import fingerprints
from parallax.checkpoint.objects import HostCopy, write_tree
from parallax.checkpoint.restore import Restored, checked_by_all, compare_arrays, not_as_saved
from parallax.checkpoint.steps import DamagedError
from parallax.display.units import in_bytes
from parallax.errors import CheckpointError, first_few, first_line
from parallax.processes import job
from parallax.storage import files

KEEP = 2  # while the newer one is written the older one counts
MANIFEST_LIMIT = 1 << 31  # of checksums that processes compare as int32


class Neighbours(NamedTuple):
    """The process whose shards this one keeps, itself if it is alone. `on_host` is the number of processes of this
    host."""

    kept: int
    distance: int
    on_host: int


class LocalCopies:
    """Writes and restores the copies of one run.

    Args:
        folder: of this run, on this host.
        settings: a JSON dict, which is written into every manifest.
        flush: is called before a step counts.
        say: reports what is not restored, and copies that could not be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, Any],
        flush: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = print,
    ):
        process = jax.process_index()
        self._neighbours = neighbours()
        self._root = folder / f"process-{process}"
        self._folders = {owner: self._root / f"of-{owner}" for owner in {process, self._neighbours.kept}}
        self._settings, self._flush, self._say = settings, flush, say
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._step: int | None = None  # that is being written

    # ---- writing

    def begin(self, start: int, trees: Mapping[str, Any]) -> None:
        """Remove what a run that goes on from `start` does not need; CheckpointError if the folder has no room for the
        copies. All call it."""
        try:
            files.make_folder(self._root)
            files.check_writable(self._root)
            self._remove_of_others()
            for folder in self._folders.values():
                files.make_folder(folder)
                for name in files.names_in(folder):
                    if name != str(start):
                        files.remove(folder / name)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.local: cannot use {self._root} ({error.strerror}); name a folder of each host that can be "
                "written"
            ) from error
        job.barrier("older copies are removed")
        size = KEEP * len(self._folders) * bytes_of_process(trees)
        room = files.bytes_below(self._root) + files.free_bytes(self._root) // self._neighbours.on_host
        if room < size:
            raise CheckpointError(
                f"checkpoint.local: copies of this process take {in_bytes(size)}, and {self._root} has room for "
                f"{in_bytes(room)}; name a folder with more, or leave the key out"
            )

    def _remove_of_others(self) -> None:
        """Remove what earlier starts kept for processes for which this one keeps nothing, or which are no longer
        there."""
        mine = {folder.name for folder in self._folders.values()}
        for name in files.names_in(self._root):
            if name.startswith("of-") and name not in mine:
                files.remove(self._root / name)
        for name in files.names_in(self._root.parent):
            process = name.removeprefix("process-")
            if process.isdecimal() and int(process) >= jax.process_count():
                files.remove_what_can_be(self._root.parent / name)  # another process may remove it, too

    def save(self, step: int, trees: Mapping[str, Any]) -> None:
        """Copy trees of arrays to the host and to the next host, and begin to write them. All processes call it."""
        self.wait()
        flat = {part: flatten(tree) for part, tree in trees.items()}
        arrays, copies = {}, {owner: {part: {} for part in flat} for owner in self._folders}
        for part, tree in flat.items():
            marks = fingerprints(tree).items()
            arrays[part] = {name: {**shape_and_dtype(tree[name]), "fingerprint": mark} for name, mark in marks}
            for name, x in tree.items():
                held = {shard.device: np.array(shard.data) for shard in x.addressable_shards}
                copies[jax.process_index()][part][name] = _host_copy(x, jax.process_index(), held)
                if len(self._folders) > 1:
                    before = devices_before(x.sharding.mesh, self._neighbours.distance)
                    received = self._sent(x, held, self._neighbours.distance)
                    kept = {before[to]: np.array(piece)[0] for to, piece in received.items()}
                    copies[self._neighbours.kept][part][name] = _host_copy(x, self._neighbours.kept, kept)
        about = {"step": step, "loss": None, "settings": self._settings, "arrays": arrays}
        self._step = step
        self._thread = threading.Thread(target=self._write, args=(step, about, flat, copies), name="local copy")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last copy is written, and remove older ones if all processes have theirs. All call it."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            self._say(f"checkpoint.local: step {self._step} could not be copied to {self._root}: {first_line(error)}")
        failed = any_process(error is not None)
        for folder in self._folders.values():
            for step in steps.numbered_steps(folder):
                if (step == self._step) == failed:
                    files.remove_what_can_be(folder / str(step))

    def close(self) -> None:
        """Wait until the last copy is written, without the other processes."""
        if self._thread is not None:
            self._thread.join()

    def remove(self) -> None:
        """Remove the copies of this process: the run has ended."""
        self.close()
        files.remove_what_can_be(self._root)
        with contextlib.suppress(OSError):  # another process of this host still has some
            self._root.parent.rmdir()

    def _write(self, step: int, about: Mapping[str, Any], flat: Mapping[str, Any], copies: Mapping[int, Any]) -> None:
        try:
            self._flush()
            for owner, parts in copies.items():
                folder = self._folders[owner] / str(step)
                files.remove(folder, missing_ok=True)
                files.make_folder(folder)
                files.write_file(folder / steps.BEGUN, "removed when the manifest is there\n")
                for part, arrays in parts.items():
                    files.make_folder(folder / part)
                    write_tree(folder / part, arrays)
                steps.write_manifest(folder, {**about, "shards": shards_mark(flat, owner)})
                steps.remove_notes(self._folders[owner], step)
        except Exception as error:
            self._error = error

    # ---- restoring

    def restore_newest(
        self, trees: Mapping[str, Any], *, after: int, why_not: Callable[[int, Any], str]
    ) -> Restored | None:
        """The newest step after `after` of which all shards are there, on the hosts that need them or on the next ones;
        None if there is none. All processes call it.

        Checksums of files, shapes and dtypes of arrays and, after loading, their fingerprints are checked.

        Args:
            trees: trees of jax.ShapeDtypeStruct, with the shardings that the copies must have, too.
            why_not: says why the settings of a step are not those of this run; "" if they fit.
        """
        flat = {part: flatten(tree) for part, tree in trees.items()}
        whole = {owner: self._whole_steps(owner, flat, after, why_not) for owner in self._folders}
        kept = {owner: {(step, mark_of(manifest)) for step, manifest in of.items()} for owner, of in whole.items()}
        # That of the other process describes the same arrays: two may each have only what they keep for the other.
        manifests = {(step, mark_of(manifest)): manifest for of in whole.values() for step, manifest in of.items()}
        everywhere = self._exchanged(kept)
        for step, mark in sorted(complete_sets(everywhere, self._neighbours.distance), reverse=True):
            lacking = {process for process, (held, _) in enumerate(everywhere) if (step, mark) not in held}
            try:
                loaded = self._load(step, flat, lacking)
                self._check(step, loaded, manifests.get((step, mark)))
            except DamagedError as error:
                self._say(str(error))
                continue
            if lacking:
                names = ", ".join(map(str, sorted(lacking)))
                self._say(f"process {names} has no copy of step {step}, and gets the one of the next host")
            return Restored(step, {part: _as_tree(tree, loaded[part]) for part, tree in trees.items()}, [])
        if any_process(any(kept.values())):
            self._say(f"checkpoint.local: no step after {after} is whole on all hosts; the run's folder is used")
        return None

    def _whole_steps(self, owner: int, flat: Any, after: int, why_not: Callable[[int, Any], str]) -> dict[int, Any]:
        """Manifests of the steps of an owner that can be restored; the others are named."""
        folder, whole = self._folders[owner], {}
        for step in sorted(steps.complete_steps(folder)) if folder.is_dir() else ():
            if step <= after:
                continue
            try:
                manifest = steps.read_manifest(folder, step)
                if reason := _why_not(manifest, flat, owner) or why_not(step, manifest["settings"]):
                    raise CheckpointError(f"the copy of step {step} in {folder} is not restored: {reason}")
                wrong = steps.odd_files(folder / str(step), flat)
                wrong = wrong or steps.wrong_files(folder / str(step), manifest["files"], contents=True)
                if wrong:
                    raise DamagedError(folder, step, first_few(wrong))
                whole[step] = manifest
            except CheckpointError as error:
                self._say(str(error))
        return whole

    def _exchanged(self, kept: Mapping[int, set[tuple[int, int]]]) -> list[tuple[set, set]]:
        """For each process the steps that it has of its own shards, and of those that it keeps for another one."""
        table = np.full((2, KEEP, 2), -1, np.int32)
        for row, owner in enumerate((jax.process_index(), self._neighbours.kept)):
            newest = sorted(kept[owner], reverse=True)[:KEEP]
            table[row, : len(newest)] = np.array(newest, np.int32).reshape(-1, 2)
        tables = multihost_utils.process_allgather(table) if jax.process_count() > 1 else table[None]
        return [tuple({tuple(map(int, pair)) for pair in rows if pair[0] >= 0} for rows in of) for of in tables]

    def _load(self, step: int, flat: Mapping[str, Any], lacking: set[int]) -> dict[str, dict[str, jax.Array]]:
        here, keeps = jax.process_index(), self._neighbours.kept
        held, kept = self._folders[here] / str(step), self._folders[keeps] / str(step)
        sends = keeps in lacking

        def read() -> tuple[Any, Any]:
            try:
                loaded = {part: read_tree(held / part, tree) for part, tree in flat.items() if here not in lacking}
                to_send = {part: read_shards(kept / part, tree, keeps) for part, tree in flat.items() if sends}
            except (ValueError, OSError, KeyError) as error:
                raise DamagedError(self._root, step, f"it cannot be read: {first_line(error)}") from error
            return loaded, to_send

        loaded, to_send = checked_by_all(self._root, step, read)
        if not lacking:
            return loaded
        received = {
            part: {name: self._returned(like, to_send.get(part, {}).get(name)) for name, like in tree.items()}
            for part, tree in flat.items()
        }
        return received if here in lacking else loaded

    def _returned(self, like: Any, shards: Mapping[tuple, np.ndarray] | None) -> jax.Array:
        """An array whose shards come from the processes that keep them; only those of a process that lacks them are
        sent."""
        before = devices_before(like.sharding.mesh, self._neighbours.distance)
        index = bounds_of(like)
        nothing = np.zeros(like.sharding.shard_shape(like.shape), like.dtype)
        held = {
            device: shards[index[before[device]]] if shards else nothing for device in like.sharding.mesh.local_devices
        }
        received = self._sent(like, held, -self._neighbours.distance)
        placed = [
            copy for device, piece in received.items() for copy in on_devices(np.asarray(piece)[0], like, [device])
        ]
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, placed)

    def _check(self, step: int, loaded: Mapping[str, Any], manifest: Any) -> None:
        marks = {part: fingerprints(arrays) for part, arrays in loaded.items()}

        def check() -> None:
            stored = {} if manifest is None else manifest["arrays"]
            wrong = [
                f"{part} {name}"
                for part in stored.keys() & marks
                for name, mark in marks[part].items()
                if mark != stored[part][name]["fingerprint"]
            ]
            if wrong:
                raise DamagedError(self._root, step, not_as_saved(wrong))

        checked_by_all(self._root, step, check)

    # ---- between hosts

    def _sent(self, x: Any, held: Mapping[jax.Device, np.ndarray], distance: int) -> dict[jax.Device, jax.Array]:
        """For each device of this process the shard, `[1, ...]`, of its counterpart `distance` processes before."""
        mesh = x.sharding.mesh
        placed = [jax.device_put(piece[None], SingleDeviceSharding(device)) for device, piece in held.items()]
        stacked = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        shape = (mesh.size, *placed[0].shape[1:])
        pieces = jax.make_array_from_single_device_arrays(shape, stacked, placed)
        sent = jax.block_until_ready(_permute(mesh, distance)(pieces))
        return {shard.device: shard.data for shard in sent.addressable_shards}


def run_copies(local: str, name: str, first_start: Mapping[str, Any]) -> Path:
    """The folder of a run's copies on a host; another run of the same name has another one.

    >>> run_copies("/dev/shm", "mine", {"host": "a", "goodput": {"began": 1.5}})
    PosixPath('/dev/shm/mine-361ac6e4')
    """
    began = json.dumps([first_start.get("host"), (first_start.get("goodput") or {}).get("began")])
    return Path(os.path.abspath(local)) / f"{name}-{zlib.crc32(began.encode()):08x}"


def neighbours() -> Neighbours:
    """The neighbours of this process, on other hosts as `distance_to_another_host` has it."""
    count, process = jax.process_count(), jax.process_index()
    if count == 1:
        return Neighbours(process, distance=0, on_host=1)
    name = np.array([zlib.crc32(socket.gethostname().encode()) % MANIFEST_LIMIT], np.int32)
    hosts = multihost_utils.process_allgather(name).reshape(-1)
    distance, on_host = distance_to_another_host(hosts), int(np.sum(hosts == hosts[process]))
    return Neighbours((process - distance) % count, distance, on_host)


def distance_to_another_host(hosts: Sequence[int]) -> int:
    """The least distance, given the host of each process, at which all neighbours are on different hosts, or as many as
    can be; 1 on a single host.

    >>> distance_to_another_host([7, 7, 8, 8]), distance_to_another_host([7, 8, 7, 8]), distance_to_another_host([7, 7])
    (2, 1, 1)
    """
    apart = [int(np.sum(np.roll(hosts, -distance) != np.array(hosts))) for distance in range(1, len(hosts))]
    return 1 + apart.index(max(apart))


def complete_sets(everywhere: list[tuple[set, set]], distance: int) -> set[tuple[int, int]]:
    """Steps of which each process has its own shards, or the process `distance` after it keeps them.

    >>> complete_sets([({(4, 1)}, set()), ({(2, 1)}, {(2, 1)})], 1)
    {(2, 1)}
    >>> complete_sets([({(4, 1)}, {(4, 1)}), (set(), {(4, 1)})], 1)
    {(4, 1)}
    """
    count = len(everywhere)
    available = (held | everywhere[(process + distance) % count][1] for process, (held, _) in enumerate(everywhere))
    return functools.reduce(set.intersection, available)


def any_process(flag: bool) -> bool:
    """Whether a flag is set in any process; all call it together."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array([flag])).any())


def mark_of(manifest: Mapping[str, Any]) -> int:
    """A checksum of what the arrays of a step hold, the same in all processes."""
    return zlib.crc32(json.dumps(manifest["arrays"], sort_keys=True).encode()) % MANIFEST_LIMIT


def shards_mark(flat: Mapping[str, Mapping[str, Any]], process: int) -> int:
    """A checksum of the bounds of all shards that a process holds, and of the number of processes."""
    bounds = {
        part: {name: sorted(shards_of_process(like, process)) for name, like in tree.items()}
        for part, tree in flat.items()
    }
    return zlib.crc32(json.dumps([jax.process_count(), bounds], sort_keys=True).encode())


def bytes_of_process(trees: Mapping[str, Any]) -> int:
    """Bytes of the different shards that this process holds."""
    return sum(
        len(shards_of_process(like, jax.process_index()))
        * int(np.prod(like.sharding.shard_shape(like.shape), dtype=np.int64))
        * like.dtype.itemsize
        for like in jax.tree.leaves(trees)
    )


def read_shards(folder: Path, tree: Mapping[str, Any], process: int) -> dict[str, dict[tuple, np.ndarray]]:
    """The shards of a process by name and bounds, on the host."""
    plain, cache = files.PlainPath(folder), new_cache()
    read = {}
    for name, like in tree.items():
        array = open_array(plain, name, cache)
        shards = shards_of_process(like, process).items()
        read[name] = {bounds: np.asarray(array[index].read().result()) for bounds, (index, _) in shards}
    return read


def bounds_of(like: Any) -> dict[jax.Device, tuple]:
    """The bounds of the shard of each device."""
    indices = like.sharding.devices_indices_map(like.shape)
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True))
        for device, index in indices.items()
    }


def devices_before(mesh: Mesh, distance: int) -> dict[jax.Device, jax.Device]:
    """The counterpart of each device `distance` processes before its own."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
        by_process.setdefault(device.process_index, []).append(device)
    count = len(by_process)
    return {
        device: by_process[(process - distance) % count][place]
        for process, devices in by_process.items()
        for place, device in enumerate(devices)
    }


@functools.cache
def _permute(mesh: Mesh, distance: int) -> Callable[[jax.Array], jax.Array]:
    """Send each device's row to its counterpart `distance` processes after."""
    ranks = {device: rank for rank, device in enumerate(mesh.devices.flat)}
    pairs = [(ranks[source], ranks[device]) for device, source in devices_before(mesh, distance).items()]
    rows = PartitionSpec(mesh.axis_names)
    permute = functools.partial(lax.ppermute, axis_name=mesh.axis_names, perm=pairs)
    return jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=True))


def _as_tree(wanted: Any, flat: Mapping[str, Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(wanted), [flat[name] for name in flatten(wanted)])


def _host_copy(x: Any, process: int, pieces: Mapping[jax.Device, np.ndarray]) -> HostCopy:
    """The shards of a process, each once, from those of its devices."""
    shards = [(index, pieces[devices[0]]) for index, devices in shards_of_process(x, process).values()]
    return HostCopy(jax.ShapeDtypeStruct(x.shape, x.dtype), x.sharding.shard_shape(x.shape), shards)


def _why_not(manifest: Mapping[str, Any], flat: Mapping[str, Any], owner: int) -> str:
    """Why a copy is not of these arrays, or was cut otherwise; "" if it fits."""
    for part, tree in flat.items():
        if differences := compare_arrays(manifest["arrays"].get(part, {}), tree, part):
            return f"it is of another model: {first_few(differences)}"
    if manifest.get("shards") != shards_mark(flat, owner):
        return "it was saved on another mesh, or by another number of processes"
    return ""
