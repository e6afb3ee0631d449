"""Arrays of a checkpoint by name, read and written on the host piece by piece."""

import collections
import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from jax.sharding import SingleDeviceSharding
from tensorstore import KvStore

from parallax.checkpoint.fingerprint import RunningFingerprint
from parallax.errors import CheckpointError, first_few, first_line
from parallax.storage.files import PlainPath, kvstore_of, write_whole

PIECE_BYTES = 1 << 26
# Chunks are shards of the mesh. With a cache, a chunk of several rows is decoded once, not once for each row.
CACHE_BYTES = 1 << 29
# Of a restore: shards that are being read and are not yet on the devices, and chunks that several of them need.
READ_AHEAD_BYTES, RESTORE_CACHE_BYTES = 1 << 27, 1 << 25
# Of an object in a bucket, unless a shard is larger; four are read for their checksums as wholes, at once.
STORED_BYTES = 1 << 26
DATABASE = "manifest.ocdbt"  # TensorStore's name of the object that makes a folder a database
# Of a new database, until all else is stored: in the memory of its context. TensorStore would write it to the store if
# no other has, and takes the answer that there is no bucket for that of another one, which it then reads (SIGSEGV).
NEW_MANIFEST = {"driver": "memory", "path": "new/"}


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by name: a checkpoint is a flat dict, whatever the containers of the trees.

    >>> flatten({"mlp": {"gate": 1, "up": (2, 3)}})
    {'mlp.gate': 1, 'mlp.up.0': 2, 'mlp.up.1': 3}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def beside(name: str, other: str) -> str:
    """The name of another array of the same module.

    >>> beside("blocks.mlp.up.kernel", "unit")
    'blocks.mlp.up.unit'
    """
    return f"{name.rpartition('.')[0]}.{other}"


def shape_and_dtype(array: Any) -> dict[str, Any]:
    """Shape and dtype as JSON."""
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def new_cache(limit_bytes: int = CACHE_BYTES) -> tensorstore.Context:
    """A cache for arrays that are open at the same time; arrays opened later with the same cache may be stale."""
    return tensorstore.Context({"cache_pool": {"total_bytes_limit": limit_bytes}})


class ArrayReader:
    """One array of a part of a step, written by orbax; rows are along the first dim.

    `running` is the fingerprint of the pieces so far; it is the array's after all pieces were read in order.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, Any], cache: tensorstore.Context | None = None):
        context = new_cache() if cache is None else cache
        self._folder = PlainPath(folder)
        self._array = open_array(self._folder, name, context)
        self.shape = tuple(about["shape"])
        self.dtype = self._array.dtype.numpy_dtype
        self.running = RunningFingerprint()
        check_array(self._array, name, about)

    def read(self, index: Any) -> np.ndarray:
        """The entries that a NumPy index selects."""
        return np.asarray(self._array[index].read().result())

    def pieces(self, index: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
        """The array, or the part that `index` selects, as consecutive pieces of rows."""
        indices, rest = [index], self.shape[len(index) :]
        if rest:
            row_bytes = max(int(np.prod(rest[1:], dtype=np.int64)) * self.dtype.itemsize, 1)
            rows = max(PIECE_BYTES // row_bytes, 1)
            indices = [(*index, slice(start, min(start + rows, rest[0]))) for start in range(0, rest[0], rows)]
        for index in indices:
            piece = self.read(index)
            self.running.add(piece)
            yield piece


def check_array(array: tensorstore.TensorStore, name: str, about: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless an array has the shape and dtype of its description."""
    dtype = array.dtype.numpy_dtype
    if list(array.shape) != [*about["shape"]] or str(dtype) != about["dtype"]:
        raise CheckpointError(f"{name} is {dtype}{list(array.shape)} in its files")


def damaged_arrays(folder: Path, arrays: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Arrays, by part, that cannot be opened as described, or whose contents have another fingerprint, each with the
    reason."""
    reasons = {}
    for part, of_part in arrays.items():
        cache = new_cache()  # of one folder: another one may have the same path, through its descriptor
        for name, about in of_part.items():
            try:
                array = ArrayReader(folder / part, name, about, cache)
                collections.deque(array.pieces(), maxlen=0)
                if array.running.value != about["fingerprint"]:
                    reasons[f"{part} {name}"] = "its fingerprint is another one"
            except (ValueError, OSError) as error:  # tensorstore raises these for any problem with its files
                reasons[f"{part} {name}"] = first_line(error)
    return reasons


def read_tree(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays of a part of a step by name, each process reading what its devices hold.

    Besides the arrays themselves the host holds `READ_AHEAD_BYTES`, or a single larger shard, and the cache.
    """
    plain, cache = PlainPath(folder), new_cache(RESTORE_CACHE_BYTES)
    placed: dict[str, list[jax.Array]] = {name: [] for name in wanted}
    reading: collections.deque = collections.deque()
    ahead_bytes = 0
    opening = open_together(plain, wanted, cache)
    for name, like in wanted.items():
        array = opening[name].result()
        for index, devices in shards_of_process(like, jax.process_index()).values():
            shard_bytes = math.prod(like.sharding.shard_shape(like.shape)) * like.dtype.itemsize
            while reading and ahead_bytes + shard_bytes > READ_AHEAD_BYTES:
                ahead_bytes -= _place(*reading.popleft(), placed)
            reading.append((name, like, devices, array[index].read()))
            ahead_bytes += shard_bytes
    while reading:
        _place(*reading.popleft(), placed)
    return {
        name: jax.make_array_from_single_device_arrays(like.shape, like.sharding, placed[name])
        for name, like in wanted.items()
    }


def shards_of_process(like: Any, process: int) -> dict[tuple, tuple[tuple[slice, ...], list[jax.Device]]]:
    """The different shards of an array that a process holds, each with its index and devices, by their bounds."""
    shards: dict[tuple, tuple[tuple[slice, ...], list[jax.Device]]] = {}
    for device, index in like.sharding.devices_indices_map(like.shape).items():
        if device.process_index == process:
            bounds = tuple(part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True))
            shards.setdefault(bounds, (index, []))[1].append(device)
    return shards


def on_devices(shard: np.ndarray, like: Any, devices: Iterable[jax.Device]) -> list[jax.Array]:
    """A shard on each of its devices, in the memory of an array's sharding; returns when it is there."""
    kind = like.sharding.memory_kind
    copies = [jax.device_put(shard, SingleDeviceSharding(device, memory_kind=kind)) for device in devices]
    return jax.block_until_ready(copies)  # until then the host's copy is held


def _place(name: str, like: Any, devices: list[jax.Device], read: Any, placed: dict[str, list[jax.Array]]) -> int:
    """Add a shard that was read to those that are on the devices; returns its size."""
    shard = np.asarray(read.result())
    placed[name] += on_devices(shard, like, devices)
    return shard.nbytes


class ArrayWriter:
    """Writes one array of a part piece by piece, in the format of orbax. All of a part have one context, and
    `store_manifest` completes it.

    Each index of the first `stacked` dims has its own chunks and is best written at once.
    """

    def __init__(self, folder: Path, name: str, about: Any, context: tensorstore.Context, *, stacked: int = 1):
        self._folder, self._path = PlainPath(folder), folder / name
        with self._writing():
            self._array = open_new_array(self._folder, name, about, _chunk(about, stacked), context=context).result()
        self._running, self._about = RunningFingerprint(), about
        self.shape, self.dtype = tuple(about.shape), about.dtype

    def write(self, index: tuple[int, ...], pieces: Iterable[np.ndarray]) -> None:
        """Fill the array, or the part that `index` selects, with pieces of rows, in order."""
        row = 0
        for piece in pieces:
            with self._writing():
                self._array[(*index, slice(row, row + len(piece)))].write(piece).result()
            self._running.add(piece)
            row += len(piece)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # tensorstore raises it for any problem with its files
            raise CheckpointError(f"{self._path} cannot be written: {first_line(error)}") from error

    def described(self) -> dict[str, Any]:
        """Shape, dtype and fingerprint for a manifest."""
        return {**shape_and_dtype(self._about), "fingerprint": self._running.value}


def check_written(folder: Path, arrays: Mapping[str, Mapping[str, Any]]) -> None:
    """Open each array of a step that was just written; CheckpointError names those that cannot be opened as described.

    Orbax skips a part of its work without an error if it does not find what it wrote.
    """
    wrong = []
    for part, of_part in arrays.items():
        plain = PlainPath(folder / part)
        for name, opening in open_together(plain, of_part, new_cache()).items():
            try:
                check_array(opening.result(), name, of_part[name])
            except (ValueError, OSError) as error:
                wrong.append(f"{part} {name} ({first_line(error)})")
    if wrong:
        raise CheckpointError(f"what was written cannot be read back: {first_few(wrong)}")


def open_array(folder: PlainPath, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
    """An array that is there."""
    return open_together(folder, [name], context)[name].result()


def open_together(
    folder: PlainPath, names: Iterable[str], context: tensorstore.Context
) -> dict[str, tensorstore.Future]:
    """Arrays that are there, all of which are being opened."""
    return {name: tensorstore.open(_zarr(folder, name), context=context, open=True) for name in names}


def open_new_array(
    folder: PlainPath,
    name: str,
    about: Any,
    chunk: tuple[int, ...],
    *,
    context: tensorstore.Context,
    transaction: tensorstore.Transaction | None = None,
) -> tensorstore.Future:
    """An array to be written, which is being opened; its chunks have this shape. It is in a database that
    `store_manifest` completes. Those of one database need one context: with another, each would write it by itself."""
    metadata = {"compressor": {"id": "zstd", "level": 1}, "chunks": [max(size, 1) for size in chunk], "order": "C"}
    spec = _zarr(folder, name) | {"metadata": metadata}
    spec["kvstore"] |= {"manifest": NEW_MANIFEST, "target_data_file_size": STORED_BYTES}
    options = {"create": True, "dtype": about.dtype.name, "shape": about.shape}
    return tensorstore.open(spec, **options, context=context, transaction=transaction)


def open_database(folder: Path, context: tensorstore.Context) -> KvStore:
    """All arrays of a folder, as keys and values."""
    return KvStore.open(_database(folder), context=context).result()


def open_new_database(folder: Path, context: tensorstore.Context) -> KvStore:
    """The same of a database that `store_manifest` completes."""
    return KvStore.open(_database(folder) | {"manifest": NEW_MANIFEST}, context=context).result()


def store_manifest(folder: Path, context: tensorstore.Context) -> None:
    """Write the manifest of a new database into its folder, which makes it one."""
    write_whole(folder / DATABASE, KvStore.open(NEW_MANIFEST, context=context).result()[DATABASE])


def _zarr(folder: PlainPath, name: str) -> dict[str, Any]:
    """The tensorstore spec of an array in orbax's format."""
    return {"driver": "zarr", "kvstore": {**_database(folder.path), "path": f"{name}/"}}


def _database(folder: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": kvstore_of(folder)}


def _chunk(about: Any, stacked: int) -> tuple[int, ...]:
    """Chunk shape: one index of the first `stacked` dims, divided further while it is larger than a piece."""
    stacked = min(stacked, len(about.shape) - 1)
    chunk = [min(size, 1) if dim < stacked else size for dim, size in enumerate(about.shape)]
    for dim, size in enumerate(chunk):
        if int(np.prod(chunk, dtype=np.int64)) * about.dtype.itemsize > PIECE_BYTES:
            chunk[dim] = max(size * PIECE_BYTES // (int(np.prod(chunk, dtype=np.int64)) * about.dtype.itemsize), 1)
    return tuple(max(size, 1) for size in chunk)
